"""The whole model: its config, decoding step by step, padding, and parameter counts."""

import math

import pytest
import torch
import torch.nn.functional as F

from deepfast.mt.models import (
    Transformer,
    TransformerConfig,
    base,
    big,
)
from deepfast.mt.models.transformer import sinusoids
from deepfast.nn import LayerNorm, RMSNorm
from tests.mt.models.decoding import (
    NEAR,
    SOURCE,
    TARGET,
    assert_close,
    assert_hypotheses_reorder,
    assert_steps_equal_forward,
)

SIZES = {"dim": 16, "heads": 2, "ffn_dim": 24, "encoder_layers": 3, "decoder_layers": 2}

VARIANTS = pytest.mark.parametrize(
    ("norm", "encoder", "decoder", "dlcl"),
    [
        ("pre", "dlcl", "dlcl", {}),
        ("post", "dlcl", "dlcl", {}),
        ("pre", "residual", "residual", {}),
        ("post", "residual", "residual", {}),
        ("pre", "dlcl", "residual", {"weight": "vector", "init": "one", "window": 2}),
        ("post", "residual", "dlcl", {"weight": "group", "groups": 3, "softmax": True}),
    ],
)


def build(norm="pre", encoder="dlcl", decoder="residual", dlcl=None, **changes):
    """A small model. Its parameters are moved from initial values that could hide a mistake."""
    config = TransformerConfig(
        vocab_size=11,
        norm=norm,
        encoder_connection=encoder,
        decoder_connection=decoder,
        dlcl=dlcl or {},
        **SIZES | changes,
    )
    model = Transformer(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
        model.embedding.weight[0].zero_()
    return model.eval()


def left_padded(tokens):
    return torch.stack([torch.cat((row[row == 0], row[row != 0])) for row in tokens])


@VARIANTS
def test_decoding_step_by_step_equals_forward(norm, encoder, decoder, dlcl):
    assert_steps_equal_forward(build(norm, encoder, decoder, dlcl), **NEAR)


@VARIANTS
def test_reordered_hypotheses(norm, encoder, decoder, dlcl):
    assert_hypotheses_reorder(build(norm, encoder, decoder, dlcl), **NEAR)


@VARIANTS
def test_padding_changes_nothing(norm, encoder, decoder, dlcl):
    model = build(norm, encoder, decoder, dlcl)
    more = lambda tokens: F.pad(tokens, (0, 3))  # noqa: E731
    with torch.no_grad():
        expected = model(SOURCE, TARGET)
        assert expected.shape == ((TARGET != 0).sum(), 11)
        assert_close(model(more(SOURCE), TARGET), expected)
        assert_close(model(SOURCE, more(TARGET)), expected)
        assert_close(model(left_padded(SOURCE), TARGET), expected)
        assert_close(model(left_padded(more(SOURCE)), more(TARGET)), expected)
        alone = [
            model(source[source != 0][None], target[target != 0][None])
            for source, target in zip(SOURCE, TARGET, strict=True)
        ]
        assert_close(torch.cat(alone), expected)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_rms_norms(norm):
    """All norms are RMS norms, those inside the mixture too."""
    model = build(norm, norm_kind="rms")
    assert "RMS norm" in model.describe()
    assert model.encoder.connection.dlcl.norm_kind == "rms"
    assert not any(type(module) is LayerNorm for module in model.modules())
    norms = [module for module in model.modules() if type(module) is RMSNorm]
    layers = 3 * 2 + 2 * 3
    # In pre-norm each stack has one more, after its last layer.
    assert len(norms) == layers + (2 if norm == "pre" else 0)
    assert_steps_equal_forward(model, **NEAR)
    F.cross_entropy(model(SOURCE, TARGET), TARGET[TARGET != 0]).backward()
    assert all(module.weight.grad.abs().sum() > 0 for module in norms)


def test_padding_does_not_change_gradients():
    model = build("pre", "dlcl", "dlcl").train()
    for module in model.modules():
        if hasattr(module, "dropout"):
            module.dropout = 0.0
    model.config.dropout = 0.0
    gradients = []
    for source in (SOURCE, left_padded(F.pad(SOURCE, (0, 2)))):
        model.zero_grad()
        F.cross_entropy(model(source, TARGET), TARGET[TARGET != 0]).backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-3, atol=1e-5, msg=name)


def test_the_future_is_not_seen():
    model = build("pre", "dlcl", "dlcl")
    changed = TARGET.clone()
    changed[0, 3] = 10
    with torch.no_grad():
        before, after = model(SOURCE, TARGET), model(SOURCE, changed)
    assert torch.equal(before[:3], after[:3])
    assert not torch.allclose(before[3], after[3])


