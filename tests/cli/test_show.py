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
from tests.mt.models import kinds

TEXT = "a small house"


@pytest.fixture(scope="module")
def vocabulary():
    text = ["a small house stands", "the old bridge is closed"] * 3
    return Vocabulary.train(text, 41, tags=["<de>"])


def make(name="dlcl", **changes):
    return kinds.make(name, torch.float32, vocab_size=41, **changes)


@pytest.fixture
def show(vocabulary, tmp_path, capsys):
    """show(model, words): what the command prints, and the picture that it draws."""

    def run(model, *words):
        picture = tmp_path / "a.svg"
        path = kinds.save(tmp_path / "model.pt", model, vocabulary.to_bytes())
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
    ("name", "dlcl", "note"),
    [
        ("dlcl", {"softmax": True}, ""),
        ("dlcl", {"weight_type": "vector"}, ", mean over 12 channels"),
        ("dlcl", {"weight_type": "group", "groups": 3}, ", mean over 12 channels in 3 groups"),
        ("dlcl everywhere", {}, ""),
    ],
)
def test_the_weights_are_those_that_are_applied(show, name, dlcl, note):
    model = make(name, dlcl=dlcl)
    parts = {"bottom ": model.bottom, "top ": model} if hasattr(model, "bottom") else {"": model}
    stacks = {
        f"{part}{side}": getattr(parts[part], side)
        for part in parts
        for side in ("encoder", "decoder")
    }
    found = {side.name: side.matrix for side in weight_picture.weights_of(model)}
    assert [*found] == [name + note for name in stacks]
    said, drawn = show(model)
    for (name, matrix), stack in zip(found.items(), stacks.values(), strict=True):
        applied = stack.connection.dlcl.effective_weight().detach()
        mean = applied.reshape(*applied.shape[:2], -1).mean(2)
        torch.testing.assert_close(matrix, mean)
        assert f"Depth weights of the {name}" in said
        assert re.search(rf"{name}: \d+ of \d+ weights", drawn)


def test_attention_residuals_over_a_sample(show, vocabulary, tmp_path):
    model = make("block_attnres", decoder_connection="attnres")
    (tmp_path / "sample").write_text("a small house\n\nthe old bridge\n")
    said, _ = show(model, "--sample", str(tmp_path / "sample"))
    # Row by row the weights of a softmax; 0 outside the pattern.
    means = mean_attention(model, vocabulary, [TEXT, "the old bridge is"])
    for side in ("encoder", "decoder"):
        assert f"Depth weights of the {side}, mean attention of sublayers" in said
        residuals = getattr(model, side).connection.residuals
        mean = means[residuals]
        torch.testing.assert_close(mean.sum(1), torch.ones(residuals.rows))
        for row, reads in enumerate(residuals.pattern):
            assert [k for k in range(residuals.rows) if mean[row, k] > 0] == list(reads)


@pytest.mark.parametrize("encoder", ["dlcl", "latent"])
def test_the_choices_of_latent_depth(show, encoder):
    """They are those of evaluation."""
    latent = {"threshold": 0.3, "evaluation": "mean"}
    model = make("latent", encoder_connection=encoder, decoder_layers=30, latent=latent,
                 languages={"de": 4, "fr": 5})  # fmt: skip
    torch.nn.init.normal_(model.decoder.latent.logits, std=2)
    side = weight_picture.choices_of(model)[-1]
    probability = model.decoder.latent.logits.detach().sigmoid()
    torch.testing.assert_close(side.probability, probability)
    said = show(model)[0].partition("drawn: ")[0]
    assert ("Layers of the encoder with" in said) == (encoder == "latent")
    assert ("Depth weights of the encoder" in said) == (encoder == "dlcl")
    said = said.partition("Layers of the decoder with a probability of at least 0.3")[2]
    for name, row in zip(("de", "fr"), probability, strict=True):
        kept = [str(layer + 1) for layer in (row >= 0.3).nonzero()[:, 0].tolist()]
        count, total, *layers = re.findall(
            r"\d+", said.partition(f" {name} ")[2].partition(" fr ")[0]
        )
        assert (count, total, layers) == (str(len(kept)), "30", kept)


def test_hops_by_layers_by_words(show, vocabulary):
    model = make("attention fusion", decoder_fusion="channel_attention")
    # Pieces in their order, the end of the sentence, and which of them begin a word.
    pieces = [*vocabulary.pieces(TEXT), "&lt;/s&gt;"]
    assert sum(piece.startswith(SPACE) for piece in pieces) == 3 < len(pieces) - 1
    texts = re.findall(r">([^<>]+)</text>", show(model, TEXT)[1])
    assert {"hop 1", "hop 2", "encoder: weight of each layer"} < {*texts}
    assert [word for word in texts if word in pieces] == pieces
    # Letters that no font has stay.
    _, drawn = show(model, "\u0378 house $a_b$", "--language", "de")
    assert all(text in drawn for text in ("\u0378", ">$<", "&lt;de&gt;"))
    _, drawn = show(model, TEXT, "--side", "decoder")
    assert "decoder: weight of each layer" in drawn
    assert "&lt;de&gt;" not in drawn
