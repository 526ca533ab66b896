"""The points of a sweep, and the runs of each."""

import itertools
import json
import math
import re
import shlex
from pathlib import Path

import pytest

from deepfast.mt.sweep import stages
from deepfast.mt.sweep.grid import best, named, points, systems
from deepfast.mt.sweep.stages import Sweep, steps_of
from deepfast.mt.training import RecipeError, load_recipe
from deepfast.nn.connections.fusion import FUSIONS, OPTIONS


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ("6,12, 20,6", ["6", "12", "20"]),
        ("[0.9, 0.98],[0.9, 0.999]", ["[0.9, 0.98]", "[0.9, 0.999]"]),
        ("{},{norm: null, init: one}", ["{}", "{norm: null, init: one}"]),
        ("'de,fr',de", ["'de,fr'", "de"]),
        ("{dlcl: {norm: true, init: one}},{}", ["{dlcl: {norm: true, init: one}}", "{}"]),
        ("/a/b,~/c:d,1e-3", ["/a/b", "~/c:d", "1e-3"]),
    ],
)
def test_commas_inside_brackets_and_quotes_separate_nothing(values, expected):
    assert [point.values for point in points([f"a={values}"])] == [[v] for v in expected]


def test_every_combination_and_its_folder():
    found = points(["model.norm=pre,post", "model.dlcl={},{norm: null}"])
    assert [point.values for point in found] == [
        ["pre", "{}"], ["pre", "{norm: null}"], ["post", "{}"], ["post", "{norm: null}"],
    ]  # fmt: skip
    assert found[1].overrides == ["model.norm=pre", "model.dlcl={norm: null}"]
    folders = [point.folder for point in found]
    assert len(set(folders)) == 4
    assert not set("".join(folders)) & set(" {}:/")
    assert points(["model.dim=8"])[0].folder == "model.dim=8"
    first, second = points(["data.vocabulary=/a/b,/a_b"])
    assert first.folder != second.folder


def test_the_runs_of_each_point(tmp_path):
    chosen = points(["model.encoder_layers=1,2", "optim.lr=1e-3,2"])
    sweep = Sweep("phrases-small", ["model.dim=16"], chosen, None, tmp_path)
    first, last = sweep.run(chosen[0], 1), sweep.run(chosen[-1], 2)
    assert (last.recipe.model["encoder_layers"], last.recipe.model["dim"]) == (2, 16)
    assert (first.recipe.optim.lr, last.recipe.optim.lr) == (1e-3, 2.0)
    assert (first.seed, last.seed) == (1, 2)
    assert first.folder == tmp_path / "model.encoder_layers=1,optim.lr=1e-3" / "seed-1"
    assert first.recipe.resume is True
    # The recipe itself translates nothing; an override may leave it so.
    assert first.recipe.train.test_bleu
    sweep = Sweep("phrases-small", ["train.test_bleu=false"], chosen)
    assert not sweep.run(chosen[0], 1).recipe.train.test_bleu
    assert sweep.folder == Path("runs/phrases-small-sweep")


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
    chosen, pilots = systems(file)
    assert [point.name for point in chosen] == ["plain net", "DLCL", "LSTM"]
    assert [point.folder for point in chosen] == ["plain-net", "DLCL", "LSTM"]
    sweep = Sweep(file, ["data.train_size=500"], chosen, pilots, tmp_path)
    plain, dlcl, lstm = (sweep.runs(point) for point in chosen)
    assert [len(own) for own in (plain, dlcl, lstm)] == [2, 3, 2]
    assert (plain[0].recipe.model["encoder_connection"], plain[0].seed) == ("residual", 1)
    assert dlcl[0].recipe.model["encoder_connection"] == "dlcl"
    # Another kind of model has its own fields alone; text and steps are those of all.
    assert lstm[0].recipe.model == {"kind": "fast_forward_lstm", "dim": 24}
    assert lstm[0].recipe.data == plain[0].recipe.data
    assert lstm[0].recipe.data.train_size == 500
    assert (plain[0].recipe.train.test_bleu, lstm[0].recipe.train.test_bleu) == (True, False)
    # Training ignores the section.
    assert load_recipe(file).model["dim"] == 16
    (point,) = named(chosen, ["DLCL"])
    assert named(chosen, []) == chosen
    with pytest.raises(RecipeError, match="--only: expected one of plain net, DLCL, LSTM, got 'x'"):
        named(chosen, ["x"])
    # A system with a value of its own has no pilots.
    assert not chosen[2].pilots
    low, high = sweep.pilots[point].values()
    assert (low.recipe.optim.lr, high.recipe.optim.lr) == (1e-3, 0.002)
    assert (low.recipe.train.max_steps, low.recipe.train.test_bleu) == (7, False)
    assert low.folder == tmp_path / "pilots" / "DLCL,optim.lr=0.001" / "seed-1"


