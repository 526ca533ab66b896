"""`deepfast mt show`: depth weights, the choices of latent depth, and the weights of a fusion."""

import re
import warnings

import pytest
import torch

from deepfast.cli import main
from deepfast.measure import weight_picture
from deepfast.measure.depth_attention import mean_attention
from deepfast.mt.data import Vocabulary
from deepfast.mt.data.vocabulary import SPACE
from deepfast.mt.models import (
    DepthGrowing,
    DepthGrowingConfig,
    Transformer,
    TransformerConfig,
)

SIZES = {"vocab_size": 9, "dim": 8, "num_heads": 2, "ffn_dim": 8, "encoder_layers": 4,
         "decoder_layers": 2}  # fmt: skip


def make(**options):
    model = Transformer(TransformerConfig(**SIZES | options))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("dlcl.weight", "latent.logits")):
                p.add_(torch.randn_like(p), alpha=0.5)
    return model


def test_small_weights_are_hidden():
    """Under 10% of their row's largest, and above the diagonal."""
    matrix = torch.tensor([[0.05, 7.0, 0.0], [0.2, -0.01, 0.0], [0.12, -4.0, 0.5]])
    side = weight_picture.SideWeights("encoder", matrix)
    rows = list(side.rows())
    assert rows[0] == ("1", "", "0 of 1", "7.05")
    assert rows[1] == ("2", "0: 0.20", "1 of 2", "0.19")
    assert rows[2] == ("output", "1: -4.00  2: 0.50", "2 of 3", "-3.38")
    assert side.caption == "3 of 6 weights"


@pytest.mark.parametrize(
    ("dlcl", "note"),
    [
        ({"softmax": True}, ""),
        ({"weight_type": "vector"}, ", mean over 8 channels"),
        ({"weight_type": "group", "groups": 3}, ", mean over 8 channels in 3 groups"),
    ],
)
def test_the_weights_are_those_that_are_applied(dlcl, note):
    model = make(dlcl=dlcl, decoder_connection="dlcl")
    encoder, decoder = weight_picture.weights_of(model)
    assert (encoder.name, decoder.name) == (f"encoder{note}", f"decoder{note}")
    assert decoder.matrix.shape == (3, 3)
    applied = model.encoder.connection.dlcl.effective_weight().detach()
    torch.testing.assert_close(encoder.matrix, applied.reshape(5, 5, -1).mean(2))


def test_bottom_and_top_of_a_grown_model(save, tmp_path, capsys):
    tops = {"top_encoder_layers": 3, "top_decoder_connection": "dlcl"}
    model, picture = DepthGrowing(DepthGrowingConfig(**SIZES | tops)), tmp_path / "a.svg"
    sides = weight_picture.weights_of(model)
    assert [(side.name, len(side.matrix)) for side in sides] == [
        ("bottom encoder", 5), ("top decoder", 3),
    ]  # fmt: skip
    bottom = model.bottom.encoder.connection.dlcl.effective_weight().detach()
    torch.testing.assert_close(sides[0].matrix, bottom)
    assert main(["mt", "show", save(model), "--output", str(picture)]) == 0
    said, drawn = capsys.readouterr().out, picture.read_text()
    for name in ("bottom encoder", "top decoder"):
        assert f"Depth weights of the {name}" in said
        assert re.search(rf"{name}: \d+ of \d+ weights", drawn)


def test_attention_residuals_over_a_sample(save, tmp_path, capsys):
    vocabulary = Vocabulary.train(["a small house", "the old bridge"] * 3, 30)
    model = make(
        vocab_size=len(vocabulary), encoder_connection="block_attnres", attnres_block=2,
        decoder_connection="attnres",
    ).eval()  # fmt: skip
    with torch.no_grad():
        for side in (model.encoder, model.decoder):
            side.connection.residuals.query.normal_()
    sample, picture = tmp_path / "sample", tmp_path / "a.svg"
    sample.write_text("a small house\n\nthe old bridge\n")
    command = ["mt", "show", save(model, vocabulary.to_bytes())]
    assert main([*command, "--sample", str(sample), "--output", str(picture)]) == 0
    said = capsys.readouterr().out
    for side in ("encoder", "decoder"):
        assert f"Depth weights of the {side}, mean attention of sublayers" in said
    assert "encoder, mean attention of sublayers:" in picture.read_text()
    sample.write_text("\n")
    assert main([*command, "--sample", str(sample)]) == 1
    assert "expected sentences with words, got none" in capsys.readouterr().err
    # Row by row the weights of a softmax; 0 outside the pattern.
    means = mean_attention(model, vocabulary, ["a small house", "the old bridge is"])
    for side in (model.encoder, model.decoder):
        residuals = side.connection.residuals
        mean = means[residuals]
        torch.testing.assert_close(mean.sum(1), torch.ones(residuals.rows))
        for row, reads in enumerate(residuals.pattern):
            assert [k for k in range(residuals.rows) if mean[row, k] > 0] == list(reads)


# ---- latent depth --------------------------------------------------------------------------------


def test_choices_are_those_of_evaluation():
    model = make(
        decoder_connection="latent", decoder_layers=5, languages={"de": 4, "fr": 5},
        latent={"threshold": 0.3, "evaluation": "mean"},
    )  # fmt: skip
    logits = torch.tensor([[0.0, -3, 2, -0.8, -0.9], [-1, -1, -1, -1, 5.0]])
    with torch.no_grad():
        model.decoder.latent.logits.copy_(logits)
    (side,) = weight_picture.choices_of(model)
    assert (side.name, side.languages, side.threshold) == ("decoder", ["de", "fr"], 0.3)
    torch.testing.assert_close(side.probability, 1 / (1 + (-logits).exp()))
    assert torch.equal(side.kept, side.probability >= 0.3)
    assert side.kept.sum(1).tolist() == [3, 1]
    model.decoder.latent.logits.data[0, 2] = float("nan")
    with pytest.raises(ValueError, match="LatentDepth: logits must be numbers"):
        weight_picture.choices_of(model)


