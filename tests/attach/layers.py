"""Layers with two sublayers for the tests of their reads, and how to connect them."""

from torch import nn
from torch.utils.checkpoint import checkpoint

import deepfast
from tests.attach.models import D, Loop, connected_loop
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
        for part in self.parts():
            x = x + part(lambda x=x: x)
        return x


class Checkpointed(TwoParts):
    """Checkpoints itself, as layers of transformers do."""

    def __call__(self, x):
        return checkpoint(super().__call__, x, use_reentrant=False)


class CheckpointedParts(TwoParts):
    """Checkpoints those of its sublayers that are ``again``, with their norms."""

    def __init__(self, *again):
        super().__init__()
        self.again = again

    def forward(self, x):
        for part, again in zip(self.parts(), self.again, strict=True):
            run = lambda x, part=part: part(lambda: x)  # noqa: E731
            x = x + (checkpoint(run, x, use_reentrant=False) if again else run(x))
        return x


class SideBySide(TwoParts):
    def parts(self):
        def both(read):
            x = read()
            return self.attn(self.norm1(x)) + self.mlp(self.norm2(x))

        return (both,)


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


class Nested(TwoParts):
    """Its second sublayer is a connected model."""

    def __init__(self):
        super().__init__()
        self.mlp = Loop(layers=2, layer=TwoParts)
        deepfast.connect(self.mlp, norm="pre", connection="attnres", sublayers=NAMES)


class DropsBehind(TwoParts):
    """With a dropout behind its first module."""

    def forward(self, x):
        x = x + nn.functional.dropout(self.attn(self.norm1(x)), 0.5, self.training)
        return x + self.mlp(self.norm2(x))


def connected(layer=TwoParts, sublayers=NAMES, **options):
    """In float64, always with the same parameters."""
    options = {"connection": "attnres", "sublayers": sublayers} | options
    return connected_loop(layer=layer, **options).double()


def literal(model, x, query, gamma=None, size=1):
    """x_r = sum_k softmax_k(q_r . RMSNorm(v_k)) v_k: v_0 is x, and each sublayer adds one. With
    gamma x_r = sum_k v_k + gamma_r times that. size: the sublayers in a block; 1 is the full form.
    """
    states = [x]

    def read():
        row = len(states) - 1
        found = attention_residuals.block(states, query, row, size)
        return found if gamma is None else sum(states) + gamma[row] * found

    for layer in model.blocks:
        for part in layer.parts():
            states.append(part(read))
    return read()
