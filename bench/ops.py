"""Single ops of `deepfast.cases`, forward and backward, beside torch's: `pytest bench/ops.py`."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from deepfast.cases import ops, sentences
from deepfast.cases.case import Case, Rows, torch_dropout, tuple_of
from deepfast.memory import LiveBytes

CASES: dict[str, Callable[[], Case]] = {
    "layer_norm": lambda: ops.layer_norm("", Rows((8192,), 512), residual=False),
    "relu": lambda: ops.activation("", Rows((8192,), 2048), "relu", p=0.1, bias=False),
    "gelu": lambda: ops.activation("", Rows((8192,), 2048), "gelu", p=0.1, bias=False),
    "depth_attention": lambda: ops.depth_attention(
        "", Rows((2048,), 512), 31, gain=False, lse=False
    ),
    "depth_attention, 4 hops": lambda: ops.depth_attention(
        "", Rows((2048,), 512), 31, 4, gain=False, lse=False
    ),
    "linear_cross_entropy": lambda: sentences.linear_cross_entropy("", Rows((1024,), 512), 32000),
} | {
    f"peephole_lstm, {width}{', lengths' if begun else ''}": partial(
        sentences.peephole_lstm, "", 30, 32, width, begun=begun
    )
    for width in (64, 128, 256, 512) for begun in (False, True)
}  # fmt: skip


def make(case: Case, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """A step of each form on the same numbers; torch's parameters have the dtype of the rest."""
    own, low = case.leaves(dtype, dtype), case.of_one_dtype(dtype)

    # torch.autograd.grad, not backward: inside a model an operand is no leaf and no gradient is
    # accumulated.
    def step(form: Callable, leaves: dict):
        outputs = tuple_of(form(**leaves))
        torch.autograd.grad(outputs, list(leaves.values()), list(map(torch.ones_like, outputs)))

    return {
        "deepfast": partial(step, case.run, own),
        "torch": partial(step, partial(case.plain, torch_dropout), low),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("who", ["deepfast", "torch"])
def test_op(benchmark, name, dtype, who):
    case = CASES[name]()
    benchmark.pedantic(make(case, dtype)[who], rounds=9, warmup_rounds=1)
    if nbytes := sum(m.nbytes(dtype) for m in case.moved):
        gb_per_second = round(nbytes / benchmark.stats.stats.median / 1e9, 2)
        benchmark.extra_info.update(bytes=nbytes, gb_per_second=gb_per_second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("who", ["deepfast", "torch", "torch, chunked"])
def test_bytes_of_linear_cross_entropy(benchmark, dtype, who):
    """Peak live bytes of the tensors between ops: scratch memory inside an op is hidden. torch's
    chunked op has no label smoothing."""
    case = CASES["linear_cross_entropy"]()
    forms = make(case, dtype)
    if hasattr(F, "linear_cross_entropy"):
        leaves, target = case.of_one_dtype(dtype), torch.randint(32000, (1024,))
        options = torch.nn.LinearCrossEntropyOptions()
        forms["torch, chunked"] = lambda: torch.autograd.grad(
            F.linear_cross_entropy(**leaves, target=target, options=options),
            list(leaves.values()),
        )
    if who not in forms:
        pytest.skip(f"torch {torch.__version__} has no linear_cross_entropy")
    benchmark.pedantic(forms[who], rounds=5, warmup_rounds=1)
    with LiveBytes() as live:
        forms[who]()
    benchmark.extra_info.update(peak_bytes=live.peak, logits_bytes=4 * 1024 * 32000)
