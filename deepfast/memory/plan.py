"""How deep, how wide, how many tokens: what fits a budget of memory, and what it costs."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from deepfast.memory.flops import relative_time
from deepfast.memory.policies import POLICIES, resolve
from deepfast.memory.sizes import MOST, Sizes
from deepfast.memory.table import advise
from deepfast.memory.timeline import peak_table
from deepfast.memory.units import format_bytes, parse_bytes

FREE = ("budget", "layers", "width", "tokens")
"""Three of them are given, or all four."""
STEP = 64
"""Widths are multiples of it, and heads this wide."""


@dataclass(frozen=True, kw_only=True)
class WhatFits:
    """What would fit, where a plan does not: other policies, or else smaller sizes."""

    policies: tuple[str, ...] = ()
    """Of the encoder's layers; empty where no policies are enough."""
    decoder_policies: tuple[str, ...] = ()
    layers: int | None = None
    """The most that fit, everything else as it is; None: not even the fewest, or policies do."""
    tokens: int | None = None
    width: int | None = None
    budget: int
    """Bytes that would do for the sizes as they are, under the most frugal policies."""


@dataclass(frozen=True)
class Plan:
    """A training step that was planned."""

    sizes: Sizes
    budget: int
    """Bytes."""
    policies: tuple[str, ...]
    """Of the encoder's layers, from the bottom."""
    decoder_policies: tuple[str, ...]
    table: dict[str, int]
    """Category to bytes at the highest point of the step."""
    time: float
    """Predicted time of a step over that of `keep` everywhere, by floating-point operations."""
    what_fits: WhatFits | None
    """Where this does not; None where it does."""
    solved: str | None
    """Of budget, layers, width and tokens the one that was left out and found."""

    @property
    def peak(self) -> int:
        """Predicted bytes at the highest point of a step."""
        return sum(self.table.values())

    @property
    def fits(self) -> bool:
        return self.peak <= self.budget

    @property
    def advice(self) -> str:
        """What would fit, where this does not, as a sentence; empty where it does."""
        return "" if self.what_fits is None else advise(self.what_fits)

    def to_dict(self) -> dict:
        """Plain values only."""
        return {
            **asdict(self.sizes),
            "budget": self.budget,
            "policies": list(self.policies),
            "decoder_policies": list(self.decoder_policies),
            "table": dict(self.table),
            "peak": self.peak,
            "fits": self.fits,
            "time": self.time,
            "solved": self.solved,
            "advice": self.advice,
            "what_fits": None if self.what_fits is None else asdict(self.what_fits),
        }


