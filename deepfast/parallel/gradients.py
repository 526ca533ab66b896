"""The gradients of the depth connection, of which every stage has a copy."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from deepfast.parallel.stage import EncoderStage


def sum_connection_gradients(
    stages: Sequence[nn.Module], group: dist.ProcessGroup | None = None
) -> None:
    """Sums the gradients of the depth connection over all stages, in place.

    An entry of W has its gradient where its state is, or where its row is, so each stage has a part
    of it. Call this after the schedule's step and before the optimizer's, on every rank of the
    pipeline. The copies of the parameters then stay equal. Where the gradient's norm is clipped,
    count them once.

    Args:
        stages: this rank's stages, or modules that contain them, wrapped by DDP, sharded by FSDP2
            or neither.
        group: the ranks of one pipeline; None for all ranks.

    Raises:
        ValueError: where ``stages`` have no `deepfast.parallel.EncoderStage`.
    """
    found = [m for stage in stages for m in stage.modules() if isinstance(m, EncoderStage)]
    if not found:
        raise ValueError(
            "deepfast.parallel.sum_connection_gradients: stages must contain an EncoderStage, got "
            f"{[type(stage).__name__ for stage in stages]}"
        )
    for copies in zip(*(m.connection.depth.whole.parameters() for m in found), strict=True):
        if not copies[0].requires_grad:
            continue
        for p in copies:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        grads = [_local(p.grad) for p in copies]
        total = torch.stack(grads).sum(0)
        dist.all_reduce(total, group=group)
        for grad in grads:
            grad.copy_(total)


def _local(x: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, which shares its memory."""
    return x.to_local() if isinstance(x, DTensor) else x
