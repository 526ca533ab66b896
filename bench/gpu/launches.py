"""Every launch of the GPU backends once, with operands of the table `deepfast.launches`: the first
items of `make gpu`, which also run under compute-sanitizer and ncu."""

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch

from bench.gpu.machine import emulate_cuda
from deepfast import backend
from deepfast.launches import LAUNCHES
from deepfast.ops.common import empty_slots

MAIN = "DEEPFAST_GPU_MAIN"
"""The environment variable with the only size, as 8192x512, where kernels are measured."""

DTYPES = (torch.bfloat16, torch.float32, torch.float16)
ROWS = 100
# Rows of the second are no multiple of 16 bytes, so other kernels run.
SIZES = ((37, 512), (9, 100), (5, 2048))
TOY = ((2, 16),)

FAR, BLOCKS, PULLED = 80, (4, 8, 16), [91, 93, 94]
NUMBERS = {
    "eps": 1e-5, "source_eps": 1e-5, "out_eps": 1e-5, "dropout_p": 0.1, "kind": "gelu",
    "rms": False, "source_rms": False, "out_rms": False, "norm": True, "norm_source": True,
    "accumulate": False, "k": 91, "near": [88, 89, 90, 91], "grad_slot": 92, "pull_rows": PULLED,
    "pull_slots": [r + 1 for r in PULLED], "label_smoothing": 0.1, "ignore_index": -100,
    "write_grad": True, "reverse": False, "left": -1, "right": 0, "scale": 0.125,
}  # fmt: skip
"""The operands that are no tensors, of a state in the middle of a block of a deep stack."""

ATTENDED = (
    {"kind": "softmax", "bias": None, "dbias": None},
    {"kind": "relu", "stats": None, "partial_stats": None, "out_stats": None},
)
"""The two kinds of attention residuals; only ReLU has a bias, and only a softmax statistics."""


def names(by: str) -> list[str]:
    """The launches that a backend has kernels for."""
    return list(LAUNCHES if by == "triton" else backend.CUDA)


def _far_pass(name: str, toy: bool) -> Iterator[dict]:
    for block in BLOCKS[:1] if toy else BLOCKS:
        # Rows that are out of order make the launch scatter its sums.
        rows = [81, 80, *range(82, 80 + block)]
        lists = {"rows": rows, "out_rows": list(range(block))}
        if name in ("mix_rows", "attend_rows"):
            yield lists | {"sources": list(range(block if toy else FAR))}
            continue
        lists |= {"sources": list(range(block)), "grad_slots": [r + 1 for r in rows]}
        yield lists
        yield lists | {"dweight": None, "dquery": None, "dbias": None}


def variants(name: str, toy: bool) -> Iterator[dict]:
    """The operands of every call of a launch that are not those of the table and NUMBERS."""
    kinds = ATTENDED if LAUNCHES[name].op == "attention_boundary" else ({},)
    if name in ("mix_rows", "pull_rows", "attend_rows", "attend_pull"):
        yield from (kind | lists for kind in kinds for lists in _far_pass(name, toy))
        return
    yield from ({"scores": None, "dscores": None} | kind for kind in kinds)
    if any(o.name in ("rms", "out_rms") for o in LAUNCHES[name].operands):
        rms = {"rms": True, "mean": None, "out_rms": True, "out_mean": None}
        yield kinds[0] | rms | {"source_rms": True, "norm_bias": None, "dnorm_bias": None}
    if name.startswith("depth_mix"):
        # Without a bias another kernel runs.
        yield {"norm_bias": None, "dnorm_bias": None}
    if name.startswith("depth_attention"):
        yield {"query": None, "dquery": None, "norm": False}
    if name.startswith("activation"):
        yield {"kind": "relu"}
    if name in ("attention_forward", "attention_backward"):
        yield {"left": -1, "right": -1}


