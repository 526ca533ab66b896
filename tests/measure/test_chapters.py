"""Chapters of a report: variants that compute the same, and rows of what does not fit."""

from dataclasses import replace

import pytest
import torch

from deepfast.measure import turns
from deepfast.measure.forms import COMPILED, RESIDUAL, STACK
from deepfast.measure.mixing import CONNECTIONS, MixingCase, mixing
from deepfast.measure.stacks import (
    ATTENTION,
    KINDS,
    PLAIN_FORMS,
    PolicyCase,
    StepCase,
    policies,
    steps,
)
from deepfast.measure.turns import Row, Turns
from deepfast.memory import POLICIES


def test_forms_of_one_connection_compute_the_same_and_residual_does_not(tiny):
    forms = [name for name in KINDS if name != COMPILED]
    case = StepCase(tiny.step, 4, forms, activation="gelu")
    for model in case.models.values():
        model.double()
    case.x = case.x.detach().double().requires_grad_()
    case.gradient = case.gradient.double()
    found = {name: case.step(name) for name in forms}
    truth, gradients = found[STACK]
    assert len(gradients) == len([*case.models[STACK].parameters()])
    for name in forms:
        exact = found[ATTENTION if KINDS[name][0] == "attnres" else STACK]
        if name != RESIDUAL:
            torch.testing.assert_close(found[name], exact)
    for name in (RESIDUAL, ATTENTION):
        assert (found[name][0] - truth).abs().max() > 1e-2
    # They share the layers, and a run leaves no gradients.
    assert len({id(model.layers) for model in case.models.values()}) == 1
    assert all(p.grad is None for model in case.models.values() for p in model.parameters())


@pytest.mark.parametrize("name", CONNECTIONS)
def test_the_forms_of_a_connection_compute_the_same(tiny, name):
    """Nine layers: more than a block of rows. Also without autograd."""
    case = MixingCase(tiny, 9, Row(variant="copy"))
    module = case.modules[name].double()
    case.y, case.grad = case.y.detach().double().requires_grad_(), case.grad.double()
    found = {}
    for form in CONNECTIONS[name]:
        x = case.mixed(name, form)
        found[form] = [x, case.y.grad, *(p.grad for p in module.parameters())]
        case.y.grad = None
        module.zero_grad()
        with torch.no_grad():
            torch.testing.assert_close(case.mixed(name, form), x)
    for form in found:
        torch.testing.assert_close(found[form], found["deepfast"])


@pytest.mark.slow
def test_compiled_forms_compute_the_same(tiny):
    case = MixingCase(tiny, 4, Row(variant="copy"))
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            found = [case.mixed("DLCL", form) for form in (COMPILED, "deepfast")]
        torch.testing.assert_close(*found)
    case = StepCase(tiny.step, 2, (COMPILED, "deepfast"))
    torch.testing.assert_close(case.step(COMPILED), case.step("deepfast"), rtol=1e-3, atol=1e-4)


def test_a_step_of_a_policy_leaves_no_gradients(tiny):
    """Of deepfast's encoder and of plain ones."""
    case = PolicyCase(tiny.memory, 2, (*POLICIES, *PLAIN_FORMS))
    found = {form: case.step(form) for form in case.models}
    for form in POLICIES:
        torch.testing.assert_close(found[form], found[POLICIES[0]])
        assert all(p.grad is None for p in case.models[form].parameters())
    # Without dropout a checkpoint changes nothing, and the connection does.
    plain, checkpointed, stacked = (found[form][0] for form in PLAIN_FORMS)
    assert torch.equal(plain, checkpointed)
    assert (plain - stacked).abs().max() > 1e-2
    assert tuple(case.encoder("dlcl").policies) == (POLICIES[-1],) * 2
    assert case.x.grad is None


def measured(groups):
    """The rows of a chapter, measured."""
    turns.measure(groups)
    return [row for group in groups for row in group.rows]


@pytest.mark.parametrize("chapter", [lambda s: steps(s, "deepfast"), mixing])
def test_memory_that_is_not_there_is_not_taken(tiny, monkeypatch, chapter):
    monkeypatch.setattr(turns, "free_bytes", lambda: turns.GIB + 50_000)
    sizes = replace(tiny, depths=(4,), mixing_depths=(9,), mixing=(128, 32))
    rows = measured(chapter(sizes))
    assert any(row.variant == STACK for row in rows)
    for row in rows:
        if row.variant == STACK:
            assert row.note.startswith("does not fit: needs ")
            assert row.peak_bytes is None
            assert row.seconds == row.relative == []
        else:
            assert row.note is None
            assert min(row.seconds) > 0


def test_rows_beside_their_base_and_a_copy():
    """An interrupted round has measured fewer variants."""
    a = Row(variant="a", seconds=[2.0, 9.0], nbytes=60, predicted_bytes=3, peak_bytes=2)
    b, other = Row(variant="b", seconds=[4.0]), Row(variant="b", what="other", seconds=[4.0])
    copy = Row(variant="copy", what="copy", seconds=[1.0, 3.0], nbytes=20)
    Turns("", [copy, a, b, other], dict, base="a")
    assert (a.relative, b.relative, other.relative) == ([1, 1], [2], [])
    assert (a.of_copy, b.of_copy) == ([1.5, 1.0], [])
    found = a.as_dict()
    assert (found["relative"], found["of_copy"], found["predicted_over_peak"]) == (1, 1.25, 1.5)
    assert b.as_dict()["of_copy"] is None


def test_a_policy_that_was_not_timed_has_no_relative_time(tiny):
    (group,) = policies(replace(tiny, depths=(4,), policy_depth=6))
    assert {row.as_dict()["relative"] for row in measured([group])} == {None}


@pytest.mark.slow
def test_a_compiled_loop_takes_part_up_to_a_depth(tiny):
    sizes = replace(tiny, depths=(2, 3), compile_up_to=2)
    rows = [row for row in measured(steps(sizes, "deepfast")) if row.variant == COMPILED]
    assert [(r.depth, len(r.seconds), r.peak_bytes) for r in rows] == [(2, tiny.rounds, None)]
