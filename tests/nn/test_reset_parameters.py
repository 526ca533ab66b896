"""Every module with parameters resets them, by the functions of torch.nn.init alone."""

import pytest
import torch
from torch import nn

from deepfast.nn import (
    DLCL,
    AttentionResiduals,
    LatentDepth,
    LayerFusion,
    LayerNorm,
    MultiheadAttention,
    RMSNorm,
    TransparentAttention,
)
from deepfast.nn.feed_forward import FeedForward

FIXED = {
    "dlcl": lambda: DLCL(4, 6),
    "dlcl rms": lambda: DLCL(4, 6, norm_type="rms"),
    "dlcl post": lambda: DLCL(4, 6, norm="post", weight_type="vector", init="one", window=2),
    "denseformer": lambda: DLCL(5, 6, norm=None, init="identity", dilation=2, period=2),
    "softmax": lambda: DLCL(4, 6, softmax=True, weight_type="group", groups=2),
    "softmax identity": lambda: DLCL(4, 6, softmax=True, init="identity"),
    "attention residuals": lambda: AttentionResiduals(
        4, 6, norm_affine=True, score_function="relu"
    ),
    "layer_norm": lambda: LayerNorm(6),
    "rms_norm": lambda: RMSNorm(6),
    "transparent": lambda: TransparentAttention(3, 2, 6),
    "latent": lambda: LatentDepth(3, 2),
}
RANDOM = {
    "self-attention": lambda: MultiheadAttention(6, 2),
    "cross-attention": lambda: MultiheadAttention(6, 2, cross=True),
    "grouped attention": lambda: MultiheadAttention(8, 4, num_kv_heads=2),
    "feed_forward": lambda: FeedForward(6, 8),
    "fusion": lambda: LayerFusion(3, 6, source_norm=True),
}
EVERY = pytest.mark.parametrize("make", (FIXED | RANDOM).values(), ids=FIXED | RANDOM)


def fill(module, value):
    with torch.no_grad():
        for p in module.parameters():
            p.fill_(value)


def reset(module):
    """From the inside to the outside, as `torch.nn.Module.apply` goes."""
    torch.manual_seed(1)
    for part in list(module.modules())[::-1]:
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()


@EVERY
@pytest.mark.parametrize("meta", [False, True])
def test_restores_the_values_of_the_constructor(make, meta):
    expected = make()
    if make in RANDOM.values():
        reset(expected)
    with torch.device("meta" if meta else "cpu"):
        m = make()
    m.to_empty(device="cpu")
    fill(m, torch.nan)
    reset(m)
    for (name, p), q in zip(m.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(p, q), name


@EVERY
def test_leaves_parameters_alone_that_a_guard_protects(monkeypatch, make):
    """transformers marks what it has loaded, and replaces the functions of torch.nn.init."""
    m = make()
    fill(m, 7.0)
    for p in m.parameters():
        p._is_loaded = True

    def guarded(function):
        def run(tensor, *args, **options):
            return tensor if hasattr(tensor, "_is_loaded") else function(tensor, *args, **options)

        return run

    for name in ("constant_", "ones_", "zeros_", "uniform_", "normal_", "xavier_uniform_"):
        monkeypatch.setattr(nn.init, name, guarded(getattr(nn.init, name)))
    m.reset_parameters()
    assert all((p == 7.0).all() for p in m.parameters())
