"""Checkpointing of layers with their pushes, and around them."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepfast.nn import DLCL, DepthHistory
from tests.depth.stack import DIM, LAYERS, MODES, history, leaf


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return self.down(nn.functional.dropout(torch.relu(self.up(x)), 0.3))


def checkpointed(dlcl, layers, y, h, p, wrap):
    """Each checkpointed function pushes a state and runs the next layer."""
    for k, layer in enumerate(layers):
        y = wrap(lambda y, k=k, f=layer: f(dlcl(y, h, index=k, dropout_p=p)), y)
    return dlcl(y, h, index=len(layers))


@MODES
@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("norm", ["pre", "post", None])
@pytest.mark.parametrize("options", [{}, {"weight": "vector", "softmax": True}, {"window": 3}])
def test_checkpointing(backend, inplace, p, norm, options):
    dlcl = DLCL(LAYERS, DIM, norm=norm, backend=backend, **options)
    layers, y = [Layer(DIM) for _ in range(LAYERS)], leaf()
    leaves = [y, *dlcl.parameters(), *(q for layer in layers for q in layer.parameters())]

    def run(wrap):
        torch.manual_seed(5)
        out = checkpointed(dlcl, layers, y, history(inplace), p, wrap)
        return out, torch.autograd.grad(out.square().sum(), leaves, allow_unused=True)

    out, want = run(lambda f, y: f(y))
    again, got = run(lambda f, y: checkpoint(f, y, use_reentrant=False))
    assert torch.equal(out, again)
    for a, b in zip(got, want, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def test_checkpointing_keeps_one_state_per_layer(meter):
    dim, tokens = 128, 64

    def peak(wrap):
        dlcl, layers = DLCL(20, dim, backend="cpu"), [Layer(dim) for _ in range(20)]
        y = leaf(tokens, dim)
        with meter() as m:
            h = DepthHistory(block=4)
            out = checkpointed(dlcl, layers, y, h, 0.0, wrap)
            del h
        assert out.requires_grad
        return m.left / (tokens * dim * 4)

    plain = peak(lambda f, y: f(y))
    saved = peak(lambda f, y: checkpoint(f, y, use_reentrant=False))
    # The states, each function's input y_k, and the output. Statistics are 1/128 of a state each.
    assert saved <= 22 + 21 + 4
    assert saved < plain / 2


def test_checkpointing_without_an_index_is_an_error(backend):
    dlcl, layers, y = DLCL(3, DIM, backend=backend), [Layer(DIM) for _ in range(3)], leaf()
    h = history()
    for layer in layers:
        y = checkpoint(lambda y, f=layer: f(dlcl(y, h)), y, use_reentrant=False)
    out = dlcl(y, h)
    with pytest.raises(RuntimeError, match="pass index="):
        out.sum().backward()


def test_reentrant_checkpointing_of_the_layer_alone(backend):
    """The boundary stays outside; a nested backward pass inside a layer does not disturb it."""
    dlcl = DLCL(LAYERS, DIM, backend=backend)
    layers, y = [Layer(DIM).eval() for _ in range(LAYERS)], leaf()
    leaves = (y, *dlcl.parameters())

    def run(wrap):
        torch.manual_seed(5)
        h = history()
        x = dlcl(y, h)
        for layer in layers:
            x = dlcl(wrap(layer, x), h)
        for q in leaves:
            q.grad = None
        x.square().sum().backward()
        return [q.grad for q in leaves]

    want = run(lambda f, x: f(x))
    got = run(lambda f, x: checkpoint(f, x, use_reentrant=True))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_repeated_push_outside_recomputation_is_an_error(backend):
    dlcl, h = DLCL(2, DIM, backend=backend), history()
    dlcl(leaf(), h, index=0)
    with pytest.raises(RuntimeError, match="out of order: expected index 1, got 0"):
        dlcl(leaf(), h, index=0)


def test_reentrant_checkpointing_around_a_push_is_an_error(backend):
    """The graph would contain the repeated push and give wrong gradients."""
    dlcl, layer = DLCL(1, DIM, norm=None, learnable=False, backend=backend), Layer(DIM)
    h, y = history(), leaf()
    y = checkpoint(lambda y: layer(dlcl(y, h, index=0)), y, use_reentrant=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        dlcl(y, h, index=1).sum().backward()
