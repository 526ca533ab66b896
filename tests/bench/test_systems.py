"""The table of systems: its rows are recipes, its columns what runs left."""

import gzip
import json
import re

import pytest

from bench.systems import __main__ as systems
from bench.systems.page import page, steps_to
from bench.systems.rows import (
    BASE,
    HELD_OUT,
    LARGE,
    ROWS,
    named,
    text_files,
)
from deepfast.mt.sweep.table import diverged
from deepfast.mt.training import load_recipe
from deepfast.nn.connections.fusion import FUSIONS, OPTIONS

TINY = (
    "data.train_size=200", "data.dev_size=20", "data.test_size=10", "data.vocab_size=120",
    "data.max_tokens=200", "model.dim=8", "model.num_heads=2", "model.ffn_dim=8",
    "model.encoder_layers=2", "model.decoder_layers=1", "train.max_steps=4",
    "train.validate_every=2", "train.save_every=2", "train.log_every=2",
)  # fmt: skip


def run(**changes):
    return {
        "model": "a model", "parameters": 2_000_000, "curve": [[10, 3.0], [20, 0.9]], "nll": 0.8,
        "bleu": 50.0, "target_tokens_per_second": 100.0, "live_bytes": 2**20,
        "process_bytes": 2**21, "target_tokens": 5000, "seed": 1,
    } | changes  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize("setting", [(), LARGE], ids=["small", "large"])
def test_every_row_is_a_recipe(row, setting):
    recipe, shared = load_recipe(row.recipe, row.settings(setting)), load_recipe(BASE, setting)
    assert recipe.data == shared.data
    assert row.grows or recipe.train == shared.train
    assert recipe.train.test_bleu
    assert recipe.data.validates


def test_a_system_in_two_stages_takes_as_many_steps_and_layers():
    (row,) = named("growing")
    recipe = load_recipe(BASE, row.settings(["train.max_steps=7", "model.encoder_layers=9"]))
    assert (recipe.train.max_steps, recipe.grow["train"]["max_steps"]) == (4, 3)
    top = recipe.grow["model"]["top_encoder_layers"]
    assert (recipe.model["encoder_layers"], top) == (6, 3)


def test_every_kind_of_fusion_has_a_row():
    rows = named(",".join(f"fusion-{kind.replace('_', '-')}" for kind in FUSIONS))
    for kind, row in zip(FUSIONS, rows, strict=True):
        model = load_recipe(BASE, row.settings(())).model
        assert (model["encoder_fusion"], model["decoder_fusion"]) == (kind, kind)
        assert set(model.get("fusion", {})) <= set(OPTIONS[kind])


@pytest.mark.parametrize("name", ["dlcl-post", "dlcl-pre"])
def test_dlcl_connects_encoder_and_decoder(name):
    (row,) = named(name)
    model = load_recipe(BASE, row.settings(())).model_config(vocab_size=8)
    assert (model.encoder_connection, model.decoder_connection) == ("dlcl", "dlcl")
    assert model.norm == name.removeprefix("dlcl-")


def test_names_of_rows():
    assert named(None) == list(ROWS)
    assert [row.name for row in named("pre-norm,post-norm")] == ["pre-norm", "post-norm"]
    with pytest.raises(ValueError, match=r"expected names of .*post-norm.*, got 'prenorm'"):
        named("prenorm")


def test_a_row_that_cannot_be_trained_is_told_first(tmp_path):
    with pytest.raises(ValueError, match="target_layers"):
        systems.main(["--output", str(tmp_path), *TINY])
    assert not (tmp_path / "systems.md").exists()


def test_what_diverged():
    assert not diverged(run())
    assert diverged(run(curve=[[10, 1.0], [20, 1.6]]))
    assert diverged(run(curve=[[10, 1.0], [20, float("nan")]]))
    assert diverged({"diverged": "step 3: the loss is nan"})


def test_steps_to_a_level():
    assert steps_to(run(), 1.0) == 20
    assert steps_to(run(), 0.5) is None


def test_the_page():
    row = ROWS[0]
    ended = ("nll", "bleu", "curve", "parameters", "target_tokens_per_second")
    failed = {k: v for k, v in run(diverged="the loss is nan").items() if k not in ended}
    text = page(
        {row: [run(), run(bleu=60.0, curve=[[10, 2.0]]), failed]}, 1.0, "make", "this", "x.svg"
    )
    (line,) = (x for x in text.splitlines() if x.startswith(f"| {row.title} "))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[3] == "2.00M"
    assert cells[4] == "20 (1 of 3)"
    assert cells[6] == "55.0 ± 7.1"
    assert cells[-2:] == ["3", "1 of 3"]
    assert "](x.svg)" in text