def test_embedding_is_tied():
    model = build()
    assert sum("embed" in name for name, _ in model.named_parameters()) == 1
    model(SOURCE, TARGET).square().sum().backward()
    tied = model.embedding.weight.grad.clone()
    model.zero_grad()
    # The gradient of the shared matrix is the sum over its two uses.
    output = model.embedding.weight.detach().clone().requires_grad_()
    model.project = lambda x: F.linear(x, output)
    model(SOURCE, TARGET).square().sum().backward()
    assert_close(model.embedding.weight.grad + output.grad, tied)
    assert output.grad.abs().sum() > 0
    assert model.embedding.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("share", "names"),
    [("decoder", ["embedding", "target_embedding"]),
     ("none", ["embedding", "output", "target_embedding"])],
)  # fmt: skip
def test_embeddings_that_are_not_shared(share, names):
    model = build(share_embeddings=share, target_vocab_size=13, first_position=2)
    found = {name.partition(".")[0] for name, _ in model.named_parameters()}
    assert sorted(found - {"encoder", "decoder"}) == names
    assert model.embedding.weight.shape == (11, 16)
    loss, _ = model.loss(SOURCE, TARGET + 2 * (TARGET > 8), TARGET)
    logits = model(SOURCE, TARGET + 2 * (TARGET > 8))
    assert logits.shape == (9, 13)
    assert_close(loss, F.cross_entropy(logits, TARGET[TARGET != 0], reduction="sum"))
    loss.backward()
    assert all(p.grad.abs().sum() > 0 for p in model.parameters() if p.dim() == 2)
    with torch.no_grad():
        state = model.start(SOURCE)
        for position in range(2):
            step = model.step(TARGET[:, position], state)
        rows = model(SOURCE[:1], TARGET[:1])
    assert_close(step[0], rows[1])


def test_the_first_position_shifts_the_sinusoids():
    shifted, plain = build(first_position=2), build()
    plain.load_state_dict(shifted.state_dict())
    seen = []
    for model in (shifted, plain):
        model.embedding.weight.data.zero_()
        hook = model.encoder.connection.register_forward_pre_hook(lambda _, a: seen.append(a[0]))
        model.encode(SOURCE[:1])
        hook.remove()
    assert_close(seen[0], sinusoids(torch.arange(2, 7), 16))
    assert_close(seen[1], sinusoids(torch.arange(5), 16))


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.6])
def test_loss_is_torchs_on_the_logits(smoothing):
    model = build()
    labels = torch.tensor([[9, 5, 6, 3], [4, 3, 0, 0], [8, 7, 3, 0]])
    loss, nll = model.loss(SOURCE, TARGET, labels, smoothing)
    loss.backward()
    got = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    logits, real = model(SOURCE, TARGET), labels[TARGET != 0]
    expected = F.cross_entropy(logits, real, label_smoothing=smoothing, reduction="sum")
    expected.backward()
    assert_close(loss, expected)
    assert_close(nll, F.cross_entropy(logits, real, reduction="sum").detach())
    assert not nll.requires_grad
    for name, p in model.named_parameters():
        torch.testing.assert_close(got[name], p.grad, rtol=1e-3, atol=1e-4, msg=name)


def test_loss_under_autocast():
    """The same as on logits in bf16; parameters and gradients stay in fp32."""
    model = build()
    with torch.autocast("cpu", torch.bfloat16):
        loss, nll = model.loss(SOURCE, TARGET, TARGET, 0.1)
        logits = model(SOURCE, TARGET).float()
    assert loss.dtype == nll.dtype == torch.float32
    expected = F.cross_entropy(logits, TARGET[TARGET != 0], label_smoothing=0.1, reduction="sum")
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    loss.backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_init_of_the_embedding():
    model = Transformer(TransformerConfig(vocab_size=400, padding_idx=1, **SIZES))
    weight = model.embedding.weight.detach()
    assert not weight[1].any()
    assert float(weight[2:].std()) == pytest.approx(16**-0.5, rel=0.05)


def test_sinusoids():
    table = sinusoids(torch.arange(50), 16)
    assert table.shape == (50, 16)
    assert table.dtype == torch.float32
    for position, i in ((0, 0), (7, 0), (7, 3), (49, 7)):
        angle = position * 10000 ** (-i / 7)
        assert float(table[position, i]) == pytest.approx(math.sin(angle), abs=1e-4)
        assert float(table[position, 8 + i]) == pytest.approx(math.cos(angle), abs=1e-4)
    assert sinusoids(torch.arange(3), 2).isfinite().all()


@VARIANTS
def test_state_dict_round_trip(norm, encoder, decoder, dlcl, tmp_path):
    model = build(norm, encoder, decoder, dlcl)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    again = Transformer(model.config).eval()
    again.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    with torch.no_grad():
        assert torch.equal(again(SOURCE, TARGET), model(SOURCE, TARGET))


