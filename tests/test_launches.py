"""The table of launches, and what is generated from it."""

import runpy
from pathlib import Path

import pytest
import torch

from deepfast import backend
from deepfast.launches import LAUNCHES, Operand


def test_shapes_are_read():
    operand = next(o for o in LAUNCHES["boundary_backward"].operands if o.name == "dweight")
    shapes = ("R", "R"), ("R", "R", "D")
    assert operand == Operand("dweight", "Tensor?", True, "compute", shapes)
    by_name = {o.name: o for o in LAUNCHES["attention_forward"].operands}
    assert by_name["cu_seqlens_q"].shape({"N": 3}) == (4,)
    assert by_name["seed"].shape({}) == ()
    lstm = {o.name: o for o in LAUNCHES["peephole_lstm_forward"].operands}
    assert lstm["f"].shape({"P": 2, "N": 3, "H": 5}) == (2, 3, 20)


def test_headers_are_written_when_they_change(tmp_path):
    write = runpy.run_path(str(Path(__file__).parents[1] / "csrc" / "headers.py"))["write"]
    write(tmp_path)
    paths = [tmp_path / name for name in ("schemas.h", "launches.h", "launches.cpp")]
    before = [path.stat().st_mtime_ns for path in paths]
    write(tmp_path)
    assert [path.stat().st_mtime_ns for path in paths] == before
    paths[0].write_text("old")
    write(tmp_path)
    text = paths[0].read_text()
    assert all(f'm.def("{launch.schema}");' in text for launch in LAUNCHES.values())


@pytest.mark.parametrize("name", LAUNCHES)
def test_the_compiled_schemas(name):
    schema = getattr(torch.ops.deepfast, name).default._schema
    assert str(schema).removeprefix("deepfast::") == LAUNCHES[name].schema


def test_a_launch_takes_its_operands_by_name():
    launch, taken = LAUNCHES["cross_entropy"], []
    given = {name: i for i, name in enumerate(reversed(launch.names))}
    launch.of_record(taken.append)(**given)
    assert taken[0]._asdict() == given == dict(zip(launch.names, taken[0], strict=True))
    call = launch.by_name(lambda *operands: taken.append(operands))
    with pytest.raises(TypeError, match=r"cross_entropy\(\) missing 1 .* argument: 'nll'"):
        call(**{name: x for name, x in given.items() if name != "nll"})
    with pytest.raises(TypeError, match=r"cross_entropy\(\) got an unexpected .* 'mean'"):
        call(**given, mean=None)


def test_an_optional_tensor_may_be_left_out():
    launch, taken = LAUNCHES["layer_norm_backward"], []
    given = {o.name: o.name for o in launch.operands if o.type != "Tensor?"}
    launch.of_record(taken.append)(**given)
    assert taken[0].dsum is None
    assert taken[0].rstd == "rstd"


SIZES = {"T": 5, "D": 8, "R": 4, "S": 5, "B": 2, "K": 3, "H": 2, "V": 7, "P": 3, "N": 2, "Q": 4,
         "E": 4, "G": 1}  # fmt: skip
NUMBERS = {
    "eps": 1e-5, "source_eps": 1e-5, "out_eps": 1e-5, "rms": False, "source_rms": False,
    "out_rms": False, "dropout_p": 0.3, "kind": "relu", "k": 2, "near": [1, 2],
    "norm_source": True, "norm": True, "grad_slot": 3, "pull_rows": [2, 3],
    "pull_slots": [3, 4], "sources": [0, 1], "rows": [2, 3],
    "grad_slots": [3, 4], "out_rows": [0, 1], "accumulate": False, "label_smoothing": 0.1,
    "ignore_index": -1, "write_grad": True, "reverse": False, "max_seqlen_q": 3,
    "max_seqlen_k": 3, "left": -1, "right": -1, "scale": 0.5,
}  # fmt: skip
BEGINS = {"cu_seqlens_q": [0, 2, 5], "cu_seqlens_k": [0, 3, 4]}
# A launch writes only a part of these operands, or reads them first.
CHANGED = {"states", "grads", "logits", "stats"}
PARTS = {
    ("boundary_backward", "dweight"), ("pull_rows", "dweight"),
    ("attention_boundary_forward", "source_rstd"), ("attention_boundary_backward", "dquery"),
    ("attention_boundary_backward", "dbias"), ("attend_pull", "dquery"), ("attend_pull", "dbias"),
}  # fmt: skip