def test_the_page_tells_what_each_row_changes():
    text = page({row: [run()] for row in ROWS}, 1.0, "make", "this", "x.svg")
    told = [line for line in text.splitlines() if line.startswith("- ")]
    assert len(told) == len(ROWS)
    assert all(f"- {row.title}: `" in text for row in ROWS)


def test_processes_and_the_picture(tmp_path, monkeypatch, capsys):
    given = {}

    def run_all(runs, report, processes):
        given.update(vars(processes))
        for each in runs:
            report(each, run(seed=each.seed, bleu=50.0 + each.seed, seconds=1.0))

    monkeypatch.setattr("deepfast.mt.sweep.runs.run_all", run_all)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert systems.main([
        "--seeds", "2", "--rows", "mudd,pre-norm", "--output", str(tmp_path), "--jobs", "3",
        "--threads", "1", "--memory-limit", "2KiB",
    ]) == 0  # fmt: skip
    assert given == {"jobs": 3, "threads": 1, "memory": 2048}
    text = (tmp_path / "systems.md").read_text()
    assert (
        "`make systems SEEDS=2 ROWS=mudd,pre-norm JOBS=3 THREADS=1 MEMORY_LIMIT=2KiB` on " in text
    )
    assert "](systems.svg)" in text
    assert f"the picture: {tmp_path / 'systems.svg'}\n" in capsys.readouterr().out
    words = re.findall(r"<text[^>]*>([^<]*)</text>", (tmp_path / "systems.svg").read_text())
    names = [word for word in words if word in ("MUDD, pre-norm", "pre-norm")]
    assert names == ["MUDD, pre-norm", "pre-norm"]
    assert {"BLEU", "system", "Mean of 2 seeds; bars: standard deviation."} <= set(words)
    with pytest.raises(SystemExit):
        systems.main(["--jobs", "0"])
    assert "jobs must be an integer of at least 1, got 0" in capsys.readouterr().err


def test_text_files_are_split(tmp_path):
    count = 10 * HELD_OUT + 7
    for side in ("en", "de"):
        content = "".join(f"{side} {i}\n" for i in range(count)).encode()
        (tmp_path / f"{side}.gz").write_bytes(gzip.compress(content))
    overrides = text_files(tmp_path / "en.gz", tmp_path / "de.gz", tmp_path / "out")
    assert "data.phrases=null" in overrides
    parts = {part: (tmp_path / "out" / f"{part}.source").read_text().splitlines()
             for part in ("train", "dev", "test")}  # fmt: skip
    assert len(parts["dev"]) == len(parts["test"]) == HELD_OUT
    lines = sorted(line for part in parts.values() for line in part)
    assert lines == sorted(f"en {i}" for i in range(count))
    (tmp_path / "few").write_text("one\n")
    with pytest.raises(ValueError, match="expected at least 5000 pairs"):
        text_files(tmp_path / "few", tmp_path / "few", tmp_path / "out")


@pytest.mark.exhaustive
def test_a_run_is_made_once(tmp_path, monkeypatch):
    """In processes, as a user would; the second call reads what the first one left."""
    arguments = ["--seeds", "1", "--rows", "dlcl-pre", "--output", str(tmp_path), *TINY]
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert systems.main(arguments) == 0
    result = tmp_path / "dlcl-pre" / "seed-1" / "result.json"
    found = json.loads(result.read_text())
    assert [step for step, _ in found["curve"]] == [2, 4]
    assert found["target_tokens"] > 0
    assert found["live_bytes"] > 4 * 4 * found["parameters"] / 2
    stamp = result.stat().st_mtime_ns
    assert systems.main(arguments) == 0
    assert result.stat().st_mtime_ns == stamp
    assert "| DLCL, pre-norm |" in (tmp_path / "systems.md").read_text()
    assert found["seconds"] > 0
    # A run of other settings is not taken for this one.
    with pytest.raises(ValueError, match=r"same settings, got other settings \(optim.lr 0.002 -> "):
        systems.main([*arguments, "optim.lr=1e-3"])
