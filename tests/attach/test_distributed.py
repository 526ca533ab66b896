"""Connected and patched models, replicated (DDP) and sharded (FSDP2) on the CPU."""

import importlib.util
from pathlib import Path

import pytest
import torch.distributed as dist

STEPS = Path(__file__).with_name("distributed_steps.py")
MODELS = ["torch pre-norm:keep", "torch pre-norm:history", "sequential:keep", "sequential:history"]
if importlib.util.find_spec("transformers") is not None:
    MODELS += ["bert:keep", "bert:history", "bart:keep", "bert:patch", "llama:patch"]
FORMS = [f"{form}:{model}" for form in ("ddp", "fsdp") for model in MODELS]


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", FORMS)
def test_two_ranks(agree_on_two_ranks, form):
    agree_on_two_ranks(form)


@pytest.fixture
def one_rank(tmp_path):
    if not dist.is_available():
        pytest.skip("torch without distributed")
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("form", FORMS)
def test_one_rank(one_rank, form):
    """The same steps in this process."""
    from tests.attach.distributed_steps import step

    step(*form.split(":"))
