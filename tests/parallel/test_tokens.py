"""Depth connections with tokens shared out over two processes on the CPU, with dropout."""

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from deepfast import backend as backends
from deepfast.nn import DLCL, DepthHistory
from deepfast.parallel import shard_tokens
from deepfast.parallel.tokens import TokenShards
from deepfast.reference.dropout import dropout_mask

STEPS = Path(__file__).with_name("token_steps.py")
FORMS = [
    "dlcl/dtensor",
    "dlcl/uneven",
    "dlcl/empty",
    "dlcl/plain",
    "dlcl/middle",
    "post/dtensor",
    "post/plain",
    "attnres/dtensor",
    "attnres/empty",
    "attnres/middle",
]


@pytest.mark.parametrize("form", FORMS)
def test_two_ranks(agree_on_two_ranks, form):
    agree_on_two_ranks(form)


def test_misuse():
    with pytest.raises(TypeError, match="expected a DLCL or AttentionResiduals, got Linear"):
        shard_tokens(nn.Linear(2, 2), None)
    with pytest.raises(ValueError, match="mesh must be a DeviceMesh of one dimension, got None"):
        shard_tokens(DLCL(2, 4), None)


def test_misuse_of_a_mesh(one_rank, monkeypatch):
    mesh, connection = init_device_mesh("cpu", (1,)), DLCL(2, 4)
    monkeypatch.setattr(DeviceMesh, "get_coordinate", lambda self: None)
    with pytest.raises(ValueError, match="mesh must contain this rank, got DeviceMesh"):
        shard_tokens(connection, mesh)
    monkeypatch.undo()
    shard_tokens(connection, mesh)
    with pytest.raises(TypeError, match="DLCL: the layer's output must be a tensor, got NoneType"):
        connection()


def test_copies_and_keywords(one_rank):
    connection, y = DLCL(2, 4), torch.randn(2, 3, 4)
    shard_tokens(connection, init_device_mesh("cpu", (1,)))
    expected = connection(y, DepthHistory())
    assert torch.equal(connection(y=y, history=DepthHistory()), expected)
    assert torch.equal(copy.deepcopy(connection)(y, DepthHistory()), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mask_of_a_shard_is_a_part_of_the_whole(any_backend, dtype):
    """Every backend draws it from one row of ones."""
    seed, shape = torch.tensor(5), (2, 7, 3, 24)
    if backends.refusal("activation", any_backend, "cpu", dtype) is not None:
        pytest.skip("the backend has no such op")
    whole = dropout_mask(seed, 42, 24, 0.4).view(shape) != 0
    for rank, part in enumerate(whole.chunk(3, 1)):
        mesh = SimpleNamespace(
            get_group=lambda: None, size=lambda: 3, get_local_rank=lambda r=rank: r
        )
        shards = TokenShards(mesh, 1, any_backend)
        kept = shards._kept(part.shape, 7, torch.ones(1, 24, dtype=dtype), 0.4, seed)
        assert torch.equal(kept, part)
