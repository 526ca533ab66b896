"""The Transformer's own: sizes, positions, norms, embeddings, transparent attention, fusions."""

import math

import pytest
import torch

from deepfast.mt.models import (
    DepthGrowing,
    DepthGrowingConfig,
    Transformer,
    TransformerConfig,
    base,
    big,
)
from deepfast.mt.models.transformer import sinusoids
from deepfast.nn import LayerNorm
from tests.mt.models import kinds
from tests.mt.models.kinds import SIZES, SOURCE, TARGET, make


def test_sizes_of_the_paper():
    sizes = [(c.dim, c.num_heads, c.ffn_dim, c.dropout) for c in (base(9), big(9, dropout=0.0))]
    assert sizes == [(512, 8, 2048, 0.1), (1024, 16, 4096, 0.0)]
    # Vaswani et al. 2017, table 3: 65 million with a shared vocabulary of 37,000.
    with torch.device("meta"):
        vaswani = Transformer(base(37_000, norm="post", encoder_connection="residual"))
    assert sum(p.numel() for p in vaswani.parameters()) / 1e6 == pytest.approx(63.1, abs=0.1)


def test_what_each_stack_gets():
    """Its own blocks, norm and seed; all norms are RMS norms where they should be."""
    own = {"encoder_connection": "block_attnres", "top_decoder_connection": "block_attnres"}
    for below, above, expected in ((2, None, 2), (2, 3, 3), (None, 1, 1)):
        config = DepthGrowingConfig(**SIZES | own, attnres_block=below, top_attnres_block=above)
        assert config.stack("top_decoder")["block"] == expected
        assert config.bottom.stack("encoder")["block"] == below
    # DeepNorm's scales are those of an encoder alone where the decoder is another one.
    own, plain = (make("deepnorm, pre-norm decoder", decoder_norm=x) for x in ("pre", None))
    assert (own.decoder.scaled, plain.decoder.scaled) == (False, True)
    assert own.encoder.alpha == (2 * 3) ** 0.25
    assert plain.encoder.alpha == 0.81 * (3**4 * 2) ** (1 / 16)
    latent = make("latent").encoder.latent, make("latent").decoder.latent
    assert latent[0].seed != latent[1].seed
    rms = make("rms")
    assert not any(type(module) is LayerNorm for module in rms.modules())
    assert rms.encoder.connection.dlcl.norm_type == "rms"


def test_embeddings_that_are_shared_or_not():
    for name, own in (
        ("dlcl", {"embedding"}),
        ("decoder's embedding", {"embedding", "target_embedding"}),
        ("own embeddings", {"embedding", "output", "target_embedding"}),
    ):
        found = {key.partition(".")[0] for key, _ in make(name).named_parameters()}
        assert found - {"encoder", "decoder"} == own


def test_sinusoids():
    table = sinusoids(torch.arange(50), 16)
    assert table.dtype == torch.float32
    angle = [[p * 10000 ** (-i / 7) for i in range(8)] for p in range(50)]
    expected = [[f(a) for f in (math.sin, math.cos) for a in row] for row in angle]
    torch.testing.assert_close(table, torch.tensor(expected), rtol=0, atol=1e-4)
    assert sinusoids(torch.arange(3), 2).isfinite().all()


@pytest.mark.parametrize("grown", [False, True])
def test_matrices_drawn_by_their_inputs(grown):
    """In both sides, the fusions, the output, and the top of a model that grows."""
    sizes = SIZES | {"vocab_size": 50, "dim": 48, "ffn_dim": 192, "init": "fan_in",
                     "share_embeddings": "none"}  # fmt: skip
    if grown:
        model = DepthGrowing(DepthGrowingConfig(**sizes))
    else:
        model = Transformer(TransformerConfig(**sizes, **kinds.fused("attention")))
    bottom = model.bottom if grown else model
    for linear in (m for m in model.modules() if isinstance(m, torch.nn.Linear)):
        bound = linear.in_features**-0.5
        assert all(p.abs().max() <= bound for p in linear.parameters())
        assert linear.weight.numel() < 1000 or linear.weight.abs().max() > 0.95 * bound
    for embedding in (bottom.embedding, bottom.target_embedding):
        assert not embedding.weight[0].any()
        std = embedding.weight[1:].std()
        torch.testing.assert_close(std, torch.tensor(48**-0.5), rtol=0.1, atol=0)


@pytest.mark.parametrize(
    "name", [name for name in kinds.TRANSFORMERS if "fusion" in name or "transparent" in name]
)
def test_what_is_made_of_the_states_of_a_stack(name):
    """A fusion, or a mixture for each decoder layer: here by the modules and not by the model."""
    model = make(name)

    def output(side, *args):
        fusion, states = getattr(model.fusions, side), []
        y = getattr(model, side).forward_packed(*args, states=states)
        if side == "encoder" and model.transparent is not None:
            return model.transparent(states, y)
        if fusion is None:
            return y
        embedding = (model.fusions.layer_embedding,) if fusion.with_embeddings else ()
        return fusion([*states[:-1], y], *embedding)

    x, packing = model.embed_source(SOURCE)
    memory = output("encoder", x, packing)
    y, target_packing = model.embed_target(TARGET)
    expected = model.project(output("decoder", y, target_packing, memory, packing))
    torch.testing.assert_close(model(SOURCE, TARGET), expected)


def test_attention_over_layers():
    for kind, hops in (("attention", 2), ("channel_attention", 2 * 12)):
        model = make(f"{kind} fusion")
        for operands, shape in (((SOURCE,), (10, hops, 4)), ((SOURCE, TARGET), (9, hops, 3))):
            weights = model.layer_attention(*operands)
            assert weights.shape == shape
            torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    with pytest.raises(ValueError, match=r"decoder_fusion: expected one of .*got None"):
        make("fusion of the encoder").layer_attention(SOURCE, TARGET)
    with pytest.raises(ValueError, match=r"encoder_fusion: expected one of .*got 'average'"):
        make("average fusion").layer_attention(SOURCE)
