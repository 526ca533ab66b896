"""Depth connections with tokens shared out over two processes on the CPU, with dropout."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module

from deepfast.nn import DLCL, AttentionResiduals, DepthHistory, LayerNorm
from deepfast.parallel import shard_tokens
from deepfast.parallel.tokens import TokenShards
from deepfast.reference.dropout import dropout_mask

LAYERS, DIM = 5, 12
FORMS = (
    "dlcl/dtensor", "dlcl/uneven", "dlcl/empty", "dlcl/plain", "dlcl/middle", "post/dtensor",
    "post/plain", "attnres/dtensor", "attnres/empty", "attnres/middle",
)  # fmt: skip
"""Connection and shape, see `step`."""
CONNECTIONS = {
    "dlcl": lambda: DLCL(LAYERS, DIM),
    "post": lambda: DLCL(LAYERS, DIM, norm="post", weight_type="vector"),
    "attnres": lambda: AttentionResiduals(LAYERS, DIM),
}
SHAPES = {
    "dtensor": (2, 6, DIM),
    "uneven": (2, 5, DIM),
    "empty": (2, 1, DIM),
    "plain": (8, DIM),
    "middle": (2, 4, 3, DIM),
}
"""Form -> the shape of all tokens; axis 1 is sharded, of "plain" axis 0. One rank has no part of
"empty"."""


class Model(nn.Module):
    """Layers that read all tokens, each with a dropout at the boundary behind it."""

    def __init__(self, name):
        super().__init__()
        self.connection = CONNECTIONS[name]()
        self.norms = nn.ModuleList(LayerNorm(DIM) for _ in range(LAYERS + 1))
        self.scales = nn.Parameter(torch.randn(LAYERS, DIM))

    def forward(self, y, mix):
        history = DepthHistory()
        post = self.connection.norm == "post"
        residual = None
        for layer in range(LAYERS + 1):
            out_norm = None if post else self.norms[layer].as_output()
            x = self.connection(y, history, residual=residual, dropout_p=0.3, out_norm=out_norm)
            x, n = (x, x) if post else x
            if layer < LAYERS:
                y, residual = mix(n, self.scales[layer]), x
        return n


def attend(n, scale, axis):
    return torch.tanh(n * scale) + n.mean(axis, keepdim=True)


def step(name, form):
    shape, axis = SHAPES[form], {"plain": 0}.get(form, 1)
    mesh = dist.init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    whole, shared = (Model(name).double() for _ in range(2))
    with torch.no_grad():
        for p in whole.parameters():
            p += 0.1 * torch.randn_like(p)
    shared.load_state_dict(whole.state_dict())
    shard_tokens(shared.connection, mesh, axis)
    if form == "dtensor":
        # Norms whose parameters are replicated DTensors, as tensor parallel models have them.
        distribute_module(shared.norms, mesh)
    x, target = torch.randn(2, *shape, dtype=torch.float64)

    # The ranks have other seeds, but those of the first one count.
    torch.manual_seed(dist.get_rank())
    seeds = torch.get_rng_state()
    dist.broadcast(seeds, 0)
    mine = torch.get_rng_state()
    torch.set_rng_state(seeds)
    expected = whole(x, lambda n, scale: attend(n, scale, axis))
    (expected * target).sum().backward()
    torch.set_rng_state(mine)

    def mix(n, scale):
        """A layer with all tokens; every rank has its part of n."""
        if form == "plain":
            n = DTensor.from_local(n, mesh, [Shard(axis)])
        full = n.redistribute(placements=[Replicate()]).to_local()
        y = DTensor.from_local(attend(full, scale, axis), mesh, [Replicate()], run_check=False)
        y = y.redistribute(placements=[Shard(axis)])
        return y.to_local() if form == "plain" else y

    part = DTensor.from_local(x, mesh, [Replicate()]).redistribute(placements=[Shard(axis)])
    out = shared(part.to_local() if form == "plain" else part, mix)
    if form == "plain":
        out = DTensor.from_local(out, mesh, [Shard(axis)])
    assert out.placements == (Shard(axis),)
    assert out.shape == x.shape
    torch.testing.assert_close(out.full_tensor(), expected, rtol=1e-12, atol=1e-12)
    targets = DTensor.from_local(target, mesh, [Replicate()]).redistribute(placements=[Shard(axis)])
    (out.to_local() * targets.to_local()).sum().backward()
    grads = {key: p.grad for key, p in shared.named_parameters()}
    grads = {key: g.full_tensor() if isinstance(g, DTensor) else g for key, g in grads.items()}
    for key, p in whole.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(grads[key], p.grad, rtol=1e-12, atol=1e-12, msg=key)


def test_two_ranks(agree_on_ranks):
    agree_on_ranks(2, step, FORMS)


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


@pytest.mark.only_if(lambda any_backend: any_backend != "cuda")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mask_of_a_shard_is_a_part_of_the_whole(any_backend, dtype):
    """Every backend draws it from one row of ones."""
    seed, shape = torch.tensor(5), (2, 7, 3, 24)
    whole = dropout_mask(seed, 42, 24, 0.4).view(shape) != 0
    for rank, part in enumerate(whole.chunk(3, 1)):
        mesh = SimpleNamespace(
            get_group=lambda: None, size=lambda: 3, get_local_rank=lambda r=rank: r
        )
        shards = TokenShards(mesh, 1, any_backend)
        kept = shards._kept(part.shape, 7, torch.ones(1, 24, dtype=dtype), 0.4, seed)
        assert torch.equal(kept, part)
