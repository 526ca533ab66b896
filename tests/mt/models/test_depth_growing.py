"""Depth growing: the equations, and a frozen bottom that keeps nothing."""

from functools import partial
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F

from deepfast.mt.models.transformer import sinusoids
from tests.mt.models.kinds import GROWING, LABELS, REAL, SOURCE, TARGET, learning, make
from tests.nn.written_out import naive
from tests.specifications.depth_growing import depth_growing


def specified(model, source, target):
    """Logits of the shallow and of the deep network for one sentence, in plain PyTorch."""
    bottom = model.bottom

    def embedded(tokens, embedding):
        positions = sinusoids(torch.arange(len(tokens)), 12).to(embedding.weight)
        return (embedding.weight[tokens] * 12**0.5 + positions)[None]

    def norm(m):
        return lambda x: F.layer_norm(x, (12,), m.weight, m.bias, m.eps)

    norms = None
    if model.config.embedding_norm:
        norms = norm(model.source_norm), norm(model.target_norm)
    stacks = bottom.encoder, bottom.decoder, model.encoder, model.decoder
    written_out = (partial(naive, m) for m in stacks)
    own = model.config.share_embeddings == "none"
    x = embedded(source, bottom.embedding)
    y = embedded(target, bottom.target_embedding if own else bottom.embedding)
    states = depth_growing(x, y, *written_out, norms=norms)
    return [s[0] @ (bottom.output if own else bottom.embedding).weight.T for s in states]


@pytest.mark.parametrize("name", GROWING)
def test_both_networks_are_the_papers(name):
    """Outputs and all gradients of a padded batch equal those of its sentences one by one."""
    model = make(name)
    rows = [
        specified(model, source[source != 0], target[target != 0])
        for source, target in zip(SOURCE, TARGET, strict=True)
    ]
    shallow, deep = (torch.cat(side) for side in zip(*rows, strict=True))
    torch.testing.assert_close(model.bottom(SOURCE, TARGET), shallow, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(model(SOURCE, TARGET), deep, rtol=1e-9, atol=1e-9)

    expected = F.cross_entropy(deep, LABELS[REAL], label_smoothing=0.1, reduction="sum")
    parameters = learning(model)
    gradients = torch.autograd.grad(expected, list(parameters.values()), materialize_grads=True)
    loss, _ = model.loss(SOURCE, TARGET, LABELS, 0.1)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
    found = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    expected = dict(zip(parameters, gradients, strict=True))
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)
    assert not [key for key in found if key.startswith("bottom.")]


@pytest.mark.parametrize("bottom_dropout", [False, True])
def test_the_bottom_costs_no_activation_memory(meter, bottom_dropout):
    """Bytes that live between forward and backward, with a bottom of 1 and of 12 layers."""

    def kept(**changes):
        model = make("dlcl below", torch.float32, bottom_dropout=bottom_dropout, **changes).train()
        # DLCL makes its pattern in the first forward.
        model.loss(SOURCE, TARGET, LABELS, 0.1)
        with meter() as found:
            loss, _ = model.loss(SOURCE, TARGET, LABELS, 0.1)
        loss.backward()
        return found.left

    one = kept(encoder_layers=1, decoder_layers=1)
    assert kept(encoder_layers=12, decoder_layers=12) == one
    # A layer of the top keeps at least 8 states of 10 tokens.
    assert kept(encoder_layers=1, decoder_layers=1, top_encoder_layers=3) > one + 4 * 8 * 10 * 12


@pytest.mark.parametrize("bottom_dropout", [False, True])
def test_dropout_of_the_bottom_and_of_the_embedding(bottom_dropout):
    """The top reads the embedding with the bottom's mask, or with its own where that has none."""
    model = make("as the paper", dropout=0.5, bottom_dropout=bottom_dropout)
    model.train()
    assert {m.training for m in model.bottom.modules()} == {bottom_dropout}
    stacks = model.bottom.encoder, model.encoder
    for stack in stacks:
        stack.forward_packed = Mock(wraps=stack.forward_packed)
    h1, h2, _ = model.encode(SOURCE)
    below, top = (stack.forward_packed.call_args.args[0] for stack in stacks)
    entered = top - h1
    assert 0.3 < (entered.abs() < 1e-5).float().mean() < 0.7
    if bottom_dropout:
        torch.testing.assert_close(entered, below, rtol=1e-4, atol=1e-5)
    else:
        assert not below.eq(0).any()
    again = model.encode(SOURCE)
    assert torch.equal(again[0], h1) != bottom_dropout
    assert not torch.equal(again[1], h2)
