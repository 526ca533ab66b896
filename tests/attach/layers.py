"""Layers with two sublayers for the tests of their reads, and how to connect them."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepfast
from tests.attach.models import D, Loop, perturbed

NAMES = ("norm1", "attn"), ("norm2", None)


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x):
        return self.linear(x).tanh()


class TwoParts(nn.Module):
    """A layer whose second sublayer is scaled behind its module."""

    def __init__(self):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(D), Part()
        self.norm2, self.mlp = nn.LayerNorm(D), Part()

    def parts(self):
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
    """Checkpoints both of its sublayers, or one of them, with their norms."""

    first = second = True

    def forward(self, x):
        def part(module, norm, x, again):
            run = lambda x: module(norm(x))  # noqa: E731
            return checkpoint(run, x, use_reentrant=False) if again else run(x)

        x = x + part(self.attn, self.norm1, x, self.first)
        return x + 0.5 * part(self.mlp, self.norm2, x, self.second)


class Gated(TwoParts):
    """Reads its input besides the norm."""

    def parts(self):
        def first(read):
            x = read()
            return x.mean(-1, keepdim=True).sigmoid() * self.attn(self.norm1(x))

        return first, super().parts()[1]

    def forward(self, x):
        x = x + x.mean(-1, keepdim=True).sigmoid() * self.attn(self.norm1(x))
        return x + 0.5 * self.mlp(self.norm2(x))


class AddsInPlace(TwoParts):
    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        x += self.mlp(self.norm2(x))
        return x

    def parts(self):
        return tuple(lambda read, m=m, n=n: m(n(read())) for m, n in (
            (self.attn, self.norm1), (self.mlp, self.norm2)
        ))  # fmt: skip


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


def connected(layer=TwoParts, sublayers=NAMES, **options):
    """In float64, always with the same parameters."""
    torch.manual_seed(0)
    model = perturbed(Loop(layer=layer)).double()
    options = {"norm": "pre", "connection": "attnres"} | options
    made = deepfast.connect(model, sublayers=sublayers, **options).double()
    perturbed(made)
    return model
