"""The memory chapter: the measurements and the closed forms beside them."""

from dataclasses import replace

import pytest
import torch

from deepfast.measure import deepest, policies, results, turns
from deepfast.measure.deepest import HELD_MODEL, HELD_POLICIES, MODEL, counted_bytes
from deepfast.measure.depth_picture import curves
from deepfast.measure.encoders import EncoderModel
from deepfast.memory import POLICIES, parse_bytes, plan
from deepfast.memory.eager import CHECKPOINTED, EAGER, LOOP, RESIDUAL, STACK, eager_peak


@pytest.fixture(scope="module")
def rows(tiny, finish):
    """Every policy at every depth, measured."""
    found = []
    finish(policies.policies(tiny, found))
    return found


def held_sizes(layers):
    return deepest.held_sizes(layers, "float32")


def test_every_policy_at_every_depth_is_as_predicted(tiny, rows):
    assert [(row.depth, row.variant) for row in rows] == [
        (depth, policy) for depth in tiny.depths for policy in POLICIES
    ]
    for row in rows:
        assert row.predicted_bytes == pytest.approx(row.peak_bytes, rel=0.05)


def test_a_policy_that_does_not_fit_is_not_run(tiny, rows, finish, monkeypatch):
    keep = next(row for row in rows if (row.depth, row.variant) == (4, "keep"))
    # Less than what keep takes, more than lean takes.
    free = turns.GIB + keep.predicted_bytes - 1
    monkeypatch.setattr(turns, "free_bytes", lambda: free)
    again = []
    finish(policies.policies(tiny, again))
    by = {(row.depth, row.variant): row for row in again}
    assert by[4, "keep"].note.startswith("does not fit")
    assert by[4, "keep"].peak_bytes is None
    assert by[4, "lean"].peak_bytes
    assert {r["relative"] for r in policies.chapter(tiny, again)["rows"]} == {None}


def test_times_are_ratios_of_rounds_to_keep(tiny, rows):
    found = [row for row in policies.chapter(tiny, rows)["rows"] if row["relative"]]
    assert [(row["depth"], row["variant"]) for row in found] == [(4, p) for p in POLICIES]
    assert found[0]["relative"] == found[0]["expected_relative"] == 1
    expected = [row["expected_relative"] for row in found]
    assert expected == sorted(expected)
    assert expected[-1] > 1.1
    for row in found:
        assert len(row["seconds"]) == tiny.policy_rounds
        assert min(row["seconds"]) > 0


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", [*EAGER, *HELD_POLICIES])
def test_closed_forms_are_held_to_counted_steps(tiny, finish, form, dtype):
    found = []
    jobs = deepest.held(replace(tiny, held_depths=(3,)), found, (form,))
    finish([job for job, row in zip(jobs, found, strict=True) if row.what == dtype])
    (row,) = [row for row in found if row.what == dtype]
    assert row.predicted_bytes == pytest.approx(row.peak_bytes, rel=0.05)


def test_what_a_form_keeps_is_what_it_is_named_for():
    sizes = held_sizes(6)
    measured = {form: counted_bytes(EncoderModel(sizes, form), sizes) for form in EAGER}
    assert measured[STACK] > measured[LOOP] > measured[RESIDUAL] > measured[CHECKPOINTED]
    assert counted_bytes(EncoderModel(sizes, "history"), sizes) < measured[CHECKPOINTED]


def test_plain_models_have_the_predicted_parameters():
    sizes = held_sizes(3)
    bare = plan(budget="1TiB", layers=3, tokens=1024, connection="residual", **HELD_MODEL)
    mixing = 4 * 4 + 2 * 4 * sizes.width
    for form in (*EAGER, "keep"):
        count = sum(p.numel() for p in EncoderModel(sizes, form).parameters())
        mixes = form in (STACK, LOOP, "keep")
        assert count == bare.sizes.parameters + (mixing if mixes else 0)
    assert count == sizes.parameters


@pytest.mark.parametrize("pair", [(STACK, LOOP), (RESIDUAL, CHECKPOINTED)])
def test_forms_of_one_model_compute_the_same(pair):
    sizes = held_sizes(2)
    first, second = (EncoderModel(sizes, form) for form in pair)
    second.load_state_dict(first.state_dict())
    tokens, target = (torch.randint(sizes.vocabulary, (4, 8)) for _ in range(2))
    gradients = []
    for model in (first, second):
        torch.manual_seed(3)
        model.loss(tokens, target).backward()
        gradients.append(model.encoder.layers[0].up.weight.grad)
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


def test_the_spread_is_of_what_was_measured():
    rows = [{"ratio": ratio} for ratio in (1.02, 0.97, 1.0, None)]
    assert results.spread(rows) == {"low": 0.97, "high": 1.02, "count": 3}
    assert results.spread(rows[3:]) is None
