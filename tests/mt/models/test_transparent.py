"""The model with transparent attention: against the specification, and decoded step by step."""

import pytest
import torch

from deepfast.memory import POLICIES
from deepfast.mt.models import Transformer, TransformerConfig
from deepfast.reference.transparent_attention import transparent_attention
from tests.mt.models.decoding import (
    SOURCE,
    TARGET,
    assert_hypotheses_reorder,
    assert_steps_equal_forward,
)

VARIANTS = pytest.mark.parametrize(
    ("norm", "encoder"),
    [("pre", "residual"), ("post", "residual"), ("pre", "dlcl"), ("post", "dlcl"),
     ("pre", "denseformer")],
)  # fmt: skip


def build(norm, encoder, **changes):
    config = TransformerConfig(
        vocab_size=11, dim=16, heads=2, ffn_dim=24, encoder_layers=3, decoder_layers=2, norm=norm,
        encoder_connection=encoder, cross_attention="transparent", **changes,
    )  # fmt: skip
    model = Transformer(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
        model.embedding.weight[0].zero_()
    return model.double().eval()


@VARIANTS
def test_logits_and_gradients_are_those_of_the_specification(norm, encoder):
    model = build(norm, encoder)
    mix, final = model.transparent, None
    if norm == "pre":
        final = model.encoder.connection.norms[-1]

    def literal(states, output):
        if final is None:
            return transparent_attention(states, mix.weight)
        gain = torch.cat((mix.norm_weight, final.weight[None]))
        shift = torch.cat((mix.norm_bias, final.bias[None]))
        return transparent_attention(states, mix.weight, norm_weight=gain, norm_bias=shift)

    results = []
    for form in (mix.forward, literal):
        mix.forward = form
        model.zero_grad()
        logits = model(SOURCE, TARGET)
        logits.square().sum().backward()
        results.append((logits, {name: p.grad for name, p in model.named_parameters()}))
    (got, grads), (want, expected) = results
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    assert grads["transparent.weight"].abs().min() > 0
    for name, gradient in expected.items():
        # Every parameter takes part in every step: DDP waits for each of them.
        if encoder == "residual":
            assert grads[name] is not None, name
        torch.testing.assert_close(grads[name], gradient, rtol=1e-8, atol=1e-8, msg=name)


@VARIANTS
def test_decoding_step_by_step_equals_forward(norm, encoder):
    model = build(norm, encoder)
    assert_steps_equal_forward(model)
    assert_hypotheses_reorder(model)


@pytest.mark.parametrize(("norm", "encoder"), [("pre", "dlcl"), ("post", "denseformer")])
def test_every_memory_policy_gives_the_same_gradients(norm, encoder):
    model, found = build(norm, encoder, dropout=0.2, mixture_dropout=0.2).train(), {}
    for policy in POLICIES:
        model.encoder.set_memory(policy)
        model.decoder.set_memory("states" if policy == "history" else policy)
        torch.manual_seed(3)
        model.zero_grad()
        model.loss(SOURCE, TARGET, TARGET, 0.1)[0].backward()
        found[policy] = {name: p.grad for name, p in model.named_parameters()}
    for policy, grads in found.items():
        for name, want in found["keep"].items():
            torch.testing.assert_close(
                grads[name], want, rtol=1e-9, atol=1e-12, msg=f"{policy} {name}"
            )


def test_decoder_layers_attend_to_memories_of_their_own():
    model = build("pre", "residual")
    with torch.no_grad():
        memories, packing = model.encode(SOURCE)
    assert len(memories) == 2
    assert not torch.allclose(*memories)
    assert "transparent attention" in model.describe()
    assert packing.indices.numel() == (SOURCE != 0).sum()


def test_config_refuses():
    with pytest.raises(ValueError, match="cross_attention must be one of top, transparent"):
        TransformerConfig(vocab_size=9, cross_attention="all")
    with pytest.raises(ValueError, match=r"mixture_dropout must be a number in \[0, 1\)"):
        TransformerConfig(vocab_size=9, mixture_dropout=1)
