"""Layers with two sublayers for the tests of their reads, and how to connect them."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepfast
from tests.attach.models import D, Loop, perturbed
from tests.specifications import attention_residuals

NAMES = ("norm1", "attn"), ("norm2", None)
BOTH = ("norm1", "attn"), ("norm2", "mlp")
SUMS = ("norm1", None), ("norm2", None)


def part():
    return nn.Sequential(nn.Linear(D, D), nn.Tanh())


class TwoParts(nn.Module):
    """A layer whose second sublayer is scaled behind its module."""

    def __init__(self):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(D), part()
        self.norm2, self.mlp = nn.LayerNorm(D), part()

    def parts(self):
        """The sublayers as functions of a function that gives their input."""
        return (
            lambda read: self.attn(self.norm1(read())),
            lambda read: 0.5 * self.mlp(self.norm2(read())),
        )

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + 0.5 * self.mlp(self.norm2(x))


class Checkpointed(TwoParts):
    """Checkpoints itself, as layers of transformers do."""

    def __call__(self, x):
        return checkpoint(super().__call__, x, use_reentrant=False)


class SideBySide(TwoParts):
    def parts(self):
        def both(read):
            x = read()
            return self.attn(self.norm1(x)) + self.mlp(self.norm2(x))

        return (both,)

    def forward(self, x):
        return x + self.attn(self.norm1(x)) + self.mlp(self.norm2(x))


class Differences(TwoParts):
    """All of its sublayers are scaled behind their modules."""

    def parts(self):
        first, second = super().parts()
        return lambda read: 2 * first(read), second

    def forward(self, x):
        x = x + 2 * self.attn(self.norm1(x))
        return x + 0.5 * self.mlp(self.norm2(x))


class CheckpointedParts(TwoParts):
    """Checkpoints both of its sublayers with their norms."""

    first = second = True

    def forward(self, x):
        def part(module, norm, x, again):
            run = lambda x: module(norm(x))  # noqa: E731
            return checkpoint(run, x, use_reentrant=False) if again else run(x)

        x = x + part(self.attn, self.norm1, x, self.first)
        return x + 0.5 * part(self.mlp, self.norm2, x, self.second)


class CheckpointedFirst(CheckpointedParts):
    second = False


class CheckpointedSecond(CheckpointedParts):
    first = False


class AddsInPlace(TwoParts):
    def parts(self):
        return super().parts()[0], lambda read: self.mlp(self.norm2(read()))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        x += self.mlp(self.norm2(x))
        return x


class Flat(TwoParts):
    """Its second half is computed on (B * T, D), as in OPT."""

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        flat = x.reshape(-1, D)
        return (flat + 0.5 * self.mlp(self.norm2(flat))).view(x.shape)


class ByKeyword(TwoParts):
    def forward(self, x):
        x = x + self.attn(self.norm1(input=x))
        return x + 0.5 * self.mlp(self.norm2(input=x))


class Nested(TwoParts):
    """Its second sublayer is a connected model."""

    def __init__(self):
        super().__init__()
        self.mlp = Loop(layers=2, layer=TwoParts)
        deepfast.connect(self.mlp, norm="pre", connection="attnres", sublayers=NAMES)


def connected(layer=TwoParts, sublayers=NAMES, **options):
    """In float64, always with the same parameters."""
    torch.manual_seed(0)
    model = perturbed(Loop(layer=layer)).double()
    options = {"norm": "pre", "connection": "attnres"} | options
    made = deepfast.connect(model, sublayers=sublayers, **options).double()
    perturbed(made)
    return model


def literal(model, x, query, gamma=None, size=None):
    """x_r = sum_k softmax_k(q_r . RMSNorm(v_k)) v_k: v_0 is x, and each sublayer adds one. With
    gamma x_r = sum_k v_k + gamma_r times that. size: the sublayers in a block."""
    states = [x]

    def read():
        row = len(states) - 1
        if size is not None:
            return attention_residuals.block(states, query, row, size)
        found = attention_residuals.full(states, query, row)
        return found if gamma is None else sum(states) + gamma[row] * found

    for layer in model.blocks:
        for part in layer.parts():
            states.append(part(read))
    return read()
