"""Recompute policies: the bytes they keep, the products they recompute, and no leaks."""

import gc
from collections import Counter
from itertools import pairwise

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from deepfast.memory import POLICIES, LiveBytes
from deepfast.nn import Packing, TransformerEncoder
from deepfast.policies import ATTENTION_RESIDUALS
from tests.nn.policies import DIM, FFN, LENGTH, OTHERS, forward, stack, step


def kept(connection, policy, layers, norm, reads=None):
    """Bytes alive after forward, and at the highest in the whole step, without gradients' own."""
    module = stack(policy, layers=layers, connection=connection, norm=norm, reads=reads)
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    tokens = 16 * LENGTH
    x = torch.randn(16, LENGTH, DIM)
    # Tensors that are made once, such as masks, exist before.
    module(x)
    with LiveBytes() as live:
        y = module(x)
        forward = live.current
        y.sum().backward()
        del y
    assert live.current <= 0
    return forward / (4 * tokens * DIM), live.peak / (4 * tokens * DIM)


# Connection, norm, reads of a layer, and in states (T, D) what it keeps, under "none" without h.
WIDTHS = [
    # A state y; n, q k v, o and s. In post-norm the sum before the last layer-norm beside.
    ("dlcl", "pre", 1, {"none": 7, "ffn": 7, "layer": 2, "layer+input": 1}),
    ("residual", "pre", 1, {"none": 6, "ffn": 6, "layer": 1}),
    ("dlcl", "post", 1, {"none": 8, "ffn": 8, "layer": 2, "layer+input": 1}),
    ("residual", "post", 1, {"none": 7, "ffn": 7, "layer": 1}),
    # A state for each read; where each sublayer reads, neither n nor s.
    *(
        case
        for name in ATTENTION_RESIDUALS
        for case in (
            (name, "pre", 1, {"none": 7, "ffn": 7, "layer": 2, "layer+input": 1}),
            (name, "pre", 2, {"none": 6, "ffn": 6, "layer": 2, "layer+input": 2}),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("connection", "norm", "reads", "widths"), WIDTHS)
def test_bytes_of_a_layer(connection, norm, reads, widths):
    """ "none" keeps h beside; statistics, (T,) each, come to less than one state here."""
    attends = connection in ATTENTION_RESIDUALS
    # Six numbers for each row and token of attention over depth.
    statistics = 6 * reads / DIM if attends else 0
    for policy, width in widths.items():
        width += FFN / DIM if policy == "none" else 0
        few, more = (
            kept(connection, policy, n, norm, reads if attends else None)[0] for n in (2, 6)
        )
        more_than = (more - few) / 4 - statistics - width
        assert -0.01 <= more_than < (0.7 if attends else 0.9), policy


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_grows_with_the_square_of_the_depth(policy):
    depths = (4, 8, 12)
    peaks = [kept("dlcl", policy, depth, "pre")[1] for depth in depths]
    first, second = (b - a for a, b in pairwise(peaks))
    # Statistics and the weights, (L + 1)^2 numbers, are far below one state.
    assert 0 < second <= 1.05 * first + 2


@pytest.mark.parametrize("policy", OTHERS)
@pytest.mark.parametrize("connection", ["dlcl", "attnres"])
def test_nothing_is_left_behind(connection, policy):
    """Without the collector: nothing refers to itself in a circle."""
    module = stack(policy, connection=connection)
    step(module)
    gc.collect()
    gc.disable()
    try:
        with LiveBytes() as live:
            step(module)
            assert live.current <= 64
            # A forward whose backward never comes.
            forward(module)
            assert live.current <= 64
    finally:
        gc.enable()


class Products(TorchDispatchMode):
    """Floating-point operations of matrix products and attention, by op."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in flop_registry:
            count = flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
            self.counts[str(func.overloadpacket)] += count
        return out


@pytest.mark.parametrize(("policy", "again"), [("ffn", 4), ("layer", 8)])
def test_products_made_again(policy, again):
    """Recomputed out of the 12 D^2 of a layer's forward with F = 4 D; never the last 4 D^2."""
    dim, tokens = 32, 24

    def count(recompute):
        module = TransformerEncoder(1, dim, 2, 4 * dim, dropout=0.1, recompute=recompute)
        x = torch.randn(tokens, dim, requires_grad=True)
        with Products() as products:
            module.forward_packed(x, Packing(3, 8)).sum().backward()
        return products.counts

    keep, counts = count("none"), count(policy)
    attention = "deepfast.attention"
    assert counts.pop(attention) == keep.pop(attention) * (2 if policy == "layer" else 1)
    extra = sum(counts.values()) - sum(keep.values())
    assert extra == 2 * again * tokens * dim * dim
    assert sum(keep.values()) > 2 * 36 * tokens * dim * dim
