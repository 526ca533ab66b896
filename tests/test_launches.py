"""The table of launches, and what is generated from it."""

import runpy
from pathlib import Path

import pytest
import torch

from deepfast import backend
from deepfast.launches import LAUNCHES, Operand
from tests.kernels.agreement import numbers


def test_shapes_are_read():
    operand = next(o for o in LAUNCHES["boundary_backward"].operands if o.name == "dweight")
    shapes = ("R", "R"), ("R", "R", "D")
    assert operand == Operand("dweight", "Tensor?", True, "compute", shapes, dense=True)
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
    call = launch.by_name(taken.append)
    call(**given)
    assert isinstance(taken[0], launch.record)
    assert taken[0]._asdict() == given == dict(zip(launch.names, taken[0], strict=True))
    with pytest.raises(TypeError, match=r"cross_entropy\(\) missing 1 .* argument: 'nll'"):
        call(**{name: x for name, x in given.items() if name != "nll"})
    with pytest.raises(TypeError, match=r"cross_entropy\(\) got an unexpected .* 'mean'"):
        call(**given, mean=None)


def test_an_optional_tensor_may_be_left_out():
    launch, taken = LAUNCHES["layer_norm_backward"], []
    given = {o.name: o.name for o in launch.operands if o.type != "Tensor?"}
    launch.by_name(taken.append)(**given)
    assert taken[0].dsum is None
    assert taken[0].rstd == "rstd"


def launched(name, **changed):
    """Calls a launch of the CPU with operands that fit, and those that are ``changed``."""
    given = numbers(name, T=5, D=8, dropout_p=0.0) | changed
    getattr(backend.choose(LAUNCHES[name].op, "cpu", "cpu", torch.float32)[1], name)(**given)


FORWARD, MIX = "layer_norm_forward", "mix_rows"
NO_SEED = "dropout_p is 0.5 and the seed is missing"


@pytest.mark.parametrize(("name", "changed", "words"), [
    (FORWARD, {"y": torch.zeros(5, 7)}, r"y: expected \(5, 8\) in float32 .* got \(5, 7\)"),
    (FORWARD, {"residual": torch.zeros(5, 8).double()}, "residual: expected .* in float32"),
    (FORWARD, {"weight": torch.ones(8).double()}, "weight: expected .* got .* in float64"),
    (FORWARD, {"weight": torch.ones(16)[::2]}, "weight: expected .* not contiguous"),
    (FORWARD, {"y": torch.zeros(5, 16)[:, ::2]}, "y: expected .* with channels apart"),
    (FORWARD, {"x": torch.zeros(5)}, "x: expected more than 1 dimensions"),
    (FORWARD, {"x": torch.zeros(5, 8).int()}, "x: expected float32, float64, bfloat16"),
    (FORWARD, {"dropout_p": 0.5}, NO_SEED),
    (FORWARD, {"seed": torch.tensor([3])}, r"seed: expected \(\) in .* got \(1\) in int64"),
    (FORWARD, {"seed": torch.tensor(3.0)}, r"seed: .*, got \(\) in float32"),
    ("layer_norm_backward", {"dropout_p": 0.5}, NO_SEED),
    ("activation_forward", {"kind": "relu", "dropout_p": 0.5}, NO_SEED),
    ("activation_backward", {"kind": "gelu", "dropout_p": 0.5}, NO_SEED),
    ("activation_forward", {"kind": "tanh"}, "expected relu or gelu, got tanh"),
    (MIX, {"sources": [24]}, "sources: expected indices below 24, got 24"),
    (MIX, {"rows": [-1]}, "rows: expected indices below 24, got -1"),
    (MIX, {"out_rows": [4]}, "out_rows: expected indices below 4, got 4"),
    (MIX, {"rows": [1, 2]}, "expected as many out_rows as rows, 2, got 3"),
    (MIX, {"out": torch.zeros(4, 4, 8)}, r"out: expected \(4, 5, 8\)"),
])  # fmt: skip
def test_an_operand_that_does_not_fit_is_named(name, changed, words):
    with pytest.raises(RuntimeError, match=words):
        launched(name, **changed)
