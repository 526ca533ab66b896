"""`deepfast mt sweep` with real runs."""

import importlib.resources
import json
import shutil

from deepfast.cli import main
from deepfast.mt.data import Vocabulary

TINY = (
    "data.train_size=200", "data.dev_size=20", "data.test_size=10", "data.max_tokens=200",
    "model.dim=8", "model.num_heads=2", "model.ffn_dim=8", "model.encoder_layers=1",
    "model.decoder_layers=1", "train.max_steps=4", "train.validate_every=2", "train.save_every=2",
    "train.log_every=2", "train.threads=1",
)  # fmt: skip


def test_runs_that_end_well_and_diverge(in_process, tmp_path, capsys):
    output = tmp_path / "sweep"
    command = ["mt", "sweep", "phrases-small", *TINY, "data.vocab_size=120", "--over",
               "optim.lr=1e-3,1e38", "--jobs", "2", "--output", str(output)]  # fmt: skip
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "optim.lr=0.001, seed 1: BLEU " in said
    assert "optim.lr=1e+38, seed 1: diverged, step " in said
    assert said.splitlines()[-2:] == [f"{output}/sweep.md", f"{output}/sweep.svg"]
    first, second = sorted(output.rglob("result.json"))
    run, other = (json.loads(path.read_text()) for path in (first, second))
    assert other.keys() == {"diverged", "machine"}
    assert run["test_bleu"] is not None
    assert run["sentences"].count(";") == 9
    assert run["step_seconds"] > 0
    assert run["peak_bytes"] > 4 * 4 * run["parameters"]
    assert {"commit", "cpu", "torch"} <= run["machine"].keys()
    assert (output / "sweep.svg").read_text().startswith("<?xml")
    page = (output / "sweep.md").read_text()
    assert page.count("\n| optim.lr=") == 2
    assert run["bleu_signature"] in page
    stamps = [path.stat().st_mtime_ns for path in (first, second)]
    # What has finished is read. A value that is left out has no line.
    command[command.index("optim.lr=1e-3,1e38")] = "optim.lr=1e-3"
    assert main(command) == 0
    assert (output / "sweep.md").read_text().count("\n| optim.lr=") == 1
    assert [path.stat().st_mtime_ns for path in (first, second)] == stamps
    assert main([*command, "model.ffn_dim=16"]) == 1
    assert "expected a run with the same settings" in capsys.readouterr().err


def test_seeds_and_pilots_share_a_text(in_process, tmp_path, monkeypatch):
    """Its vocabulary is learned and its ids are written once, and the page states the case of its
    BLEU."""
    learned, learn = [], Vocabulary.train
    monkeypatch.setattr(Vocabulary, "train", lambda *args, **options: (
        learned.append(1) or learn(*args, **options)
    ))  # fmt: skip
    words = ["ein altes haus", "das rote haus", "ein rotes BUCH", "das alte buch"] * 30
    for side in ("source", "target"):
        (tmp_path / side).write_text("\n".join(words))
    files = [f"data.{part}_{side}={tmp_path / side}" for part in ("train", "dev", "test")
             for side in ("source", "target")]  # fmt: skip
    recipe = tmp_path / "own.yaml"
    recipe.write_text("""
sweep:
  seeds: 2
  pilots: {key: optim.lr, values: [0.001, 0.002], steps: 2}
  systems: {plain: {}}
""")
    own = [word for word in TINY if "_size" not in word]
    more = ("data.vocab_size=40", "data.vocab_at_most=true", "data.lowercase=true",
            "data.max_length=50")  # fmt: skip
    command = ["mt", "sweep", str(recipe), *own, *files, *more, "train.device=cpu"]
    assert main([*command, f"data.cache={tmp_path}/ids", "--output", f"{tmp_path}/sweep"]) == 0
    assert len(list((tmp_path / "sweep").rglob("result.json"))) == 4
    assert len(list((tmp_path / "ids").rglob("about.json"))) == len(learned) == 1
    page = (tmp_path / "sweep" / "sweep.md").read_text()
    assert "`nrefs:1|case:lc|" in page
    assert "case:mixed" not in page


