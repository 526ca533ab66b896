"""Patched models in two processes on the CPU: replicated (DDP) and sharded (FSDP2)."""

from pathlib import Path

import pytest

pytest.importorskip("transformers")

STEPS = Path(__file__).with_name("distributed_steps.py")
FORMS = [f"{form}-{name}" for form in ("ddp", "fsdp")
         for name in ("BertForMaskedLM", "LlamaForCausalLM")]  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", FORMS)
def test_two_ranks(agree_on_two_ranks, form):
    agree_on_two_ranks(form)
