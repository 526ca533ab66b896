"""Two processes on the CPU, joined by gloo: replicated and sharded training."""

from pathlib import Path

import pytest
import torch

STEPS = Path(__file__).with_name("distributed_steps.py")


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
@pytest.mark.parametrize("form", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("norm", "memory"),
    [("pre", "keep"), ("post", "keep"), ("pre", "leaner"), ("pre", "history"), ("post", "states")],
)
def test_two_ranks(python, form, norm, memory):
    done = python(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(STEPS), form,
        norm, memory, OMP_NUM_THREADS="1",
    )  # fmt: skip
    # The ranks share one pipe: their lines may run together.
    assert done.stdout.count("rank 0 agrees") == done.stdout.count("rank 1 agrees") == 1
