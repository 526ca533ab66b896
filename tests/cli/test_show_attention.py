"""`deepfast mt show-attention`, as a user calls it."""

import re
import warnings

import pytest

from deepfast.cli import main
from deepfast.mt.data import Vocabulary
from deepfast.mt.data.vocabulary import SPACE
from deepfast.mt.models import Transformer, TransformerConfig

TEXT = "a small house"


@pytest.fixture
def vocabulary():
    texts = ["a small house stands", "the old bridge is closed"]
    return Vocabulary.train(texts * 3, 41, tags=["<de>"])


@pytest.fixture
def make_checkpoint(save, vocabulary):
    def make(**changes):
        config = TransformerConfig(
            vocab_size=len(vocabulary), dim=12, num_heads=2, ffn_dim=16, encoder_layers=3,
            decoder_layers=2, **changes,
        )  # fmt: skip
        return save(Transformer(config), vocabulary.to_bytes())

    return make


FUSED = {
    "encoder_fusion": "attention", "decoder_fusion": "channel_attention",
    "fusion": {"hops": 2, "attention_dim": 4, "hidden_dim": 4},
}  # fmt: skip


def test_hops_by_layers_by_words(make_checkpoint, vocabulary, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "layers.svg"
    words = [make_checkpoint(**FUSED), TEXT, "--output", str(path)]
    assert main(["mt", "show-attention", *words]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    said = re.findall(r">([^<>]+)</text>", path.read_text("utf-8"))
    # Letters of the pieces, and the end of the sentence.
    assert said.count("hop 1") == said.count("hop 2") == 1
    assert said.count("0") == said.count("3") == 2
    assert "encoder: weight of each layer" in said
    assert said.count("layer (0: the embedding)") == 1
    assert said.count(f"source ({SPACE} begins a word)") == 1
    # Pieces in their order, and which of them begin a word.
    pieces = [*vocabulary.pieces(TEXT), "&lt;/s&gt;"]
    assert sum(piece.startswith(SPACE) for piece in pieces) == 3 < len(pieces) - 1
    assert [word for word in said if word in pieces] == pieces


# The first is no character, so no font has it. The second is in a font of symbols.
NOWHERE, SYMBOL = "\u0378", "\u2315"


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_characters_that_no_font_has(make_checkpoint, tmp_path, capsys, ending):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"layers.{ending}"
    arguments = [f"{NOWHERE} house {SYMBOL} $a_b$", "--output", str(path)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main(["mt", "show-attention", make_checkpoint(**FUSED), *arguments]) == 0
    how = "left to the viewer's fonts" if ending == "svg" else "shown as codes"
    said = capsys.readouterr().err
    assert said == f"deepfast mt show-attention: no font here has {NOWHERE}: {how}\n"
    if ending == "svg":
        drawn = path.read_text("utf-8")
        assert all(character in drawn for character in (NOWHERE, SYMBOL, ">$<"))


@pytest.mark.parametrize(
    "arguments",
    [[f"<de> {TEXT}"], [TEXT, "--language", "de"], [TEXT, "--side", "decoder"],
     [TEXT, "--side", "decoder", "--translation", "the old bridge"]],
)  # fmt: skip
def test_a_language_and_the_decoder(make_checkpoint, tmp_path, arguments):
    pytest.importorskip("matplotlib")
    path = tmp_path / "layers.svg"
    words = [make_checkpoint(**FUSED), *arguments, "--output", str(path)]
    assert main(["mt", "show-attention", *words]) == 0
    drawn = path.read_text("utf-8")
    assert ("&lt;de&gt;" in drawn) == ("decoder" not in arguments)
    assert ("decoder: weight of each layer" in drawn) == ("decoder" in arguments)


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({}, [TEXT], "expected a model with an encoder_fusion or a decoder_fusion"),
        (FUSED, [TEXT, "--output", "x.pdf"], "ending in .svg or .png, got x.pdf"),
        (FUSED, ["  "], "TEXT: expected words, got none"),
        (FUSED, [TEXT, "--language", "it"], "expected a language of the checkpoint (de), got 'it'"),
        (FUSED, [TEXT, "--translation", "x"], "--translation: expected the decoder"),
        (FUSED | {"decoder_fusion": None}, [TEXT, "--side", "decoder"], "got None"),
    ],
)
def test_refuses_with_a_sentence(make_checkpoint, capsys, changes, arguments, message):
    pytest.importorskip("matplotlib")
    assert main(["mt", "show-attention", make_checkpoint(**changes), *arguments]) == 1
    assert message in capsys.readouterr().err