def operands(
    name: str, tokens: int, dim: int, dtype, device: str, given: dict, channels: bool = False
) -> dict:
    """Every operand of a launch by name: ones in what it reads, zeros in what it writes.

    given: operands, and sizes by their letters in the table.
    channels: whether depth weights are one per channel.
    """
    sizes = {"T": tokens, "Q": tokens, "D": dim, "V": dim, "R": ROWS, "S": ROWS + 1, "B": 16,
             "K": 3, "H": 4, "G": 4, "E": 64, "N": 1, "P": 3} | given  # fmt: skip
    kinds = {"storage": dtype, "compute": torch.float32, "int32": torch.int32, "int64": torch.int64}
    made = NUMBERS | {"max_seqlen_q": tokens, "max_seqlen_k": tokens} | given
    for o in LAUNCHES[name].operands:
        if not o.dtype or o.name in given:
            continue
        shape = o.shape(sizes) + ((dim,) if channels and len(o.shapes) > 1 else ())
        kind = {"dtype": kinds[o.dtype], "device": device}
        if o.dtype == "int32":
            made[o.name] = torch.arange(2, **kind) * tokens  # one sentence
        elif not o.dense and o.shapes[0][0] in "SB":
            made[o.name] = empty_slots(shape[0], torch.empty(shape[1:], **kind)).zero_()
        else:
            # The statistics are read too.
            fill = torch.zeros if o.writes and o.name != "stats" else torch.ones
            x = [fill(shape, **kind) for _ in range(sizes["K"] if o.type == "Tensor[]" else 1)]
            made[o.name] = x if o.type == "Tensor[]" else x[0]
    return {o.name: made[o.name] for o in LAUNCHES[name].operands}


def launch(
    run: Callable, name: str, tokens: int, dim: int, dtype, device: str, toy: bool = False
) -> Iterator[tuple[dict, dict]]:
    """Every variant of a launch, a few if ``toy``: what was given, and all operands after it."""
    per_channel = any(len(o.shapes) > 1 for o in LAUNCHES[name].operands)
    for channels in (False, True)[: 1 + per_channel]:
        for given in variants(name, toy):
            made = operands(name, tokens, dim, dtype, device, given, channels)
            # ncu reads the kernels of this range alone.
            marked = torch.cuda.nvtx.range("launch") if device == "cuda" else nullcontext()
            with marked:
                run(**made)
            yield given, made


def check_finite(name: str, given: dict, made: dict) -> None:
    """Raises if a result of a launch is not finite."""
    for o in LAUNCHES[name].operands:
        written = made[o.name] if o.writes and made[o.name] is not None else []
        for x in [written] if isinstance(written, torch.Tensor) else written:
            if not x.isfinite().all():
                raise ValueError(f"{name}: {o.name} is not finite with {given or 'all operands'}")


def every_launch(ops, device: str, tokens: int, dim: int) -> None:
    """All launches of ``ops``, a namespace of `torch.ops`, with every dtype and kind of weight."""
    for name in names("cuda"):
        for dtype in DTYPES:
            for _ in launch(getattr(ops, name), name, tokens, dim, dtype, device):
                pass


@pytest.mark.parametrize(
    ("by", "name"), [(by, name) for by in ("cuda", "triton") for name in names(by)]
)
def test_launch(run, by, name):
    """All its variants; in the profile stage the main ones at sizes of their own."""
    main = os.environ.get(MAIN)
    sizes = [tuple(map(int, main.split("x")))] if main else TOY if run.dry else SIZES
    if run.dry and by == "cuda":
        emulate_cuda()
    for dtype in DTYPES[:1] if run.dry or main else DTYPES:
        launcher = getattr(backend.choose(LAUNCHES[name].op, by, run.device, dtype)[1], name)
        for tokens, dim in sizes:
            for given, made in launch(launcher, name, tokens, dim, dtype, run.device, run.dry):
                check_finite(name, given, made)
    if run.device == "cuda":
        torch.cuda.synchronize()
