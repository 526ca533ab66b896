"""The points of a sweep, and the runs of each."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from deepfast.mt.sweep import stages
from deepfast.mt.sweep.grid import Point, named, points, systems
from deepfast.mt.sweep.stages import Sweep, steps_of
from deepfast.mt.training import RecipeError, load_recipe


def test_values_are_elements_of_a_list_of_yaml():
    for values, expected in (
        ("6,12, 20", ["6", "12", "20"]),
        ("[0.9, 0.98],[0.9, 0.999]", ["[0.9, 0.98]", "[0.9, 0.999]"]),
        ("{},{norm: null, init: one}", ["{}", '{"norm": null, "init": "one"}']),
        ("'de,fr',de", ["de,fr", "de"]),
        ("/a/b,~/c:d,1e-3", ["/a/b", "~/c:d", "0.001"]),
    ):
        assert [p.overrides for p in points([f"a={values}"])] == [(f"a={v}",) for v in expected]


def test_every_combination_and_its_folder():
    found = points(["model.norm=pre,post", "model.dlcl={},{norm: null}"])
    assert [point.overrides for point in found] == [
        (f"model.norm={norm}", f"model.dlcl={dlcl}")
        for norm in ("pre", "post") for dlcl in ("{}", '{"norm": null}')
    ]  # fmt: skip
    assert found[0].name == "model.norm=pre, model.dlcl={}"
    folders = [point.folder for point in (*found, *points(["data.vocabulary=/a/b,/a_b"]))]
    assert len(set(folders)) == 6
    assert not set("".join(folders)) & set(" {}:/")
    assert points(["model.dim=8"])[0].folder == "model.dim=8"
    assert {Point(name).folder[:2] for name in ("..", ".", "")} == {"..", ".-", "-e"}


def test_the_runs_of_each_point(tmp_path):
    chosen = points(["model.encoder_layers=1,2", "optim.lr=1e-3,2"])
    sweep = Sweep("phrases-small", ["train.test_bleu=false"], chosen)
    assert sweep.folder == Path("runs/phrases-small-sweep")
    # The recipe itself translates nothing; an override may leave it so.
    assert not sweep.run(chosen[0], 1).recipe.train.test_bleu
    last = Sweep("phrases-small", ["model.dim=16"], chosen, tmp_path).run(chosen[-1], 2).recipe
    found = last.model["encoder_layers"], last.model["dim"], last.optim.lr, last.train.seed
    assert found == (2, 16, 2.0, 2)
    assert last.output == f"{tmp_path}/model.encoder_layers=2,optim.lr=2/seed-2"
    assert last.resume is last.train.test_bleu is True


FILE = """
data: {phrases: de}
model: {dim: 16, num_heads: 2, encoder_connection: residual}
train: {max_steps: 2000}
sweep:
  seeds: 2
  pilots: {key: optim.lr, values: [0.001, 0.002], steps: 7}
  systems:
    plain net:
    DLCL: {model: {encoder_connection: dlcl}, seeds: 3}
    LSTM: {model: {kind: fast_forward_lstm, dim: 24}, optim: {lr: 4e-3}, train: {test_bleu: false}}
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "own.yaml").write_text(FILE)
    return str(tmp_path / "own.yaml")


def test_systems_of_a_file(file, tmp_path):
    chosen = systems(file)
    assert [point.folder for point in chosen] == ["plain-net", "DLCL", "LSTM"]
    sweep = Sweep(file, ["data.train_size=500"], chosen, tmp_path)
    plain, dlcl, lstm = ([run.recipe for run in sweep.runs(point)] for point in chosen)
    assert [len(own) for own in (plain, dlcl, lstm)] == [2, 3, 2]
    connections = [own[0].model["encoder_connection"] for own in (plain, dlcl)]
    assert connections == ["residual", "dlcl"]
    # Another kind of model has its own fields alone; text and steps are those of all.
    assert lstm[0].model == {"kind": "fast_forward_lstm", "dim": 24}
    assert lstm[0].data == plain[0].data
    assert lstm[0].data.train_size == 500
    assert (plain[0].train.test_bleu, lstm[0].train.test_bleu) == (True, False)
    # Training ignores the section.
    assert load_recipe(file).model["dim"] == 16
    (point,) = named(chosen, ["DLCL"])
    assert named(chosen, []) == chosen
    # A system with a value of its own has no pilots.
    assert not chosen[2].pilots
    low, high = (run.recipe for run in sweep.pilots[point])
    assert (low.optim.lr, high.optim.lr) == (1e-3, 0.002)
    assert (low.train.max_steps, low.train.test_bleu) == (7, False)
    assert low.output == f"{tmp_path}/pilots/DLCL,optim.lr=0.001/seed-1"
    with pytest.raises(RecipeError, match=r"sweep\.pilots: expected dev pairs"):
        Sweep(file, ["data.dev_size=0"], chosen, tmp_path)


