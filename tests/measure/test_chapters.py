"""What is measured: forms that compute the same, the rows of every chapter, counted steps
beside what is predicted."""

from dataclasses import replace

import pytest
import torch
from deepfast.measure.connections import (
    CONNECTIONS,
    OURS,
    PLAIN,
    ConnectionCase,
    connections,
    pairs,
    ratios,
)

from deepfast.measure import jobs, memory_steps, page, steps
from deepfast.measure.clock import COPY, Row
from deepfast.measure.encoders import (
    CHECKPOINTED,
    LOOP,
    PLAIN_FORMS,
    RESIDUAL,
    STACK,
    VARIANTS,
    EncoderModel,
    StepCase,
)
from deepfast.measure.forms import COMPILED, mixing_alone
from deepfast.measure.memory_steps import HELD_POLICIES, MODEL
from deepfast.measure.report_pictures import memory_curves
from deepfast.measure.settings import DEFAULT, FULL, QUICK
from deepfast.memory import POLICIES, plan

FORMS = [f"{name}: {form}" for name in CONNECTIONS for form in (OURS, PLAIN)]
SLOW = ("stack and sum", *(form for form in FORMS if form.endswith(PLAIN)))
"""Variants that are not run where their memory is not free."""


# ---- steps, and their connection alone -----------------------------------------------------------


def test_all_dlcl_variants_compute_the_same_and_residual_does_not(tiny):
    case = StepCase(tiny, 4)
    own = {id(p) for p in case.encoder.parameters()}
    losses = {v: case.step(v)[0].item() for v in VARIANTS}
    plain = losses.pop("plain residual")
    assert losses == pytest.approx(dict.fromkeys(losses, losses["stack and sum"]), rel=1e-5)
    assert abs(plain - losses["deepfast"]) > 1e-4
    # They share every parameter, and a run leaves no gradients.
    assert all({id(p) for p in model.parameters()} <= own for model in case.models.values())
    assert all(p.grad is None for p in case.encoder.parameters())


@pytest.mark.parametrize("chapter", [steps.steps, steps.mixing, connections])
def test_memory_that_is_not_there_is_not_taken(tiny, measured, monkeypatch, chapter):
    monkeypatch.setattr(jobs, "free_bytes", lambda: jobs.GIB + 50_000)
    sizes = replace(tiny, connection_depths=(4, 9), connection_tokens=128)
    rows = measured(chapter(sizes))
    assert {row.variant for row in rows} & {*SLOW}
    for row in rows:
        if row.variant in SLOW:
            assert row.note.startswith("does not fit: needs ")
            assert row.peak_bytes is row.median is None
        else:
            assert row.note is None
            assert row.median > 0


def test_the_predicted_memory_is_not_below_the_measured_one(tiny, measured):
    for row in measured(steps.steps(tiny)):
        if row.variant == "stack and sum":
            assert row.peak_bytes <= row.predicted_bytes <= 1.5 * row.peak_bytes


def test_variants_take_turns(tiny):
    labels = [job.label for job in steps.steps(tiny)[0].jobs()]
    assert labels == [
        *(f"2 layers, {v}: memory" for v in VARIANTS),
        *(f"2 layers, {v}: time" for v in VARIANTS * tiny.rounds),
    ]


