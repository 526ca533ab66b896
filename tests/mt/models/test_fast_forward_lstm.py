"""FastForwardLSTM against the specification; padding, decoding, learning rates, errors."""

import pytest
import torch

from deepfast.mt.models import (
    FastForwardLSTM,
    FastForwardLSTMConfig,
    build,
    kind_of,
)
from deepfast.mt.search import DecodingOptions, beam_search
from deepfast.reference.fast_forward_lstm import fast_forward_lstm
from tests.mt.models.decoding import assert_hypotheses_reorder, assert_steps_equal_forward

V, PAD, BOS, EOS = 13, 0, 2, 3
SIZES = {"dim": 6, "embedding_dim": 5, "encoder_layers": 3, "decoder_layers": 2}


def make(attention=True, dtype=torch.float64, **changes):
    """In evaluation mode, with recurrent parameters that are not zero."""
    config = FastForwardLSTMConfig(vocab_size=V, attention=attention, **(SIZES | changes))
    model = FastForwardLSTM(config).to(dtype).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.3)
        for words in (model.source_embedding, model.target_embedding):
            words.weight[PAD] = 0
    return model


def batch():
    """Source, target in and target out. The second source is padded on the left."""
    source = [[5, 6, 7, 8, EOS], [PAD, PAD, 9, 5, EOS], [4, EOS, PAD, PAD, PAD]]
    given = [[BOS, 4, 5, 6], [BOS, 7, PAD, PAD], [BOS, 8, 9, PAD]]
    wanted = [[4, 5, 6, EOS], [7, EOS, PAD, PAD], [8, 9, EOS, PAD]]
    return torch.tensor(source), torch.tensor(given), torch.tensor(wanted)


def transcribed(model, source, target_in):
    p = dict(model.named_parameters())
    c = model.config
    return fast_forward_lstm(
        p, source, target_in, encoder_layers=c.encoder_layers, decoder_layers=c.decoder_layers,
        attention=c.attention, fast_forward=c.fast_forward, bidirectional=c.bidirectional,
        columns=c.columns,
    )  # fmt: skip


def real(row):
    return [token for token in row if token != PAD]


@pytest.mark.parametrize("layers", [(3, 2), (1, 1), (2, 1)])
@pytest.mark.parametrize("attention", [True, False])
def test_is_its_transcription(attention, layers):
    assert_is_its_transcription(make(attention, encoder_layers=layers[0], decoder_layers=layers[1]))


