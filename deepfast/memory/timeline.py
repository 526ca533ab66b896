"""The memory of a training step at its peak, by category.

The computation follows a step: up through the layers, which keep what their policies say; the loss;
then down again, where each layer frees what it kept and adds its gradients. What one layer needs,
and the loss, come from a `recording`.
"""

import torch
from torch import Tensor

from deepfast.memory.history import FP32
from deepfast.memory.ledger import (
    ACTIVATIONS,
    CATEGORIES,
    COPIES,
    GRADIENTS,
    HEAD,
    HISTORY,
    TRANSIENT,
)
from deepfast.memory.recording import held, recording
from deepfast.memory.sizes import OPTIMIZERS, Sizes
from deepfast.memory.stack import Stack

MARGIN, WORKSPACES, CONTEXT = 0.07, 2 * 32 * 2**20, 300 * 2**20
"""The share of memory that CUDA's allocator loses to rounding and fragmentation; the bytes of
cuBLAS's workspaces, one for forward's thread and one for backward's, of 32 MiB each on Hopper; an
estimate of what CUDA and its libraries hold outside of the allocator."""


def _moments(sizes: Sizes, stacks: dict[str, Stack]) -> Tensor:
    """(N, 6): every point of a step at which the peak can lie."""
    moments = []
    for section, rest in recording(sizes).rest.items():
        alive = rest + held(section, stacks)
        side, _, way = section.partition(" ")
        if side in stacks and way in ("forward", "backward"):
            alive = alive + getattr(stacks[side], way)()
        moments.append(alive.view(-1, len(CATEGORIES)))
    return torch.cat(moments)


def peak_table(sizes: Sizes, *policies: tuple[str, ...]) -> dict[str, int]:
    """Category -> bytes at the peak of a step; their sum is the peak.

    policies: of the encoder's layers and, where there is a decoder, of the decoder's.
    """
    records = recording(sizes).layers
    stacks = {
        side.name: Stack(side, records[side.name], names)
        for side, names in zip(sizes.sides, policies, strict=False)
    }
    # What a rank keeps from step to step.
    count = -(-sizes.parameters // sizes.ranks) if sizes.sharded else sizes.parameters
    moments = on_one_rank(sizes, _moments(sizes, stacks))
    top = moments[moments.sum(1).argmax()].tolist()
    # Where a layer has freed a part of what it saved, that part is missing among the rest.
    missing = max(-top[TRANSIENT], 0)
    table = {
        "parameters": FP32 * count,
        "gradients": top[GRADIENTS],
        "optimizer": OPTIMIZERS[sizes.optimizer] * count,
        "weight copies": top[COPIES],
        "history": top[HISTORY],
        "activations": top[ACTIVATIONS] - missing,
        "transient": top[TRANSIENT] + missing,
        "head": top[HEAD],
        "allocator margin": 0,
    }
    if sizes.device == "cuda":
        table["allocator margin"] = int(MARGIN * sum(table.values())) + WORKSPACES + CONTEXT
    return table


# ---- one of several ranks that share the model ---------------------------------------------------


def gathered(sizes: Sizes) -> int:
    """Bytes of the unsharded parameters that FSDP holds at one time: a layer and its all-gather
    buffer, one connection in fp32, and all parameters outside of the layers."""
    layer = max(side.layer_parameters for side in sizes.sides)
    connections = [side.connection_parameters for side in sizes.sides]
    if sizes.reshard:
        rest = sizes.vocab_size * sizes.dim
        return sizes.bytes * (2 * layer + rest) + FP32 * max(connections)
    low = sizes.parameters - sum(connections) + layer
    return sizes.bytes * low + FP32 * sum(connections)


def on_one_rank(sizes: Sizes, moments: Tensor) -> Tensor:
    """The moments (N, 6) of a step with what a rank has of gradients and weights."""
    moments, whole = moments.clone(), FP32 * sizes.parameters
    gradients, copies = moments[:, GRADIENTS], moments[:, COPIES]
    if not sizes.sharded:
        if sizes.ranks > 1 or sizes.accumulate > 1:
            # The gradients of earlier micro-batches are alive while later ones run. DDP keeps its
            # buckets of gradients from step to step, and the gradients until the buckets get their
            # sum.
            gradients[:] = whole * (2 if sizes.ranks > 1 and sizes.accumulate > 1 else 1)
        return moments
    # A layer's gradients, and the buffer in fp32 from which they are reduced over the ranks.
    reduced = (sizes.bytes + FP32) * max(side.layer_parameters for side in sizes.sides)
    gradients[:] = gradients // sizes.ranks + reduced * (gradients > 0)
    # Gradients are not reduced before the last micro-batch of a step.
    gradients += whole if sizes.accumulate > 1 else 0
    # Autocast finds the weights in its dtype.
    copies *= sizes.bytes != 2
    copies += gathered(sizes)
    return moments
