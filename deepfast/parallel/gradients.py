"""The gradients of the depth connection, of which every stage has a copy."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from deepfast.parallel.depth import local_part
from deepfast.parallel.stage import EncoderStage

OP = "deepfast.parallel.sum_connection_gradients"


def sum_connection_gradients(
    stages: Sequence[nn.Module], group: dist.ProcessGroup | None = None
) -> None:
    """Sums the gradients of the depth connection over all stages, in place.

    An entry of W has its gradient where its state is, or where its row is, so each stage has a part
    of it. Call this after the schedule's step and before the optimizer's, on every rank of the
    pipeline. The copies of the parameters then stay equal. Where the gradient's norm is clipped,
    count them once.

    The first call checks, on all ranks, that the copies are equal and that no stage is missing.

    Args:
        stages: this rank's stages, or modules that contain them, wrapped by DDP, sharded by FSDP2
            or neither.
        group: the ranks of one pipeline; None for all ranks.

    Raises:
        TypeError, ValueError: if ``stages`` is not a list of modules, or has no
            `deepfast.parallel.EncoderStage`; where ``group`` does not have every stage of one
            pipeline once.
        RuntimeError: if the gradients are summed already, or the copies differ.
    """
    if not isinstance(stages, Iterable):
        raise TypeError(f"{OP}: stages must be a list of modules, got {type(stages).__name__}")
    stages = list(stages)
    modules = (m for stage in stages if isinstance(stage, nn.Module) for m in stage.modules())
    found = [m for m in modules if isinstance(m, EncoderStage)]
    if not found:
        raise ValueError(
            f"{OP}: stages must contain an EncoderStage, got "
            f"{[type(stage).__name__ for stage in stages]}"
        )
    if dist.get_rank(group) < 0:
        raise ValueError(f"{OP}: group must contain this rank, got one without it")
    for stage in found:
        stage.connection.depth.check_not_summed()
    if not all(stage.connection.depth.agreed for stage in found):
        _agree(found, group)
    for copies in zip(*(m.connection.depth.whole.parameters() for m in found), strict=True):
        if not copies[0].requires_grad:
            continue
        for p in copies:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        grads = [local_part(p.grad) for p in copies]
        total = torch.stack(grads).sum(0)
        dist.all_reduce(total, group=group)
        for grad in grads:
            grad.copy_(total)
    for stage in found:
        stage.connection.depth.summed = True


def _agree(found: list[EncoderStage], group: dist.ProcessGroup | None) -> None:
    """Checks once that the ranks together have each stage once, with equal copies."""
    copies = [
        torch.cat(
            [local_part(p.detach()).flatten() for p in stage.connection.depth.whole.parameters()]
        )
        for stage in found
    ]
    first = copies[0].clone()
    dist.broadcast(first, group=group, group_src=0)
    # How many there are of each stage, then how many copies differ from the first rank's.
    counts = torch.zeros(found[0].stages + 1, dtype=torch.int64, device=first.device)
    for stage, copy in zip(found, copies, strict=True):
        counts[stage.index] += 1
        counts[-1] += not torch.equal(copy, first)
    dist.all_reduce(counts, group=group)
    *times, different = counts.tolist()
    for index, count in enumerate(times):
        if count != 1:
            raise ValueError(
                f"{OP}: the ranks of the group must have each of the {len(times)} stages once, got "
                f"stage {index} {count} times: pass all stages of this rank, and the group of one "
                "pipeline"
            )
    if different:
        raise RuntimeError(
            f"{OP}: the copies of the depth connection must be equal on all stages, got "
            f"{different} that differ from the first rank: make the encoder of every process from "
            "one seed or checkpoint, and call this before every step of the optimizer"
        )
    for stage in found:
        stage.connection.depth.agreed = True
