"""What is measured: forms that compute the same, and rows of a chapter that do not fit."""

from dataclasses import replace

import pytest
import torch

from deepfast.measure import jobs, steps
from deepfast.measure.connections import CONNECTIONS, PLAIN, connections
from deepfast.measure.encoders import (
    REFERENCE,
    RESIDUAL,
    VARIANTS,
    PlainEncoder,
    StepCase,
)
from deepfast.measure.forms import COMPILED, mixing_alone
from deepfast.measure.settings import DEFAULT, FULL, QUICK


def test_all_dlcl_variants_compute_the_same_and_residual_does_not(tiny):
    case = StepCase(tiny, 4, activation="gelu")
    own = {id(p) for p in case.encoder.parameters()}
    # They share every parameter.
    assert all({id(p) for p in model.parameters()} <= own for model in case.models.values())
    case.encoder.double()
    case.x, case.target = case.x.double(), case.target.double()
    truth, gradients = case.step(REFERENCE)
    assert len(gradients) == len(list(case.encoder.parameters()))
    for variant in {*VARIANTS} - {RESIDUAL}:
        torch.testing.assert_close(case.step(variant), (truth, gradients))
    assert abs(case.step(RESIDUAL)[0] - truth) > 1e-4
    # A run leaves no gradients.
    assert all(p.grad is None for p in case.encoder.parameters())


@pytest.mark.parametrize("pair", [(REFERENCE, "loop of adds"), (RESIDUAL, "plain, checkpointed")])
def test_plain_encoders_compute_the_same(pair):
    first, second = (PlainEncoder(2, 8, 2, 16, form=form) for form in pair)
    second.load_state_dict(first.state_dict())
    x, found = torch.randn(4, 8, 8), []
    for model in (first, second):
        torch.manual_seed(3)
        y = model(x)
        y.square().sum().backward()
        found.append([y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(found[0]) > 10
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", CONNECTIONS)
def test_both_forms_of_a_connection_compute_the_same(name):
    connection = CONNECTIONS[name]
    module = connection.make(9, 8).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    y, grad = torch.randn(5, 8, dtype=torch.double, requires_grad=True), torch.randn(5, 8).double()
    found = []
    for form in (connection.ours, connection.plain):
        x = mixing_alone(form, module, y, grad)
        found.append([x, y.grad, *(p.grad for p in module.parameters())])
        y.grad = None
        module.zero_grad()
    torch.testing.assert_close(*found)


def measured(groups):
    """Runs the jobs of a chapter; returns its rows."""
    for group in groups:
        for job in group.jobs():
            job.run()
    return [row for group in groups for row in group.rows]


@pytest.mark.parametrize("chapter", [steps.steps, steps.mixing, connections])
def test_memory_that_is_not_there_is_not_taken(tiny, monkeypatch, chapter):
    monkeypatch.setattr(jobs, "free_bytes", lambda: jobs.GIB + 50_000)
    rows = measured(chapter(replace(tiny, connection_depths=(4, 9), connection_tokens=128)))
    large = [row for row in rows if row.variant == REFERENCE or row.variant.endswith(PLAIN)]
    assert large
    for row in rows:
        if row in large:
            assert row.note.startswith("does not fit: needs ")
            assert row.peak_bytes is row.median is None
        else:
            assert row.note is None
            assert row.median > 0


def test_traffic_and_memory_of_connections(tiny):
    rows = measured(connections(replace(tiny, connection_depths=(4, 9), connection_tokens=128)))
    (short, long) = ({r.variant: r for r in rows if r.depth == depth} for depth in (4, 9))
    growth = {name: long[name].nbytes / short[name].nbytes for name in long}
    for name in CONNECTIONS:
        ours, plain = long[f"{name}: deepfast"], long[f"{name}: {PLAIN}"]
        assert ours.nbytes < plain.nbytes
        assert ours.peak_bytes < plain.peak_bytes <= plain.predicted_bytes
    # At twice the depth plain PyTorch moves four times the bytes, in blocks twice.
    assert 2 < growth[f"attention in blocks: {PLAIN}"] < growth[f"DLCL: {PLAIN}"] < 4


def test_variants_take_turns(tiny):
    labels = [job.label for job in steps.steps(tiny)[0].jobs()]
    order = [*((v, "memory") for v in VARIANTS), *((v, "time") for v in VARIANTS * tiny.rounds)]
    assert labels == [f"2 layers, {variant}: {what}" for variant, what in order]


@pytest.mark.slow
def test_a_compiled_loop_takes_part_up_to_a_depth(tiny):
    sizes = replace(tiny, depths=(2, 3), compile_up_to=2)
    rows = [row for row in measured(steps.steps(sizes)) if row.variant == COMPILED]
    assert [(r.depth, len(r.seconds), r.peak_bytes) for r in rows] == [(2, tiny.rounds, None)]
    case = StepCase(tiny, 2)
    (loss, gradients), (true_loss, truth) = case.step(COMPILED), case.step(REFERENCE)
    torch.testing.assert_close(loss, true_loss)
    torch.testing.assert_close(gradients, truth, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("settings", [DEFAULT, FULL, QUICK])
def test_every_setting_times_the_policies(settings):
    assert settings.policy_depth in settings.depths
