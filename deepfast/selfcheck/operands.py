"""Random operands for a launch: like those of a call, with few tokens."""

import math

import torch
from torch import Tensor

from deepfast.launches import Launch, Operand

READ_TOO = {"states", "grads", "logits", "stats", "source_rstd"}
"""Operands that some launches write, but read before, so they need random values."""

TOKENS, STEPS = 37, 3
"""Largest number of tokens, and of steps of a recurrence. With 37 tokens most kernels run several
programs, and the last program is only partly filled."""

ELEMENTS = 1 << 20
"""The most elements of the largest operand, where 3 tokens allow it: the check of a deep stack must
not take much memory."""


def random(
    name: str, shape: tuple[int, ...], generator: torch.Generator | None = None,
    device: torch.device | None = None,
) -> Tensor:  # fmt: skip
    """Values in fp32 for the operand ``name``: scales and sums of exponentials are positive.

    generator: if given, the state of torch's default generator does not change.
    """
    how = {"generator": generator, "device": device, "dtype": torch.float32}
    if name in ("rstd", "out_rstd", "source_rstd", "total"):
        return 0.5 + torch.rand(shape, **how)  # type: ignore[call-overload]
    if name == "gates":
        return torch.rand(shape, **how)  # type: ignore[call-overload]
    if name in ("most", "lse"):
        return 3 + torch.rand(shape, **how)  # type: ignore[call-overload]
    if name in ("stats", "partial_stats"):
        x = 1 + torch.rand(shape, **how)  # type: ignore[call-overload]
        x[..., 0, :] += 2
        return x
    x = torch.randn(shape, **how)  # type: ignore[call-overload]
    if name in ("query", "weight") and len(shape) == 2:
        return x / max(1, shape[1]) ** 0.5
    return x


def _choice(o: Operand, x: Tensor) -> int:
    """Index of the shape in ``o.shapes`` that has as many dimensions as ``x``."""
    return next(i for i, shape in enumerate(o.shapes) if len(shape) == x.dim())


def sizes_of(launch: Launch, operands: tuple) -> dict[str, int]:
    """The sizes of a call, by their letters in the table of launches."""
    sizes = {}
    for o, x in zip(launch.operands, operands, strict=True):
        many = o.type == "Tensor[]"
        if x is None or not o.dtype or (many and not x):
            continue
        if many:
            sizes["K"] = len(x)
        first = x[0] if many else x
        shape = o.shapes[_choice(o, first)]
        sizes |= {n: size for n, size in zip(shape, first.shape, strict=True) if len(n) == 1}
    return sizes


def few(sizes: dict[str, int]) -> dict[str, int]:
    """The sizes with few tokens. All others decide which variant of a kernel runs."""
    slots = max(sizes.get(n, 1) for n in "SBKH")
    tokens = max(3, min(TOKENS, ELEMENTS // (slots * max(sizes.get(n, 1) for n in "DVE"))))
    less = {"T": tokens, "Q": tokens, "P": STEPS}
    return {n: min(size, less.get(n, size)) for n, size in sizes.items()}


def _empty(o: Operand, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """An empty tensor with the alignment and the strides of ``x``. Triton compiles a separate
    variant for some alignments and strides."""
    strides, extent, fewer = [0] * x.dim(), 1, False
    regular = o.dense or x.stride(-1) != 1 or 0 in x.stride()
    for i in sorted(range(x.dim()), key=lambda i: -i if regular else x.stride(i)):
        # Slots lie closer together than in x where they have fewer tokens.
        closer = -(-extent // 64) * 64 + x.stride(i) % 64
        distance = closer if fewer else max(x.stride(i), extent)
        strides[i] = extent if regular else distance
        extent += (shape[i] - 1) * strides[i]
        fewer = fewer or shape[i] != x.shape[i]
    offset = x.data_ptr() % 16 // x.element_size()
    flat = torch.empty(offset + extent, dtype=x.dtype, device=x.device)
    return flat.as_strided(shape, strides, offset)


def _offsets(total: int, sentences: int, longest: int, device: torch.device) -> Tensor:
    """(N + 1,) int32: where each sentence begins, and the end."""
    places = [min(i * longest, total) for i in range(sentences)]
    return torch.tensor([*places, total], dtype=torch.int32, device=device)


def alike(launch: Launch, operands: tuple, generator: torch.Generator | None) -> list:
    """Operands in the order of ``operands``, with the same None, numbers, dtypes, widths and
    layouts. Outputs are filled with 7 first, to detect wrong writes."""
    sizes, given = few(sizes_of(launch, operands)), dict(zip(launch.names, operands, strict=True))
    longest, sentences = {}, 1
    for n, end in (("T", "q"), ("Q", "k")):
        if f"cu_seqlens_{end}" in given:
            # More than one sentence, each at most as long as the call says.
            longest[end] = max(1, min(given[f"max_seqlen_{end}"], 2 * sizes[n] // 3))
            sentences = max(sentences, -(-sizes[n] // longest[end]))

    def value(o: Operand, x: Tensor) -> Tensor:
        if o.dtype == "int32":
            end = o.name[-1]
            ends = _offsets(sizes["T" if end == "q" else "Q"], sentences, longest[end], x.device)
            return _empty(o, x, ends.shape).copy_(ends)
        if o.name == "seed":
            return x
        shape = o.shape(sizes, _choice(o, x))
        if o.dtype == "int64":
            most = sizes["V"] if o.name == "target" else sizes["P"] + 1
            made = torch.randint(most, shape, generator=generator, device=x.device)
            if "ignore_index" in given:
                made[1::5] = given["ignore_index"]
            return _empty(o, x, shape).copy_(made)
        made = _empty(o, x, shape)
        if o.writes and o.name not in READ_TOO:
            return made.fill_(7)
        return made.copy_(random(o.name, shape, generator, x.device))

    made: list = []
    for o, x in zip(launch.operands, operands, strict=True):
        if isinstance(x, Tensor):
            made.append(value(o, x))
        elif o.type == "Tensor[]":
            made.append([value(o, y) for y in x])
        else:
            made.append(list(x) if o.type == "int[]" else x)
    return made


def no_elements(launch: Launch, operands: tuple) -> bool:
    """Whether a call has nothing to compute."""
    return math.prod(sizes_of(launch, operands).values()) == 0
