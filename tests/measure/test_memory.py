"""The memory chapter: what is measured, what is refused, and which closed forms stand beside it."""

import argparse
from dataclasses import replace

import pytest
import torch

from deepfast.cli.report import add_arguments, command_line
from deepfast.measure import deepest, memory_chapter
from deepfast.measure.deepest import (
    HELD_MODEL,
    HELD_POLICIES,
    MODEL,
    counted_bytes,
)
from deepfast.measure.depth_picture import curves
from deepfast.measure.plain import FusedModel, PlainModel
from deepfast.measure.policies import peaks, times
from deepfast.measure.rows import (
    DOES_NOT_FIT,
    MEASURED,
    NOT_MEASURED,
    Row,
)
from deepfast.measure.settings import Deadline
from deepfast.memory import POLICIES, parse_bytes, plan
from deepfast.memory.eager import (
    CHECKPOINTED,
    EAGER,
    LOOP,
    RESIDUAL,
    STACK,
    eager_peak,
)


def quiet(line):
    pass


def held_sizes(layers, dtype="float32"):
    return plan(
        budget="1TiB", layers=layers, dtype=dtype, tokens=1024, length=32, **HELD_MODEL
    ).sizes  # fmt: skip


def test_every_policy_at_every_depth_is_as_predicted(tiny):
    rows = peaks(tiny, Deadline(60), quiet)
    assert [(row.depth, row.variant) for row in rows] == [
        (depth, policy) for depth in tiny.depths for policy in POLICIES
    ]
    for row in rows:
        assert row.status == MEASURED
        assert row.predicted_peak_bytes == pytest.approx(row.peak_bytes, rel=0.05)


def test_a_policy_that_does_not_fit_is_not_run(tiny):
    free = {row.variant: row for row in peaks(tiny, Deadline(60), quiet) if row.depth == 8}
    # Less than what keep takes, more than lean takes.
    tiny.memory_bytes = free["keep"].predicted_peak_bytes - 1
    rows = {(r.depth, r.variant): r for r in peaks(tiny, Deadline(60), quiet)}
    assert rows[8, "keep"].status == DOES_NOT_FIT
    assert rows[8, "keep"].peak_bytes is None
    assert rows[8, "lean"].status == MEASURED
    assert times(tiny, Deadline(60), list(rows.values()), quiet)["depth"] == 4


def test_times_are_ratios_of_rounds_to_keep(tiny):
    found = times(tiny, Deadline(60), peaks(tiny, Deadline(60), quiet), quiet)
    assert found["depth"] == 8
    rows = {row["policy"]: row for row in found["rows"]}
    assert list(rows) == list(POLICIES)
    assert rows["keep"]["relative"] == rows["keep"]["predicted_relative"] == 1
    expected = [rows[policy]["predicted_relative"] for policy in POLICIES]
    assert expected == sorted(expected)
    assert expected[-1] > 1.1
    for row in rows.values():
        assert len(row["seconds"]) == tiny.rounds
        assert min(row["seconds"]) > 0


def test_where_time_is_short_a_shallower_depth_is_timed(tiny):
    def row(depth, policy, first):
        return Row(variant=policy, depth=depth, first_seconds=first, peak_bytes=1)

    rows = [row(d, p, s) for d, s in ((2, 0.01), (4, 0.1), (8, 100.0)) for p in POLICIES]
    assert times(tiny, Deadline(20), rows, quiet)["depth"] == 4
    tiny.policy_depth = 3
    assert times(tiny, Deadline(20), rows, quiet)["depth"] == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", [*EAGER, *HELD_POLICIES])
def test_closed_forms_are_held_to_counted_steps(tiny, form, dtype):
    (row,) = [
        r for r in deepest.held(replace(tiny, held_depths=(3,)), Deadline(120), quiet, (form,))
        if r["dtype"] == dtype
    ]  # fmt: skip
    assert row["ratio"] == row["predicted_bytes"] / row["measured_bytes"]
    assert row["ratio"] == pytest.approx(1, abs=0.05)