@pytest.mark.parametrize(
    "change",
    [
        {"fast_forward": False}, {"bidirectional": False}, {"columns": 1}, {"bias": True},
        {"fast_forward": False, "columns": 1, "bidirectional": False, "bias": True},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("attention", [True, False])
def test_ablations_are_their_transcriptions(attention, change):
    """The options of the paper's tables 2 to 6."""
    model = make(attention, encoder_layers=2, **change)
    assert_is_its_transcription(model)
    assert_steps_equal_forward(model, *batch()[:2])


def test_a_model_without_its_options_has_no_such_parameters():
    plain = make(fast_forward=False, columns=1)
    assert not hasattr(plain, "quarter")
    assert len(plain.columns) == 1
    assert plain.describe() == (
        "Deep-Att, 3 + 2 LSTM layers, 6 cells, no fast-forward connections, one column"
    )
    biases = [p for name, p in FastForwardLSTM(FastForwardLSTMConfig(
        vocab_size=V, bias=True, **SIZES)).named_parameters() if name.endswith("bias")]  # fmt: skip
    assert len(biases) == 2 * 3 + 2 + 2
    assert not any(p.any() for p in biases)


def assert_is_its_transcription(model):
    source, given, wanted = batch()
    pairs = [(real(s), real(t)) for s, t in zip(source.tolist(), given.tolist(), strict=True)]
    exact = torch.cat([transcribed(model, *pair)[0] for pair in pairs])
    torch.testing.assert_close(model(source, given), exact)
    loss, nll = model.loss(source, given, wanted, 0.1)
    labels = torch.tensor([t for row in wanted.tolist() for t in real(row)])
    for value, smoothing in ((loss, 0.1), (nll, 0.0)):
        expected = torch.nn.functional.cross_entropy(
            exact, labels, reduction="sum", label_smoothing=smoothing
        )
        torch.testing.assert_close(value, expected)
    got = torch.autograd.grad(loss, list(model.parameters()))
    expected = torch.nn.functional.cross_entropy(
        exact, labels, reduction="sum", label_smoothing=0.1
    )
    for (name, _), a, b in zip(
        model.named_parameters(), got, torch.autograd.grad(expected, list(model.parameters())),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(a, b, msg=name)
        assert a.ne(0).any() or "peephole" in name, name


@pytest.mark.parametrize("attention", [True, False])
def test_step_by_step_is_the_whole(attention):
    source, given, _ = batch()
    assert_steps_equal_forward(make(attention), source, given)


@pytest.mark.parametrize("attention", [True, False])
def test_reordered_hypotheses(attention):
    assert_hypotheses_reorder(make(attention))


@pytest.mark.parametrize("attention", [True, False])
def test_a_source_of_padding_alone(attention):
    """Its context is 0, like that of an empty source, and the other sentences do not change."""
    model = make(attention)
    source, given, wanted = batch()
    source[1] = PAD
    logits, alone = model(source, given), model(source[[0, 2]], given[[0, 2]])
    torch.testing.assert_close(logits[[0, 1, 2, 3, 6, 7, 8]], alone)
    torch.testing.assert_close(logits[4:6], model(source[1:2, :0], given[1:2]))
    nothing = model.start(source[:1, :0])
    if attention:
        assert model.alignment(source, given)[1].eq(0).all()
    else:
        assert nothing.source.encoded.eq(0).all()
    state = model.start(source)
    for t in range(2):
        expected = model.step(given[1:2, t], nothing)[0]
        torch.testing.assert_close(model.step(given[:, t], state)[1], expected)
        torch.testing.assert_close(logits[4 + t], expected)
    model.loss(source, given, wanted)[0].backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("sizes", [(3, 0, 4), (3, 5, 0), (3, 0, 0), (0, 5, 4), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("attention", [True, False])
def test_no_sentence_and_no_position(attention, sizes):
    model = make(attention)
    B, S, T = sizes
    source, given, wanted = batch()
    source, given, wanted = source[:B, :S], given[:B, :T], wanted[:B, :T]
    assert model(source, given).shape == (given.ne(PAD).sum(), V)
    if attention:
        assert model.alignment(source, given).shape == (B, T, S)
    loss, nll = model.loss(source, given, wanted, 0.1)
    loss.backward()
    assert torch.isfinite(loss)
    assert bool(nll) == bool(given.numel())
    for name, p in model.named_parameters():
        assert p.grad is None or torch.isfinite(p.grad).all(), name


def test_alignment_is_the_attention():
    model = make()
    source, given, _ = batch()
    weights = model.alignment(source, given)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    for b in range(3):
        row, target = source[b].tolist(), real(given[b].tolist())
        kept = [s for s, token in enumerate(row) if token != PAD]
        exact = transcribed(model, real(row), target)[1]
        torch.testing.assert_close(weights[b, : len(target)][:, kept], exact)
    assert make(attention=False).alignment is None


@pytest.mark.parametrize("attention", [True, False])
def test_beam_search_runs_it(attention):
    model = make(attention, torch.float32)
    source, _, _ = batch()
    together = beam_search(model, source, DecodingOptions(beam=3, nbest=2, max_length=6))
    for row, hypotheses in zip(source, together, strict=True):
        alone = beam_search(model, row[None], DecodingOptions(beam=3, nbest=2, max_length=6))[0]
        assert [h.tokens for h in alone] == [h.tokens for h in hypotheses]


def test_starts_as_the_paper_says():
    torch.manual_seed(0)
    model = FastForwardLSTM(FastForwardLSTMConfig(vocab_size=50, dim=32, embedding_dim=16))
    for name, p in model.named_parameters():
        if name.endswith(("recurrent", "peephole")):
            assert not p.any(), name
        else:
            assert 0.05 < p[p != 0].std() < 0.09, name
    # 512 cells: c has 5120 channels, which attention reduces to 1280.
    assert model.quarter.weight.shape == (80, 320)
    assert (len(model.columns), len(model.columns[0]), len(model.decoder)) == (2, 9, 7)


def test_rates_and_decay():
    model = make()
    recurrent, others, words = model.parameter_groups()
    assert {p.shape for p in recurrent["params"]} == {(6, 24), (3, 6)}
    assert [g.get("lr_scale", 1) for g in (recurrent, others, words)] == [1, 0.08, 0.08]
    assert [g.get("decays", False) for g in (recurrent, others, words)] == [True, True, False]
    named = [id(p) for g in (recurrent, others, words) for p in g["params"]]
    assert sorted(named) == sorted(id(p) for p in model.parameters())


def test_dropout_falls_on_h_alone():
    """With h all zero, only f carries the source to the top and gradients to the bottom."""
    model = make(dropout=0.999999).train()
    source, given, wanted = batch()
    model.loss(source, given, wanted)[0].backward()
    assert model.source_embedding.weight.grad.ne(0).any()
    assert model.decoder[0].feed_forward.weight.grad.ne(0).any()


def test_sixteen_layers_learn():
    """Nine and seven layers learn with plain Adam."""
    torch.manual_seed(1)
    config = FastForwardLSTMConfig(vocab_size=V, dim=16, embedding_dim=8, dropout=0.0)
    model = FastForwardLSTM(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        loss, _ = model.loss(*batch())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_autocast():
    model = make(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = model.loss(*batch())
        state = model.start(batch()[0])
        for token in (BOS, 4):
            logits = model.step(torch.full((3,), token), state)
    loss.backward()
    assert torch.isfinite(logits).all()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def test_registered_by_its_kind():
    config = FastForwardLSTMConfig(vocab_size=V, **SIZES)
    assert kind_of(config) == "fast_forward_lstm"
    assert type(build(config)) is FastForwardLSTM


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 7}, "dim must be even, got 7"),
        ({"encoder_layers": 0}, "encoder_layers must be a whole number of at least 1, got 0"),
        ({"dropout": 1.0}, r"dropout must be a number in \[0, 1\), got 1.0"),
        ({"lr_scale": 0}, "lr_scale must be a number above 0, got 0"),
        ({"padding_idx": 20}, "padding_idx must be a whole number from 0 to 12, got 20"),
    ],
)
def test_bad_config_is_one_sentence(change, message):
    with pytest.raises(ValueError, match=message):
        FastForwardLSTMConfig(vocab_size=V, **(SIZES | change))