def test_a_compiled_loop_takes_part_up_to_a_depth(tiny, measured):
    sizes = replace(tiny, depths=(2, 3), compile_up_to=2)
    rows = [row for row in measured(steps.steps(sizes)) if row.variant == COMPILED]
    assert [(row.depth, len(row.seconds), row.peak_bytes) for row in rows] == [
        (2, tiny.rounds, None)
    ]
    case = StepCase(tiny, 2)
    (loss, gradients), (true_loss, truth) = case.step(COMPILED), case.step("stack and sum")
    torch.testing.assert_close(loss, true_loss)
    torch.testing.assert_close(gradients, truth, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("settings", [DEFAULT, FULL, QUICK], ids=["default", "full", "quick"])
def test_every_setting_measures_the_headline_rows(settings):
    assert settings.policy_depth in settings.depths
    assert settings is QUICK or settings.depths == (6, 30, 60, 100)
    assert settings is not FULL or (settings.tokens, settings.dim) == (2048, 256)


def test_mixing_is_compared_with_the_copy(made):
    rows = {row["variant"]: row for row in made.report["mixing"]}
    assert rows[COPY]["fraction_of_copy"] == 1
    assert rows[COPY]["gb_per_second"] > 0.1
    assert all(row["fraction_of_copy"] > 0 for row in rows.values())


def test_forms_agree_with_float64(made):
    rows = {(r["variant"], r["dtype"]): r for r in made.report["agreement"]["rows"]}
    assert rows.pop(("deepfast", "float64"))["gradients"] < 1e-12
    assert {v for v, _ in rows} == {*VARIANTS} - {RESIDUAL}
    for row in rows.values():
        assert row["loss"] < 1e-6
        assert max(row["gradients"], row["weight"]) < 1e-5


# ---- connections ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONNECTIONS)
def test_both_forms_of_a_connection_compute_the_same(tiny, name):
    case = ConnectionCase(tiny, 9, [Row(variant=v) for v in FORMS])
    connection, module = CONNECTIONS[name], case.modules[name].double()
    y, grad = case.y.detach().double().requires_grad_(), case.grad.double()
    found = []
    for form in (connection.ours, connection.plain):
        x = mixing_alone(form, module, y, grad)
        found.append([x, y.grad, *(p.grad for p in module.parameters())])
        y.grad = None
        module.zero_grad()
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain)


def test_every_form_is_measured_at_every_depth(tiny, measured):
    sizes = replace(tiny, connection_depths=(4, 9), connection_tokens=128)
    rows = measured(connections(sizes))
    assert [(row.depth, row.variant) for row in rows] == [(d, v) for d in (4, 9) for v in FORMS]
    for row in rows:
        assert len(row.seconds) == tiny.rounds
        assert row.variant not in SLOW or row.peak_bytes <= row.predicted_bytes
    rows = [row.as_dict() for row in rows]
    for ours, plain in pairs(rows)[len(CONNECTIONS) :]:
        assert (ours["depth"], ours["what"]) == (9, plain["what"])
        assert 0 < ours["nbytes"] < plain["nbytes"]
        assert 0 < ours["peak_bytes"] < plain["peak_bytes"]
    found = ratios(rows)
    assert found.keys() == CONNECTIONS.keys()
    ours, plain = pairs(rows)[len(CONNECTIONS)]
    assert found["DLCL"]["memory"] == plain["peak_bytes"] / ours["peak_bytes"]
    # At twice the depth: plain PyTorch's traffic by four, that of blocks by two.
    assert 2 < found["attention in blocks"]["plain_growth"] < found["DLCL"]["plain_growth"] < 4
    plain["median_seconds"] = None
    assert "DLCL" not in ratios(rows)


# ---- memory --------------------------------------------------------------------------------------


