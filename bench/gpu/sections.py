"""The sections of benchmarks, each an item of `make gpu`, in the order in which they run."""

import pytest

from bench.gpu import models, ops, stacks, sweep

SECTIONS = {
    "copy": ops.copy,
    "training ratio": models.ratio,
    "training": models.training,
    "layer_norm": ops.layer_norm,
    "depth_mix": stacks.depth_mix,
    "boundary": stacks.boundary,
    "mixing": models.mixing,
    "attention": ops.attention,
    "linear_cross_entropy": ops.linear_cross_entropy,
    "launching": models.launching,
} | {f"sweep of {name}": run for name, run in sweep.SWEEPS.items()}

SMOKE = ("copy", "training ratio")
"""The sections of the first stage."""

BENCH = tuple(name for name in SECTIONS if name not in SMOKE)


@pytest.mark.parametrize("section", SECTIONS)
def test_section(bench, section):
    bench.attempt(SECTIONS[section])
    assert not bench.failed, "\n".join(bench.failed)
