"""Run by test_distributed.py under torchrun: patched models on two ranks, replicated and sharded,
against the plain model in this process.

    torchrun --nproc-per-node 2 distributed_steps.py ddp-BertForMaskedLM fsdp-LlamaForCausalLM ...
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import deepfast
from tests.integrations.hf_models import assert_same, batch, make, results


def fsdp(model):
    """Each layer is a unit, and so is an output layer of its own."""
    decoder = hasattr(model, "lm_head")
    for layer in model.model.layers if decoder else model.bert.encoder.layer:
        fully_shard(layer)
    if decoder:
        fully_shard(model.lm_head)
    return fully_shard(model)


def step(form, name):
    torch.manual_seed(0)
    model, inputs = make(name), batch(padded=True)
    want = results(model, inputs)
    deepfast.patch(model)
    wrapped = {"ddp": DistributedDataParallel, "fsdp": fsdp}[form](model)
    for _ in range(2):
        found = results(wrapped, inputs)
    found = {
        n.removeprefix("module."): g.full_tensor() if isinstance(g, DTensor) else g
        for n, g in found.items()
    }
    assert_same(found, want)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for form in sys.argv[1:]:
        step(*form.split("-"))
        print(f"{form}: rank {dist.get_rank()} agrees", flush=True)
    dist.destroy_process_group()
