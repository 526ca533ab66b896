"""The Transformer with a fusion of its layers on either side."""

from dataclasses import asdict

import pytest
import torch

from deepfast.mt.models import (
    DepthGrowing,
    DepthGrowingConfig,
    Transformer,
    TransformerConfig,
)
from deepfast.mt.models.checkpoint import load_model
from deepfast.mt.models.checkpoint_file import FORMAT, VERSION
from deepfast.mt.training.checkpoint import check_config
from deepfast.nn import LayerFusion
from deepfast.nn.connections.fusion import FUSIONS, OPTIONS, WITH_ATTENTION
from tests.mt.models.decoding import assert_steps_equal_forward

SIZES = {"vocab_size": 11, "dim": 12, "heads": 2, "ffn_dim": 16, "dropout": 0.0}
FUSION = {"hidden_dim": 6, "hops": 2, "attention_dim": 5}
"""Each kind gets those of these options that it reads."""
SOURCE = torch.tensor([[3, 4, 5, 6], [7, 8, 2, 0]])
TARGET_IN = torch.tensor([[1, 9, 5], [1, 4, 0]])
TARGET_OUT = torch.tensor([[9, 5, 2], [4, 2, 0]])


def transformer(kind="attention", norm="post", **changes):
    torch.manual_seed(1)
    options = {"encoder_fusion": kind, "decoder_fusion": kind, "norm": norm}
    options["fusion"] = {name: x for name, x in FUSION.items() if name in OPTIONS.get(kind, ())}
    config = TransformerConfig(
        **SIZES | {"encoder_layers": 3, "decoder_layers": 2} | options | changes
    )
    return Transformer(config)


def by_hand(model, source, target_in):
    """The logits, with the stacks' states fused here and not by the model."""

    def fused(stack, fusion, *args):
        states = []
        y = stack.forward_packed(*args, states=states)
        embedding = (model.fusions.layer_embedding,) if fusion.kind in WITH_ATTENTION else ()
        return fusion([*states[:-1], y], *embedding)

    x, packing = model._packed(source, model.embedding)
    memory = fused(model.encoder, model.fusions.encoder, x, packing)
    y, target_packing = model._packed(target_in, model.embedding)
    args = y, target_packing, memory, packing
    return model.project(fused(model.decoder, model.fusions.decoder, *args))


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("kind", FUSIONS)
def test_the_output_is_that_of_the_fusion(kind, norm):
    model = transformer(kind, norm)
    torch.testing.assert_close(model(SOURCE, TARGET_IN), by_hand(model, SOURCE, TARGET_IN))


@pytest.mark.parametrize("memory", ["keep", "lean", "states"])
@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("kind", FUSIONS)
def test_every_parameter_learns(kind, norm, memory):
    model = transformer(kind, norm)
    for stack in (model.encoder, model.decoder):
        stack.set_memory(memory)
    loss, _ = model.loss(SOURCE, TARGET_IN, TARGET_OUT)
    loss.backward()
    # Every parameter has a gradient that is not zero.
    assert all(p.grad is not None and p.grad.ne(0).any() for p in model.parameters())


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("kind", FUSIONS)
def test_decoding_by_steps_is_decoding_at_once(kind, norm):
    model = transformer(kind, norm, decoder_connection="dlcl").eval()
    assert_steps_equal_forward(model, SOURCE, TARGET_IN)


def test_one_side_alone():
    model = transformer("attention", decoder_fusion=None)
    assert model.fusions.decoder is None
    assert model.fusions.layer_embedding.shape == (4, 12)
    assert "3 encoder layers (dlcl, attention fusion), 2 decoder layers (residual)" in (
        model.describe()
    )
    plain = transformer(None, fusion={})
    assert not [name for name, _ in plain.named_parameters() if "fusion" in name]


@pytest.mark.parametrize("kind", WITH_ATTENTION)
def test_attention_over_layers(kind):
    model = transformer(kind).eval()
    hops = 2 if kind == "attention" else 2 * 12
    encoder = model.layer_attention(SOURCE)
    assert encoder.shape == (7, hops, 4)
    decoder = model.layer_attention(SOURCE, TARGET_IN)
    assert decoder.shape == (5, hops, 3)
    for weights in (encoder, decoder):
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))


