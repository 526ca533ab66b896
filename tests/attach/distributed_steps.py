"""Run by test_distributed.py under torchrun: connected models on two ranks, each against a plain
one in this process.

    torchrun --nproc-per-node 2 distributed_steps.py ddp-torch fsdp-sequential-history ...
"""

import copy
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.attach.models import CASES, perturbed

NAMES = {"torch": "torch pre-norm", "sequential": "sequential", "bert": "bert", "bart": "bart"}


def averaged_grads(case, model):
    loss(case, model).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    return {name: p.grad for name, p in model.named_parameters()}


def loss(case, model):
    """Each rank has its own."""
    return (case.run(model) - dist.get_rank()).square().mean()


def ddp(model, _case):
    return DistributedDataParallel(model)


def fsdp(model, case):
    """Each layer is a unit; the connection is in the unit of its parent or of the model."""
    for _, parent, layers in case.places(model):
        for layer in getattr(parent, layers) if layers else parent:
            fully_shard(layer)
    return fully_shard(model)


def step(form, name, memory="keep"):
    case = CASES[NAMES[name]]
    torch.manual_seed(0)
    plain = perturbed(case.make())
    case.connect(plain, memory=memory)
    wrapped = copy.deepcopy(plain)
    wrapped = {"ddp": ddp, "fsdp": fsdp}[form](wrapped, case)
    expected = averaged_grads(case, plain)
    for _ in range(2):
        wrapped.zero_grad()
        loss(case, wrapped).backward()
    for name, p in wrapped.named_parameters():
        grad = p.grad.full_tensor() if isinstance(p, DTensor) else p.grad
        wanted = expected[name.removeprefix("module.")]
        torch.testing.assert_close(grad, wanted, rtol=1e-5, atol=1e-6, msg=name)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for form in sys.argv[1:]:
        step(*form.split("-"))
        print(f"{form}: rank {dist.get_rank()} agrees", flush=True)
    dist.destroy_process_group()
