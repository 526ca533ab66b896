"""The points of a sweep, and the runs of each."""

import itertools
import json
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

from deepfast.mt.sweep.grid import Pilots, Point, named, points, runs_of, systems
from deepfast.mt.sweep.plan import steps_of
from deepfast.mt.sweep.runs import Processes, read_recipe
from deepfast.mt.sweep.stages import Sweep
from deepfast.mt.training import RecipeError, load_recipe, recipe_names
from deepfast.nn.connections.fusion import FUSIONS, OPTIONS


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ("6,12, 20", ["6", "12", "20"]),
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
    found = runs_of("phrases-small", ["model.dim=16"], chosen, 2, tmp_path)
    assert [run.seed for runs in found.values() for run in runs] == [1, 2] * 4
    first, last = found[chosen[0]][0], found[chosen[-1]][-1]
    assert (last.recipe.model["encoder_layers"], last.recipe.model["dim"]) == (2, 16)
    assert (first.recipe.optim.lr, last.recipe.optim.lr) == (1e-3, 2.0)
    assert first.folder == tmp_path / "model.encoder_layers=1,optim.lr=1e-3" / "seed-1"
    # The recipe itself translates nothing; an override may leave it so.
    assert first.recipe.train.test_bleu
    found = runs_of("phrases-small", ["train.test_bleu=false"], chosen, 1, tmp_path)
    assert not found[chosen[0]][0].recipe.train.test_bleu


