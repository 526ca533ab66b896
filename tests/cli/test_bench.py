"""`deepfast bench` at toy size: both forms compute the same, and the table has every op."""

import json
import re
from functools import partial

import pytest
import torch

from deepfast import ops
from deepfast.cases.case import differentiate, torch_dropout
from deepfast.cli import main
from deepfast.measure.bench_ops import CASES, Sizes

TOY = ["--tokens", "6", "--dim", "8", "--rounds", "1", "--device", "cpu"]


def test_every_op_has_a_case():
    assert set(ops.__all__) <= set(CASES)


@pytest.mark.parametrize("op", CASES)
def test_both_forms_compute_the_same(op):
    sizes = Sizes(tokens=170, dim=8, sources=3, layers=3, vocabulary=11, dropout=0.0,
                  dtype=torch.float64)  # fmt: skip
    case = CASES[op](sizes)
    ours, plain = (
        differentiate(form, case.of_one_dtype(torch.float64), torch.float64)
        for form in (case.run, partial(case.plain, torch_dropout))
    )
    for name in ours:
        torch.testing.assert_close(ours[name], plain[name], check_dtype=False, rtol=1e-5, atol=1e-5)


def test_the_table_has_every_op(capsys):
    pytest.importorskip("rich")
    assert main(["bench", *TOY]) == 0
    text = capsys.readouterr().out
    assert "6 tokens, 8 channels, float32, " in text
    for op in CASES:
        (line,) = re.findall(rf"^ +{op} .*", text, re.M)
        assert len(re.findall(r"\d\.\d\d", line)) == 6
        assert f"\n  {op}: " in text


def test_json_of_one_op(capsys):
    assert main(["bench", "layer_norm", "--json", "--dtype", "bfloat16", *TOY]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["op"], row["pass"]) for row in rows] == [
        ("layer_norm", "forward"), ("layer_norm", "forward and backward"),
    ]  # fmt: skip
    for row in rows:
        assert row["backend"] == "cpu"
        assert row["ratio"] == pytest.approx(row["seconds"]["torch"] / row["seconds"]["deepfast"])
