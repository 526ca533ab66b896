"""`deepfast bench` at toy size: the table has every op."""

import json
import re

import pytest

from deepfast import ops
from deepfast.cli import main
from deepfast.measure import bench_ops
from deepfast.measure.bench_ops import CASES, PASSES

TOY = ["--tokens", "6", "--dim", "8", "--rounds", "1", "--device", "cpu"]


MATRIX_PRODUCTS = {"norm_linear", "add_norm_linear", "feed_forward", "linear_cross_entropy",
                   "peephole_lstm"}  # fmt: skip
"""Ops whose time they take, so that no copy says how fast they could be."""


def test_the_table_has_every_op(capsys):
    assert set(ops.__all__) <= set(CASES)
    assert main(["bench", "--quick", *TOY]) == 0
    text = capsys.readouterr().out
    assert text.startswith("6 tokens, 8 channels, float32, ")
    tables, forms = text.split("What torch runs")
    for op in CASES:
        lines = re.findall(rf"^ +{op} +(\S+) +(\S+) +(\S+) +(\S+)(?: +(\d+)%)? *$", tables, re.M)
        assert len(lines) == len(PASSES)
        for ours, backend, plain, ratio, copy in lines:
            assert backend in {"cpu", "sdpa", "cpu+sdpa", "reference"}
            assert min(map(float, (ours, plain))) > 0
            # Where something else ran in between, it rounds to 0.
            assert float(ratio.rstrip("*")) >= 0
            assert bool(copy) != (op in MATRIX_PRODUCTS)
        assert f"\n  {op}: " in forms


@pytest.mark.parametrize("json_", [False, True])
def test_ctrl_c_leaves_what_was_measured(monkeypatch, capsys, json_):
    """The third measurement is the second op's forward; the first op has both passes."""
    measured = iter([bench_ops.take_turns] * 2)

    def take_turns(*args, **options):
        for found in measured:
            return found(*args, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_ops, "take_turns", take_turns)
    words = ["norm_linear", "feed_forward", *TOY, *(["--json"] if json_ else [])]
    assert main(["bench", *words]) == 130
    said = capsys.readouterr()
    assert said.err == "deepfast bench: interrupted\n"
    # The table names each op again with what torch runs.
    assert said.out.count("norm_linear") == 3 - json_
    assert "feed_forward" not in said.out
    assert not json_ or not json.loads(said.out)["complete"]


@pytest.mark.slow
def test_it_needs_torch_and_rich_alone(python):
    missing = ("numpy", "matplotlib", "jinja2", "yaml", "sentencepiece", "safetensors", "tqdm")
    words = ["bench", "add_layer_norm", *TOY]
    program = f"import sys; sys.modules.update(dict.fromkeys({missing})); "
    program += f"from deepfast.cli import main; sys.exit(main({words}))"
    assert "add_layer_norm: dropout, add, layer_norm" in python("-c", program).stdout


@pytest.mark.slow
def test_compiled_forms_take_part(capsys):
    assert main(["bench", "rms_norm", "--compile", *TOY]) == 0
    text = capsys.readouterr().out
    assert re.search(r"op +deepfast +backend +torch +compiled +ratio +of a copy", text)
    assert len(re.findall(r"^ +rms_norm +[\d.]+ +\w+ +[\d.]+ +[\d.]+ +[\d.]+", text, re.M)) == 2
    assert "\ntorch.compile took " in text


def test_json_of_one_op(capsys):
    assert main(["bench", "add_layer_norm", "--json", "--dtype", "bfloat16", *TOY]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["complete"]
    rows = found["rows"]
    assert [row["pass"] for row in rows] == [*PASSES]
    for row in rows:
        assert (row["op"], row["backend"]) == ("add_layer_norm", "cpu")
        seconds = row["seconds"]
        assert row["ratio"] == pytest.approx(seconds["torch"] / seconds["deepfast"])
        assert row["fraction_of_copy"] == pytest.approx(seconds["copy"] / seconds["deepfast"])
    # bfloat16, 6 tokens, 8 channels: forward reads and writes 2 states and 2 fp32 statistics per
    # token, backward 5 states and the statistics.
    assert [row["moved_bytes"] for row in rows] == [4 * 48 * 2 + 48, 9 * 48 * 2 + 96]
