"""A training step of a deep encoder: DLCL against the plain residual stack."""

from collections.abc import Callable

import pytest
import torch

from deepfast.nn import TransformerEncoder

SENTENCES, LENGTH, DIM, HEADS, FFN = 64, 32, 256, 4, 1024


def make(
    layers: int,
    connection: str,
    *,
    dropout: float = 0.1,
    optimizer: bool = True,
    change: Callable[[TransformerEncoder], None] = lambda encoder: None,
):
    """A whole step: forward, backward, Adam. ``change`` is called with the encoder first."""
    torch.manual_seed(0)
    encoder = TransformerEncoder(layers, DIM, HEADS, FFN, connection=connection, dropout=dropout)
    change(encoder)
    adam = torch.optim.Adam(encoder.parameters(), lr=1e-4, fused=True) if optimizer else None
    x, target = torch.randn(2, SENTENCES, LENGTH, DIM).unbind(0)

    def step():
        loss = (encoder(x) - target).square().mean()
        loss.backward()
        if adam is not None:
            adam.step()
        encoder.zero_grad(set_to_none=True)

    return step


@pytest.mark.parametrize("connection", ["dlcl", "residual"])
@pytest.mark.parametrize("layers", [6, 30])
def test_training_step(benchmark, layers, connection):
    benchmark.pedantic(make(layers, connection), rounds=5, warmup_rounds=1)
    median = benchmark.stats.stats.median
    benchmark.extra_info["tokens_per_second"] = round(SENTENCES * LENGTH / median)
