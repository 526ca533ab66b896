"""Chapters of a report: variants that compute the same, and rows of what does not fit."""

from dataclasses import replace

import pytest
import torch

from deepfast.measure import jobs, memory_steps, mixing, steps
from deepfast.measure.forms import COMPILED, RESIDUAL, STACK
from deepfast.measure.steps import VARIANTS, StepCase
from deepfast.memory import POLICIES


def test_all_dlcl_variants_compute_the_same_and_residual_does_not(tiny):
    case = StepCase(tiny, 4, activation="gelu")
    own = {id(p) for p in case.encoder.parameters()}
    # They share every parameter.
    assert all({id(p) for p in model.parameters()} <= own for model in case.models.values())
    case.encoder.double()
    case.x, case.target = case.x.double(), case.target.double()
    truth, gradients = case.step(STACK)
    assert len(gradients) == len(own)
    for variant in {*VARIANTS} - {RESIDUAL}:
        torch.testing.assert_close(case.step(variant), (truth, gradients))
    assert abs(case.step(RESIDUAL)[0] - truth) > 1e-4
    # A run leaves no gradients.
    assert all(p.grad is None for p in case.encoder.parameters())


def measured(groups):
    """Runs the jobs of a chapter; returns its rows."""
    for group in groups:
        for job in group.jobs():
            job.run()
    return [row for group in groups for row in group.rows]


@pytest.mark.parametrize("chapter", [steps.steps, mixing.mixing])
def test_memory_that_is_not_there_is_not_taken(tiny, monkeypatch, chapter):
    monkeypatch.setattr(jobs, "free_bytes", lambda: jobs.GIB + 50_000)
    rows = measured(chapter(replace(tiny, mixing_depths=(4, 9), mixing_tokens=128)))
    assert any(row.variant == STACK for row in rows)
    for row in rows:
        if row.variant == STACK:
            assert row.note.startswith("does not fit: needs ")
            assert row.peak_bytes is row.median is None
        else:
            assert row.note is None
            assert row.median > 0


def test_without_the_time_of_policy_none_no_time_is_relative(tiny):
    rows = measured(memory_steps.policies(replace(tiny, depths=(4,))))
    for row in rows:
        row.seconds = row.seconds if row.variant != POLICIES[0] else []
    assert {row["relative"] for row in memory_steps.policy_chapter(tiny, rows)} == {None}


@pytest.mark.slow
def test_a_compiled_loop_takes_part_up_to_a_depth(tiny):
    sizes = replace(tiny, depths=(2, 3), compile_up_to=2)
    rows = [row for row in measured(steps.steps(sizes)) if row.variant == COMPILED]
    assert [(r.depth, len(r.seconds), r.peak_bytes) for r in rows] == [(2, tiny.rounds, None)]
