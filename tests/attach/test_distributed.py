"""Connected and patched models, replicated (DDP) and sharded (FSDP2) on the CPU, each against the
plain one in the same process."""

import copy

import pytest
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import deepfast
from tests.attach.models import CASES, GATED, READS, Loss, assert_same, batch, perturbed

OPTIONS = {"again": {"recompute": "layer+input"}, "reads": READS, "gated": GATED}
MODELS = ["torch pre-norm/gated", "sequential/again"]
OF_TRANSFORMERS = ["bart/again", "bert/patch", "llama/loss", "t5/reads"]


def fsdp(model, case):
    """Each layer is a unit, and so is an output layer of its own; the connection is in the unit of
    its parent or of the model."""
    for layer in case.layers(model.model if isinstance(model, Loss) else model):
        fully_shard(layer)
    if hasattr(model, "lm_head") and not model.config.tie_word_embeddings:
        fully_shard(model.lm_head)
    return fully_shard(model)


def step(form, name, what):
    """what: one of `OPTIONS` of a connection, "patch", or "loss"."""
    case, inputs = CASES[name], batch(padded=True)
    plain = case.connected(**OPTIONS[what]) if what in OPTIONS else perturbed(case.make())
    wrapped = copy.deepcopy(plain)
    if what == "patch":
        if form == "fsdp":
            with pytest.raises(ValueError, match="before sharding; got a DTensor on cpu in"):
                deepfast.patch(fsdp(copy.deepcopy(plain), case))
        deepfast.patch(wrapped)
    wrapped = Loss(wrapped) if what == "loss" else wrapped

    def loss(model):
        if what == "loss":
            return model(**inputs) if model is not plain else model(**inputs).loss
        # Each rank has its own.
        out = model(**inputs).loss if what == "patch" else case.run(model) - dist.get_rank()
        return out.square().mean()

    loss(plain).backward()
    expected = {n: p.grad for n, p in plain.named_parameters()}
    for grad in expected.values():
        dist.all_reduce(grad)
        grad /= dist.get_world_size()
    wrapped = DistributedDataParallel(wrapped) if form == "ddp" else fsdp(wrapped, case)
    for _ in range(2):
        wrapped.zero_grad()
        loss(wrapped).backward()
    # Without the prefixes of the wrappers.
    found = [p.grad for p in wrapped.parameters()]
    found = [g.full_tensor() if isinstance(g, DTensor) else g for g in found]
    assert_same(
        dict(zip(expected, found, strict=True)), expected, 1e-6 if what in OPTIONS else 1e-5
    )


@pytest.mark.parametrize("form", ["ddp", "fsdp"])
def test_two_ranks(agree_on_ranks, form):
    agree_on_ranks(2, step, [f"{form}/{model}" for model in MODELS])


@pytest.mark.slow
def test_two_ranks_of_transformers(agree_on_ranks):
    pytest.importorskip("transformers")
    forms = [f"{form}/{model}" for form in ("ddp", "fsdp") for model in OF_TRANSFORMERS]
    agree_on_ranks(2, step, forms)