def test_a_run_that_fails_says_why(in_process, tmp_path, capsys):
    command = ["mt", "sweep", "phrases-small", *TINY, "--over", "data.vocab_size=5000"]
    assert main([*command, "--output", str(tmp_path)]) == 1
    (_, failed, *_) = capsys.readouterr().out.splitlines()
    assert failed.startswith("data.vocab_size=5000, seed 1: failed, exit 1: ")
    table = (tmp_path / "sweep.md").read_text()
    assert "\n| data.vocab_size=5000 | - | baseline | - | baseline |  | 1, 1 failed | - |" in table
    assert failed in table


SYSTEMS = """
sweep:
  seeds: 2
  pilots: {key: optim.lr, values: [0.001, 1.0e+38], steps: 2}
  systems:
    plain: {model: {encoder_connection: residual}}
    DLCL: {model: {encoder_connection: dlcl}, train: {max_steps: 4}}
    once: {model: {encoder_connection: attnres}, optim: {lr: 2.0e-3}, seeds: 1}
"""


def test_systems_with_a_plan_and_pilots(in_process, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("deepfast.mt.sweep.stages.MEASURED", 2)
    monkeypatch.setattr("deepfast.mt.sweep.stages.SHORT", 0)
    recipe, output = tmp_path / "own.yaml", tmp_path / "sweep"
    recipe.write_text(
        (importlib.resources.files("deepfast.mt") / "recipes/phrases-small.yaml").read_text()
        + SYSTEMS
    )
    command = ["mt", "sweep", str(recipe), *TINY, "data.vocab_size=120", "--output", str(output)]
    assert main([*command, "--plan"]) == 0
    *measured, planned = capsys.readouterr().out.splitlines()
    names = ["plan of plain", "plan of DLCL", "plan of once"]
    assert [line.partition(", seed")[0] for line in measured] == names
    assert planned.startswith(
        "plan: runs 9, steps 28, hours 0.0 with --jobs 1, memory of a process"
    )
    assert [path.name for path in output.iterdir()] == [".lock"]

    assert main(command) == 0
    said = capsys.readouterr().out
    assert "plan: runs 9" in said
    assert "DLCL, optim.lr=1e+38, seed 1: diverged, step " in said
    text = (output / "sweep.md").read_text()
    assert "\n- DLCL: dev NLL of pilots: optim.lr=0.001 " in text
    assert "\n- once: " not in text
    assert len(list((output / "DLCL").iterdir())) == 2
    assert len(list((output / "once").iterdir())) == 1
    # What a run leaves is enough: the rest may go, and nothing is made again.
    kept = {path: path.read_bytes() for path in output.rglob("result.json")}
    for path in output.rglob("seed-*/*"):
        if path.is_file() and path.name not in ("result.json", "recipe.yaml"):
            path.unlink()
    assert main(command) == 0
    assert "plan:" not in capsys.readouterr().out
    assert {path: path.read_bytes() for path in output.rglob("result.json")} == kept
    assert (output / "sweep.md").read_text() == text
    shutil.rmtree(output / "DLCL" / "seed-2")
    assert main([*command, "--jobs", "0"]) == 0
    # The page keeps what has finished before, and nothing else is made.
    shutil.rmtree(output / "once")
    assert main([*command, "--only", "once"]) == 0
    assert not (output / "DLCL" / "seed-2").exists()
    left = (output / "sweep.md").read_text()
    assert left.count("\n| plain | ") == 1
    assert left.count("\n| once | ") == 1
    # Without any result there is no page.
    capsys.readouterr()
    assert main([*command, "--jobs", "0", "--output", str(tmp_path / "empty")]) == 0
    assert capsys.readouterr().out == ""
