"""Arguments that layers and stacks refuse, with one sentence each."""

import pytest
import torch

from deepfast.nn import (
    MultiheadAttention,
    Packing,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)

DIM, HEADS, FFN = 8, 2, 16
X, ENCODED = torch.randn(2, 3, DIM), torch.randn(2, 4, DIM)
RIGHT = torch.tensor([[0, 0, 0], [0, 1, 1]]).bool()
LEFT = RIGHT.flip(1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dlcl": ["window"]}, r"dlcl must be a dict, got \['window'\]"),
        ({"connection": "latent", "latent": 3}, "latent must be a dict, got 3"),
        ({"latent": {"tau": 2.0}}, "latent options need connection='latent', got 'dlcl'"),
    ],
)
@pytest.mark.parametrize("kind", [TransformerEncoder, TransformerDecoder])
def test_options_of_a_connection(kind, options, message):
    with pytest.raises(ValueError, match=f"^{kind.__name__}: {message}"):
        kind(1, DIM, HEADS, FFN, **options)


def test_packed_tokens_are_those_of_the_packing():
    encoder, decoder = encoders()[0], decoders()[0]
    short, packing = torch.randn(5, DIM), Packing(2, 3)
    message = rf"must be \(6, {DIM}\), got \(5, {DIM}\)"
    with pytest.raises(ValueError, match=f"TransformerEncoder: x {message}"):
        encoder.forward_packed(short, packing)
    with pytest.raises(ValueError, match=f"TransformerDecoder: x {message}"):
        decoder.forward_packed(short, packing, X.flatten(0, 1), packing)
    for encoded in (short, [short]):
        with pytest.raises(ValueError, match=f"TransformerDecoder: encoded {message}"):
            decoder.start(encoded, packing)
    cache = decoder.start(X.flatten(0, 1), packing)
    with pytest.raises(ValueError, match=rf"TransformerDecoder: x must be \(2, {DIM}\), got"):
        decoder.step(torch.randn(1, DIM), cache)


@pytest.mark.parametrize("flag", ["first_norm", "later_norms"])
def test_a_layer_refuses_a_flag_that_is_none(flag):
    with pytest.raises(ValueError, match=f"TransformerEncoderLayer: {flag} must be True or False"):
        TransformerEncoderLayer(DIM, HEADS, FFN, **{flag: 0})


def encoders():
    return TransformerEncoder(1, DIM, HEADS, FFN), TransformerEncoderLayer(DIM, HEADS, FFN)


def decoders(**options):
    sizes = DIM, HEADS, FFN
    return TransformerDecoder(1, *sizes, **options), TransformerDecoderLayer(*sizes, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 0, "heads": 1}, "dim must be a whole number of at least 1, got 0"),
        ({"heads": 0}, "heads must be a whole number of at least 1, got 0"),
        ({"heads": 3}, "heads must divide dim 8, got 3"),
        ({"dropout": 2.0}, "dropout must be between 0 and 1, got 2.0"),
        ({"num_kv_heads": 0}, "num_kv_heads must be a whole number of at least 1, got 0"),
        ({"num_kv_heads": 4}, "num_kv_heads must divide heads 2, got 4"),
        ({"window": "wide"}, "window must be None, a whole number .*, got 'wide'"),
        ({"window": (1, -2)}, r"window must be None, a whole number .*, got \(1, -2\)"),
        ({"window": 3, "cross": True}, "window must be None where cross is True, got 3"),
    ],
)
def test_attention_refuses_options(options, message):
    with pytest.raises(ValueError, match=f"MultiheadAttention: {message}"):
        MultiheadAttention(**{"dim": DIM, "heads": HEADS} | options)


@pytest.mark.parametrize("kind", [TransformerEncoderLayer, TransformerDecoderLayer])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": 5.0}, "dropout must be between 0 and 1, got 5.0"),
        ({"attention_dropout": "a"}, "attention_dropout must be between 0 and 1, got 'a'"),
        ({"ffn_dim": 1.5}, "ffn_dim must be a whole number of at least 1, got 1.5"),
    ],
)
def test_layers_refuse_options(kind, options, message):
    with pytest.raises(ValueError, match=f"{kind.__name__}: {message}"):
        kind(**{"dim": DIM, "heads": HEADS, "ffn_dim": FFN} | options)


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((X[0],), ValueError, r"x must be \(B, S, 8\), got \(3, 8\)"),
        ((ENCODED[..., :7],), ValueError, r"x must be \(B, S, 8\), got \(2, 4, 7\)"),
        (([1.0],), TypeError, "x must be a tensor, got list"),
        ((X, [[0]]), TypeError, "key_padding_mask must be a tensor or None, got list"),
        ((X, RIGHT[:1]), ValueError, r"key_padding_mask must be bool \(2, 3\), got"),
    ],
)
def test_encoders_refuse(args, error, message):
    for m in encoders():
        with pytest.raises(error, match=f"{type(m).__name__}: {message}"):
            m(*args)


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((X[0], ENCODED), ValueError, r"x must be \(B, S, 8\), got \(3, 8\)"),
        ((X, ENCODED[0]), ValueError, r"encoded must be \(B, S, 8\), got \(4, 8\)"),
        ((X, ENCODED[..., :7]), ValueError, r"encoded must be \(B, S, 8\), got \(2, 4, 7\)"),
        ((X, ENCODED[:1]), ValueError, "encoded must have x's batch size 2, got 1"),
        ((X, None), TypeError, "encoded must be a tensor, got NoneType"),
        ((X, ENCODED, None, RIGHT), ValueError, r"encoded_key_padding_mask must be bool \(2, 4\)"),
        ((X, ENCODED, LEFT), ValueError, "padding of x must be on the right.*in sentence 1"),
        (
            (X, ENCODED, RIGHT.roll(1, 1)),
            ValueError,
            "padding of x must be on the right.*in sentence 1",
        ),
    ],
)
def test_decoders_refuse(args, error, message):
    for m in decoders():
        with pytest.raises(error, match=f"{type(m).__name__}: .*{message}"):
            m(*args)


def test_padding_on_the_right_and_of_whole_sentences_is_taken():
    """The tokens get what they get without it; the encoder's output may be padded anywhere."""
    whole = torch.tensor([[1, 1, 1], [0, 1, 1]]).bool()
    left = torch.tensor([[0, 0, 0, 0], [1, 1, 0, 0]]).bool()
    for m in decoders(dropout=0.0):
        for padding in (RIGHT, whole):
            out = m(X, ENCODED, padding, left)
            torch.testing.assert_close(out[1:, :1], m(X[1:, :1], ENCODED[1:, 2:]))