def test_what_a_form_keeps_is_what_it_is_named_for():
    sizes = held_sizes(12)
    measured = {form: counted_bytes(PlainModel(sizes, form), sizes) for form in EAGER}
    assert measured[STACK] > measured[LOOP] > measured[RESIDUAL] > measured[CHECKPOINTED]
    assert counted_bytes(FusedModel(sizes, "history"), sizes) < measured[CHECKPOINTED]


@pytest.mark.parametrize("form", EAGER)
def test_plain_models_have_the_predicted_parameters(form):
    sizes = held_sizes(3)
    count = sum(p.numel() for p in PlainModel(sizes, form).parameters())
    connection = 4 * 4 + 2 * 4 * sizes.width if form in (STACK, LOOP) else 0
    expected = plan(
        budget="1TiB", layers=3, tokens=1024, connection="residual", **HELD_MODEL
    ).sizes.parameters  # fmt: skip
    assert count == expected + connection
    fused = sum(p.numel() for p in FusedModel(sizes, "keep").parameters())
    assert fused == sizes.parameters == expected + 4 * 4 + 2 * 4 * sizes.width


@pytest.mark.parametrize("pair", [(STACK, LOOP), (RESIDUAL, CHECKPOINTED)])
def test_forms_of_one_model_compute_the_same(pair):
    sizes = held_sizes(2)
    first, second = (PlainModel(sizes, form) for form in pair)
    second.load_state_dict(first.state_dict())
    tokens, target = (torch.randint(sizes.vocabulary, (4, 8)) for _ in range(2))
    gradients = []
    for model in (first, second):
        torch.manual_seed(3)
        model.loss(tokens, target).backward()
        gradients.append(model.layers[0].linear1.weight.grad)
    assert gradients[0].abs().max() > 0
    torch.testing.assert_close(*gradients)


def test_one_layer_more_than_the_deepest_does_not_fit():
    found = deepest.deepest()
    for index, budget in enumerate(deepest.BUDGETS):
        limit = parse_bytes(budget)
        for form in EAGER:
            layers = found["layers"][form][index]
            sizes = plan(budget="1TiB", layers=layers + 1, **MODEL).sizes
            assert eager_peak(sizes, form) > limit
            if layers:
                assert eager_peak(replace(sizes, layers=layers), form) <= limit
        layers = found["layers"][deepest.PLANNED][index]
        assert plan(budget=budget, layers=layers, **MODEL).fits
        assert not plan(budget=budget, layers=layers + 1, **MODEL).fits
    assert found["layers"][STACK][0] == 0


def test_a_budget_without_a_single_layer_has_no_plan():
    assert deepest.planned("400MiB") is None


def test_the_picture_s_points_are_the_closed_forms_with_the_same_margin():
    sizes = plan(budget="1TiB", layers=1, **MODEL).sizes
    found = curves(sizes)
    layers, gib = found[LOOP][2]
    deep = replace(sizes, layers=layers)
    bare = eager_peak(replace(deep, device="cpu", dropout=False), LOOP)
    without = eager_peak(replace(deep, dropout=False), LOOP)
    assert without == pytest.approx(1.04 * bare + 300 * 2**20, rel=1e-6)
    assert gib * 2**30 == eager_peak(deep, LOOP) > without
    layers, gib = found["deepfast, lean"][2]
    known = plan(budget="1TiB", layers=layers, policies="lean", **MODEL)
    assert gib * 2**30 == known.peak > known.table["allocator margin"] > 300 * 2**20


def test_leaving_it_out_is_part_of_the_command():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert "--no-memory" in command_line(parser.parse_args(["--no-memory"]))
    assert "--no-memory" not in command_line(parser.parse_args([]))


def test_spread_and_frugal_are_taken_from_the_rows():
    rows = [{"status": MEASURED, "ratio": r} for r in (1.02, 0.97, 1.0)]
    rows.append({"status": NOT_MEASURED, "ratio": None})
    assert memory_chapter.spread(rows) == {"low": 0.97, "high": 1.02, "count": 3}
    timed = [{"policy": p, "peak_bytes": 60 - 10 * i, "relative": 1 + i / 10}
             for i, p in enumerate(POLICIES)]  # fmt: skip
    found = memory_chapter.frugal({"times": {"depth": 60, "rows": timed}})
    assert found == {"depth": 60, "policy": "history", "saved": 3.0, "time": 1.4}