def plan(
    *,
    budget: str | int | None = None,
    layers: int | None = None,
    width: int | None = None,
    tokens: int | None = None,
    heads: int | None = None,
    ffn: int | None = None,
    vocabulary: int = 32_000,
    decoder_layers: int = 6,
    target_tokens: int | None = None,
    connection: str = "dlcl",
    decoder_connection: str = "residual",
    norm: str = "pre",
    weight: str = "scalar",
    dtype: str = "bfloat16",
    optimizer: str = "adam",
    device: str = "cuda",
    activation: str = "relu",
    dropout: bool = True,
    accumulate: int = 1,
    length: int = 128,
    padding: bool = False,
    policies: str | Sequence[str] | None = None,
    decoder_policies: str | Sequence[str] | None = None,
) -> Plan:
    """Predicts the peak memory of a training step, solves for what is left out, and chooses for
    every layer what it keeps.

    Of ``budget``, ``layers``, ``width`` and ``tokens`` three are given, and the fourth is found:
    the most layers, the widest model (a multiple of 64, with heads of 64 where ``heads`` is None)
    or the most tokens that fit under the most frugal policy, or the smallest budget, again that
    of the most frugal policy (of ``policies`` where they are given). With all four, the plan tells
    whether they fit. Then, within the budget, policies with the least recomputation are chosen:
    the bottom layers of a stack may have a more frugal one than its top. Gradients grow in
    backward while what layers keep goes, from the top, so what lies at the bottom is there last.

    Args:
        budget: bytes, or text such as "24GiB".
        layers: L of the encoder.
        width: D.
        tokens: T of a micro-batch on the encoder's side, padding left out.
        heads: H; None: heads of 64.
        ffn: F; None: 4 D.
        vocabulary: V, with tied embeddings; 0: a stack without embedding and loss.
        decoder_layers: 0: an encoder alone.
        target_tokens: of a micro-batch on the decoder's side; None: as many as ``tokens``.
        connection, decoder_connection: "dlcl" or "residual".
        norm: "pre" or "post".
        weight: kind of the depth weights, "scalar" or "vector".
        dtype: "bfloat16" (autocast) or "float32".
        optimizer: "adam", "sgd" (no momentum) or "none".
        device: "cuda" or "cpu"; a margin for the allocator is added on "cuda".
        activation: "relu" or "gelu".
        dropout: whether branches are dropped out.
        accumulate: micro-batches per step.
        length: tokens per sentence; it decides what attention costs.
        padding: whether sentences differ in length where attention is torch's SDPA, which works
            on padded copies; sizes are then counted with the padding.
        policies, decoder_policies: of the layers, a name or one for each; None: chosen. "history"
            needs "dlcl".

    Raises:
        ValueError: a size or a choice that is none; two or more of the four left out; a budget in
            which not even the smallest model fits; policies of a decoder that is not there.
    """
    given = {"budget": budget, "layers": layers, "width": width, "tokens": tokens}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) > 1:
        raise ValueError(
            f"{', '.join(FREE)}: expected at least three of them, got none for "
            f"{' and '.join(missing)}"
        )
    if decoder_policies is not None and decoder_layers == 0:
        raise ValueError(
            f"decoder_policies: expected none without a decoder, got {decoder_policies!r} for "
            "decoder_layers=0"
        )
    limit = None if budget is None else parse_bytes(budget)
    options = {
        "vocabulary": vocabulary, "decoder_layers": decoder_layers, "connection": connection,
        "decoder_connection": decoder_connection, "norm": norm, "weight": weight, "dtype": dtype,
        "optimizer": optimizer, "device": device, "activation": activation, "dropout": dropout,
        "accumulate": accumulate, "length": length, "padding": padding,
    }  # fmt: skip

    def sized(**free: int) -> Sizes:
        sizes = given | free
        d, t = sizes["width"], sizes["tokens"]
        # Before anything is derived from them.
        return Sizes(
            layers=sizes["layers"], width=d, tokens=t,
            heads=_heads(d) if heads is None else heads,
            ffn=4 * d if ffn is None and isinstance(d, int) else ffn,
            target_tokens=t if target_tokens is None else target_tokens, **options,
        )  # fmt: skip

    search = _Search(policies, decoder_policies)
    free = missing[0] if missing else None
    if free in (None, "budget"):
        sizes = sized()
    else:
        step = math.lcm(STEP, heads or 1) if free == "width" else 1
        sizes = _largest(free, step, sized, search, limit)
    if limit is None:
        limit = search.smallest(sizes)
    chosen = search.cheapest(sizes, limit)
    table = peak_table(sizes, *chosen)
    what_fits = (
        None if sum(table.values()) <= limit else _what_fits(sizes, limit, sized, heads or 1)
    )
    return Plan(sizes, limit, *chosen, table, relative_time(sizes, *chosen), what_fits, free)