def operand(name, o, absent):
    if not o.dtype:
        return NUMBERS[o.name]
    if o.name in absent:
        return None
    shape = o.shape(SIZES)
    if o.dtype == "int32":
        return torch.tensor(BEGINS[o.name], dtype=torch.int32)
    if o.dtype == "int64":
        return torch.ones(shape, dtype=torch.int64)
    if o.type == "Tensor[]":
        return [torch.randn(shape) for _ in range(SIZES["K"])]
    if not o.writes or o.name in CHANGED:
        return torch.randn(shape)
    return torch.zeros(shape) if (name, o.name) in PARTS else torch.full(shape, torch.nan)


def layer_norm(**changed):
    rows, channels, tokens = torch.zeros(5, 8), torch.ones(8), torch.zeros(5)
    given = {
        "x": rows, "residual": rows, "weight": channels, "eps": 1e-5, "rms": False,
        "dropout_p": 0.0, "sum": rows.clone(), "y": rows.clone(), "mean": tokens, "rstd": tokens,
    } | changed  # fmt: skip
    backend.choose("layer_norm", "cpu", "cpu", torch.float32)[1].layer_norm_forward(**given)


def mix(**changed):
    given = {
        "states": torch.zeros(5, 3, 8), "sources": [0], "weight": torch.zeros(4, 4), "rows": [1],
        "out": torch.zeros(2, 3, 8), "out_rows": [0], "accumulate": False,
    } | changed  # fmt: skip
    backend.choose("boundary", "cpu", "cpu", torch.float32)[1].mix_rows(**given)


@pytest.mark.parametrize(
    ("call", "changed", "words"),
    [
        (layer_norm, {"y": torch.zeros(5, 7)}, r"y: expected \(5, 8\) in float32 .* got \(5, 7\)"),
        (layer_norm, {"residual": torch.zeros(5, 8).double()}, "residual: expected .* in float32"),
        (layer_norm, {"weight": torch.ones(8).double()}, "weight: expected .* got .* in float64"),
        (layer_norm, {"weight": torch.ones(16)[::2]}, "weight: expected .* not contiguous"),
        (layer_norm, {"y": torch.zeros(5, 16)[:, ::2]}, "y: expected .* with channels apart"),
        (layer_norm, {"x": torch.zeros(5)}, "x: expected more than 1 dimensions"),
        (layer_norm, {"x": torch.zeros(5, 8).int()}, "x: expected float32, float64, bfloat16"),
        (mix, {"sources": [4]}, "sources: expected indices below 4, got 4"),
        (mix, {"rows": [-1]}, "rows: expected indices below 4, got -1"),
        (mix, {"out_rows": [2]}, "out_rows: expected indices below 2, got 2"),
        (mix, {"rows": [1, 2]}, "expected as many out_rows as rows, 2, got 1"),
        (mix, {"out": torch.zeros(2, 4, 8)}, r"out: expected \(2, 3, 8\)"),
    ],
)
def test_an_operand_that_does_not_fit_is_named(call, changed, words):
    with pytest.raises(RuntimeError, match=words):
        call(**changed)


@pytest.mark.parametrize("name", LAUNCHES)
def test_every_result_is_written(any_backend, name):
    """The operands that a launch writes, by the table, hold NaN before it and numbers after it."""
    launch = LAUNCHES[name]
    if backend.refusal(launch.op, any_backend, "cpu", torch.float32) is not None:
        pytest.skip(f"{any_backend} does not serve {launch.op}")
    absent = {"scores", "dscores"}
    given = {o.name: operand(name, o, absent) for o in launch.operands}
    if launch.op == "attention_boundary":
        given["kind"] = "softmax"
    launches = backend.choose(launch.op, any_backend, "cpu", torch.float32)[1]
    if launches is None:
        pytest.skip(f"{any_backend}'s attention is torch's")
    getattr(launches, name)(**given)
    for o in launch.operands:
        for x in given[o.name] if o.type == "Tensor[]" else [given[o.name]]:
            if o.writes and x is not None:
                assert x.isfinite().all(), o.name
