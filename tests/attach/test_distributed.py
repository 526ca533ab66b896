"""Connected and patched models, replicated (DDP) and sharded (FSDP2) on the CPU, each against the
plain one in the same process."""

import copy
import importlib.util

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import deepfast
from tests.attach.models import CASES, assert_same, batch, perturbed

MODELS = [
    "torch pre-norm/none",
    "torch pre-norm/layer+input",
    "sequential/none",
    "sequential/layer+input",
    "torch pre-norm/sublayers",
    "torch pre-norm/gated",
]
if importlib.util.find_spec("transformers") is not None:
    MODELS += ["bert/none", "bert/layer+input", "bart/none", "bert/patch", "llama/patch",
               "llama/loss", "llama/sublayers", "t5/sublayers"]  # fmt: skip
FORMS = [f"{form}/{model}" for form in ("ddp", "fsdp") for model in MODELS]


class Loss(torch.nn.Module):
    """The loss of a causal language model as a module to wrap."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **inputs):
        return deepfast.causal_lm_loss(self.model, **inputs)


def fsdp(model, case):
    """Each layer is a unit, and so is an output layer of its own; the connection is in the unit of
    its parent or of the model."""
    for layer in case.layers(model.model if isinstance(model, Loss) else model):
        fully_shard(layer)
    if hasattr(model, "lm_head") and not model.config.tie_word_embeddings:
        fully_shard(model.lm_head)
    return fully_shard(model)


def step(form, name, what):
    """what: the recompute policy of a connected model, "patch", "loss", or "sublayers" that read,
    or "gated" that do so on top of the residual stream."""
    case = CASES[name]
    torch.manual_seed(0)
    plain, inputs = perturbed(case.make()), batch(padded=True)
    if what in ("sublayers", "gated"):
        additive = what if what == "gated" else None
        for made in case.connect(plain, "attnres", sublayers="auto", additive=additive).values():
            perturbed(made)
    elif what not in ("patch", "loss"):
        case.connect(plain, recompute=what)
    wrapped = copy.deepcopy(plain)
    if what == "patch":
        if form == "fsdp":
            with pytest.raises(ValueError, match="before sharding; got a DTensor on cpu in"):
                deepfast.patch(fsdp(copy.deepcopy(plain), case))
        deepfast.patch(wrapped)
    if what == "loss":
        wrapped = Loss(wrapped)

    def loss(model):
        if what in ("patch", "loss"):
            out = model(**inputs)
            return out if isinstance(out, torch.Tensor) else out.loss
        # Each rank has its own.
        return (case.run(model) - dist.get_rank()).square().mean()

    loss(plain).backward()
    expected = {n: p.grad for n, p in plain.named_parameters()}
    for grad in expected.values():
        dist.all_reduce(grad)
        grad /= dist.get_world_size()
    wrapped = DistributedDataParallel(wrapped) if form == "ddp" else fsdp(wrapped, case)
    for _ in range(2):
        wrapped.zero_grad()
        loss(wrapped).backward()
    prefix = "model." if what == "loss" else ""
    found = {
        n.removeprefix("module.").removeprefix(prefix): p.grad
        for n, p in wrapped.named_parameters()
    }
    found = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in found.items()}
    assert_same(found, expected, 1e-5 if what in ("patch", "loss") else 1e-6)


def test_two_ranks(agree_on_ranks):
    agree_on_ranks(2, step, FORMS)