FILE = """
data: {phrases: de}
model: {dim: 16, encoder_connection: residual}
sweep:
  seeds: 2
  pilots: {key: optim.lr, values: [1e-3, 0.002], steps: 7}
  systems:
    plain net: {}
    DLCL: {model: {encoder_connection: dlcl}, seeds: 3}
    LSTM: {recipe: phrases-fflstm, model.dim: 24, train: {test_bleu: false}}
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "own.yaml").write_text(FILE)
    return str(tmp_path / "own.yaml")


def test_systems_of_a_file(file, tmp_path):
    chosen, seeds, pilots = systems(file)
    assert [point.name for point in chosen] == ["plain net", "DLCL", "LSTM"]
    assert [point.folder for point in chosen] == ["plain-net", "DLCL", "LSTM"]
    runs = runs_of(file, ["data.train_size=500"], chosen, seeds, tmp_path)
    plain, dlcl, lstm = runs.values()
    assert [len(own) for own in runs.values()] == [2, 3, 2]
    assert (plain[0].recipe.model["encoder_connection"], plain[0].seed) == ("residual", 1)
    assert dlcl[0].recipe.model["encoder_connection"] == "dlcl"
    # Model and rates are those of its recipe, text and steps those of all.
    assert lstm[0].recipe.model["kind"] == "fast_forward_lstm"
    assert (lstm[0].recipe.model["dim"], lstm[0].recipe.optim.lr) == (24, 4e-3)
    assert lstm[0].recipe.data == plain[0].recipe.data
    assert lstm[0].recipe.data.train_size == 500
    assert lstm[0].recipe.train.max_steps == plain[0].recipe.train.max_steps
    assert (plain[0].recipe.train.test_bleu, lstm[0].recipe.train.test_bleu) == (True, False)
    # What the command says holds for all.
    *_, (other,) = runs_of(file, ["optim.lr=7e-3"], chosen, 1, tmp_path).values()
    assert (other.recipe.optim.lr, other.recipe.model["kind"]) == (7e-3, "fast_forward_lstm")
    (point,) = named(chosen, ["DLCL"])
    assert named(chosen, []) == chosen
    with pytest.raises(RecipeError, match="--only: expected one of plain net, DLCL, LSTM, got 'x'"):
        named(chosen, ["x"])
    tried = pilots.of(point)
    assert point.choosing(tried[1]).overrides[-1] == "optim.lr=0.002"
    assert point.choosing(tried[1]).folder == point.folder
    assert [pilot.overrides[-1] for pilot in tried] == ["optim.lr=1e-3", "optim.lr=0.002"]
    assert tried[0].folder == "DLCL,optim.lr=1e-3"
    low, high, none = ([{"nll": x}] for x in (1.0, 2.0, None))
    assert pilots.best({tried[0]: high, tried[1]: low}) == tried[1]
    assert pilots.best({tried[0]: none, tried[1]: high}) == tried[1]
    assert pilots.best({tried[0]: none, tried[1]: [{"failed": "x"}]}) is None
    # Training ignores the section.
    assert load_recipe(file).model["dim"] == 16


@pytest.mark.parametrize(
    ("own", "key", "pilots"),
    [
        ('optim={"lr": 1}', "optim.lr", 0), ("optim.lr=1", "optim.lr", 0),
        ("optim=5", "optim.lr", 2), ("optim=null", "optim.lr", 2),
        ('optim={"warmup": 9}', "optim.lr", 2), ("model={}", "model.dlcl.init", 2),
        ('model={"dlcl": {"init": "one"}}', "model.dlcl.init", 0),
        ('model={"dlcl.init": "one"}', "model.dlcl.init", 0), ("optim.l=1", "optim.lr", 2),
    ],
)  # fmt: skip
def test_a_value_of_its_own_has_no_pilots(own, key, pilots):
    point = Point((("system", "a"),), (own,))
    assert len(Pilots(key, ("1", "2"), 3).of(point)) == pilots


class Finished(NamedTuple):
    name: str
    found: str | None

    def result(self):
        return self.found


def test_a_pilot_that_failed_starts_no_run_of_its_system(tmp_path, monkeypatch):
    made = []

    def compare(lines, processes, write=None):
        made.append([run for runs in lines.values() for run in runs])
        return {line: dict.fromkeys(runs, results[line.name]) for line, runs in lines.items()}

    good, bad = (Point((("system", name),)) for name in ("good", "bad"))
    pilots = Pilots("optim.lr", ("1", "2"), 3)
    results = {point.name: {"nll": 1.0} for point in (good, bad, *pilots.of(good), *pilots.of(bad))}
    results["bad, optim.lr=2"] = {"failed": "exit 1"}
    monkeypatch.setattr("deepfast.mt.sweep.stages.compare", compare)
    # Of the other system the first seed had finished.
    found = {"bad1": "a result"}

    def runs(point):
        names = (f"{point.name}{seed}" for seed in (1, 2))
        return [Finished(name, found.get(name)) for name in names]

    sweep = Sweep([good, bad], runs, pilots, lambda pilot: pilot.name, lambda *_: None)
    assert not sweep.make(Processes())
    assert made[0] == [pilot.name for point in (good, bad) for pilot in pilots.of(point)]
    assert [run.name for run in made[1]] == ["good1", "good2", "bad1"]


def test_pilots_that_all_diverged_are_told(monkeypatch, capsys):
    point, pilots = Point((("system", "a"),)), Pilots("optim.lr", ("1", "2"), 3)
    monkeypatch.setattr("deepfast.mt.sweep.stages.compare", lambda lines, processes, write=None: {
        line: {run: {"diverged": "step 1", "nll": None} for run in runs}
        for line, runs in lines.items()
    })  # fmt: skip
    sweep = Sweep([point], lambda point: [point.own], pilots, lambda pilot: pilot.name, print)
    assert sweep.make(Processes())
    assert capsys.readouterr().out == "a: no pilot has a dev NLL, its runs are as a, optim.lr=1\n"


@pytest.mark.parametrize("name", ["phrases-systems", "phrases-growing", "multi30k-depth"])
def test_every_system_that_ships_is_a_recipe(name, tmp_path):
    chosen, seeds, pilots = systems(name)
    files = itertools.product(("train", "dev", "test"), ("source", "target"))
    given = load_recipe(name).data.phrases is not None
    text = [] if given else [f"data.{part}_{side}=file" for part, side in files]
    found = runs_of(name, text, chosen, seeds, tmp_path)
    # Pilots may choose another rate than the recipe's.
    settings = {
        (json.dumps(own[0].recipe.to_dict(), sort_keys=True), bool(pilots and pilots.of(point)))
        for point, own in found.items()
    }
    assert len(settings) == len(chosen)
    lengths = set()
    for own in found.values():
        recipe = own[0].recipe
        lengths.add(steps_of(own[0]))
        assert recipe.train.test_bleu
    assert len(lengths) == (2 if name == "phrases-growing" else 1)


def test_every_kind_of_fusion_is_a_system():
    chosen, *_ = systems("phrases-systems")
    models = [
        own[0].recipe.model for own in runs_of("phrases-systems", [], chosen, 1, None).values()
    ]
    for kind in FUSIONS:
        (model,) = (model for model in models if model.get("encoder_fusion") == kind)
        assert model["decoder_fusion"] == kind
        assert set(model.get("fusion") or {}) <= set(OPTIONS[kind])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("seeds: 2", "seeds: 0"), "sweep.seeds: expected an integer of at least 1, got 0"),
        (("seeds: 2", "sides: 2"), "sweep: expected keys among systems, seeds, pilots, got"),
        (("seeds: 3", "seeds: x"), "sweep.systems.DLCL.seeds: expected an integer of at least 1"),
        (("plain net: {}", "plain net: 3"), "sweep.systems.plain net: expected keys and values"),
        (("plain net: {}", "plain net: {output: x}"), "another key than output, which --output de"),
        (("steps: 7", "steps: null"), "sweep.pilots.steps: expected an integer of at least 1, got"),
        (("[1e-3, 0.002]", "1e-3"), "sweep.pilots.values: expected a list of two different"),
        (("[1e-3, 0.002]", "[2, 2]"), "sweep.pilots.values: expected a list of two different"),
        (("plain net: {}", 'A: {train: {seed: 7}}'), "another key than train.seed, which --seeds"),
        (("plain net: {}", '"A\\nB": {}'), "sweep.systems: expected names of one line, got"),
        (("plain net: {}", "A: {model.dim: 2001-01-01}"), "sweep.systems.A: expected text, num"),
        (("key: optim.lr", "key: train.seed"), "expected another key than train.seed, which --se"),
        (("plain net: {}", "DLCL : {}"), "the key DLCL occurs twice"),
        (("plain net: {}", "LSTM 1: {}\n    LSTM-1: {}"), "names that differ in more than a space"),
        (("plain net: {}", "..: {}"), "names other than plan and pilots that begin with neither"),
        (("plain net: {}", "sweep.md: {}"), "names other than plan and pilots that begin with"),
        (("recipe: phrases-fflstm", "recipe: 3"), "sweep.systems.LSTM.recipe: expected a recipe's"),
    ],
)  # fmt: skip
def test_a_section_that_is_refused(file, change, sentence):
    text = FILE.replace(*change)
    assert text != FILE
    Path(file).write_text(text)
    with pytest.raises(RecipeError) as error:
        systems(file)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("overs", "overrides", "sentence"),
    [
        (["model.dim"], [], "expected KEY=VALUE,VALUE, such as model.encoder_layers=6,12, got 'mo"),
        (["=1"], [], "expected KEY=VALUE,VALUE"),
        (["model.dim=8,,16"], [], "--over model.dim: expected values between the commas, got '8,,"),
        (["model.dim="], [], "--over model.dim: expected values between the commas, got ''"),
        (["model.dim=" + "[" * 1500], [], "--over model.dim: expected values between the commas"),
        (["model.dim=8,16,8"], [], "expected each value once, got 8 twice"),
        (["train.seed=1,2"], [], "expected another key than train.seed, which --seeds decides"),
        (["system=a,b"], [], "expected another key than system, which --only decides"),
        (["output=a,b"], [], "expected another key than output, which --output decides"),
        (["model.dim=8", "model.dim=16"], [], "expected each key once, got model.dim twice"),
        (
            ["model.dim=16"],
            ["model.dim=8"],
            "model.dim: expected no override, --over or sweep.pilots",
        ),
        (["optim.betas=[0.9, 1],[0.9,1]"], [], "expected values that differ in more than spaces"),
        (["model.dim=16"], ["resume=true"], "resume: expected no override, --output decides it"),
        (["model.dimm=16"], [], "unknown key model.dimm, the nearest known key is model.dim"),
        (["model.num_heads=2,x"], [], "model.num_heads: expected an integer, got 'x'"),
        (["model.dim=16"], ["data.dev_size=0", "data.test_size=0"], "expected dev or test pairs"),
    ],
)
def test_refused_with_a_sentence_before_any_run(tmp_path, overs, overrides, sentence):
    with pytest.raises(RecipeError) as error:
        runs_of("phrases-small", overrides, points(overs), 1, tmp_path)
    assert sentence in str(error.value)


def test_the_commands_of_the_page_can_run(tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "translation.md").read_text()
    page = page.replace("\\\n", "")
    commands = re.findall(r"^    deepfast mt sweep (phrases.*)$", page, re.MULTILINE)
    assert len(commands) == 5
    for command in commands:
        recipe, *words = shlex.split(command)
        overs = [value for option, value in itertools.pairwise(words) if option == "--over"]
        given = [word for word in words if "=" in word and word not in overs]
        chosen = points(overs) if overs else systems(recipe)[0]
        assert len(runs_of(recipe, given, chosen, 3, tmp_path)) == len(chosen) >= 3


def one_run(name, tmp_path):
    overrides = [] if "phrases" in name else ["data.dev_source=x", "data.dev_target=x"]
    ((run,),) = runs_of(name, overrides, points(["optim.lr=1e-3"]), 1, tmp_path).values()
    run.write()
    return run


@pytest.mark.parametrize("name", recipe_names())
def test_a_process_reads_the_recipe_that_was_written(tmp_path, name):
    run = one_run(name, tmp_path)
    recipe = read_recipe(run.folder)
    assert recipe.resume is True
    assert recipe.output == str(run.folder / "run")
    expected = run.recipe.to_dict() | {"resume": True, "output": recipe.output}
    assert recipe.to_dict() == expected
    assert run.result() is None


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("result", '{"seed": 1}', "result.json: expected what deepfast mt sweep writes"),
        (
            "result",
            '{"seed": 1, "process_bytes": 9, "steps": 1, "parameters": 1, "curve": []}',
            "result.json: expected what deepfast mt",
        ),
        ("result", '{"seed": 1, "process_bytes": 9}', "result.json: expected what deepfast mt"),
        ("result", "[]", "result.json: expected what deepfast mt sweep writes, got other content"),
        ("settings", '{"model"', "settings.json: expected what deepfast mt sweep writes"),
        ("settings", "[1]", "settings.json: expected what deepfast mt sweep writes"),
        ("settings", "{}", "settings.json: expected what deepfast mt sweep writes"),
        ("settings", None, "settings.json: cannot be read (No such file or directory)"),
    ],
)
def test_other_content_in_the_folder_of_a_run(tmp_path, file, content, message):
    run = one_run("phrases-small", tmp_path)
    path = run.folder / f"{file}.json"
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=re.escape(message)):
        run.result() if file == "result" else read_recipe(run.folder)
