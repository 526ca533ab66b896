"""`deepfast mt sweep` with real runs."""

import importlib.resources
import json
import shutil

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
    names = ("sweep.json", "sweep.md", "sweep.svg", "sweep_curves.svg", "sweep_gradients.svg")
    assert said.splitlines()[-5:] == [f"{output}/{name}" for name in names]
    content = json.loads((output / "sweep.json").read_text())
    assert content["over"] == {"data.vocab_size": ["120"], "optim.lr": ["1e-3", "1e38"]}
    (run,) = content["points"][0]["runs"]
    assert [step for step, _ in run["curve"]] == [2, 4]
    assert run["bleu"] is not None
    assert run["sentences"].count(";") == 9
    assert [row["step"] for row in run["gradient_norms"]] == [1, 4]
    assert len(run["gradient_norms"][0]["grad_norm_encoder"]) == 1
    assert {"commit", "cpu", "torch"} <= run.keys()
    assert run["threads"] == 1
    assert run["live_bytes"] > 4 * 4 * run["parameters"] / 2
    assert (output / "sweep.svg").read_text().startswith("<?xml")
    # A line of what was learned, and one of the cost.
    assert (output / "sweep.md").read_text().count("\n| 120 |") == 4
    (first, second) = sorted(output.rglob("result.json"))
    stamps = [path.stat().st_mtime_ns for path in (first, second)]
    # What has finished is read. A value that is left out has no line.
    command[command.index("optim.lr=1e-3,1e38")] = "optim.lr=1e-3"
    assert main(command) == 0
    assert (output / "sweep.md").read_text().count("\n| 120 |") == 2
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


SYSTEMS = """
sweep:
  seeds: 2
  pilots: {key: optim.lr, values: [1e-3, 1e38], steps: 2}
  systems:
    plain: {model: {encoder_connection: residual}}
    DLCL: {model: {encoder_connection: dlcl}, train: {max_steps: 4}}
    once: {model: {encoder_connection: attnres}, optim: {lr: 2e-3}, seeds: 1}
"""


def test_systems_with_a_plan_and_pilots(in_process, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("deepfast.mt.sweep.plan.MEASURED", 2)
    monkeypatch.setattr("deepfast.mt.sweep.plan.SHORT", 0)
    recipe, output = tmp_path / "own.yaml", tmp_path / "sweep"
    recipe.write_text(
        (importlib.resources.files("deepfast.mt") / "recipes/phrases-small.yaml").read_text()
        + SYSTEMS
    )
    command = ["mt", "sweep", str(recipe), *TINY, "data.vocab_size=120", "--output", str(output)]
    assert main([*command, "--plan"]) == 0
    *measured, planned = capsys.readouterr().out.splitlines()
    assert [line.partition(", seed")[0] for line in measured] == [
        f"plan, {name}" for name in ("plain", "DLCL", "once")
    ]
    assert planned.startswith("plan: 9 runs of 3 points, 28 steps; about 0.0 hours with 1 process,")
    assert not list(output.rglob("sweep.md"))

    assert main(command) == 0
    said = capsys.readouterr().out.splitlines()
    assert len([line for line in said if line.startswith("plan,")]) == 3
    assert "DLCL, optim.lr=1e38, seed 1: diverged, step " in "\n".join(said)
    text = (output / "sweep.md").read_text()
    assert text.startswith("# Systems\n")
    assert "\n| DLCL | **" in text
    assert text.count("\n| once | ") == 2  # no pilots
    for point in json.loads((output / "sweep.json").read_text())["points"]:
        assert len(point["runs"]) == (1 if point["values"]["system"] == "once" else 2)
    # The measured steps serve whatever is left.
    shutil.rmtree(output / "DLCL" / "seed-2")
    assert main(command) == 0
    assert "\nplan: 1 run of 1 point," in capsys.readouterr().out
    text = (output / "sweep.md").read_text()
    # What a run leaves is enough: the rest may go, and nothing is made again.
    kept = {path: path.read_bytes() for path in output.rglob("result.json")}
    for path in [*output.rglob("run"), output / "plan"]:
        shutil.rmtree(path)
    assert main(command) == 0
    again = capsys.readouterr().out.splitlines()
    assert not [line for line in again if line.startswith("plan")]
    assert {path: path.read_bytes() for path in output.rglob("result.json")} == {
        path: content for path, content in kept.items() if "plan" not in path.parts
    }
    assert (output / "sweep.md").read_text() == text
    shutil.rmtree(output / "DLCL" / "seed-2")
    assert main([*command, "--jobs", "0"]) == 0
    assert "\n| once | " in (output / "sweep.md").read_text()
    assert not (output / "DLCL" / "seed-2").exists()
    # The page keeps what has finished before, and nothing else is made.
    shutil.rmtree(output / "once")
    assert main([*command, "--only", "once"]) == 0
    assert not (output / "DLCL" / "seed-2").exists()
    left = (output / "sweep.md").read_text()
    assert left.count("\n| plain | ") == text.count("\n| plain | ") == 3
    assert left.count("\n| once | ") == 2
    # Steps that were measured with other settings are measured again.
    shutil.rmtree(output / "once" / "seed-1")
    settings = output / "plan" / "once" / "settings.json"
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text((output / "plain/seed-1/settings.json").read_text())
    assert main([*command, "--only", "once"]) == 0
    # Without any result there is no page.
    capsys.readouterr()
    assert main([*command, "--jobs", "0", "--output", str(tmp_path / "empty")]) == 0
    assert capsys.readouterr().out == ""
