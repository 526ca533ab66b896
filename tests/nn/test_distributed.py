"""Two processes on the CPU, connected by gloo: replicated and sharded training."""

from pathlib import Path

import pytest

STEPS = Path(__file__).with_name("distributed_steps.py")
STACKS = ("pre-keep", "post-keep", "pre-leaner", "pre-history", "post-states")
FORMS = [f"{form}-{stack}" for form in ("ddp", "fsdp") for stack in STACKS]
FORMS += [f"{form}-attnres-{memory}" for form in ("ddp", "fsdp") for memory in ("keep", "leaner")]
FORMS += ["fsdp-attnres-history", "latent-pre-keep", "latent-post-states"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", FORMS)
def test_two_ranks(agree_on_two_ranks, form):
    agree_on_two_ranks(form)
