"""Depth mixing alone: the connection of a whole stack whose layers do nothing."""

import pytest
import torch

from deepfast.depth.schedule import default_block
from deepfast.measure.forms import FORMS, FusedPerLayer, mixing_alone
from deepfast.nn import DLCL


def blocked_bytes(layers: int, tokens: int, dim: int, size: int = 4, backward: bool = True) -> int:
    """Bytes the blocked algorithm has to move: reads of far and near states, sums, results.

    Forward, per row: its share of the block's pass over older states, its own block's states, the
    partial sum written and read, the new state and the row written. Backward moves as much.
    """
    block, rows = default_block(layers + 1), layers + 1
    far = sum(k for k in range(0, rows, block))
    near = sum(k % block + 1 for k in range(rows))
    forward = far + near + 4 * rows
    return (forward * 2 if backward else forward) * tokens * dim * size


def make(layers: int, tokens: int, dim: int, *, backward: bool = True) -> dict:
    """Each form as a function without arguments, on the same weights and input."""
    dlcl = DLCL(layers, dim)
    y = torch.randn(tokens, dim, requires_grad=backward)
    grad = torch.randn(tokens, dim) if backward else None

    def step(form):
        def run():
            with torch.set_grad_enabled(backward):
                mixing_alone(form, dlcl, y, grad)

        return run

    forms = FORMS | {"one fused pass per layer": FusedPerLayer}
    return {name: step(form) for name, form in forms.items()}


@pytest.mark.parametrize("form", ["deepfast", "one fused pass per layer", "DenseFormer form"])
@pytest.mark.parametrize("layers", [30, 100])
def test_mixing(measure, layers, form):
    tokens, dim = 2048, 256
    rounds = 5 if form == "deepfast" else 1
    measure(make(layers, tokens, dim)[form], blocked_bytes(layers, tokens, dim), rounds)


@pytest.mark.parametrize("form", ["deepfast", "one fused pass per layer"])
def test_mixing_forward(measure, form):
    layers, tokens, dim = 100, 4096, 512
    nbytes = blocked_bytes(layers, tokens, dim, backward=False)
    measure(make(layers, tokens, dim, backward=False)[form], nbytes, 3)
