"""How ranks share a step's micro-batches, and the model: by torch's DDP, or FSDP2 layer by layer.

A step has the same micro-batches on any number of ranks. The ranks first divide the micro-batches
among themselves, as far as their number allows, and then the sentences of a micro-batch. With 4
micro-batches, 2 ranks take 2 each, and 8 ranks are pairs that divide one each.

One process alone imports neither engine: they take a second, and not every torch has them.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deepfast.mt.data import Batch, take
from deepfast.mt.models import TranslationModel
from deepfast.mt.training.ranks import Ranks
from deepfast.mt.training.recipe import Recipe
from deepfast.nn.connections.latent import LatentDepth
from deepfast.nn.transformer import TransformerDecoder, TransformerEncoder

STATE = 16
"""Bytes of a parameter with its gradient and Adam's state."""


class Share(NamedTuple):
    """A rank's part of a micro-batch."""

    batch: Batch
    counts: bool
    """False for a sentence that only keeps this rank in step: its loss counts nothing."""


def shares(batches: Sequence[Batch], rank: int, size: int, *, whole: bool = True) -> list[Share]:
    """What a rank computes of a step, the same number of parts on every rank.

    Args:
        whole: whether different ranks may work on different micro-batches.
    """
    if size == 1:
        return [Share(batch, True) for batch in batches]
    together = micro_batches_at_once(len(batches), size) if whole else 1
    if together > 1:
        # Ranks run side by side on micro-batches of about the same size.
        batches = sorted(batches, key=_tokens)
    divided = size // together
    return [_part(batch, rank % divided, divided) for batch in batches[rank // divided :: together]]


def micro_batches_at_once(count: int, size: int) -> int:
    """How many of `count` micro-batches run at the same time on `size` ranks."""
    return math.gcd(count, size)


def _tokens(batch: Batch) -> int:
    return batch.source_tokens + batch.target_tokens


def _part(batch: Batch, part: int, parts: int) -> Share:
    """One of `parts` parts with about the same number of tokens; each sentence is in one."""
    if parts == 1:
        return Share(batch, True)
    lengths = torch.stack(batch.lengths()).sum(0).tolist()
    longest_first = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    rows: list[list[int]] = [[] for _ in range(parts)]
    loads = [0] * parts
    for row in longest_first:
        least = loads.index(min(loads))
        rows[least].append(row)
        loads[least] += lengths[row]
    mine = sorted(rows[part])
    # Every rank takes part in every common call, also where there are fewer sentences than ranks.
    return Share(take(batch, mine or longest_first[-1:]), bool(mine))


class Loss(nn.Module):
    """Calls the loss of a model: DDP and FSDP act around the call of a module."""

    def __init__(self, model: TranslationModel):
        super().__init__()
        self.model = model

    def forward(self, *operands: Any) -> tuple[Tensor, ...]:
        return self.model.loss(*operands)


def share_model(
    model: TranslationModel, recipe: Recipe, ranks: Ranks, device: torch.device
) -> nn.Module:
    """The loss of a model that all ranks share: its gradient is the mean over the ranks.

    With FSDP the model's parameters become shards, in place.
    """
    loss = Loss(model)
    if ranks.alone:
        return loss
    if kind_for(recipe, model, device, ranks) == "fsdp":
        return _sharded(loss, recipe, ranks, device)
    return nn.parallel.DistributedDataParallel(
        loss,
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
    )


def kind_for(recipe: Recipe, model: nn.Module, device: torch.device, ranks: Ranks) -> str:
    """ "ddp" or "fsdp": the recipe's choice, or that of the model's size and of the rank with the
    least memory. A common call."""
    if recipe.parallel.kind != "auto":
        return recipe.parallel.kind
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        memory //= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    needed = STATE * sum(p.numel() for p in model.parameters())
    (least,) = min(ranks.rows(memory))
    return "ddp" if needed <= least // 2 else "fsdp"


def _sharded(loss: Loss, recipe: Recipe, ranks: Ranks, device: torch.device) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mixed = recipe.train.precision == "bfloat16"
    low = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if mixed else None, reduce_dtype=torch.float32
    )
    # Depth weights and logits are few and want all digits; the states keep their dtype.
    full = MixedPrecisionPolicy(param_dtype=None, cast_forward_inputs=False)
    # By default the mesh is of GPUs wherever there are any.
    shard = partial(fully_shard, mesh=init_device_mesh(device.type, (ranks.size,)))
    reshard = recipe.parallel.reshard
    for module in loss.modules():
        if isinstance(module, (TransformerEncoder, TransformerDecoder)):
            for layer in module.layers:
                shard(layer, mp_policy=low, reshard_after_forward=reshard)
            shard(module.connection, mp_policy=full, reshard_after_forward=reshard)
            if module.latent is not None:
                # The penalty reads the logits after forward.
                shard(module.latent, mp_policy=full, reshard_after_forward=False)
    return shard(loss, mp_policy=low)


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 has a module's parameters."""
    return hasattr(module, "set_requires_gradient_sync")


def syncing(loss: Any, last: bool) -> contextlib.AbstractContextManager[Any]:
    """Around forward and backward of a micro-batch: only the last one of a step reduces gradients
    over the ranks."""
    if is_sharded(loss):
        loss.set_requires_gradient_sync(last)
    elif hasattr(loss, "no_sync") and not last:
        return loss.no_sync()
    return contextlib.nullcontext()


def shard_again(loss: nn.Module) -> None:
    """Frees the parameters that FSDP gathered for a forward pass without a backward pass: until
    then they stand in the model in place of those that the optimizer has."""
    for module in loss.modules():
        if is_sharded(module):
            module.reshard()  # type: ignore[operator]


@contextlib.contextmanager
def logits_gathered(model: nn.Module) -> Iterator[None]:
    """The logits of latent depth are whole inside the block, so that its metrics can be read."""
    parts: list[Any] = [m for m in model.modules() if isinstance(m, LatentDepth) and is_sharded(m)]
    for part in parts:
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.reshard()


def whole(tensor: Any) -> Tensor:
    """A tensor with all ranks' shares; a common call."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def like(full: Tensor, own: Any) -> Tensor:
    """This rank's share of a full tensor that every rank has, laid out as `own`. A tensor that is
    a share already stays, and so does one of another shape."""
    shared = hasattr(full, "full_tensor") or not hasattr(own, "full_tensor")
    if shared or full.shape != own.shape:
        return full
    from torch.distributed.tensor import distribute_tensor

    full = full.to(own.device_mesh.device_type)
    return distribute_tensor(full, own.device_mesh, own.placements, src_data_rank=None)


def local(tensor: Any) -> Tensor:
    """This rank's share of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def local_bytes(tensor: Tensor) -> int:
    """Bytes of this rank's share."""
    tensor = local(tensor)
    return tensor.numel() * tensor.element_size()
