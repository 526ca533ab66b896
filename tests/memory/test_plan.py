"""The planner's arithmetic: solutions that invert and are monotone, errors in one sentence."""

import pytest
import torch

from deepfast.memory import POLICIES, format_bytes, parse_bytes, plan
from deepfast.memory.flops import recomputed_flops
from deepfast.memory.recording import _record, recording
from deepfast.memory.table import describe

MODEL = {"dim": 512, "tokens": 8192}
# A loss over few words is counted faster.
SMALL = MODEL | {"vocab_size": 2000}
LATENT = {"connection": "latent", "decoder_layers": 0}
POST = {"connection": "residual", "norm": "post", "dtype": "bfloat16", "decoder_layers": 0}


@pytest.mark.parametrize(("text", "size", "written"), [
    ("24GiB", 24 * 2**30, "24.0 GiB"), ("24 gib", 24 * 2**30, "24.0 GiB"),
    (" 24GB ", 24 * 10**9, "22.4 GiB"), ("1.5KiB", 1536, "1.50 KiB"),
    (".5MB", 500_000, "488 KiB"), ("7", 7, "7 B"), ("7B", 7, "7 B"), (999, 999, "999 B"),
    (2.0**40, 2**40, "1.00 TiB"), (2**30 - 1, 2**30 - 1, "1.00 GiB"),
    (345 * 2**20, 345 * 2**20, "345 MiB"), (3 * 2**50, 3 * 2**50, "3072 TiB"),
])  # fmt: skip
def test_bytes_are_read_and_written(text, size, written):
    assert parse_bytes(text) == size
    assert format_bytes(size) == written
    assert parse_bytes(format_bytes(size, up=True)) >= size


@pytest.mark.parametrize("text", ["", "GiB", "24G", "24 GiBs", "-1GiB", "1e3", 0, -5, True, None,
                                  "0.1B", float("nan"), float("inf"), "9" * 30])  # fmt: skip
def test_what_is_no_size_is_one_sentence(text):
    with pytest.raises(ValueError, match=r"budget: expected bytes such as 24GiB.*, got "):
        parse_bytes(text)


# A plan counts a small model for each width and each number of tokens that it tries.
SLOW = pytest.mark.slow


@pytest.mark.parametrize(("free", "kind"), [
    ("num_layers", LATENT), ("dim", POST),
    pytest.param("tokens", {"decoder_connection": "dlcl", "decoder_layers": 2}, marks=SLOW),
])  # fmt: skip
def test_solving_inverts(free, kind):
    """And runs few further small models, each of which takes about a second. More layers need
    none."""
    sizes = {"num_layers": 30, "dim": 512, "tokens": 4096}
    kind = kind | {"vocab_size": SMALL["vocab_size"]}
    budget, before = plan(**sizes, **kind).budget, _record.cache_info().misses
    given = {name: value for name, value in sizes.items() if name != free}
    found = plan(budget=budget, **given, **kind)
    assert _record.cache_info().misses - before <= (0 if free == "num_layers" else 8)
    assert getattr(found.sizes, free) == sizes[free]
    assert found.fits
    # One more does not fit.
    step = 64 if free == "dim" else 1
    assert plan(**sizes | {free: sizes[free] + step}, **kind).budget > budget


def test_the_smallest_budget_is_that_of_the_most_frugal_policy_and_costs_time():
    sizes = {"num_layers": 12, **SMALL}
    smallest, most = plan(**sizes), plan(**sizes, budget="1TiB")
    assert smallest.fits
    assert smallest.budget == min(
        plan(**sizes, budget="1TiB", recompute=p, decoder_recompute=d).peak
        for p in POLICIES
        for d in POLICIES[:-1]
    )
    assert plan(**sizes, recompute="ffn", decoder_recompute="none").budget > smallest.budget
    times = [1.0]
    for part in (1.0, 0.4, 0.0):
        budget = int(smallest.budget + part * (most.peak - smallest.budget))
        found = plan(**sizes, budget=budget)
        assert found.fits
        times.append(found.time)
    assert times == sorted(times)
    assert times[-1] > 1.1


def test_policies_may_be_mixed_and_are_the_cheapest_of_their_kind():
    sizes = {"num_layers": 60, **SMALL, "decoder_layers": 0}
    pure = [plan(**sizes, budget="1TiB", recompute=p) for p in POLICIES]
    between = (pure[0].peak + pure[1].peak) // 2
    mixed = plan(**sizes, budget=between)
    assert mixed.fits
    assert len(set(mixed.recompute)) == 2
    assert pure[0].time < mixed.time < min(p.time for p in pure if p.peak <= between)
    # The policy that saves more memory is that of the lowest layers, without gaps.
    levels = [POLICIES.index(p) for p in mixed.recompute]
    assert levels == sorted(levels, reverse=True)
    # One layer fewer of it does not fit.
    changed = list(mixed.recompute)
    changed[levels.count(max(levels)) - 1] = mixed.recompute[-1]
    assert plan(**sizes, budget=between, recompute=changed).peak > between


