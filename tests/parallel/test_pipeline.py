"""Schedules of torch.distributed.pipelining over encoder stages, in processes on the CPU."""

from pathlib import Path

import pytest
import torch

STEPS = Path(__file__).with_name("pipeline_steps.py")
FORMS = {
    2: ["gpipe/dlcl", "1f1b/attnres/history", "interleaved/dlcl, post-norm"],
    3: ["gpipe/attnres", "1f1b/denseformer", "interleaved/dlcl/history"],
    4: [
        "1f1b/dlcl",
        "gpipe/block_attnres",
        "1f1b/dlcl/ddp",
        "1f1b/attnres/ddp",
        "1f1b/dlcl/fsdp",
        "interleaved/dlcl/fsdp",
        "gpipe/attnres/fsdp",
    ],
}
"""Number of ranks -> what they run, see `pipeline_steps`."""


@pytest.mark.parametrize(
    "ranks", [2, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (3, 4))]
)
def test_schedules(python, ranks):
    if not torch.distributed.is_available():
        pytest.skip("torch without distributed")
    said = python(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), str(STEPS),
        *FORMS[ranks], timeout=180, OMP_NUM_THREADS="1",
    ).stdout  # fmt: skip
    # The ranks share one pipe: their lines may run together.
    for form in FORMS[ranks]:
        for rank in range(ranks):
            assert said.count(f"{form}: rank {rank} agrees") == 1, said