def expected_parameters(c):
    """By formula, for scalar DLCL."""
    d, f = c.dim, c.ffn_dim
    attention, norm = 4 * d * d + 4 * d, 2 * d
    feed_forward = 2 * d * f + f + d
    pre = c.norm == "pre"
    stacks = 0
    for layers, branches, connection in (
        (c.encoder_layers, 1, c.encoder_connection),
        (c.decoder_layers, 2, c.decoder_connection),
    ):
        # Each branch has an LN; in pre-norm there is a final one too.
        stacks += layers * (branches * attention + feed_forward + (branches + 1) * norm)
        stacks += norm if pre else 0
        if connection == "dlcl":
            stacks += (layers + 1) * (layers + 1 + norm)
    return c.vocab_size * d + stacks


@pytest.mark.parametrize("size", [base, big])
@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("connection", ["dlcl", "residual"])
def test_parameter_counts(size, norm, connection):
    config = size(32_000, norm=norm, encoder_layers=30, encoder_connection=connection)
    with torch.device("meta"):
        model = Transformer(config)
    assert sum(p.numel() for p in model.parameters()) == expected_parameters(config)


def test_sizes_of_the_paper():
    assert (base(9).dim, base(9).heads, base(9).ffn_dim, base(9).dropout) == (512, 8, 2048, 0.1)
    assert (big(9).dim, big(9).heads, big(9).ffn_dim, big(9).dropout) == (1024, 16, 4096, 0.3)
    changed = big(9, dim=256, dropout=0.0)
    assert (changed.vocab_size, changed.dim, changed.heads, changed.dropout) == (9, 256, 16, 0.0)
    # Vaswani et al. 2017, table 3: 65 million with a shared vocabulary of 37,000.
    with torch.device("meta"):
        vaswani = Transformer(base(37_000, norm="post", encoder_connection="residual"))
    assert sum(p.numel() for p in vaswani.parameters()) / 1e6 == pytest.approx(63.1, abs=0.1)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"vocab_size": 0}, "vocab_size must be a whole number of at least 1, got 0"),
        ({"encoder_layers": 0}, "encoder_layers must be a whole number of at least 1, got 0"),
        ({"decoder_layers": 2.5}, "decoder_layers must be a whole number of at least 1, got 2.5"),
        ({"heads": True}, "heads must be a whole number of at least 1, got True"),
        ({"dim": 18, "heads": 4}, "dim must be an even multiple of heads 4, got 18"),
        ({"dim": 15, "heads": 3}, "dim must be an even multiple of heads 3, got 15"),
        ({"dropout": 1.0}, r"dropout must be a number in \[0, 1\), got 1.0"),
        ({"attention_dropout": -0.1}, r"attention_dropout must be a number in \[0, 1\)"),
        ({"activation_dropout": "x"}, r"activation_dropout must be a number in \[0, 1\)"),
        ({"dropout": math.nan}, r"dropout must be a number in \[0, 1\), got nan"),
        ({"norm": "mid"}, "norm must be one of pre, post, got 'mid'"),
        ({"activation": "tanh"}, "activation must be one of relu, gelu, got 'tanh'"),
        ({"encoder_connection": "dense"}, "encoder_connection must be one of dlcl, residual"),
        ({"decoder_connection": None}, "decoder_connection must be one of dlcl, residual"),
        ({"share_embeddings": "some"}, "share_embeddings must be one of all, decoder, none"),
        ({"target_vocab_size": 12}, "target_vocab_size must be the source's 11 where share_emb"),
        ({"target_vocab_size": 0}, "target_vocab_size must be a whole number of at least 1"),
        ({"dlcl": {"window": 2.5}}, "dlcl: window must be a whole number of at least 1, got 2.5"),
        ({"dlcl": {1: 2, "a": 3}}, "dlcl must have keys among .*, got 1, a"),
        ({"first_position": -1}, "first_position must be a whole number of at least 0, got -1"),
    ],
)
def test_config_refuses(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        TransformerConfig(**{"vocab_size": 11} | SIZES | changes)


def test_model_refuses_what_its_parts_refuse():
    with pytest.raises(TypeError, match="takes 1 positional argument"):
        TransformerConfig(11)
    with pytest.raises(ValueError, match="weight must be one of"):
        build(dlcl={"weight": "matrix"})
    with pytest.raises(ValueError, match=r"dlcl must have keys among .*weight.*, got wieght"):
        build(dlcl={"wieght": "scalar"})
    with pytest.raises(ValueError, match="dlcl needs a side with connection 'dlcl'"):
        TransformerConfig(vocab_size=11, encoder_connection="residual", dlcl={"window": 2})
    with pytest.raises(ValueError, match="padding_idx must be a whole number from 0 to 10"):
        TransformerConfig(vocab_size=11, padding_idx=11)
