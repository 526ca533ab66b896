"""`deepfast mt sweep` with real runs."""

import json

from deepfast.cli import main

TINY = (
    "data.train_size=200", "data.dev_size=20", "data.test_size=10", "data.max_tokens=200",
    "model.dim=8", "model.num_heads=2", "model.ffn_dim=8", "model.encoder_layers=1",
    "model.decoder_layers=1", "train.max_steps=4", "train.validate_every=2", "train.save_every=2",
    "train.log_every=2", "train.threads=1",
)  # fmt: skip


def test_runs_that_end_well_and_diverge(in_process, tmp_path, capsys):
    output = tmp_path / "sweep"
    command = ["mt", "sweep", "phrases-small", *TINY, "--over", "data.vocab_size=120", "--over",
               "optim.lr=1e-3,1e38", "--jobs", "2", "--output", str(output)]  # fmt: skip
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "data.vocab_size=120, optim.lr=1e-3, seed 1: BLEU " in said
    assert "data.vocab_size=120, optim.lr=1e38, seed 1: diverged, step " in said
    assert said.endswith(f"{output}/sweep.md\n{output}/sweep.svg\n{output}/sweep.json\n")
    content = json.loads((output / "sweep.json").read_text())
    assert content["over"] == {"data.vocab_size": ["120"], "optim.lr": ["1e-3", "1e38"]}
    (run,) = content["points"][0]["runs"]
    assert [step for step, _ in run["curve"]] == [2, 4]
    assert run["bleu"] is not None
    assert run["threads"] == 1
    assert run["live_bytes"] > 4 * 4 * run["parameters"] / 2
    assert (output / "sweep.svg").read_text().startswith("<?xml")
    assert (output / "sweep.md").read_text().count("\n| 120 |") == 2
    (first, second) = sorted(output.rglob("result.json"))
    stamps = [path.stat().st_mtime_ns for path in (first, second)]
    # What has finished is read. A value that is left out has no line.
    command[command.index("optim.lr=1e-3,1e38")] = "optim.lr=1e-3"
    assert main(command) == 0
    assert (output / "sweep.md").read_text().count("\n| 120 |") == 1
    assert [path.stat().st_mtime_ns for path in (first, second)] == stamps
    assert main([*command, "model.ffn_dim=16"]) == 1
    assert "expected a run with the same settings" in capsys.readouterr().err


def test_a_run_that_fails_says_why(in_process, tmp_path, capsys):
    command = ["mt", "sweep", "phrases-small", *TINY, "--over", "data.vocab_size=5000"]
    assert main([*command, "--memory-limit", "8GiB", "--output", str(tmp_path)]) == 1
    (failed, *_) = capsys.readouterr().out.splitlines()
    assert failed.startswith("data.vocab_size=5000, seed 1: failed, exit 1: DataError: ")
    table = (tmp_path / "sweep.md").read_text()
    assert "\n| 5000 | - | - |" in table
    assert failed.split("failed, ")[1] in table
