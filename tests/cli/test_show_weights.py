"""`deepfast show-weights`: what is small is left out, and what is drawn is W as it is applied."""

import re

import pytest
import torch

from deepfast.cli import main
from deepfast.models import DepthGrowing, DepthGrowingConfig, Transformer, TransformerConfig
from deepfast.profiling import weight_picture
from deepfast.training.checkpoint import save_checkpoint


@pytest.fixture
def save(tmp_path):
    """``save(**config)`` writes a checkpoint with weights of its own; returns model and path."""

    def make(**options):
        sizes = {"dim": 8, "heads": 2, "ffn_dim": 8, "encoder_layers": 4, "decoder_layers": 2}
        config = TransformerConfig(vocab_size=9, **sizes | options)
        model = Transformer(config)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name.endswith("dlcl.weight"):
                    p.add_(torch.randn_like(p), alpha=0.5)
        path = tmp_path / "model.pt"
        save_checkpoint(path, {"config": vars(config), "model": model.state_dict(),
                               "vocabulary": b"none"})  # fmt: skip
        return model, path

    return make


def test_small_weights_are_hidden():
    matrix = torch.tensor([[0.05, 7.0, 0.0], [0.2, -0.11, 0.0], [0.12, -4.0, 0.3]])
    side = weight_picture.SideWeights("encoder", matrix, "")
    # Under 0.1, above the diagonal, and under 5% of a row's largest.
    want = torch.tensor([[1, 1, 1], [0, 0, 1], [1, 0, 0]]).bool()
    assert torch.equal(side.hidden, want)
    rows = list(weight_picture.rows_of(side))
    assert rows[1] == ("2", "0: 0.20  1: -0.11", "2 of 2", "0.09")
    assert rows[2] == ("output", "1: -4.00  2: 0.30", "2 of 3", "-3.58")


@pytest.mark.parametrize(
    ("dlcl", "title"),
    [
        ({"window": 2}, "encoder"),
        ({"softmax": True}, "encoder"),
        ({"weight": "vector"}, "encoder, mean over 8 channels"),
        ({"weight": "group", "groups": 3}, "encoder, mean over 8 channels in 3 groups"),
    ],
)
def test_the_weights_are_those_that_are_applied(save, dlcl, title):
    model, _ = save(dlcl=dlcl, decoder_connection="dlcl")
    encoder, decoder = weight_picture.weights_of(model)
    assert (encoder.title, decoder.name, decoder.matrix.shape) == (title, "decoder", (3, 3))
    weight = model.encoder.connection.dlcl.weight.detach()
    if "window" in dlcl:
        expected = weight.tril() - weight.tril(-2)
    elif "softmax" in dlcl:
        expected = torch.stack([
            torch.cat((row[: i + 1].softmax(0), torch.zeros(4 - i))) for i, row in enumerate(weight)
        ])  # fmt: skip
    else:
        channels = torch.arange(8) % weight.shape[2]
        expected = weight[..., channels].mean(2).tril()
    torch.testing.assert_close(encoder.matrix, expected)


def test_table_and_picture(save, tmp_path, capsys):
    _, path = save(decoder_connection="denseformer")
    pictures = [tmp_path / name for name in ("a.svg", "b.svg", "c.png")]
    for picture in pictures:
        assert main(["show-weights", str(path), "--output", str(picture)]) == 0
    said = capsys.readouterr().out
    assert said.count("Depth weights of the encoder") == 3
    assert said.count("Depth weights of the decoder") == 3
    svg = pictures[0].read_text()
    assert svg == pictures[1].read_text()
    assert re.search(r"encoder: \d+ of 15 weights", svg)
    assert re.search(r"decoder: \d of 6 weights", svg)
    assert pictures[2].read_bytes().startswith(b"\x89PNG")


def test_bottom_and_top_of_a_grown_model(tmp_path, capsys):
    config = DepthGrowingConfig(
        vocab_size=9, dim=8, heads=2, ffn_dim=8, encoder_layers=4, decoder_layers=2,
        top_encoder_layers=3, top_decoder_connection="dlcl",
    )  # fmt: skip
    model = DepthGrowing(config)
    sides = weight_picture.weights_of(model)
    assert [(side.title, len(side.matrix)) for side in sides] == [
        ("bottom encoder", 5), ("top decoder", 3),
    ]  # fmt: skip
    bottom = model.bottom.encoder.connection.dlcl.effective_weight().detach()
    torch.testing.assert_close(sides[0].matrix, bottom)
    save_checkpoint(tmp_path / "model.pt", {
        "kind": "depth_growing", "config": vars(config), "model": model.state_dict(),
        "vocabulary": b"none",
    })  # fmt: skip
    assert main(["show-weights", str(tmp_path / "model.pt")]) == 0
    said = capsys.readouterr().out
    assert "Depth weights of the bottom encoder" in said
    assert "Depth weights of the top decoder" in said


def test_a_side_without_weights_is_left_out(save, capsys):
    _, path = save()
    assert main(["show-weights", str(path)]) == 0
    said = capsys.readouterr().out
    assert "Depth weights of the encoder" in said
    assert "decoder" not in said


def test_what_has_no_weights_or_no_picture_is_refused(save, tmp_path, capsys):
    _, path = save(encoder_connection="residual")
    assert main(["show-weights", str(path)]) == 1
    assert "expected a model with DLCL in the encoder or the decoder" in capsys.readouterr().err
    assert main(["show-weights", str(path), "--output", str(tmp_path / "a.jpg")]) == 1
    assert "expected a file ending in .svg or .png" in capsys.readouterr().err