@pytest.mark.parametrize("encoder", ["dlcl", "latent"])
def test_choices_as_table_and_picture(save, tmp_path, capsys, encoder):
    languages = {"de": 1, "fr": 2}
    model = make(
        encoder_connection=encoder, decoder_connection="latent", decoder_layers=30,
        languages=languages,
    )  # fmt: skip
    sides = weight_picture.choices_of(model)
    picture = tmp_path / "a.svg"
    assert main(["mt", "show", save(model), "--output", str(picture)]) == 0
    said = capsys.readouterr().out.partition("drawn: ")[0]
    assert ("Layers of the encoder with" in said) == (encoder == "latent")
    assert ("Depth weights of the encoder" in said) == (encoder == "dlcl")
    assert said.count("Layers of the decoder with a probability of at least 0.5") == 1
    for name, count in zip(languages, sides[-1].counts, strict=True):
        layers = re.findall(r"\d+", said.rpartition(f" {name} ")[2].partition(" fr ")[0])
        assert layers[0] == count.partition(" ")[0] == str(len(layers) - 2)
    svg = picture.read_text()
    assert "decoder: choice of layers" in svg
    for name, count in zip(languages, sides[-1].counts, strict=True):
        assert f"{name}: {count}" in svg


# ---- a fusion of layers -------------------------------------------------------------------------

TEXT = "a small house"


VOCABULARY = Vocabulary.train(
    ["a small house stands", "the old bridge is closed"] * 3, 41, tags=["<de>"]
)


@pytest.fixture
def make_checkpoint(save):
    def make(**changes):
        config = TransformerConfig(
            vocab_size=len(VOCABULARY), dim=12, num_heads=2, ffn_dim=16, encoder_layers=3,
            decoder_layers=2, **changes,
        )  # fmt: skip
        return save(Transformer(config), VOCABULARY.to_bytes())

    return make


RESIDUAL = {"encoder_connection": "residual"}
FUSED = {
    "encoder_fusion": "attention", "decoder_fusion": "channel_attention",
    "fusion": {"hops": 2, "attention_dim": 4, "hidden_dim": 4},
}  # fmt: skip


def test_hops_by_layers_by_words(make_checkpoint, tmp_path, capsys):
    path = tmp_path / "layers.svg"
    words = [make_checkpoint(**FUSED), TEXT, "--output", str(path)]
    assert main(["mt", "show", *words]) == 0
    assert capsys.readouterr().out == f"drawn: {path}\n"
    said = re.findall(r">([^<>]+)</text>", path.read_text("utf-8"))
    # Letters of the pieces, and the end of the sentence.
    assert said.count("hop 1") == said.count("hop 2") == 1
    assert said.count("0") == said.count("3") == 2
    assert "encoder: weight of each layer" in said
    assert said.count("layer (0: the embedding)") == 1
    assert said.count(f"source ({SPACE} begins a word)") == 1
    # Pieces in their order, and which of them begin a word.
    pieces = [*VOCABULARY.pieces(TEXT), "&lt;/s&gt;"]
    assert sum(piece.startswith(SPACE) for piece in pieces) == 3 < len(pieces) - 1
    assert [word for word in said if word in pieces] == pieces


def test_letters_that_no_font_has_stay_in_the_picture(make_checkpoint, tmp_path, capsys):
    path, nowhere = tmp_path / "layers.svg", "\u0378"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        words = [make_checkpoint(**FUSED), f"{nowhere} house $a_b$", "--output", str(path)]
        assert main(["mt", "show", *words]) == 0
    assert not capsys.readouterr().err
    drawn = path.read_text("utf-8")
    assert nowhere in drawn
    assert ">$<" in drawn


@pytest.mark.parametrize(
    "arguments",
    [[f"<de> {TEXT}"], [TEXT, "--language", "de"], [TEXT, "--side", "decoder"]],
)
def test_a_language_and_the_decoder(make_checkpoint, tmp_path, arguments):
    path = tmp_path / "layers.svg"
    words = [make_checkpoint(**FUSED), *arguments, "--output", str(path)]
    assert main(["mt", "show", *words]) == 0
    drawn = path.read_text("utf-8")
    assert ("&lt;de&gt;" in drawn) == ("decoder" not in arguments)
    assert ("decoder: weight of each layer" in drawn) == ("decoder" in arguments)


@pytest.mark.parametrize(
    ("changes", "words", "sentence"),
    [
        (RESIDUAL, [], "with DLCL, attention residuals or latent depth in the encoder or the dec"),
        ({"encoder_connection": "attnres"}, [], "--sample: expected source sentences, over which"),
        ({}, ["--output=a.jpg"], "expected a file ending in .svg or .png"),
        (RESIDUAL, [TEXT], "expected a model with an encoder_fusion or a decoder_fusion"),
        (FUSED, ["  "], "TEXT: expected words, got none"),
        (FUSED, [TEXT, "--language", "it"], "expected a language of the checkpoint (de), got 'it'"),
        (FUSED | {"decoder_fusion": None}, [TEXT, "--side", "decoder"], "got None"),
    ],
)
def test_refused_with_a_sentence(make_checkpoint, capsys, changes, words, sentence):
    assert main(["mt", "show", make_checkpoint(**changes), *words]) == 1
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1
