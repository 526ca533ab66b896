"""The printed lines, the metrics file, and the table of gradient norms."""

import json
import sys

import pytest

from deepfast.mt.training import norms_table
from deepfast.mt.training.report import Report

ROW = {"step": 20, "loss": 2.5, "grad_norm_encoder": [0.5, None, 0.25], "encoder_used": [0, 2]}


def test_the_table_of_norms():
    """Of the first, the middle and the last line of metrics."""
    rows = [{"event": "train", "step": step, "grad_norm": 1.0, "grad_norm_other": 1.0,
             "grad_norm_encoder": [step / 2, None], "grad_norm_decoder": [2.0],
             "encoder_used": [1]} for step in (1, 5, 8, 9)]  # fmt: skip
    assert [line.split() for line in norms_table.lines([{"event": "valid", "step": 3}, *rows])] == [
        ["encoder", "layer", "step", "1", "step", "8", "step", "9"],
        ["1", "0.5", "4", "4.5"],
        ["2", "nan", "nan", "nan"],
        ["decoder", "layer", "step", "1", "step", "8", "step", "9"],
        ["1", "2", "2", "2"],
    ]
    assert norms_table.lines(rows[:1])[0] == "encoder layer           step 1"
    assert norms_table.lines([]) == []


@pytest.mark.parametrize("broken", [b'{"event": "tr', b"\0\0\0", b'\xff{"event"'])
def test_resuming_removes_later_and_broken_rows(tmp_path, broken):
    path = tmp_path / "metrics.jsonl"
    rows = [json.dumps({"event": "train", "step": step}) for step in (1, 2, 3)]
    path.write_bytes("\n".join(rows).encode() + b"\n" + broken)
    Report(tmp_path, total_steps=9, first_step=2, tensorboard=False, quiet=True)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_metrics_for_programs_and_progress_for_people(tmp_path, capsys, monkeypatch):
    """An infinite perplexity is null in JSON, which has no infinity."""
    pytest.importorskip("tensorboard")
    report = Report(tmp_path, total_steps=60)
    report.log("train", ROW | {"ppl": float("inf")}, seconds=10.0)
    report.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["ppl"] is None
    assert capsys.readouterr().out.endswith(" 10 s, 0:00:20 left\n")
    (events,) = (tmp_path / "tensorboard").iterdir()
    text = events.read_bytes()
    assert b"train/loss" in text
    # A group of curves for the layers; one without a gradient has none.
    for layer, has in ((1, True), (2, False), (3, True)):
        assert (f"train_grad_norm_encoder/{layer:03}".encode() in text) == has
    assert b"encoder_used" not in text
    # The package may be missing.
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    report = Report(tmp_path, total_steps=9)
    report.log("train", ROW, seconds=10.0)
    report.close()