def test_the_best_pilot():
    first, second = tried = points(["optim.lr=1,2"])
    low, high, none, failed = {"nll": 1.0}, {"nll": 2.0}, {"nll": None}, {"failed": "x"}
    for found, expected in (((high, low), second), ((none, high), second), ((low, low), first),
                            ((none, failed), None)):  # fmt: skip
        assert best(dict(zip(tried, found, strict=True))) == expected


def test_pilots_decide_what_runs(file, tmp_path, monkeypatch, capsys):
    made, found = [], {"plain net": 1.0, "DLCL": None}

    def make(runs, jobs, each=lambda: None):
        for run in runs:
            made.append((run.name, run.seed, run.recipe.optim.lr))
            run._found = {"seed": run.seed, "nll": found.get(run.name.partition(",")[0])}
            if (run.name, run.recipe.optim.lr) == ("LSTM", 4e-3):
                run._found = {"seed": 1, "failed": "x"}

    monkeypatch.setattr(stages, "make_runs", make)
    chosen, pilots = systems(file)
    assert not Sweep(file, [], chosen, pilots, tmp_path).make(chosen, 1, lambda *_: None)
    assert [(name, rate) for name, _, rate in made[:4]] == [
        (f"{name}, optim.lr={text}", rate)
        for name in ("plain net", "DLCL")
        for text, rate in (("0.001", 1e-3), ("0.002", 2e-3))
    ]
    assert made[4:] == [
        *(("plain net", seed, 1e-3) for seed in (1, 2)),
        *(("DLCL", seed, 1e-3) for seed in (1, 2, 3)),
        *(("LSTM", seed, 4e-3) for seed in (1, 2)),
    ]
    said = "DLCL: no pilot has a dev NLL, its runs are as DLCL, optim.lr=0.001\n"
    assert capsys.readouterr().out == said
    # A pilot that failed may still win: no run of its system starts.
    made.clear()

    def fail(runs, jobs, each=lambda: None):
        make(runs, jobs)
        for run in runs:
            if run.name == "DLCL, optim.lr=0.002":
                run._found = {"seed": 1, "failed": "x"}

    monkeypatch.setattr(stages, "make_runs", fail)
    Sweep(file, [], chosen, pilots, tmp_path).make(chosen[:2], 1, lambda *_: None)
    assert made[4:] == [("plain net", 1, 1e-3), ("plain net", 2, 1e-3)]


def test_a_plan_keeps_what_it_measured_and_removes_nothing(file, tmp_path, monkeypatch):
    """The steps of other settings lie in another folder."""
    measured = []

    def make(runs, jobs):
        for run in runs:
            assert run.recipe.train.max_steps == run.recipe.train.log_every == 20
            measured.append(run.folder)
            run._found = {"seed": 1, "step_seconds": 1.8, "peak_bytes": 2**30}

    monkeypatch.setattr(stages, "make_runs", make)
    chosen, pilots = systems(file)
    said = Sweep(file, [], chosen, pilots, tmp_path).plan(chosen, 2)
    steps = 7 * 2000 + 4 * 7
    assert said == (
        f"plan: 11 runs of 3 points, {steps:,} steps; about {steps * 1.8 / 2 / 3600:.1f} hours "
        "with 2 processes, by 20 measured steps of each point, without translation; at most "
        "1.00 GiB in a process"
    )
    Sweep(file, [], chosen, pilots, tmp_path).plan(chosen, 2)
    assert measured[:3] == measured[3:]
    measured[0].mkdir(parents=True)
    (measured[0] / "recipe.yaml").write_text("not a recipe")
    Sweep(file, ["optim.warmup=9"], chosen, pilots, tmp_path).plan(chosen, 2)
    assert not set(measured[6:]) & set(measured[:3])
    assert (measured[0] / "recipe.yaml").exists()
    endless = ["train.max_steps=null", "train.patience=3"]
    said = Sweep(file, endless, chosen, pilots, tmp_path).plan(chosen, 2)
    assert said.startswith("plan: 11 runs of 3 points, 28 steps; an unknown time with 2 processes")
    # Runs that are as short as their measurement have no plan.
    assert Sweep(file, ["train.max_steps=9"], chosen, pilots, tmp_path).plan(chosen, 2) is None


