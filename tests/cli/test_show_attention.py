"""`deepfast show-attention`, as a user calls it."""

import re

import pytest
import torch

from deepfast.cli import main
from deepfast.data import Vocabulary
from deepfast.models import Transformer, TransformerConfig

TEXT = "a small house"


@pytest.fixture(scope="module")
def make_checkpoint(tmp_path_factory):
    vocabulary = Vocabulary.train(
        ["a small house stands", "the old bridge is closed"] * 3, 41, tags=["<de>"]
    )

    def make(**changes):
        config = TransformerConfig(
            vocab_size=len(vocabulary), dim=12, heads=2, ffn_dim=16, encoder_layers=3,
            decoder_layers=2, **changes,
        )  # fmt: skip
        path = tmp_path_factory.mktemp("checkpoint") / "model.pt"
        torch.save(
            {
                "format": "deepfast-checkpoint", "version": 1, "config": vars(config),
                "model": Transformer(config).state_dict(), "vocabulary": vocabulary.to_bytes(),
            },
            path,
        )  # fmt: skip
        return str(path)

    return make


FUSED = {
    "encoder_fusion": "attention", "decoder_fusion": "channel_attention",
    "fusion": {"hops": 2, "attention_dim": 4, "hidden_dim": 4},
}  # fmt: skip


def test_hops_by_layers_by_words(make_checkpoint, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "layers.svg"
    assert main(["show-attention", make_checkpoint(**FUSED), TEXT, "--output", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    said = re.findall(r">([^<>]+)</text>", path.read_text("utf-8"))
    # Letters of the pieces, and the end of the sentence.
    assert said.count("hop 1") == said.count("hop 2") == 1
    assert said.count("emb") == said.count("3") == 2
    assert "&lt;/s&gt;" in said
    assert "encoder: weight of each layer" in said


@pytest.mark.parametrize("arguments", [[f"<de> {TEXT}"], [TEXT, "--language", "de"]])
def test_a_language(make_checkpoint, tmp_path, arguments):
    pytest.importorskip("matplotlib")
    path = tmp_path / "layers.svg"
    assert (
        main(["show-attention", make_checkpoint(**FUSED), *arguments, "--output", str(path)]) == 0
    )
    assert path.read_text("utf-8").count("&lt;de&gt;") >= 1


@pytest.mark.parametrize("more", [[], ["--translation", "the old bridge"]])
def test_the_decoder_along_a_translation(make_checkpoint, tmp_path, more):
    pytest.importorskip("matplotlib")
    path = tmp_path / "layers.png"
    arguments = [TEXT, "--side", "decoder", "--output", str(path), *more]
    assert main(["show-attention", make_checkpoint(**FUSED), *arguments]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({}, [TEXT], "expected a model with an encoder_fusion or a decoder_fusion"),
        (FUSED, [TEXT, "--output", "x.pdf"], "ending in .svg or .png, got 'x.pdf'"),
        (FUSED, ["  "], "TEXT: expected words, got none"),
        (FUSED, [TEXT, "--language", "it"], "expected a language of the checkpoint (de), got 'it'"),
        (FUSED, [TEXT, "--translation", "x"], "--translation: expected with the decoder"),
        (FUSED | {"decoder_fusion": None}, [TEXT, "--side", "decoder"], "got None"),
    ],
)
def test_refuses_with_a_sentence(make_checkpoint, capsys, changes, arguments, message):
    pytest.importorskip("matplotlib")
    assert main(["show-attention", make_checkpoint(**changes), *arguments]) == 1
    assert message in capsys.readouterr().err
