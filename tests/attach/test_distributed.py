"""Connected models in two processes on the CPU: replicated (DDP) and sharded (FSDP2)."""

import importlib.util
from pathlib import Path

import pytest
import torch

STEPS = Path(__file__).with_name("distributed_steps.py")
NAMES = ["torch", "sequential"]
if importlib.util.find_spec("transformers") is not None:
    NAMES += ["bert", "bart"]
FORMS = [f"{form}-{name}" for form in ("ddp", "fsdp") for name in NAMES]
FORMS += [f"{form}-{name}-history" for form in ("ddp", "fsdp") for name in NAMES[:3]]


@pytest.fixture(scope="module")
def said(python):
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
