"""Two processes on the CPU, connected by gloo: replicated and sharded training."""

from pathlib import Path

import pytest
import torch

STEPS = Path(__file__).with_name("distributed_steps.py")
STACKS = ("pre-keep", "post-keep", "pre-leaner", "pre-history", "post-states")
FORMS = [f"{form}-{stack}" for form in ("ddp", "fsdp") for stack in STACKS]
FORMS += [f"{form}-attnres-{memory}" for form in ("ddp", "fsdp") for memory in ("keep", "leaner")]
FORMS += ["fsdp-attnres-history", "latent-pre-keep", "latent-post-states"]


@pytest.fixture(scope="module")
def said(python):
    """What two ranks print for all forms: starting them takes longer than their steps."""
    if not torch.distributed.is_available():
        pytest.skip("torch without distributed")
    return python(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(STEPS),
        *FORMS, OMP_NUM_THREADS="1",
    ).stdout  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_two_ranks(said, form):
    # The ranks share one pipe: their lines may run together.
    for rank in (0, 1):
        assert said.count(f"{form}: rank {rank} agrees") == 1, said
