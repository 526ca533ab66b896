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

WHOLE = "must be an integer of at least 1, got"
REFUSED = {
    TransformerConfig: [
        ({"vocab_size": 0}, f"vocab_size {WHOLE} 0"),
        ({"encoder_layers": 0}, f"encoder_layers {WHOLE} 0"),
        ({"decoder_layers": 2.5}, f"decoder_layers {WHOLE} 2.5"),
        ({"num_heads": True}, f"num_heads {WHOLE} True"),
        ({"dim": 18, "num_heads": 4}, "dim must be an even multiple of num_heads 4, got 18"),
        ({"dim": 15}, "dim must be an even multiple of num_heads 3, got 15"),
        ({"padding_idx": 11}, "padding_idx must be an integer from 0 to 10, got 11"),
        ({"first_position": -1}, "first_position must be an integer of at least 0, got -1"),
        ({"dropout": 1.0}, r"dropout must be a number in \[0, 1\), got 1.0"),
        ({"dropout": math.nan}, r"dropout must be a number in \[0, 1\), got nan"),
        ({"attention_dropout": -0.1}, r"attention_dropout must be a number in \[0, 1\)"),
        ({"activation_dropout": "x"}, r"activation_dropout must be a number in \[0, 1\)"),
        ({"mixture_dropout": 1}, r"mixture_dropout must be a number in \[0, 1\)"),
        ({"init": "normal"}, "init must be one of xavier, fan_in, got 'normal'"),
        ({"norm": "mid"}, "norm must be one of pre, post, deepnorm, got 'mid'"),
        ({"decoder_norm": "mid"}, "decoder_norm must be one of None, pre, post, deepnorm"),
        ({"decoder_norm": "deepnorm", "decoder_connection": "dlcl"},
         "norm deepnorm needs decoder_connection residual, got dlcl"),
        ({"norm_type": "none"}, "norm_type='none' needs norm='pre' and the connection residual"),
        ({"norm": "post", "encoder_connection": "attnres"},
         "encoder_connection attnres needs norm pre"),
        ({"activation": "tanh"}, "activation must be one of relu, gelu, got 'tanh'"),
        ({"cross_attention": "all"}, "cross_attention must be one of top, transparent"),
        ({"encoder_connection": "dense"}, "encoder_connection must be one of dlcl, residual"),
        ({"decoder_connection": None}, "decoder_connection must be one of dlcl, residual"),
        ({"attnres_block": 2}, "attnres_block needs a side with 'block_attnres', got none"),
        ({"share_embeddings": "some"}, "share_embeddings must be one of all, decoder, none"),
        ({"target_vocab_size": 12}, "target_vocab_size must be the source's 11 where share_emb"),
        ({"target_vocab_size": 0}, f"target_vocab_size {WHOLE}"),
        ({"dlcl": {"window": 2.5}}, f"dlcl: window {WHOLE} 2.5"),
        ({"dlcl": {"weight_type": "matrix"}}, "dlcl: weight_type must be one of"),
        ({"dlcl": {1: 2, "a": 3}}, "dlcl must have keys among .*weight.*, got 1, a"),
        (both("residual", dlcl={"window": 2}), "dlcl needs a side with connection 'dlcl'"),
        # Fusions of layers.
        ({"encoder_fusion": "sum"}, "encoder_fusion must be one of None, average.*got 'sum'"),
        ({"fusion": {1: 2, "hops": 3}}, r"a side with a fusion for \[1, 'hops'\], got none"),
        ({"encoder_fusion": "attention", "fusion": {"num_heads": 2}},
         "fusion must have keys among activation, attention_dim.*got num_heads"),
        ({"encoder_fusion": "attention", "fusion": {"hops": 0}}, f"fusion: hops {WHOLE} 0"),
        ({"encoder_fusion": "attention", "fusion": {"shared": "no"}},
         "fusion: shared must be True or False, got 'no'"),
        ({"encoder_fusion": "average", "cross_attention": "transparent"},
         "encoder_fusion must be None where cross_attention is transparent"),
        ({"encoder_fusion": "average", "fusion": {"hops": 8, "shared": True}},
         r"fusion must have no options but those that average reads \(none\), got {'hops': 8}"),
        ({"encoder_fusion": "average", "decoder_fusion": "feed_forward",
          "fusion": {"hidden_dim": 6, "activation": "relu"}},
         r"that average or feed_forward reads \(hidden_dim\), got {'activation': 'relu'}"),
        # Latent depth and languages.
        (both("latent", latent={"taus": 1}), "latent must have keys among anneal.* got taus"),
        (both("latent", latent={"tau": 0}), "latent: tau must be a number above 0, got 0"),
        (both("latent", latent={"hard": "no"}), "latent: hard must be True or False, got 'no'"),
        (both("latent", latent={"seed": 1.5}), "latent: seed must be an integer, got 1.5"),
        (both("latent", latent={"target_layers": 3, "target_weight": 1}), "at most the 2 layers"),
        ({"latent": {"tau": 2}},
         r"latent needs a side with connection 'latent' for \['tau'\], got none"),
        (both("latent", cross_attention="transparent"), "transparent needs another encoder_conn"),
        ({"languages": {"de": 4, "fr": 4}}, "languages must have different ids below vocab_size"),
        ({"languages": {"de": 11}}, "languages must have different ids below vocab_size 11 for"),
    ],
    DepthGrowingConfig: [
        ({"top_encoder_layers": 0}, f"top_encoder_layers {WHOLE}"),
        ({"top_decoder_layers": 1.5}, f"top_decoder_layers {WHOLE}"),
        ({"top_encoder_connection": "dense"}, "top_encoder_connection must be one of dlcl, resi"),
        ({"top_dlcl": {"window": 2}}, "top_dlcl needs a side with connection 'dlcl'"),
        ({"top_dlcl": {"wide": 2}, "top_encoder_connection": "dlcl"}, "got wide"),
        ({"dim": 15}, "dim must be an even multiple of num_heads 3, got 15"),
        ({"cross_attention": "transparent"}, "cross_attention must be top in a model that grows"),
        ({"encoder_connection": "latent"}, "encoder_connection must not be latent in a model tha"),
        ({"top_decoder_connection": "latent"}, "top_decoder_connection must not be latent in a m"),
    ],
    FastForwardLSTMConfig: [
        ({"dim": 7}, "dim must be even, got 7"),
        ({"encoder_layers": 0}, f"encoder_layers {WHOLE} 0"),
        ({"columns": 3}, "columns must be an integer from 1 to 2, got 3"),
        ({"dropout": 1.0}, r"dropout must be a number in \[0, 1\), got 1.0"),
        ({"lr_scale": 0}, "lr_scale must be a number above 0, got 0"),
        ({"padding_idx": 20}, "padding_idx must be an integer from 0 to 10, got 20"),
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
    sizes = [(c.dim, c.num_heads, c.ffn_dim, c.dropout) for c in (base(9), big(9))]
    assert sizes == [(512, 8, 2048, 0.1), (1024, 16, 4096, 0.3)]
    changed = big(9, dim=256, dropout=0.0)
    assert (changed.vocab_size, changed.dim, changed.num_heads, changed.dropout) == (
        9,
        256,
        16,
        0.0,
    )
    # Vaswani et al. 2017, table 3: 65 million with a shared vocabulary of 37,000.
    with torch.device("meta"):
        vaswani = Transformer(base(37_000, norm="post", encoder_connection="residual"))
    assert sum(p.numel() for p in vaswani.parameters()) / 1e6 == pytest.approx(63.1, abs=0.1)


@pytest.mark.parametrize("kind", FUSIONS)
def test_fusion_options_are_those_that_change_the_module(kind):
    """`OPTIONS` names the options that change the module's parameters or its output."""

    def seen(**options):
        torch.manual_seed(1)
        fusion = LayerFusion(
            3, 4, kind, **{"hops": 2, "attention_dim": 5, "hidden_dim": 6} | options
        )
        states = torch.linspace(-1, 2, 24).view(3, 2, 4)
        return {k: p.shape for k, p in fusion.named_parameters()}, fusion(list(states)).tolist()

    changes = {"hops": 3, "attention_dim": 7, "hidden_dim": 8, "activation": "relu",
               "shared": False}  # fmt: skip
    plain = seen()
    assert tuple(k for k, value in changes.items() if seen(**{k: value}) != plain) == OPTIONS[kind]


def test_fusion_options_that_one_side_reads_and_defaults_are_taken():
    sides = {"encoder_fusion": "average", "decoder_fusion": "attention"}
    TransformerConfig(**SIZES | sides | {"fusion": {"hops": 8}})
    defaults = {"hops": None, "attention_dim": 1024, "hidden_dim": 512, "activation": "tanh",
                "shared": True}  # fmt: skip
    for kind in FUSIONS:
        config = TransformerConfig(**SIZES | {"encoder_fusion": kind, "fusion": defaults})
        assert TransformerConfig(**asdict(config)) == config


def test_blocks_of_attention_residuals_are_each_network_s_own():
    own = {"encoder_connection": "block_attnres", "top_decoder_connection": "block_attnres"}
    for below, above, expected in ((2, None, 2), (2, 3, 3), (None, 1, 1)):
        config = DepthGrowingConfig(
            **SIZES | own, attnres_block=below, top_attnres_block=above, top_decoder_layers=3
        )
        assert config.stack("top_decoder")["block"] == expected
        assert config.bottom.stack("encoder")["block"] == below
        assert type(config.bottom) is TransformerConfig


def test_the_decoder_s_own_norm():
    """DeepNorm's scales are those of an encoder alone where the decoder is another one."""
    sizes = SIZES | {"norm": "deepnorm", "encoder_connection": "residual"}
    own, plain = (Transformer(TransformerConfig(**sizes, **more)) for more in
                  ({"decoder_norm": "pre"}, {}))  # fmt: skip
    layers = SIZES["encoder_layers"]
    assert own.encoder.alpha == (2 * layers) ** 0.25
    assert plain.encoder.alpha == 0.81 * (layers**4 * SIZES["decoder_layers"]) ** (1 / 16)
    assert (own.decoder.scaled, plain.decoder.scaled) == (False, True)
    assert "deepnorm-norm (pre in the decoder)" in own.describe()
    dlcl = TransformerConfig(**SIZES, norm="deepnorm", encoder_connection="residual",
                             decoder_norm="post", decoder_connection="dlcl")  # fmt: skip
    assert Transformer(dlcl).decoder.connection.dlcl.norm == "post"