def test_what_a_plan_says():
    """Given policies are kept, and the table adds up."""
    names = ["layer+input"] * 5 + ["layer"] * 5 + ["none"] * 5
    sizes = {"num_layers": 15, **SMALL, "recompute": names, "decoder_recompute": "ffn"}
    found = plan(budget="40GiB", **sizes)
    assert found.recompute == tuple(names)
    assert found.decoder_recompute == ("ffn",) * 6
    policies = "5 layer+input, 5 layer, 5 none from the bottom; decoder ffn"
    assert describe(found.recompute, found.decoder_recompute) == policies
    peak = format_bytes(found.peak, up=True)
    assert repr(found) == f"Plan(15 layers, {policies}, peak {peak} of 40.0 GiB)"
    assert found.peak == sum(found.table.values())
    assert all(size >= 0 for size in found.table.values())
    assert found.table["parameters"] == 4 * found.sizes.parameters
    assert found.table["optimizer"] == 8 * found.sizes.parameters
    assert found.table["allocator margin"] > 0


def test_recomputation_is_that_of_the_design():
    """Shares of an encoder layer's matrix work, F = 4 D: 11%, and 22% plus attention."""
    sizes = plan(budget="1TiB", num_layers=30, **SMALL, length=1).sizes
    work = 72 * sizes.dim**2 * sizes.tokens
    shares = [recomputed_flops(sizes.sides[0], policy) / work for policy in POLICIES]
    assert shares == pytest.approx([0, 8 / 72, 16 / 72, 16 / 72], abs=0.02)
    assert shares[-1] > shares[-2]
    long = plan(budget="1TiB", num_layers=30, **SMALL, length=512).sizes
    assert recomputed_flops(long.sides[0], "layer") > recomputed_flops(sizes.sides[0], "layer")
    assert recomputed_flops(long.sides[0], "ffn") == recomputed_flops(sizes.sides[0], "ffn")


@pytest.mark.parametrize(("changes", "message"), [
    ({"num_layers": None, "dim": None}, "budget, num_layers, dim, tokens: expected at least "
     "three of them, got none for num_layers and dim"),
    ({"decoder_layers": 0, "decoder_recompute": "ffn"}, "decoder_recompute: expected none "
     "without a decoder, got 'ffn' for decoder_layers=0"),
    ({"tokens": True}, "tokens: expected an integer of at least 1, got True"),
    ({"num_kv_heads": 3}, "num_kv_heads: expected a divisor of num_heads 8, got 3"),
    ({"vocab_size": 0}, "vocab_size: expected at least 1 with a decoder, got 0"),
    ({"recompute": "less"}, "^recompute: expected one of none, ffn, .*, got 'less'$"),
    ({"recompute": "layer+input", "connection": "residual"}, "'layer.input' recomputes inputs"),
    ({"connection": "denseformer"},
     r"^connection: expected one of dlcl, .*, got 'denseformer', which plan counts as dlcl$"),
    ({"length": 8193}, "length: expected at most tokens 8192, got 8193"),
    ({"connection": "attnres", "norm": "post"},
     "norm: expected pre with connection 'attnres', got 'post'"),
    ({"connection": "attnres", "reads": 3}, "reads: expected at most 2, got 3"),
    ({"reads": 1}, "^reads: expected none without connection attnres or block_attnres, got 1 "
     "with dlcl and residual$"),
    ({"connection": "attnres", "weight_type": "vector"}, "^weight_type: expected none without"),
    ({"dim": None, "budget": "8GiB", "num_heads": 1.5},
     "num_heads: expected an integer of at least 1, got 1.5"),
    ({"num_layers": None, "budget": "1MiB"}, r"budget: expected at least .* for "
     r"num_layers 1, got 1\."),
])  # fmt: skip
def test_errors_say_what_expected_got(changes, message):
    with pytest.raises(ValueError, match=message):
        plan(**{"budget": "24GiB", "num_layers": 30, **SMALL} | changes)


def test_advice_names_what_fits():
    base = SMALL | {"decoder_layers": 0}
    tight = plan(budget="6GiB", num_layers=60, **base, recompute="none")
    assert not tight.fits
    assert tight.advice.startswith("it fits with recompute policies ")
    assert plan(budget="6GiB", num_layers=60, **base, recompute=tight.what_fits.recompute).fits


@SLOW
def test_the_sizes_advised_are_the_roundest_that_fit():
    """Where no size fits, the advice has the budget alone."""
    step, budget = 12, "480MiB"
    sizes = {"num_layers": 300, "dim": 1536, "tokens": 1024, "vocab_size": 1000,
             "decoder_layers": 1, "num_heads": 6}  # fmt: skip
    found = plan(budget=budget, **sizes)
    told = found.what_fits
    assert found.advice.startswith("what fits is ")
    assert found.advice.endswith(
        f"{told.dim} wide; unchanged it needs a budget of {format_bytes(told.budget, up=True)}"
    )
    assert told.dim % step == 0
    for name, more in (("num_layers", 1), ("tokens", 1), ("dim", step)):
        if (count := getattr(told, name)) is not None:
            assert plan(budget=budget, **sizes | {name: count}).fits
            assert not plan(budget=budget, **sizes | {name: count + more}).fits
    none = plan(budget="1MiB", **SMALL, num_layers=2, decoder_layers=0)
    assert none.advice.startswith("it needs a budget of ")
    assert none.what_fits.budget == plan(**SMALL, num_layers=2, decoder_layers=0).peak


@SLOW
def test_the_callers_settings_neither_matter_nor_change():
    sizes = {"dim": 96, "tokens": 500, "decoder_layers": 1, "vocab_size": 90, "num_layers": 3}
    expected = plan(**sizes, connection="latent").table
    _record.cache_clear()
    recording.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        before = torch.get_rng_state()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
            assert plan(**sizes, connection="latent").table == expected
            assert torch.is_autocast_enabled("cpu")
            assert torch.is_inference_mode_enabled()
        assert torch.equal(torch.get_rng_state(), before)
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
