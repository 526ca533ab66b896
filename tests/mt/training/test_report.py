"""The printed lines and the metrics file."""

import json
import threading

import pytest

from deepfast.mt.training import RecipeError, train
from deepfast.mt.training import report as module
from deepfast.mt.training.report import Report, describe

ROW = {
    "step": 20, "epoch": 0, "loss": 2.5, "nll": 2.0, "ppl": 7.389, "lr": 1e-3, "grad_norm": 0.7,
    "source_tokens_per_second": 1234.0, "target_tokens_per_second": 1100.0,
    "memory_bytes": 2**30,
}  # fmt: skip


def test_a_run_says_what_was_read_and_dropped(make_recipe, corpus, tmp_path, capsys):
    source, target = tmp_path / "a.en", tmp_path / "a.de"
    source.write_text("one two\n\u200b\n" + (corpus / "train.en").read_text() + "red " * 50 + "\n")
    target.write_text("zwei eins\nx\n" + (corpus / "train.de").read_text("utf-8") + "rot\n")
    (tmp_path / "dev.en").write_text("one Q\n")
    (tmp_path / "dev.de").write_text("eins Q\n")
    changes = {"data.train_source": str(source), "data.train_target": str(target),
               "data.dev_source": str(tmp_path / "dev.en"),
               "data.dev_target": str(tmp_path / "dev.de"), "train.max_steps": 2}  # fmt: skip
    train(make_recipe(changes))
    out = capsys.readouterr().out
    assert "train 242 pairs" in out
    dropped = f"1 empty (first at {source}:2), 1 too long (first at {source}:243)"
    assert f"2 pairs dropped: {dropped}; sentences of at most 40 tokens, " in out
    assert out.count("dropped") == 1
    dev = next(line for line in out.splitlines() if line.startswith("dev "))
    assert "1 pairs" in dev
    assert "0.00% unknown" not in dev
    assert "3 encoder layers (dlcl), 1 decoder layers (residual), pre-norm" in out
    assert "target tok/s" in out
    assert "\x1b" not in out


def test_lines_state_units():
    line = describe({"event": "train", "seconds": 61.2} | ROW)
    for part in ("nll 2.0000 nats", "ppl 7.39", "1,100 target tok/s", "1,024 MiB", "61 s"):
        assert part in line
    row = {"event": "valid", "step": 3, "nll": 1.0, "ppl": 2.718, "accuracy": 0.625, "best": True}
    assert describe(row).endswith("valid nll 1.0000 nats, ppl 2.72, accuracy 62.5%, best so far")
    assert describe({"event": "test", "step": 3, "bleu": 12.345}).endswith("test BLEU 12.35")


@pytest.mark.parametrize(
    "broken", [b'{"event": "tr', b'{"event": "train", "step": null}', b"\0\0\0", b'\xff{"event"']
)
def test_resuming_removes_later_and_broken_rows(tmp_path, broken):
    path = tmp_path / "metrics.jsonl"
    rows = [json.dumps({"event": "train", "step": step}) for step in (1, 2, 3)]
    path.write_bytes("\n".join(rows).encode() + b"\n" + broken)
    Report(tmp_path, total_steps=9, first_step=2, tensorboard=False, quiet=True).close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_an_infinite_perplexity_is_null_in_json(tmp_path):
    report = Report(tmp_path, total_steps=9, tensorboard=False, quiet=True)
    report.log("train", ROW | {"ppl": float("inf")}, seconds=1.0)
    report.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["ppl"] is None


def test_tensorboard_events_are_written(tmp_path):
    pytest.importorskip("tensorboard")
    report = Report(tmp_path, total_steps=9, quiet=True)
    norms = {"grad_norm_encoder": [0.5, None, 0.25], "encoder_used": [0, 2]}
    report.log("train", ROW | norms, seconds=1.0)
    report.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    text = events.read_bytes()
    assert b"train/loss" in text
    # A group of curves for the layers; one without a gradient has none.
    for layer, has in ((1, True), (2, False), (3, True)):
        assert (f"train_grad_norm_encoder/{layer:03}".encode() in text) == has
    assert b"encoder_used" not in text


def test_without_tensorboard_a_line_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "_tensorboard", lambda *args: None)
    report = Report(tmp_path, total_steps=9)
    report.log("train", ROW, seconds=1.0)
    report.close()
    assert "tensorboard is not installed" in capsys.readouterr().out


def test_a_terminal_gets_a_bar(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module.sys.stdout, "isatty", lambda: True, raising=False)
    report = Report(tmp_path, total_steps=40, tensorboard=False)
    assert report._bar is not None
    report.log("train", ROW, seconds=1.0)
    report.say("[a line] with brackets")
    assert report._bar.tasks[0].completed == 20
    report.close()
    report.close()
    assert "[a line] with brackets" in capsys.readouterr().out


def test_training_in_a_thread_leaves_signals_alone(make_recipe):
    results = []
    recipe = make_recipe({"train.max_steps": 2})
    thread = threading.Thread(target=lambda: results.append(train(recipe, quiet=True)))
    thread.start()
    thread.join()
    assert results[0].stopped == "max_steps"


def test_an_unknown_device_is_one_sentence(make_recipe):
    for name in ("gpu", "cuda:99", "meta"):
        with pytest.raises(RecipeError, match=r"train\.device: expected .* got '"):
            train(make_recipe({"train.device": name}), quiet=True)
