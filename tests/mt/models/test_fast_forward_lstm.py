"""FastForwardLSTM against the specification; learning rates, first values."""

import pytest
import torch
import torch.nn.functional as F

from deepfast.mt.models import FastForwardLSTM, FastForwardLSTMConfig
from tests.mt.models.kinds import LABELS, LSTMS, REAL, SOURCE, TARGET, make
from tests.specifications.fast_forward_lstm import fast_forward_lstm


def transcribed(model, source, target_in):
    p = dict(model.named_parameters())
    c = model.config
    return fast_forward_lstm(
        p, source, target_in, encoder_layers=c.encoder_layers, decoder_layers=c.decoder_layers,
        attention=c.attention, fast_forward=c.fast_forward, bidirectional=c.bidirectional,
        columns=c.columns,
    )  # fmt: skip


@pytest.mark.parametrize("name", LSTMS)
def test_is_its_transcription(name):
    """With the options of the paper's tables 2 to 6."""
    model = make(name)
    pairs = [(s[s != 0].tolist(), t[t != 0].tolist()) for s, t in zip(SOURCE, TARGET, strict=True)]
    exact, attention = zip(*(transcribed(model, *pair) for pair in pairs), strict=True)
    exact = torch.cat(exact)
    torch.testing.assert_close(model(SOURCE, TARGET), exact)
    expected = F.cross_entropy(exact, LABELS[REAL], reduction="sum", label_smoothing=0.1)
    loss, _ = model.loss(SOURCE, TARGET, LABELS, 0.1)
    torch.testing.assert_close(loss, expected)
    found, wanted = (torch.autograd.grad(x, list(model.parameters())) for x in (loss, expected))
    torch.testing.assert_close(found, wanted)
    if not model.config.attention:
        assert model.alignment is None
        return
    weights = model.alignment(SOURCE, TARGET)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    for row, source, (_, target), own in zip(weights, SOURCE, pairs, attention, strict=True):
        torch.testing.assert_close(row[: len(target)][:, source != 0], own)


def test_starts_as_the_paper_says():
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "dim": 32, "embedding_dim": 16, "bias": True}
    model = FastForwardLSTM(FastForwardLSTMConfig(**sizes))
    for name, p in model.named_parameters():
        if name.endswith(("recurrent", "peephole", "bias")):
            assert not p.any(), name
        else:
            assert 0.05 < p[p != 0].std() < 0.09, name
    # 512 cells: c has 5120 channels, which attention reduces to 1280.
    assert model.quarter.weight.shape == (80, 320)
    assert (len(model.columns), len(model.columns[0]), len(model.decoder)) == (2, 9, 7)


def test_rates_and_decay():
    model = make("Deep-Att")
    recurrent, others, words = model.parameter_groups()
    assert {p.shape for p in recurrent["params"]} == {(6, 24), (3, 6)}
    assert [g.get("lr_scale", 1) for g in (recurrent, others, words)] == [1, 0.08, 0.08]
    assert [g.get("decays", False) for g in (recurrent, others, words)] == [True, True, False]
    named = [id(p) for g in (recurrent, others, words) for p in g["params"]]
    assert sorted(named) == sorted(id(p) for p in model.parameters())


def test_dropout_falls_on_h_alone():
    """With h all zero, only f carries the source to the top and gradients to the bottom."""
    model = make("Deep-Att", dropout=0.999999).train()
    model.loss(SOURCE, TARGET, LABELS)[0].backward()
    assert model.source_embedding.weight.grad.ne(0).any()
    assert model.decoder[0].feed_forward.weight.grad.ne(0).any()