def test_every_policy_at_every_depth_is_as_predicted(tiny, measured):
    rows = measured(memory_steps.policies(tiny))
    every = [(depth, policy) for depth in tiny.depths for policy in POLICIES]
    assert [(row.depth, row.variant) for row in rows] == every
    for row in rows:
        assert row.predicted_bytes == pytest.approx(row.peak_bytes, rel=0.05)
    found = memory_steps.policy_chapter(tiny, rows)["rows"]
    for row in found:
        assert row["ratio"] == row["predicted_bytes"] / row["peak_bytes"]
        # Both numbers include the parameters, so their ratio is nearer to 1.
        assert row["parameter_bytes"] > 0
        assert abs(row["ratio_with_parameters"] - 1) <= abs(row["ratio"] - 1)
    timed = [row for row in found if row["relative"]]
    assert [(row["depth"], row["variant"]) for row in timed] == [(4, p) for p in POLICIES]
    assert timed[0]["relative"] == timed[0]["expected_relative"] == 1
    assert all(len(row["seconds"]) == tiny.rounds for row in timed)
    expected = [row["expected_relative"] for row in timed]
    assert expected == sorted(expected)
    assert expected[-1] > 1.1
    # Where keep did not run, there is nothing to compare with.
    for row in rows:
        row.seconds = row.seconds if row.variant != "none" else []
    chapter = memory_steps.policy_chapter(tiny, rows)
    assert {row["relative"] for row in chapter["rows"]} == {None}


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", [*PLAIN_FORMS, *HELD_POLICIES])
def test_whole_steps_are_counted_and_those_of_deepfast_predicted(tiny, measured, form, dtype):
    groups = memory_steps.held(replace(tiny, held_depths=(3,)), (form,))
    (row,) = measured([group for group in groups if group.rows[0].what == dtype])
    assert row.peak_bytes > 0
    if form in PLAIN_FORMS:
        assert row.predicted_bytes is memory_steps.ratio(row) is None
    else:
        assert row.predicted_bytes == pytest.approx(row.peak_bytes, rel=0.05)


@pytest.mark.parametrize("pair", [(STACK, LOOP), (RESIDUAL, CHECKPOINTED)])
def test_forms_of_one_model_compute_the_same(pair):
    sizes = memory_steps.held_sizes(2, "float32")
    first, second = (EncoderModel(sizes, form) for form in pair)
    second.load_state_dict(first.state_dict())
    tokens, target = (torch.randint(sizes.vocab_size, (4, 8)) for _ in range(2))
    gradients = []
    for model in (first, second):
        torch.manual_seed(3)
        model.loss(tokens, target).backward()
        gradients.append(model.encoder.layers[0].up.weight.grad)
    assert gradients[0].abs().max() > 0
    torch.testing.assert_close(*gradients)


def test_one_layer_more_than_the_deepest_does_not_fit():
    for found in memory_steps.deepest()["plans"]:
        sizes = {"budget": found["budget"], **MODEL}
        assert plan(num_layers=found["layers"], **sizes).fits
        assert not plan(num_layers=found["layers"] + 1, **sizes).fits
    assert memory_steps.planned("400MiB") is None


def test_the_curves_are_the_planners():
    layers, gib = memory_curves(memory_steps.planned_sizes())["deepfast, ffn"][2]
    known = plan(budget="1TiB", num_layers=layers, recompute="ffn", **MODEL)
    assert gib * 2**30 == known.peak > known.table["allocator margin"] > 300 * 2**20


# ---- numbers on the page -------------------------------------------------------------------------


def test_numbers_are_short():
    assert [page.seconds(v) for v in (None, 0.00123, 0.5, 2.345, 41.23)] == [
        "", "1.23 ms", "500 ms", "2.35 s", "41.2 s",
    ]  # fmt: skip
    assert [page.size(v) for v in (None, 3 << 29)] == ["", "1.50 GiB"]
    rows = [{"ratio": ratio} for ratio in (1.02, 0.97, 1.0, None)]
    assert page.spread(rows) == {"low": 0.97, "high": 1.02, "count": 3}
    assert page.spread(rows[3:]) is None


@pytest.mark.parametrize(
    ("ours", "twin", "says"),
    [(2.0, 4.4, "little more than token frequencies"), (2.0, 3.0, "but later"),
     (3.0, 2.0, "not behind")],
)  # fmt: skip
def test_the_verdict_follows_the_numbers(ours, twin, says):
    def run(nll):
        return {"steps": 100, "curve": {"dev": [[50, 5.0, 1.0], [100, nll, 2.0]]}}

    training = {"status": "measured", "unigram_nll": 4.5}
    assert says in page.verdict(training | {"runs": {"dlcl": run(ours), "twin": run(twin)}})