def test_a_pilot_that_failed_may_still_win(file, tmp_path, monkeypatch):
    """No run of its system starts, and the line of the system tells why."""
    made, pages, chosen = [], [], systems(file)

    def make(runs, jobs, each=lambda: None):
        for run in runs:
            made.append(run.point.name)
            failed = "0.002" in run.point.name
            run.found = {"seed": run.seed} | ({"failed": "x"} if failed else {"nll": 3.0})
            each()

    monkeypatch.setattr(stages, "make_runs", make)
    sweep = Sweep(file, [], chosen, tmp_path)
    assert not sweep.make(chosen[1:], 1, lambda *results: pages.append(results[0]))
    assert [point.name for point in pages[-1]] == ["plain net", "DLCL", "LSTM"]
    assert made == ["DLCL, optim.lr=0.001", "DLCL, optim.lr=0.002", "LSTM", "LSTM"]


def test_the_hours_of_a_plan(file, tmp_path, monkeypatch):
    def make(runs, jobs):
        for run in runs:
            run.found = {"seed": 1, "step_seconds": 1.8, "peak_bytes": 2**30}

    monkeypatch.setattr(stages, "make_runs", make)
    chosen, steps = systems(file), 7 * 2000 + 4 * 7
    endless = ["train.max_steps=null", "train.patience=3"]
    # Runs that are as short as their measurement are only counted.
    for overrides, said in (
        ([], f"steps {steps:,}, hours {steps * 1.8 / 2 / 3600:.1f} with --jobs 2, memory of a "
         "process 1.00 GiB; by 20 measured steps of each, without translation"),
        (endless, "steps 28, hours unknown with --jobs 2, memory of a process 1.00 GiB; by 20 "
         "measured steps of each, without translation"),
        (["train.max_steps=9"], "steps 91, too few to measure"),
    ):  # fmt: skip
        sweep = Sweep(file, overrides, chosen, tmp_path)
        assert sweep.plan(chosen, 2) == f"plan: runs 11, {said}"
        assert sweep.plan([], 2) is None


def test_the_steps_of_runs():
    text = [f"data.{part}_{side}=x" for part in ("train", "dev") for side in ("source", "target")]
    for own, steps in (([], 400_000), (["grow.from=x"], 100_000)):
        assert steps_of(load_recipe("growing-big", [*text, *own])) == steps
    # A short run of a model that grows has two short stages.
    (short, *_) = (replace(point, steps=20) for point in systems("growing-big"))
    assert steps_of(Sweep("growing-big", text, [short]).run(short, 1).recipe) == 40


@pytest.mark.parametrize("name", ["phrases-systems", "multi30k-depth"])
def test_every_system_that_ships_is_a_recipe(name):
    chosen = systems(name)
    files = itertools.product(("train", "dev", "test"), ("source", "target"))
    own = [f"data.{part}_{side}=file" for part, side in files] * ("multi30k" in name)
    recipes = [load_recipe(name, [*own, *point.overrides]) for point in chosen]
    # Pilots may choose another rate than the recipe's.
    texts = [json.dumps(recipe.to_dict() | {"output": ""}) for recipe in recipes]
    pilots = [bool(point.pilots) for point in chosen]
    assert len({*zip(texts, pilots, strict=True)}) == len(chosen)
    assert len({steps_of(recipe) for recipe in recipes}) == 1


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("seeds: 2", "sides: 2", "sweep.sides: unknown key, the nearest one is seeds"),
        ("seeds: 3", "seeds: x", "sweep.systems.DLCL.seeds: expected an integer of at least 1"),
        ("plain net:", "plain net: 3", "sweep.systems: expected names with their keys, got"),
        ("steps: 7", "steps: null", "sweep.pilots.steps: expected an integer of at least 1, got"),
        ("[0.001, 0.002]", "[2]", "sweep.pilots.values: expected a list of two values or more"),
    ],
)
def test_a_section_that_is_refused(file, old, new, sentence):
    Path(file).write_text(FILE.replace(old, new))
    with pytest.raises(RecipeError, match=f"^{re.escape(sentence)}"):
        systems(file)


@pytest.mark.parametrize(
    ("over", "overrides", "sentence"),
    [
        ("model.dim", [], "expected KEY=VALUE,VALUE, such as model.encoder_layers=6,12, got 'mo"),
        ("model.dim=8,,16", [], "--over model.dim=8,,16: expected YAML, got an error"),
        ("data.seed=2020-01-01", [], "data.seed: expected numbers, text, lists and keys"),
        ("model.dim=8,8", [], "model.dim=8: expected a folder for each system, got two with this"),
        ("train.seed=1,2", [], "train.seed: expected no value, got one: --seeds decides it"),
        ("model.dim=16", ["resume=true"], "resume: expected no value, got one: --output"),
        ("model.num_heads=2,x", [], "model.num_heads: expected an integer of at least 1"),
        ("model.dim=16", ["data.dev_size=0", "data.test_size=0"], "expected dev or test pairs"),
    ],
)
def test_refused_with_a_sentence_before_any_run(tmp_path, over, overrides, sentence):
    with pytest.raises(RecipeError, match=re.escape(sentence)):
        Sweep("phrases-small", overrides, points([over]), tmp_path)
