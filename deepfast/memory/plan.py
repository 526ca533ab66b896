"""Plans a training step: the sizes and policies that fit a memory budget, and what they cost."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations
from typing import Any

from deepfast import checks
from deepfast.memory.flops import relative_time
from deepfast.memory.sizes import LIMITS, Sizes
from deepfast.memory.table import Plan, WhatFits
from deepfast.memory.timeline import peak_table
from deepfast.memory.units import format_bytes, parse_bytes
from deepfast.policies import ATTENTION_RESIDUALS, policies_of, resolve

STEP = 64
"""A width that `plan` chooses is a multiple of it; heads are this wide by default."""
USUAL = {"num_layers": 16, "dim": 8, "tokens": 8192}
"""Numbers to try first; of widths as multiples of `STEP`."""

Pair = tuple[tuple[str, ...], tuple[str, ...]]
"""The policies of all layers of encoder and decoder."""


class DoesNotFitError(ValueError):
    """The budget is too small even for the smallest size."""


def plan(
    *,
    budget: str | int | None = None,
    num_layers: int | None = None,
    dim: int | None = None,
    tokens: int | None = None,
    recompute: str | Sequence[str] | None = None,
    decoder_recompute: str | Sequence[str] | None = None,
    **options: Any,
) -> Plan:
    """Predicts the peak memory of a training step, solves for the size that is not given, and
    chooses what every layer keeps for backward.

    Give three of ``budget``, ``num_layers``, ``dim`` and ``tokens``, and the plan finds the fourth:
    the largest one that fits under the policies with the lowest peak (a width is a multiple of
    64), or the smallest budget that these policies need. Where all four are given, the plan says
    whether they fit. It then chooses the policies with the least recomputation within the budget.
    Bottom layers may recompute more than top layers: backward first frees what the top layers
    keep, while gradients grow.

    Args:
        budget: bytes, or text such as "24GiB".
        num_layers, dim, tokens: L of the encoder, D, and T of a micro-batch on the encoder's side,
            without padding.
        recompute, decoder_recompute: one policy, or one per layer; None: the plan chooses.
            "layer+input" needs a depth connection.
        options: the other fields of `deepfast.memory.sizes.Sizes`: num_heads, num_kv_heads,
            ffn_dim, vocab_size, decoder_layers, target_tokens, connection, decoder_connection,
            reads, norm, norm_type, weight_type, dtype, optimizer, device, activation, dropout,
            accumulate, length, padding, ranks, parallel, reshard. Budget and tokens are those of
            one rank.

    Raises:
        TypeError: for an option that `Sizes` does not have.
        ValueError: for a wrong size or choice.
        DoesNotFitError: a ValueError; even the smallest model exceeds the budget.
    """
    sizes = {"num_layers": num_layers, "dim": dim, "tokens": tokens}
    given = {"budget": budget, **sizes}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) > 1:
        got = " and ".join(missing)
        raise ValueError(f"{', '.join(given)}: expected at least three of them, got none for {got}")
    if decoder_recompute is not None and options.get("decoder_layers") == 0:
        raise ValueError(
            f"decoder_recompute: expected none without a decoder, got {decoder_recompute!r} for "
            "decoder_layers=0"
        )
    _check_used(options | {"tokens": tokens})
    limit = None if budget is None else parse_bytes(budget)
    search = _Search(recompute, decoder_recompute)
    sized = partial(_sized, sizes | options)
    free = missing[0] if missing else None
    num_heads = options.get("num_heads") or 1
    if free in (None, "budget"):
        found = sized()
    else:
        # `Sizes` raises for wrong heads.
        by_heads = free == "dim" and checks.is_whole(num_heads)
        step = math.lcm(STEP, num_heads) if by_heads else 1
        found = _largest(free, step, sized, search, limit)
    if limit is None:
        limit = search.smallest(found)
    chosen = search.cheapest(found, limit)
    table = peak_table(found, *chosen)
    fits = sum(table.values()) <= limit
    what_fits = None if fits else _what_fits(found, limit, sized, num_heads)
    return Plan(found, limit, *chosen, table, relative_time(found, *chosen), what_fits, free)


def _check_used(options: dict[str, Any]) -> None:
    """Raises for sentences longer than the tokens, and for an option that none of the connections
    has."""
    length, tokens = options.get("length"), options["tokens"]
    if checks.is_whole(length) and checks.is_whole(tokens) and length > tokens:
        raise ValueError(f"length: expected at most tokens {tokens}, got {length}")
    kinds = [options.get("connection") or Sizes.connection]
    if options.get("decoder_layers") != 0:
        kinds.append(options.get("decoder_connection") or Sizes.decoder_connection)
    for name, owners in (("reads", ATTENTION_RESIDUALS), ("weight_type", ("dlcl",))):
        value = options.get(name)
        if value is not None and not set(owners) & set(kinds):
            raise ValueError(
                f"{name}: expected none without connection {' or '.join(owners)}, got {value!r} "
                f"with {' and '.join(map(str, kinds))}"
            )


def _sized(given: dict[str, Any], **free: int) -> Sizes:
    """The sizes with ``free`` in place of what is not given, and with the defaults that depend on
    dim and the tokens."""
    sizes = given | free
    dim = sizes["dim"]
    # `Sizes` raises for a wrong dim.
    whole = checks.is_whole(dim) and dim >= 1
    derived = {
        "num_heads": _heads(dim) if whole else 1,
        "ffn_dim": 4 * dim if whole else 1,
        "target_tokens": sizes["tokens"],
    }
    return Sizes(**derived | {name: value for name, value in sizes.items() if value is not None})


def _heads(dim: int) -> int:
    """The number of heads of width 64 if 64 divides the width, else the most that are wider."""
    return next(h for h in range(max(dim // STEP, 1), 0, -1) if dim % h == 0)


def _largest(
    free: str, step: int, sized: Callable[..., Sizes], search: "_Search", limit: int
) -> Sizes:
    """The sizes with the largest ``free``, a multiple of ``step``, that fit."""

    def need(multiple: int) -> int:
        return search.smallest(sized(**{free: multiple * step}))

    # Larger sizes are beyond every machine.
    most, usual, power = LIMITS[free][1] // step, USUAL[free], 2 if free == "dim" else 1
    if not (found := largest(need, limit, most, usual, power)):
        raise DoesNotFitError(
            f"budget: expected at least {format_bytes(need(1), up=True)} for {free} {step}, got "
            f"{format_bytes(limit)}"
        )
    return sized(**{free: step * found})


def largest(
    need: Callable[[int], int], limit: int, most: int, usual: int = 1, power: int = 1
) -> int:
    """The largest number up to ``most`` whose need is within the limit; 0 if that of 1 is not.

    The need grows about as a power of the number. Each need may take a second to compute, so a line
    through the two last ones says which number to try next.

    Args:
        usual: the number to try first.
    """
    low, high, guess = 0, most + 1, usual
    tried = [(0, 0)]
    while high - low > 1:
        guess = min(max(guess, low + 1), high - 1)
        tried.append((guess, need(guess)))
        (before, of_before), (last, of_last) = tried[-2:]
        low, high = (last, high) if of_last <= limit else (low, last)
        if len(tried) % 5 == 0 and high <= most:
            guess = (low + high) // 2
            continue
        slope = (of_last - of_before) / (last**power - before**power)
        wanted = last**power + (limit - of_last) / slope if slope > 0 else high**power
        guess = int(max(wanted, 0) ** (1 / power))
    return low


def _what_fits(sizes: Sizes, limit: int, sized: Callable[..., Sizes], num_heads: int) -> WhatFits:
    frugal = _Search(None, None)
    least = frugal.smallest(sizes)
    if least <= limit:
        recompute, decoder = frugal.cheapest(sizes, limit)
        return WhatFits(recompute=recompute, decoder_recompute=decoder, budget=least)
    most = {}
    # Where no multiple of 64 fits, the width of a head is a multiple of 8, or of 2.
    wide = math.lcm(STEP, num_heads), 8 * num_heads, 2 * num_heads
    for name, steps in (("num_layers", (1,)), ("tokens", (1,)), ("dim", wide)):
        for step in steps:
            try:
                most[name] = getattr(_largest(name, step, sized, frugal, limit), name)
            except ValueError:
                continue
            break
    return WhatFits(budget=least, **most)


class _Search:
    """Finds the best policies among those that may be chosen.

    Args:
        wanted: of the encoder and of the decoder one policy, one per layer, or None where any may
            be chosen.
    """

    def __init__(self, *wanted: str | Sequence[str] | None):
        self.wanted = wanted

    def uniform(self, sizes: Sizes) -> list[Pair]:
        """Pairs with one policy for all layers of each stack, from most memory to least.

        The encoder is deeper, so its policy changes first, then the decoder's.
        """
        options: list[list[tuple[str, ...]]] = []
        names = "recompute", "decoder_recompute"
        for side, wanted, name in zip(sizes.sides, self.wanted, names, strict=False):
            kind = side.connection
            wishes = policies_of(kind) if wanted is None else (wanted,)
            options.append([resolve(wish, side.layers, kind, name) for wish in wishes])
        if len(options) == 1:
            options.append([()])
        encoder, decoder = options
        return [(e, decoder[0]) for e in encoder] + [(encoder[-1], d) for d in decoder[1:]]

    def smallest(self, sizes: Sizes) -> int:
        """The lowest peak of all pairs."""
        return min(_peak(sizes, pair) for pair in self.uniform(sizes))

    def cheapest(self, sizes: Sizes, limit: int) -> Pair:
        """The policies with the least predicted time within the limit, or with the lowest peak
        where nothing fits."""
        pairs = self.uniform(sizes)
        found = [pair for pair in pairs if _peak(sizes, pair) <= limit]
        if not found:
            return min(pairs, key=lambda pair: _peak(sizes, pair))
        mixed = (_mixed(sizes, *both, limit) for both in combinations(pairs, 2))
        found += [pair for pair in mixed if pair is not None]
        return min(found, key=lambda pair: (relative_time(sizes, *pair), _peak(sizes, pair)))


def _peak(sizes: Sizes, pair: Pair) -> int:
    return sum(peak_table(sizes, *pair).values())


def uniform_peak(sizes: Sizes, policy: str) -> int:
    """The peak with one policy for all layers; without a depth connection, "layer+input" becomes
    "layer"."""
    policies = (
        (policy if policy in policies_of(side.connection) else "layer",) * side.layers
        for side in sizes.sides
    )
    return sum(peak_table(sizes, *policies).values())


def _mixed(sizes: Sizes, top: Pair, bottom: Pair, limit: int) -> Pair | None:
    """Combines two choices: as many upper layers as possible use ``top``, and the others
    ``bottom``, which needs less memory; None where not even those fit."""
    # The encoder's layers lie below the decoder's.
    lean, frugal = top[0] + top[1], bottom[0] + bottom[1]
    count = len(lean)

    def mix(upper: int) -> Pair:
        whole = frugal[: count - upper] + lean[count - upper :]
        return whole[: sizes.num_layers], whole[sizes.num_layers :]

    if _peak(sizes, bottom) > limit:
        return None
    return mix(largest(lambda upper: _peak(sizes, mix(upper)), limit, count - 1, count // 2))