def _heads(width: object) -> int:
    """Heads of 64 where they divide the width, else the most that are wider and do."""
    if not isinstance(width, int) or width < 1:
        return 1
    return next(h for h in range(max(width // STEP, 1), 0, -1) if width % h == 0)


def _largest(
    free: str, step: int, sized: Callable[..., Sizes], search: "_Search", limit: int
) -> Sizes:
    """The sizes with the most of ``free``, in multiples of ``step``, that fit."""

    def fits(multiple: int) -> bool:
        return search.smallest(sized(**{free: multiple * step})) <= limit

    if not fits(1):
        smallest = search.smallest(sized(**{free: step}))
        raise ValueError(
            f"budget: expected at least {format_bytes(smallest, up=True)} for {free} {step}, got "
            f"{format_bytes(limit)}"
        )
    most = MOST[free] // step
    low, high = 1, 2
    while high <= most and fits(high):
        low, high = high, 2 * high
    # Beyond every machine it is not looked for.
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return sized(**{free: low * step})


def _what_fits(sizes: Sizes, limit: int, sized: Callable[..., Sizes], heads: int) -> WhatFits:
    frugal = _Search(None, None)
    least = frugal.smallest(sizes)
    if least <= limit:
        policies, decoder = frugal.cheapest(sizes, limit)
        return WhatFits(policies=policies, decoder_policies=decoder, budget=least)
    most = {}
    # Heads are a multiple of 8 wide, or of 2, where no multiple of 64 fits.
    wide = math.lcm(STEP, heads), 8 * heads, 2 * heads
    for name, steps in (("layers", (1,)), ("tokens", (1,)), ("width", wide)):
        for step in steps:
            try:
                most[name] = getattr(_largest(name, step, sized, frugal, limit), name)
            except ValueError:
                continue
            break
    return WhatFits(budget=least, **most)


class _Search:
    """Which policies may be chosen, and the best of them.

    Args:
        encoder, decoder: a name, one for each layer, or None where the choice is free.
    """

    def __init__(self, encoder: str | Sequence[str] | None, decoder: str | Sequence[str] | None):
        self.wanted = encoder, decoder

    def _sides(self, sizes: Sizes):
        """For either stack its layers, its connection, and what is wanted."""
        counts = sizes.layers, sizes.decoder_layers
        kinds = sizes.connection, sizes.decoder_connection
        return zip(counts, kinds, self.wanted, strict=True)

    def uniform(self, sizes: Sizes) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        """One policy for all layers of a stack, where it may be chosen, from most memory to least:
        first the encoder, which is the deeper one, saves, then the decoder."""
        options = []
        sides = zip(("policies", "decoder_policies"), self._sides(sizes), strict=True)
        for name, (count, kind, wanted) in sides:
            names = POLICIES if kind == "dlcl" else POLICIES[:-1]
            wishes = names if wanted is None else (wanted,)
            options.append([resolve(wish, count, kind, name) for wish in wishes] if count else [()])
        encoder, decoder = options
        return [(e, decoder[0]) for e in encoder] + [(encoder[-1], d) for d in decoder[1:]]

    def smallest(self, sizes: Sizes) -> int:
        """The least peak of all."""
        return min(_peak(sizes, pair) for pair in self.uniform(sizes))

    def cheapest(self, sizes: Sizes, limit: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The policies with the least predicted time within the limit; the least peak where
        nothing fits."""
        pairs = self.uniform(sizes)
        found = [pair for pair in pairs if _peak(sizes, pair) <= limit]
        if not found:
            return min(pairs, key=lambda pair: _peak(sizes, pair))
        for lean in range(len(pairs)):
            for frugal in range(lean + 1, len(pairs)):
                found += _mixed(sizes, pairs[lean], pairs[frugal], limit)
        return min(found, key=lambda pair: (relative_time(sizes, *pair), _peak(sizes, pair)))


def _peak(sizes: Sizes, pair: tuple[tuple[str, ...], tuple[str, ...]]) -> int:
    return sum(peak_table(sizes, *pair).values())


def uniform_peak(sizes: Sizes, policy: str) -> int:
    """The peak with one policy for all layers; where there is no DLCL "history" is "states"."""
    kinds = (sizes.layers, sizes.connection), (sizes.decoder_layers, sizes.decoder_connection)
    encoder, decoder = (
        ("states" if policy == "history" and kind != "dlcl" else policy,) * count
        for count, kind in kinds
    )
    return _peak(sizes, (encoder, decoder))


def _mixed(sizes: Sizes, top, bottom, limit: int):
    """The mix of two choices with the fewest bottom layers of the more frugal one that fits."""
    count = sizes.layers + sizes.decoder_layers

    def mix(lower: int):
        # The encoder's layers lie below the decoder's.
        whole = (bottom[0] + bottom[1])[:lower] + (top[0] + top[1])[lower:]
        return whole[: sizes.layers], whole[sizes.layers :]

    low, high = 0, count
    if _peak(sizes, mix(high)) > limit:
        return []
    while high - low > 1:
        middle = (low + high) // 2
        if _peak(sizes, mix(middle)) <= limit:
            high = middle
        else:
            low = middle
    return [mix(high)]
