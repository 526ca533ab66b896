"""Connected models in two processes on the CPU: replicated (DDP) and sharded (FSDP2)."""

import importlib.util
from pathlib import Path

import pytest

STEPS = Path(__file__).with_name("distributed_steps.py")
NAMES = ["torch", "sequential"]
if importlib.util.find_spec("transformers") is not None:
    NAMES += ["bert", "bart"]
FORMS = [f"{form}-{name}" for form in ("ddp", "fsdp") for name in NAMES]
FORMS += [f"{form}-{name}-history" for form in ("ddp", "fsdp") for name in NAMES[:3]]


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", FORMS)
def test_two_ranks(agree_on_two_ranks, form):
    agree_on_two_ranks(form)
