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
from deepfast.mt.models import DepthGrowingConfig, TransformerConfig, build
from tests.mt.models.kinds import save

SIZES = {"vocab_size": 9, "dim": 8, "num_heads": 2, "ffn_dim": 8, "encoder_layers": 4,
         "decoder_layers": 2}  # fmt: skip
FUSED = {
    "encoder_fusion": "attention", "decoder_fusion": "channel_attention",
    "fusion": {"hops": 2, "attention_dim": 4, "hidden_dim": 4},
}  # fmt: skip
TEXT = "a small house"


@pytest.fixture(scope="module")
def vocabulary():
    text = ["a small house stands", "the old bridge is closed"] * 3
    return Vocabulary.train(text, 41, tags=["<de>"])


def make(config=TransformerConfig, **options):
    model = build(config(**SIZES | options)).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("dlcl.weight", "latent.logits", "residuals.query")):
                p.add_(torch.randn_like(p), alpha=0.5)
    return model


@pytest.fixture
def show(vocabulary, tmp_path, capsys):
    """show(model, words): what the command prints, and the picture that it draws."""

    def run(model, *words):
        picture = tmp_path / "a.svg"
        path = save(tmp_path / "model.pt", model, vocabulary.to_bytes())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert main(["mt", "show", path, *words, "--output", str(picture)]) == 0
        said = capsys.readouterr()
        assert not said.err
        assert said.out.endswith(f"drawn: {picture}\n")
        return said.out, picture.read_text("utf-8")

    return run


def test_small_weights_are_hidden():
    """Under 10% of their row's largest, and above the diagonal."""
    matrix = torch.tensor([[0.05, 7.0, 0.0], [0.2, -0.01, 0.0], [0.12, -4.0, 0.5]])
    assert list(weight_picture.SideWeights("encoder", matrix).rows()) == [
        ("1", "", "0 of 1", "7.05"),
        ("2", "0: 0.20", "1 of 2", "0.19"),
        ("output", "1: -4.00  2: 0.50", "2 of 3", "-3.38"),
    ]


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
    sides = weight_picture.weights_of(model)
    assert [side.name for side in sides] == [f"encoder{note}", f"decoder{note}"]
    for side, stack in zip(sides, (model.encoder, model.decoder), strict=True):
        applied = stack.connection.dlcl.effective_weight().detach()
        mean = applied.reshape(*applied.shape[:2], -1).mean(2)
        torch.testing.assert_close(side.matrix, mean)


def test_bottom_and_top_of_a_grown_model(show):
    model = make(
        DepthGrowingConfig, top_encoder_layers=3, top_decoder_connection="dlcl", vocab_size=41
    )
    sides = weight_picture.weights_of(model)
    assert [len(side.matrix) for side in sides] == [5, 3]
    bottom = model.bottom.encoder.connection.dlcl.effective_weight().detach()
    torch.testing.assert_close(sides[0].matrix, bottom)
    said, drawn = show(model)
    for name in ("bottom encoder", "top decoder"):
        assert f"Depth weights of the {name}" in said
        assert re.search(rf"{name}: \d+ of \d+ weights", drawn)


def test_attention_residuals_over_a_sample(show, vocabulary, tmp_path):
    model = make(vocab_size=41, encoder_connection="block_attnres", attnres_block=2,
                 decoder_connection="attnres")  # fmt: skip
    (tmp_path / "sample").write_text("a small house\n\nthe old bridge\n")
    said, drawn = show(model, "--sample", str(tmp_path / "sample"))
    for side in ("encoder", "decoder"):
        assert f"Depth weights of the {side}, mean attention of sublayers" in said
        assert f"{side}, mean attention of sublayers:" in drawn
    # Row by row the weights of a softmax; 0 outside the pattern.
    means = mean_attention(model, vocabulary, [TEXT, "the old bridge is"])
    for side in (model.encoder, model.decoder):
        residuals = side.connection.residuals
        mean = means[residuals]
        torch.testing.assert_close(mean.sum(1), torch.ones(residuals.rows))
        for row, reads in enumerate(residuals.pattern):
            assert [k for k in range(residuals.rows) if mean[row, k] > 0] == list(reads)


@pytest.mark.parametrize("encoder", ["dlcl", "latent"])
def test_the_choices_of_latent_depth(show, encoder):
    """They are those of evaluation."""
    languages = {"de": 4, "fr": 5}
    model = make(
        vocab_size=41, encoder_connection=encoder, decoder_connection="latent", decoder_layers=30,
        languages=languages, latent={"threshold": 0.3, "evaluation": "mean"},
    )  # fmt: skip
    side = weight_picture.choices_of(model)[-1]
    assert (side.name, side.languages, side.threshold) == ("decoder", ["de", "fr"], 0.3)
    torch.testing.assert_close(side.probability, model.decoder.latent.logits.detach().sigmoid())
    assert torch.equal(side.kept, side.probability >= 0.3)
    said, drawn = show(model)
    said = said.partition("drawn: ")[0]
    assert ("Layers of the encoder with" in said) == (encoder == "latent")
    assert ("Depth weights of the encoder" in said) == (encoder == "dlcl")
    assert said.count("Layers of the decoder with a probability of at least 0.3") == 1
    assert "decoder: choice of layers" in drawn
    for name, count in zip(languages, side.counts, strict=True):
        layers = re.findall(r"\d+", said.rpartition(f" {name} ")[2].partition(" fr ")[0])
        assert layers[0] == count.partition(" ")[0] == str(len(layers) - 2)
        assert f"{name}: {count}" in drawn


def test_hops_by_layers_by_words(show, vocabulary):
    model = make(vocab_size=41, **FUSED)
    said, drawn = show(model, TEXT)
    assert said.startswith("drawn: ")
    texts = re.findall(r">([^<>]+)</text>", drawn)
    assert texts.count("hop 1") == texts.count("hop 2") == 1
    assert "encoder: weight of each layer" in texts
    # Pieces in their order, the end of the sentence, and which of them begin a word.
    pieces = [*vocabulary.pieces(TEXT), "&lt;/s&gt;"]
    assert sum(piece.startswith(SPACE) for piece in pieces) == 3 < len(pieces) - 1
    assert [word for word in texts if word in pieces] == pieces
    # Letters that no font has stay.
    _, drawn = show(model, "\u0378 house $a_b$")
    assert "\u0378" in drawn
    assert ">$<" in drawn
    for words in ([f"<de> {TEXT}"], [TEXT, "--language", "de"]):
        assert "&lt;de&gt;" in show(model, *words)[1]
    _, drawn = show(model, TEXT, "--side", "decoder")
    assert "decoder: weight of each layer" in drawn
    assert "&lt;de&gt;" not in drawn