def test_the_steps_of_runs():
    def steps(*own):
        sides = [f"{part}_{side}" for part in ("train", "dev") for side in ("source", "target")]
        return steps_of(load_recipe("growing-big", [*(f"data.{x}=x" for x in sides), *own]))

    assert steps() == 400_000
    assert steps("grow.from=x") == 100_000
    assert steps("grow.train.max_steps=7") == 300_007
    assert steps("grow=null") == 300_000
    assert steps("grow=null", "train.max_steps=null", "train.patience=1") == math.inf


@pytest.mark.parametrize("name", ["phrases-systems", "multi30k-depth"])
def test_every_system_that_ships_is_a_recipe(name, tmp_path):
    chosen, pilots = systems(name)
    files = itertools.product(("train", "dev", "test"), ("source", "target"))
    given = load_recipe(name).data.phrases is not None
    text = [] if given else [f"data.{part}_{side}=file" for part, side in files]
    sweep = Sweep(name, text, chosen, pilots, tmp_path)
    recipes = {point: sweep.run(point, 1).recipe for point in chosen}
    # Pilots may choose another rate than the recipe's.
    settings = {
        (json.dumps(recipe.to_dict() | {"output": ""}, sort_keys=True), bool(point.pilots))
        for point, recipe in recipes.items()
    }
    assert len(settings) == len(chosen)
    assert len({steps_of(recipe) for recipe in recipes.values()}) == 1
    assert all(recipe.train.test_bleu for recipe in recipes.values())
    if name == "phrases-systems":
        for kind in FUSIONS:
            (model,) = (r.model for r in recipes.values() if r.model.get("encoder_fusion") == kind)
            assert model["decoder_fusion"] == kind
            assert set(model.get("fusion") or {}) <= set(OPTIONS[kind])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("seeds: 2", "seeds: 0"), "sweep.seeds: expected an integer of at least 1, got 0"),
        (("seeds: 2", "sides: 2"), "sweep.sides: unknown key, the nearest one is seeds"),
        (("seeds: 3", "seeds: x"), "sweep.systems.DLCL.seeds: expected an integer of at least 1"),
        (("plain net:", "plain net: 3"), "sweep.systems: expected names with their keys, got"),
        (("steps: 7", "steps: null"), "sweep.pilots.steps: expected an integer of at least 1, got"),
        (("[0.001, 0.002]", "1e-3"), "sweep.pilots.values: expected a list of two values or more"),
        (("[0.001, 0.002]", "[2]"), "sweep.pilots.values: expected a list of two values or more"),
    ],
)
def test_a_section_that_is_refused(file, change, sentence):
    text = FILE.replace(*change)
    assert text != FILE
    Path(file).write_text(text)
    with pytest.raises(RecipeError) as error:
        systems(file)
    assert str(error.value).startswith(sentence)


@pytest.mark.parametrize(
    ("overs", "overrides", "sentence"),
    [
        (["model.dim"], [], "expected KEY=VALUE,VALUE, such as model.encoder_layers=6,12, got 'mo"),
        (["=1"], [], "expected KEY=VALUE,VALUE"),
        (["model.dim=8,,16"], [], "--over: expected KEY=VALUE,VALUE, such as"),
        (["model.dim="], [], "--over: expected KEY=VALUE,VALUE, such as"),
        (["model.dim=" + "[" * 1500], [], "--over: expected KEY=VALUE,VALUE, such as"),
        (["train.seed=1,2"], [], "train.seed: expected no value here, got one: --seeds decides"),
        (["output=a,b"], [], "output: expected no value here, got one: --output decides it"),
        (["model.dim=16"], ["resume=true"], "resume: expected no value here, got one: --output"),
        (["model.dim=16"], ["model.dim=8"], "model.dim: expected no value here, got one: --over"),
        (["model.dimm=16"], [], "model.dimm: unknown key, the nearest one is dim"),
        (["model.num_heads=2,x"], [], "model.num_heads: expected an integer of at least 1"),
        (["model.dim=16"], ["data.dev_size=0", "data.test_size=0"], "expected dev or test pairs"),
    ],
)
def test_refused_with_a_sentence_before_any_run(tmp_path, overs, overrides, sentence):
    with pytest.raises(RecipeError) as error:
        Sweep("phrases-small", overrides, points(overs), None, tmp_path)
    assert sentence in str(error.value)


def test_the_commands_of_the_page_can_run(tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "translation.md").read_text()
    page = page.replace("\\\n", "")
    commands = re.findall(r"^    deepfast mt sweep (phrases.*)$", page, re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        recipe, *words = shlex.split(command)
        overs = [value for option, value in itertools.pairwise(words) if option == "--over"]
        given = [word for word in words if "=" in word and word not in overs]
        chosen, pilots = (points(overs), None) if overs else systems(recipe)
        assert len(Sweep(recipe, given, chosen, pilots, tmp_path).pilots) == len(chosen) >= 3
