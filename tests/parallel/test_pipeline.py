"""Schedules of torch.distributed.pipelining over encoder stages, in processes on the CPU, against
the whole encoder in each process."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from deepfast.parallel import split, sum_connection_gradients
from tests.parallel.encoders import CONNECTIONS, batch, encoder, loss, whole_step

FORMS = {
    2: ("gpipe/dlcl", "1f1b/attnres/layer+input", "interleaved/dlcl, post-norm"),
    3: ("gpipe/attnres", "1f1b/denseformer", "interleaved/dlcl/layer+input"),
    4: (
        "1f1b/dlcl", "gpipe/block_attnres", "1f1b/dlcl/ddp", "1f1b/attnres/ddp", "1f1b/dlcl/fsdp",
        "interleaved/dlcl/fsdp", "gpipe/attnres/fsdp",
    ),
}  # fmt: skip
"""Number of ranks -> what they run: schedule, connection, and a recompute policy or a wrapper."""
LAYERS, PIECES, SENTENCES = 7, 4, 8
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}


def made(name, recompute="none"):
    # Without dropout, in a dtype in which the order of sums hardly counts.
    return encoder(LAYERS, torch.float64, recompute=recompute, **CONNECTIONS[name])


def pipeline(form, name, group, wrap=lambda stage: stage, recompute="none"):
    """This rank's stages, and the schedule over them."""
    ranks, rank = group.size(), group.rank()
    count = 2 * ranks if form == "interleaved" else ranks
    parts = split(made(name, recompute), count)
    mine = {i: wrap(parts[i]) for i in range(rank, count, ranks)}
    pipes = [
        PipelineStage(part, i, count, torch.device("cpu"), group=group) for i, part in mine.items()
    ]
    schedule = SCHEDULES[form](
        pipes if form == "interleaved" else pipes[0], n_microbatches=PIECES, loss_fn=loss
    )
    return list(mine.values()), schedule, rank == (count - 1) % ranks


def scheduled(stages, schedule, last, group, x, target, padding):
    losses = []
    options = {"target": target, "losses": losses} if last else {}
    schedule.step(*([x] if group.rank() == 0 else []), key_padding_mask=padding, **options)
    sum_connection_gradients(stages, group)
    return torch.stack(losses).mean() if last else None


def check(stages, expected, found):
    if found is not None:
        torch.testing.assert_close(found, expected["loss"], rtol=1e-12, atol=1e-12)
    for stage in stages:
        for name, p in stage.named_parameters():
            grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            wanted = expected[name.removeprefix("module.")]
            torch.testing.assert_close(grad, wanted, rtol=1e-12, atol=1e-12, msg=name)


def one_pipeline(form, name, recompute="none"):
    """All ranks are one pipeline, for two steps."""
    group = dist.group.WORLD
    stages, schedule, last = pipeline(form, name, group, recompute=recompute)
    operands = batch(SENTENCES, torch.float64)
    expected = whole_step(made(name), *operands)
    for _ in range(2):
        for stage in stages:
            stage.zero_grad()
        check(stages, expected, scheduled(stages, schedule, last, group, *operands))


def two_pipelines(form, name, wrap):
    """Four ranks: two pipelines of two stages, each with half of the sentences."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "stage"))
    group, data = mesh["stage"].get_group(), mesh["data"]

    def wrapped(stage):
        if wrap == "ddp":
            return DistributedDataParallel(stage, process_group=data.get_group())
        for layer in stage.layers.values():
            fully_shard(layer, mesh=data)
        return fully_shard(stage, mesh=data)

    stages, schedule, last = pipeline(form, name, group, wrapped)
    operands = batch(SENTENCES, torch.float64)
    expected = whole_step(made(name), *operands)
    mine = [t.chunk(2)[data.get_local_rank()] for t in operands]
    for _ in range(2):
        for stage in stages:
            stage.zero_grad()
        scheduled(stages, schedule, last, group, *mine)
        check(stages, expected, None)


def step(form, name, option="none"):
    if option in ("ddp", "fsdp"):
        two_pipelines(form, name, option)
    else:
        one_pipeline(form, name, option)


@pytest.mark.parametrize(
    "ranks", [2, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (3, 4))]
)
def test_schedules(agree_on_ranks, ranks):
    agree_on_ranks(ranks, step, FORMS[ranks])
