"""The points of a sweep, and the runs of each."""

import itertools
import json
import re
import shlex
from pathlib import Path

import pytest

from deepfast.mt.sweep.grid import Over, parse_over, points, runs_of
from deepfast.mt.sweep.runs import read_recipe
from deepfast.mt.training import RecipeError, recipe_names


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("model.encoder_layers=6,12, 20", ("6", "12", "20")),
        ("optim.betas=[0.9, 0.98],[0.9, 0.999]", ("[0.9, 0.98]", "[0.9, 0.999]")),
        ("model.dlcl={},{norm: null, init: one}", ("{}", "{norm: null, init: one}")),
        ("data.phrases='de,fr',de", ("'de,fr'", "de")),
        ("model={dlcl: {norm: true, init: one}},{}", ("{dlcl: {norm: true, init: one}}", "{}")),
    ],
)  # fmt: skip
def test_commas_inside_brackets_and_quotes_separate_nothing(text, values):
    assert parse_over(text).values == values


@pytest.mark.parametrize(
    ("texts", "sentence"),
    [
        (["model.dim"], "expected KEY=VALUE,VALUE, such as model.encoder_layers=6,12, got 'mode"),
        (["=1"], "expected KEY=VALUE,VALUE"),
        (["model.dim=8,,16"], "--over model.dim: expected values between the commas, got '8,,16'"),
        (["model.dim=8,16,8"], "expected each value once, got 8 twice"),
        (["train.seed=1,2"], "expected another key than train.seed, which --seeds decides"),
        (["output=a,b"], "expected another key than output, which --output decides"),
        (["model.dim=8", "model.dim=16"], "expected each key once, got model.dim twice"),
    ],
)  # fmt: skip
def test_refused_with_a_sentence(texts, sentence):
    with pytest.raises(RecipeError) as error:
        points([parse_over(text) for text in texts])
    assert sentence in str(error.value)


def test_every_combination_and_its_folder():
    found = points([parse_over("model.norm=pre,post"), parse_over("model.dlcl={},{norm: null}")])
    assert [point.values for point in found] == [
        ("pre", "{}"), ("pre", "{norm: null}"), ("post", "{}"), ("post", "{norm: null}"),
    ]  # fmt: skip
    assert found[1].overrides == ["model.norm=pre", "model.dlcl={norm: null}"]
    folders = [point.folder for point in found]
    assert len(set(folders)) == 4
    assert not set("".join(folders)) & set(" {}:/")
    (plain,) = points([Over("model.dim", ("8",))])
    assert plain.folder == "model.dim=8"
    deep = points([parse_over("data.vocabulary=/a/b,/a_b")])
    assert deep[0].folder != deep[1].folder


def test_the_runs_of_each_point(tmp_path):
    overs = [parse_over("model.encoder_layers=1,2"), parse_over("optim.lr=1e-3,2")]
    found = runs_of("phrases-small", ["model.dim=16"], points(overs), 2, tmp_path)
    assert [run.seed for runs in found.values() for run in runs] == [1, 2] * 4
    (first, *_), last = found.values().__iter__().__next__(), list(found.values())[-1][-1]
    assert last.recipe.model["encoder_layers"] == 2
    assert last.recipe.optim.lr == 2.0
    assert last.recipe.model["dim"] == 16
    assert first.folder == tmp_path / "model.encoder_layers=1,optim.lr=1e-3" / "seed-1"
    # The recipe itself translates nothing.
    assert first.recipe.train.test_bleu
    # YAML reads 1e-3 as text, the recipe as a number.
    assert next(iter(found)).numbers(first.recipe) == [1, 1e-3]


def test_values_that_are_no_numbers(tmp_path):
    overs = [parse_over("model.dlcl={norm: null}"), parse_over("train.deterministic=true")]
    ((point, (run,)),) = runs_of("phrases-small", [], points(overs), 1, tmp_path).items()
    assert point.numbers(run.recipe) == [None, None]


@pytest.mark.parametrize(
    ("over", "overrides", "sentence"),
    [
        ("model.dim=16", ["model.dim=8"], "model.dim: expected either an override or --over, got"),
        ("model.dim=16", ["resume=true"], "resume: expected no override, --output decides it"),
        ("model.dimm=16", [], "unknown key model.dimm, the nearest known key is model.dim"),
        ("model.heads=2,x", [], "model.heads: expected a whole number, got 'x'"),
        ("model.dim=16", ["data.dev_size=0", "data.test_size=0"], "expected dev or test pairs"),
    ],
)  # fmt: skip
def test_a_recipe_that_refuses_is_told_before_any_run(tmp_path, over, overrides, sentence):
    with pytest.raises(RecipeError) as error:
        runs_of("phrases-small", overrides, points([parse_over(over)]), 1, tmp_path)
    assert sentence in str(error.value)


def test_an_override_may_leave_out_the_translation(tmp_path):
    chosen = points([parse_over("model.dim=16")])
    ((run,),) = runs_of("phrases-small", ["train.test_bleu=false"], chosen, 1, tmp_path).values()
    assert not run.recipe.train.test_bleu


def test_the_commands_of_the_page_can_run(tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "systems.md").read_text()
    commands = re.findall(r"^    deepfast sweep (.*)$", page, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        recipe, *words = shlex.split(command)
        overs = [value for option, value in itertools.pairwise(words) if option == "--over"]
        given = [word for word in words if "=" in word and word not in overs]
        chosen = points([parse_over(over) for over in overs])
        assert len(runs_of(recipe, given, chosen, 3, tmp_path)) == len(chosen) >= 5


@pytest.mark.parametrize("name", recipe_names())
def test_a_process_reads_the_recipe_that_was_written(tmp_path, name):
    over = [parse_over("optim.lr=1e-3")]
    overrides = [] if "phrases" in name else ["data.dev_source=x", "data.dev_target=x"]
    ((run,),) = runs_of(name, overrides, points(over), 1, tmp_path).values()
    run.write()
    recipe = read_recipe(run.folder)
    assert recipe.resume is True
    assert recipe.output == str(run.folder / "run")
    expected = run.recipe.to_dict() | {"resume": True, "output": recipe.output}
    assert recipe.to_dict() == expected
    assert run.result() is None


@pytest.mark.parametrize("content", ['{"seed": 1}', '{"seed": 1, "process_bytes": 9}', "[]"])
def test_a_result_that_lacks_what_the_table_reads_is_refused(tmp_path, content):
    over = [parse_over("optim.lr=1e-3")]
    ((run,),) = runs_of("phrases-small", [], points(over), 1, tmp_path).values()
    run.write()
    (run.folder / "result.json").write_text(content)
    with pytest.raises(ValueError, match=r"result\.json: expected what deepfast sweep writes, got"):
        run.result()
    diverged = {"seed": 1, "process_bytes": 9, "diverged": "NaN"}
    (run.folder / "result.json").write_text(json.dumps(diverged))
    assert run.result() == diverged


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"model"', "settings.json: expected what deepfast sweep writes, got other content"),
        ("[1]", "settings.json: expected what deepfast sweep writes, got other content"),
        ("{}", "settings.json: expected what deepfast sweep writes, got other content"),
        (None, r"settings.json: cannot be read \(No such file or directory\)"),
    ],
)
def test_a_process_refuses_another_recipe(tmp_path, content, message):
    if content is not None:
        (tmp_path / "settings.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_recipe(tmp_path)
