"""The operands of a launch: what tells its variants apart, and random ones like those of a call."""

import functools
from collections.abc import Callable
from typing import Any

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


@functools.cache
def variant_of(launch: Launch) -> Callable[[Any], tuple]:
    """A function of the record that tells variants apart: the device, the dtype, widths, which
    operands are missing, flags, words, and the rough length of lists.

    It is compiled once, because it runs at each launch: it takes about a microsecond.
    """
    stored = {
        o: f"a.{o.name}[0]" if o.type == "Tensor[]" else f"a.{o.name}"
        for o in launch.operands
        if o.dtype == "storage" and o.type != "Tensor?"
    }
    first = next(iter(stored.values()))
    parts = [f"{first}.get_device()", f"{first}.dtype"]
    widths: set[str] = set()
    # Widths of operands that are never missing first.
    for o in sorted(launch.operands, key=lambda o: o not in stored):
        x = f"a.{o.name}"
        there = f"{x} is not None and " if o.type == "Tensor?" else ""
        for i, letter in enumerate(o.shapes[0] if o.shapes else ()):
            if letter in set("DEHGV") - widths:
                widths |= {letter} if o in stored else set()
                parts.append(f"{there}{stored.get(o, x)}.shape[{i}]")
        if len(o.shapes) > 1:
            parts.append(f"{there}{x}.dim()")
        if o.type == "Tensor?":
            parts.append(f"{x} is not None")
        elif o.type in ("int[]", "Tensor[]"):
            parts.append(f"len({x}).bit_length()")
        elif o.type in ("bool", "str"):
            parts.append(x)
        elif o.name == "dropout_p":
            parts.append(f"{x} > 0")
        elif o.type == "int" and not o.below:
            # Lengths choose tiles. A window's side without end is -1.
            parts.append(f"(-1 if {x} < 0 else {x}.bit_length())")
    return eval(f"lambda a: ({', '.join(parts)})")


POSITIVE = {"gates": 0.0, "stats": 1.0, "partial_stats": 1.0, "most": 3.0, "lse": 3.0}
POSITIVE |= dict.fromkeys(("rstd", "out_rstd", "source_rstd", "total"), 0.5)
"""The least value of operands that are scales, sums of exponentials and the like; they are up to 1
more."""


def random(
    name: str, shape: tuple[int, ...], generator: torch.Generator | None = None, device=None
) -> Tensor:
    """Values in fp32 for the operand ``name``.

    generator: if given, the state of torch's default generator does not change.
    """
    x = torch.empty(shape, dtype=torch.float32, device=device)
    if name in POSITIVE:
        x.uniform_(generator=generator).add_(POSITIVE[name])
        if "stats" in name:
            x[..., 0, :] += 2
        return x
    x.normal_(generator=generator)
    if name in ("query", "weight") and len(shape) == 2:
        x /= max(1, shape[1]) ** 0.5
    return x


def _choice(o: Operand, x: Tensor) -> int:
    """Index of the shape in ``o.shapes`` that has as many dimensions as ``x``."""
    return next(i for i, shape in enumerate(o.shapes) if len(shape) == x.dim())


def sizes_of(launch: Launch, call: Any) -> dict[str, int]:
    """The sizes of a call, by their letters in the table of launches."""
    sizes = {}
    for o, x in zip(launch.operands, call, strict=True):
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
    # The only head of the keys has the stride of the tokens, and is not the outer dimension.
    inner = [-i if regular else (x.stride(i), x.shape[i] > 1) for i in range(x.dim())]
    for i in sorted(range(x.dim()), key=inner.__getitem__):
        # Slots lie closer together than in x where they have fewer tokens.
        closer = -(-extent // 64) * 64 + x.stride(i) % 64
        distance = closer if fewer else max(x.stride(i), extent)
        strides[i] = extent if regular else distance
        extent += (shape[i] - 1) * strides[i]
        fewer = fewer or shape[i] != x.shape[i]
    offset = x.data_ptr() % 16 // x.element_size()
    flat = torch.empty(offset + extent, dtype=x.dtype, device=x.device)
    return flat.as_strided(shape, strides, offset)


def like_those_of(launch: Launch, call: Any, generator: torch.Generator | None) -> Any:
    """Random operands with the same None, numbers, dtypes, widths and layouts as the record
    ``call``. Outputs are filled with 7 first, to detect wrong writes."""
    sizes, given = few(sizes_of(launch, call)), call._asdict()
    longest, sentences = {}, 1
    for n, end in (("T", "q"), ("Q", "k")):
        if f"cu_seqlens_{end}" in given:
            # More than one sentence, each at most as long as the call says.
            longest[end] = max(1, min(given[f"max_seqlen_{end}"], 2 * sizes[n] // 3))
            sentences = max(sentences, -(-sizes[n] // longest[end]))

    def value(o: Operand, x: Tensor) -> Tensor:
        if o.dtype == "int32":
            end = o.name[-1]
            total = sizes["T" if end == "q" else "Q"]
            starts = [min(i * longest[end], total) for i in range(sentences)]
            return _empty(o, x, (sentences + 1,)).copy_(torch.tensor([*starts, total]))
        if o.name == "seed":
            return x
        shape = o.shape(sizes, _choice(o, x))
        if o.dtype == "int64":
            most = sizes["V"] if o.name == "target" else sizes["P"] + 1
            values = torch.randint(most, shape, generator=generator, device=x.device)
            if "ignore_index" in given:
                values[1::5] = given["ignore_index"]
            return _empty(o, x, shape).copy_(values)
        made = _empty(o, x, shape)
        if o.writes and o.name not in READ_TOO:
            return made.fill_(7)
        return made.copy_(random(o.name, shape, generator, x.device))

    def operand(o: Operand, x: Any) -> Any:
        if o.type == "Tensor[]":
            return [value(o, y) for y in x]
        return value(o, x) if isinstance(x, Tensor) else x

    return launch.record._make(map(operand, launch.operands, call))  # type: ignore[attr-defined]


def copied(call: Any, dtype: torch.dtype | None = None) -> Any:
    """A copy of a record; its floating-point numbers are in ``dtype``, where that is given."""

    def copy(x: Any) -> Any:
        if isinstance(x, list):
            return [copy(y) for y in x]
        if not isinstance(x, Tensor):
            return x
        return x.to(dtype, copy=True) if dtype and x.is_floating_point() else x.clone()

    return call._make(map(copy, call))


def written(launch: Launch, call: Any) -> dict[str, Tensor]:
    """The operands of a record that the launch writes into, by name."""
    results: dict[str, Tensor] = {}
    for o, x in zip(launch.operands, call, strict=True):
        if o.writes and isinstance(x, list):
            results |= {f"{o.name}[{i}]": y for i, y in enumerate(x)}
        elif o.writes and x is not None:
            results[o.name] = x
    return results
