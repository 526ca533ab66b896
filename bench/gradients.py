"""Gradients of each layer at initialisation, for stacks with different connections.

`python -m bench.gradients` draws bench/results/gradients.svg and records ratios. In
post-norm the gradient of a layer has passed the layer-norms of all layers above it, in pre-norm
none of them (Wang et al. 2019, section 2). In DLCL every later row reads a state, so gradients
reach the lowest layers on short paths.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from bench.record import FILE, record
from deepfast.measure.pictures import BLUE, COLORS, Look, label_ends, picture
from deepfast.nn import TransformerEncoder
from deepfast.ops import linear_cross_entropy

STACKS: dict[str, dict] = {
    "post-norm": {"connection": "residual", "norm": "post"},
    "pre-norm": {"connection": "residual", "norm": "pre"},
    "DLCL, post-norm": {"connection": "dlcl", "norm": "post"},
    "DLCL, pre-norm": {"connection": "dlcl", "norm": "pre"},
    "latent depth, pre-norm": {"connection": "latent", "norm": "pre"},
}
"""Name -> arguments of `TransformerEncoder`; its colour is below."""

STACK_COLORS = {
    "post-norm": COLORS["stack and sum"],
    "pre-norm": "#7a7a7a",
    "DLCL, post-norm": BLUE,
    "DLCL, pre-norm": COLORS["deepfast"],
    "latent depth, pre-norm": COLORS["DenseFormer form"],
}
LAYERS, DIM, HEADS, TOKENS, LENGTH, LABELS = 100, 64, 4, 256, 32, 1000
SEEDS = 3


def layer_gradients(encoder: TransformerEncoder, x_BSD: Tensor, labels: Tensor) -> Tensor:
    """(L,): the norm of the gradient of each layer's parameters, its layer-norms included.

    The loss is the mean cross-entropy of ``labels`` (B * S,) under a random projection, in nats.
    """
    generator = torch.Generator().manual_seed(0)
    dim = x_BSD.shape[-1]
    output = torch.randn(LABELS, dim, generator=generator) * dim**-0.5
    encoder.zero_grad()
    linear_cross_entropy(encoder(x_BSD).flatten(0, 1), output, labels).backward()
    return torch.stack([
        torch.stack([p.grad.norm() for p in layer.parameters()]).norm() for layer in encoder.layers
    ])  # fmt: skip


def measure(
    stacks: Mapping[str, dict] = STACKS, *, layers: int = LAYERS, seeds: int = SEEDS
) -> dict[str, list[float]]:
    """Name -> norm of each layer's gradient at initialisation, the geometric mean over seeds."""
    found = {}
    for name, options in stacks.items():
        logs = torch.zeros(layers)
        for seed in range(seeds):
            torch.manual_seed(seed)
            encoder = TransformerEncoder(layers, DIM, HEADS, 4 * DIM, dropout=0.0, **options)
            if encoder.latent is not None:
                encoder.latent.seed = seed
            x = torch.randn(TOKENS // LENGTH, LENGTH, DIM)
            labels = torch.randint(LABELS, (TOKENS,))
            logs += layer_gradients(encoder, x, labels).log()
        found[name] = (logs / seeds).exp().tolist()
    return found


def draw(norms: Mapping[str, Sequence[float]], path: Path) -> None:
    """Draws the norms over the layers, on a logarithmic axis, to an SVG or PNG file."""
    curves = {name: list(enumerate(values, 1)) for name, values in norms.items()}
    look = Look(STACK_COLORS, strong=("DLCL, pre-norm",))
    with picture(path) as figure:
        axes = figure.add_subplot()
        for name, points in curves.items():
            main = name in look.strong
            axes.plot(*zip(*points, strict=True), color=look.colors[name],
                      linewidth=2.4 if main else 1.5, zorder=3 if main else 2)  # fmt: skip
        axes.set_yscale("log")
        axes.set_xlim(0, max(len(values) for values in norms.values()) + 1)
        axes.set_xlabel("layer, from the bottom")
        axes.set_title("norm of a layer's gradient at initialisation")
        label_ends(axes, curves, look)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.parse_args(argv)
    norms = measure()
    draw(norms, FILE.parent / "gradients.svg")
    for name, values in norms.items():
        key = re.sub(r"\W+", "_", name.lower())
        what = f"gradient norm at initialisation: lowest layer over highest, {name}"
        what += f", L={LAYERS}, D={DIM}, {SEEDS} seeds"
        command = "python -m bench.gradients"
        record(f"gradients_{key}", values[0] / values[-1], "x", what, command, "any")


if __name__ == "__main__":
    main()
