"""The sections of benchmarks, each an item of `make gpu`, in the order in which they run."""

import pytest

from bench.gpu import models, ops, stacks, sweep, workload

STAGES = {
    "ratio": {"copy": ops.copy, "training ratio": models.ratio, "launching": models.launching},
    "copy": {
        "layer_norm": ops.layer_norm, "boundary": stacks.boundary, "depth_mix": stacks.depth_mix,
        "mixing": models.mixing, "attention": ops.attention,
        "linear_cross_entropy": ops.linear_cross_entropy,
    },
    "workload": {"workload": workload.workload, "workload compiled": workload.compiled},
    "curves": {"curves": workload.curves},
    "sweeps": {"training": models.training}
    | {f"sweep of {name}": run for name, run in sweep.SWEEPS.items()},
}  # fmt: skip
"""Stage -> its sections, in the order in which they run."""

SECTIONS = {name: run for found in STAGES.values() for name, run in found.items()}


@pytest.mark.parametrize("section", SECTIONS)
def test_section(bench, section):
    bench.attempt(SECTIONS[section])
    assert not bench.failed, "\n".join(bench.failed)
