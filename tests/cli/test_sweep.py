"""`deepfast mt sweep` with real runs."""

import json
import shutil

import pytest

from deepfast.cli import main
from deepfast.mt.data import Vocabulary

SMALL = (
    "data.max_tokens=200", "model.dim=8", "model.num_heads=2", "model.ffn_dim=8",
    "model.encoder_layers=1", "model.decoder_layers=1", "train.max_steps=3",
    "train.validate_every=3", "train.save_every=3", "train.log_every=2", "train.threads=1",
)  # fmt: skip
TINY = (*SMALL, "data.train_size=200", "data.dev_size=20", "data.test_size=10")


@pytest.fixture
def sweep(in_process, tmp_path, capsys):
    """sweep(recipe, words): the exit code, and what was printed and written."""

    def run(recipe, *words, output="sweep"):
        code = main(["mt", "sweep", str(recipe), *words, "--output", str(tmp_path / output)])
        return code, capsys.readouterr()

    return run


def test_runs_that_end_well_and_diverge_and_fail(sweep, tmp_path):
    size, over = "data.vocab_size=120", "optim.lr=1e-3,1e38"
    code, said = sweep("phrases-small", *TINY, size, "--over", over, "--jobs", "2")
    assert code == 0
    assert "optim.lr=0.001, seed 1: BLEU " in said.out
    assert "optim.lr=1e+38, seed 1: diverged, step " in said.out
    page, picture = tmp_path / "sweep" / "sweep.md", tmp_path / "sweep" / "sweep.svg"
    assert said.out.splitlines()[-2:] == [str(page), str(picture)]
    first, second = sorted(tmp_path.rglob("result.json"))
    run = json.loads(first.read_text())
    assert run["sentences"].count(";") == 9
    assert page.read_text().count("\n| optim.lr=") == 2
    assert run["bleu_signature"] in page.read_text()
    assert picture.read_text().startswith("<?xml")
    # What has finished is read. A value that is left out has no line.
    stamps = [path.stat().st_mtime_ns for path in (first, second)]
    command = "phrases-small", *TINY, size, "--over", "optim.lr=1e-3"
    assert sweep(*command)[0] == 0
    assert page.read_text().count("\n| optim.lr=") == 1
    code, said = sweep(*command, "model.ffn_dim=16")
    assert code == 1
    told = "expected a run with the same settings, got other settings (model.ffn_dim 8 -> 16); "
    assert told in said.err
    assert [path.stat().st_mtime_ns for path in (first, second)] == stamps

    code, said = sweep("phrases-small", *TINY, "--over", "data.vocab_size=5000", output="failed")
    assert code == 1
    (_, failed, *_) = said.out.splitlines()
    # The command's name, with which the run's sentence begins, goes.
    assert failed.startswith("data.vocab_size=5000, seed 1: failed, exit 1: a vocabulary of ")
    table = (tmp_path / "failed" / "sweep.md").read_text()
    assert "\n| data.vocab_size=5000 | - | baseline | - | baseline |  | 1, 1 failed | - |" in table
    assert failed in table


SYSTEMS = """
sweep:
  seeds: 2
  pilots: {key: optim.lr, values: [1.0e+38, 0.001], steps: 2}
  systems:
    DLCL: {model: {encoder_connection: dlcl}}
    once: {model: {encoder_connection: attnres}, optim: {lr: 2.0e-3}, seeds: 1}
"""


def test_systems_with_a_plan_and_pilots(sweep, tmp_path, monkeypatch):
    """They share a text: its vocabulary is learned and its ids are written once."""
    monkeypatch.setattr("deepfast.mt.sweep.stages.MEASURED", 2)
    monkeypatch.setattr("deepfast.mt.sweep.stages.SHORT", 0)
    learned, learn = [], Vocabulary.train
    monkeypatch.setattr(Vocabulary, "train", lambda *args, **options: (
        learned.append(1) or learn(*args, **options)
    ))  # fmt: skip
    words = ["ein altes haus", "das rote haus", "ein rotes BUCH", "das alte buch"] * 6
    for side in ("source", "target"):
        (tmp_path / side).write_text("\n".join(words))
    files = [f"data.{part}_{side}={tmp_path / side}" for part in ("train", "dev", "test")
             for side in ("source", "target")]  # fmt: skip
    recipe, output = tmp_path / "own.yaml", tmp_path / "sweep"
    recipe.write_text(SYSTEMS)
    command = (recipe, *SMALL, *files, "data.vocab_size=40", "data.vocab_at_most=true",
               "data.lowercase=true", "data.max_length=50", "train.device=cpu",
               f"data.cache={tmp_path}/ids")  # fmt: skip
    code, said = sweep(*command, "--plan")
    *measured, planned = said.out.splitlines()
    names = ["plan of DLCL", "plan of once"]
    assert [line.partition(", seed")[0] for line in measured] == names
    assert planned.startswith("plan: runs 5, steps 13, hours 0.0 with --jobs 1, memory of a proces")
    assert (code, [path.name for path in output.iterdir()]) == (0, [".lock"])

    code, said = sweep(*command)
    assert code == 0
    assert "plan: runs 5" in said.out
    assert "DLCL, optim.lr=1e+38, seed 1: diverged, step " in said.out
    assert len(list((tmp_path / "ids").rglob("about.json"))) == len(learned) == 1
    text = (output / "sweep.md").read_text()
    assert "\n- DLCL: dev NLL of pilots: optim.lr=1e+38 -, optim.lr=0.001 " in text
    assert "  lr: 0.001\n" in (output / "DLCL" / "seed-2" / "recipe.yaml").read_text()
    assert "\n- once: " not in text
    # The page states the case of its BLEU.
    assert "`nrefs:1|case:lc|" in text
    assert [len(list((output / name).iterdir())) for name in ("DLCL", "once")] == [2, 1]
    # What a run leaves is enough: the rest may go, and nothing is made again.
    kept = {path: path.read_bytes() for path in output.rglob("result.json")}
    for path in output.rglob("seed-*/*"):
        if path.is_file() and path.name not in ("result.json", "recipe.yaml"):
            path.unlink()
    code, said = sweep(*command)
    assert (code, "plan:" in said.out) == (0, False)
    assert {path: path.read_bytes() for path in output.rglob("result.json")} == kept
    assert (output / "sweep.md").read_text() == text
    # The page keeps what has finished before, and nothing else is made.
    shutil.rmtree(output / "DLCL" / "seed-2")
    shutil.rmtree(output / "once")
    assert sweep(*command, "--only", "once")[0] == 0
    assert not (output / "DLCL" / "seed-2").exists()
    left = (output / "sweep.md").read_text()
    assert [left.count(f"\n| {name} | ") for name in ("DLCL", "once")] == [1, 1]
    # Without any result there is no page.
    code, said = sweep(*command, "--jobs", "0", output="empty")
    assert (code, said.out) == (0, "")
