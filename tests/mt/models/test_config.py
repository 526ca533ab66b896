"""Configs that make no sense, each with the sentence that says so; and those that do."""

import math
from dataclasses import asdict

import pytest
import torch

from deepfast.mt.models import (
    DepthGrowingConfig,
    FastForwardLSTMConfig,
    Transformer,
    TransformerConfig,
    base,
    big,
)
from deepfast.nn import LayerFusion
from deepfast.nn.connections.fusion import FUSIONS, OPTIONS
from tests.mt.models.kinds import RECURRENT, SIZES, both

WHOLE = "expected an integer of at least 1"
REFUSED = {
    TransformerConfig: [
        ({"decoder_layers": 2.5}, f"decoder_layers: {WHOLE} and at most 65536, got 2.5"),
        ({"num_head": 3}, "num_head: unknown key, the nearest one is num_heads"),
        ({"dim": 18, "num_heads": 4}, "dim: expected an even multiple of num_heads 4, got 18"),
        ({"dropout": 1.0}, r"dropout: expected a number in \[0, 1\), got 1.0"),
        ({"attention_dropout": math.nan}, r"attention_dropout: expected a number in .* got nan"),
        ({"decoder_norm": "mid"}, "decoder_norm: expected one of pre, post, deepnorm or null"),
        ({"decoder_norm": "deepnorm", "decoder_connection": "dlcl"},
         "decoder_connection: expected residual with norm deepnorm, got 'dlcl'"),
        ({"norm_type": "none"}, "norm_type='none' needs norm='pre' and the connection residual"),
        ({"norm": "post", "encoder_connection": "attnres"},
         "encoder_connection: expected another one with norm post, as it needs norm pre"),
        ({"attnres_reads": 3}, "attnres_reads: expected an integer of at least 1 and at most 2 or"),
        ({"attnres_block": 2}, "attnres_block: expected null without a side with 'block_attnres'"),
        ({"target_vocab_size": 12}, "target_vocab_size: expected the source's 11 where share_emb"),
        ({"dlcl": {"a": 2}}, "dlcl: expected keys among .*weight.*, got {'a': 2}"),
        ({"dlcl": {1: 2}}, "dlcl: expected keys and values, got {1: 2}"),
        (both("residual", dlcl={"window": 2}), "dlcl: expected no options without a side wit"),
        ({"encoder_fusion": "sum"}, "encoder_fusion: expected one of average.* or null, got 'sum'"),
        ({"fusion": {"hops": 3}}, "fusion: expected no options without a side with a fusion, got"),
        ({"encoder_fusion": "attention", "fusion": {"num_heads": 2}},
         "fusion: expected keys among activation, attention_dim.*got {'num_heads': 2}"),
        ({"encoder_fusion": "attention", "fusion": {"shared": "no"}},
         "fusion: shared must be True or False, got 'no'"),
        ({"encoder_fusion": "average", "cross_attention": "transparent"},
         "encoder_fusion: expected null where cross_attention is transparent"),
        ({"encoder_fusion": "average", "decoder_fusion": "feed_forward",
          "fusion": {"hidden_dim": 6, "activation": "relu"}},
         r"fusion: expected options that average or feed_forward reads \(hidden_dim\), got"),
        (both("latent", latent={"taus": 1}), "latent: expected keys among anneal.* got {'taus'"),
        (both("latent", latent={"hard": "no"}), "latent: hard must be True or False, got 'no'"),
        (both("latent", latent={"target_layers": 3, "target_weight": 1}), "at most the 2 layers"),
        (both("latent", cross_attention="transparent"),
         "encoder_connection: expected another than latent, .* with cross_attention transparent"),
    ],
    DepthGrowingConfig: [
        ({"top_dlcl": {"window": 2}}, "top_dlcl: expected no options without a side with connecti"),
        ({"top_dlcl": {"wide": 2}, "top_encoder_connection": "dlcl"}, "top_dlcl: .*got {'wide'"),
        ({"cross_attention": "transparent"}, "cross_attention: expected top in a model that grows"),
        ({"top_decoder_connection": "latent"}, "top_decoder_connection: expected another connecti"),
    ],
    FastForwardLSTMConfig: [
        ({"dim": 7}, "dim: expected an integer of at least 1 and at most .* multiple of 2, got 7"),
        ({"columns": True}, "columns: expected an integer of at least 1 and at most 2, got True"),
        ({"lr_scale": 0}, "lr_scale: expected a number above 0, got 0"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "changes", "sentence"),
    [(kind, *row) for kind, rows in REFUSED.items() for row in rows],
)
def test_refused_with_a_sentence(kind, changes, sentence):
    sizes = RECURRENT if kind is FastForwardLSTMConfig else SIZES
    with pytest.raises(ValueError, match=sentence) as error:
        kind(**sizes | changes)
    assert str(error.value).startswith(f"{kind.__name__}: ")


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
