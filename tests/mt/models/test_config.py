"""Configs that make sense: sizes, options of fusions, blocks, norms."""

from dataclasses import asdict

import pytest
import torch

from deepfast.mt.models import DepthGrowingConfig, Transformer, TransformerConfig, base, big
from deepfast.nn import LayerFusion
from deepfast.nn.connections.fusion import FUSIONS, OPTIONS
from tests.mt.models.kinds import SIZES


def test_sizes_of_the_paper():
    sizes = [(c.dim, c.num_heads, c.ffn_dim, c.dropout) for c in (base(9), big(9, dropout=0.0))]
    assert sizes == [(512, 8, 2048, 0.1), (1024, 16, 4096, 0.0)]
    # Vaswani et al. 2017, table 3: 65 million with a shared vocabulary of 37,000.
    with torch.device("meta"):
        vaswani = Transformer(base(37_000, norm="post", encoder_connection="residual"))
    assert sum(p.numel() for p in vaswani.parameters()) / 1e6 == pytest.approx(63.1, abs=0.1)


@pytest.mark.parametrize("kind", FUSIONS)
def test_fusion_options_are_those_that_change_the_module(kind):
    """`OPTIONS` names them; the other options are taken only with their defaults."""

    def seen(**options):
        torch.manual_seed(1)
        given = {"hops": 2, "attention_dim": 5, "hidden_dim": 6} | options
        fusion = LayerFusion(3, 4, kind, **given)
        states = torch.linspace(-1, 2, 24).view(3, 2, 4)
        return {k: p.shape for k, p in fusion.named_parameters()}, fusion(list(states)).tolist()

    changes = {"hops": 3, "attention_dim": 7, "hidden_dim": 8, "activation": "relu",
               "shared": False}  # fmt: skip
    plain = seen()
    assert tuple(k for k, value in changes.items() if seen(**{k: value}) != plain) == OPTIONS[kind]
    defaults = {"hops": None, "attention_dim": 1024, "hidden_dim": 512, "activation": "tanh",
                "shared": True}  # fmt: skip
    config = TransformerConfig(**SIZES | {"encoder_fusion": kind, "fusion": defaults})
    assert TransformerConfig(**asdict(config)) == config
    # One side may read an option that the other one does not.
    sides = {"encoder_fusion": kind, "decoder_fusion": "attention"}
    TransformerConfig(**SIZES | sides | {"fusion": {"hops": 8}})


def test_blocks_of_attention_residuals_are_each_network_s_own():
    own = {"encoder_connection": "block_attnres", "top_decoder_connection": "block_attnres"}
    for below, above, expected in ((2, None, 2), (2, 3, 3), (None, 1, 1)):
        config = DepthGrowingConfig(
            **SIZES | own, attnres_block=below, top_attnres_block=above, top_decoder_layers=3
        )
        assert config.stack("top_decoder")["block"] == expected
        assert config.bottom.stack("encoder")["block"] == below


def test_the_decoder_s_own_norm():
    """DeepNorm's scales are those of an encoder alone where the decoder is another one."""
    sizes = SIZES | {"norm": "deepnorm", "encoder_connection": "residual"}
    configs = (TransformerConfig(**sizes, **more) for more in ({"decoder_norm": "pre"}, {}))
    own, plain = map(Transformer, configs)
    layers = SIZES["encoder_layers"]
    assert own.encoder.alpha == (2 * layers) ** 0.25
    assert plain.encoder.alpha == 0.81 * (layers**4 * SIZES["decoder_layers"]) ** (1 / 16)
    assert (own.decoder.scaled, plain.decoder.scaled) == (False, True)
    dlcl = TransformerConfig(**sizes, decoder_norm="post", decoder_connection="dlcl")
    assert Transformer(dlcl).decoder.connection.dlcl.norm == "post"