def test_no_attention_to_show():
    with pytest.raises(ValueError, match=r"decoder_fusion: expected one of .*got None"):
        transformer("attention", decoder_fusion=None).layer_attention(SOURCE, TARGET_IN)
    with pytest.raises(ValueError, match=r"encoder_fusion: expected one of .*got 'average'"):
        transformer("average").layer_attention(SOURCE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder_fusion": "sum"}, "encoder_fusion must be one of None, average.*got 'sum'"),
        ({"fusion": {"hops": 2}}, "fusion needs a side with a fusion for .*got none"),
        (
            {"encoder_fusion": "attention", "fusion": {"heads": 2}},
            "fusion must have keys among activation, attention_dim.*got heads",
        ),
        ({"encoder_fusion": "attention", "fusion": {1: 2}}, "fusion must have keys among .*got 1"),
        ({"fusion": {1: 2, "hops": 3}}, r"a side with a fusion for \[1, 'hops'\], got none"),
        (
            {"encoder_fusion": "attention", "fusion": {"hops": 0}},
            "fusion: hops must be a whole number of at least 1, got 0",
        ),
        (
            {"encoder_fusion": "attention", "fusion": {"shared": "no"}},
            "fusion: shared must be True or False, got 'no'",
        ),
        (
            {"encoder_fusion": "average", "cross_attention": "transparent"},
            "encoder_fusion must be None where cross_attention is transparent",
        ),
        (
            {"encoder_fusion": "average", "fusion": {"hops": 8, "shared": True}},
            r"fusion must have no options but those that average reads \(none\), got {'hops': 8}",
        ),
        (
            {
                "encoder_fusion": "average",
                "decoder_fusion": "feed_forward",
                "fusion": {"hidden_dim": 6, "activation": "relu"},
            },
            r"that average or feed_forward reads \(hidden_dim\), got {'activation': 'relu'}",
        ),
        (
            {"decoder_fusion": "feed_forward", "fusion": {"hops": 2}},
            r"reads \(hidden_dim\), got {'hops': 2}",
        ),
    ],
)
def test_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**SIZES | changes)


@pytest.mark.parametrize("kind", FUSIONS)
def test_options_are_those_that_change_the_module(kind):
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


def test_an_option_that_one_side_reads_and_defaults_are_taken():
    sides = {"encoder_fusion": "average", "decoder_fusion": "attention"}
    TransformerConfig(**SIZES | sides | {"fusion": {"hops": 8}})
    defaults = {"hops": None, "attention_dim": 1024, "hidden_dim": 512, "activation": "tanh",
                "shared": True}  # fmt: skip
    for kind in FUSIONS:
        config = TransformerConfig(**SIZES | {"encoder_fusion": kind, "fusion": defaults})
        assert TransformerConfig(**asdict(config)) == config


def test_a_checkpoint_with_an_option_that_was_ignored_loads(tmp_path):
    """Older configs accept it; the weights are those of the model without it."""
    model = transformer("average")
    saved = {**asdict(model.config), "fusion": {"hops": 8}}
    content = {"format": FORMAT, "version": VERSION, "config": saved, "model": model.state_dict(),
               "vocabulary": b"v"}  # fmt: skip
    torch.save(content, tmp_path / "a.pt")
    loaded, _ = load_model(tmp_path / "a.pt")
    assert loaded.config.fusion == {}
    assert torch.equal(loaded(SOURCE, TARGET_IN), model.eval()(SOURCE, TARGET_IN))
    check_config("a.pt", content, model.config)
    for wrong in ({"fusion": [1]}, {"encoder_fusion": []}, {"fusion": {"heads": 1}}):
        torch.save(content | {"config": saved | wrong}, tmp_path / "a.pt")
        with pytest.raises(ValueError, match="the checkpoint's config cannot be used"):
            load_model(tmp_path / "a.pt")


@pytest.mark.parametrize("kind", FUSIONS)
@pytest.mark.parametrize("layer_embeddings", [False, True])
def test_without_the_word_embedding(kind, layer_embeddings):
    """The fusions of both sides share E, in every kind; all that is left learns."""
    own = {name: x for name, x in FUSION.items() if name in OPTIONS[kind]}
    own |= {"word_embedding": False, "layer_embeddings": layer_embeddings}
    model = transformer(kind, "pre", fusion=own)
    assert (model.fusions.layer_embedding is not None) == layer_embeddings
    loss, _ = model.loss(SOURCE, TARGET_IN, TARGET_OUT)
    loss.backward()
    assert all(p.grad is not None and p.grad.ne(0).any() for p in model.parameters())
    assert_steps_equal_forward(model.eval(), SOURCE, TARGET_IN)


@pytest.mark.parametrize("grown", [False, True])
def test_matrices_drawn_by_their_inputs(grown):
    """In both sides, the fusions, the output, and the top of a model that grows."""
    changes = {"vocab_size": 50, "dim": 64, "ffn_dim": 256, "init": "fan_in",
               "share_embeddings": "none"}  # fmt: skip
    torch.manual_seed(1)
    model = DepthGrowing(DepthGrowingConfig(**SIZES | changes)) if grown else transformer(**changes)
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    bottom = model.bottom if grown else model
    assert bottom.output in linears
    for linear in linears:
        bound = linear.in_features**-0.5
        for p in linear.parameters():
            assert p.abs().max() <= bound
        if linear.weight.numel() > 1000:
            assert linear.weight.abs().max() > 0.95 * bound
    for embedding in (bottom.embedding, bottom.target_embedding):
        std = embedding.weight[1:].std()
        torch.testing.assert_close(std, torch.tensor(64**-0.5), rtol=0.1, atol=0)


def test_an_unknown_initialisation_is_refused():
    with pytest.raises(ValueError, match="init must be one of xavier, fan_in, got 'normal'"):
        transformer(init="normal")
