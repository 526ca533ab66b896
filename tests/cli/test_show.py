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
    matrix = torch.tensor([[0.05, 7.0, 0.0], [0.2, -0.11, 0.0], [0.12, -4.0, 0.3]])
    side = weight_picture.SideWeights("encoder", matrix, "")
    # Under 0.1, above the diagonal, and under 5% of a row's largest.
    want = torch.tensor([[1, 1, 1], [0, 0, 1], [1, 0, 0]]).bool()
    assert torch.equal(side.hidden, want)
    rows = list(side.rows())
    assert rows[1] == ("2", "0: 0.20  1: -0.11", "2 of 2", "0.09")
    assert rows[2] == ("output", "1: -4.00  2: 0.30", "2 of 3", "-3.58")
    # The first row has no weight of 0.1 that it may read.
    assert side.caption.startswith("2 of 6 weights left out: under 0.1, or under 5% of their row's")


def test_a_row_without_a_large_weight_is_shown_by_its_own_scale():
    matrix = torch.tensor([[0.05, 0.0, 0.0], [0.04, -0.001, 0.0], [0.09, 0.09, 0.1]])
    side = weight_picture.SideWeights("encoder", matrix, "")
    assert torch.equal(side.hidden, torch.tensor([[0, 1, 1], [0, 1, 1], [1, 1, 0]]).bool())
    assert side.by_own_scale.tolist() == [True, True, False]
    assert [row[0] for row in side.rows()] == ["* 1", "* 2", "output"]
    assert side.caption == (
        "3 of 6 weights left out: under 0.1, or under 5% of their row's largest\n"
        "* no weight of the row reaches 0.1: the 5% alone"
    )
    everything = weight_picture.SideWeights("encoder", matrix, "", 0.0)
    assert torch.equal(everything.hidden, torch.ones(3, 3).triu(1).bool())
    assert everything.caption == "all 6 weights are shown"
    assert not everything.by_own_scale.any()
    # A threshold that no weight reaches does not hide everything.
    none = weight_picture.SideWeights("encoder", matrix, "", 0.2)
    assert none.by_own_scale.all()
    assert (~none.hidden).sum() == 5


@pytest.mark.parametrize(
    ("arguments", "left"), [([], "0"), (["--threshold", "0.4"], "1"), (["--threshold", "0"], None)]
)
def test_a_threshold(save, tmp_path, capsys, arguments, left):
    model = make()
    with torch.no_grad():
        weight = model.encoder.connection.dlcl.weight
        weight.copy_(1 / torch.arange(1, 6).unsqueeze(1).expand(5, 5))
        weight[2, :2] = torch.tensor([0.45, 0.5])
    picture = tmp_path / "a.svg"
    assert main(["mt", "show", save(model), "--output", str(picture), *arguments]) == 0
    said = " ".join(capsys.readouterr().out.split())
    if left is None:
        assert "all 15 weights are shown" in said
        assert "grey:" not in picture.read_text()
    else:
        assert f"{left} of 15 weights left out" in said
        assert f"{15 - int(left)} of 15 weights" in picture.read_text()
    assert ("* no weight of the row reaches 0.4: the 5% alone" in said) == (left == "1")


@pytest.mark.parametrize(
    ("dlcl", "title"),
    [
        ({"softmax": True}, "encoder"),
        ({"weight_type": "vector"}, "encoder, mean over 8 channels"),
        ({"weight_type": "group", "groups": 3}, "encoder, mean over 8 channels in 3 groups"),
    ],
)
def test_the_weights_are_those_that_are_applied(dlcl, title):
    model = make(dlcl=dlcl, decoder_connection="dlcl")
    encoder, decoder = weight_picture.weights_of(model)
    assert (encoder.title, decoder.name, decoder.matrix.shape) == (title, "decoder", (3, 3))
    applied = model.encoder.connection.dlcl.effective_weight().detach()
    torch.testing.assert_close(encoder.matrix, applied.reshape(5, 5, -1).mean(2))


def test_one_source(save, tmp_path, capsys):
    """Figure 5c: a column of W. The decoder has too few layers for source 3."""
    model = make(decoder_connection="dlcl")
    path = save(model)
    picture = tmp_path / "a.svg"
    assert main(["mt", "show", path, "--source", "3", "--output", str(picture)]) == 0
    weight = model.encoder.connection.dlcl.effective_weight()
    said = capsys.readouterr().out
    assert "Weight of y3 in the encoder" in " ".join(said.split())
    assert "decoder" not in said
    rows = [line.split() for line in said.splitlines() if re.match(r" +(output|\d+) ", line)]
    assert rows == [["4", f"{weight[3, 3]:.3f}"], ["output", f"{weight[4, 3]:.3f}"]]
    assert "weight of y3" in picture.read_text()
    assert main(["mt", "show", path, "--source", "0"]) == 0
    assert "Weight of y0 in the decoder" in " ".join(capsys.readouterr().out.split())


def test_bottom_and_top_of_a_grown_model(save, tmp_path, capsys):
    tops = {"top_encoder_layers": 3, "top_decoder_connection": "dlcl"}
    model, picture = DepthGrowing(DepthGrowingConfig(**SIZES | tops)), tmp_path / "a.svg"
    sides = weight_picture.weights_of(model)
    assert [(side.title, len(side.matrix)) for side in sides] == [
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


@pytest.mark.parametrize(
    ("connection", "words", "sentence"),
    [
        ("residual", [], "with DLCL, attention residuals or latent depth in the encoder or the"),
        ("attnres", [], "--sample: expected source sentences for a model with attention resid"),
        ("dlcl", ["--sample", "x"], "and for no other model, got x"),
        ("dlcl", ["--side=encoder"], "--side: expected TEXT beside it"),
        ("dlcl", ["a", "--source=1"], "--source: expected no TEXT beside it"),
        ("dlcl", ["--threshold=-0.1"], "--threshold: expected a number of at least 0, got -0.1"),
        ("dlcl", ["--threshold=nan"], "--threshold: expected a number of at least 0, got nan"),
        ("dlcl", ["--threshold=inf"], "--threshold: expected a number of at least 0, got inf"),
        ("latent", ["--source=1"], "--source: expected a model with weights of layers, got 1"),
        ("latent nan", [], "LatentDepth: logits must be numbers"),
        ("dlcl", ["--source=5"], "--source: expected a layer from 0 to 4, got 5"),
        ("dlcl", ["--source=-1"], "--source: expected a layer from 0 to 4, got -1"),
        ("dlcl", ["--output=a.jpg"], "expected a file ending in .svg or .png"),
    ],
)
def test_refused_with_a_sentence(save, capsys, connection, words, sentence):
    connection, _, broken = connection.partition(" ")
    model = make(encoder_connection=connection)
    if broken:
        model.encoder.latent.logits.data[0, 2] = float(broken)
    assert main(["mt", "show", save(model), *words]) == 1
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1


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
    assert side.rows(slice(0, 1))[2:4] == [["0.88 kept"], ["0.31 kept"]]
    assert side.rows(slice(0, 2))[4] == ["0.29", "0.99 kept"]


@pytest.mark.parametrize("encoder", ["dlcl", "latent"])
def test_choices_as_table_and_picture(save, tmp_path, capsys, encoder):
    languages = {name: number for number, name in enumerate("abcdefg", 1)}
    model = make(
        encoder_connection=encoder, decoder_connection="latent", decoder_layers=30,
        languages=languages,
    )  # fmt: skip
    sides = weight_picture.choices_of(model)
    picture = tmp_path / "a.svg"
    assert main(["mt", "show", save(model), "--output", str(picture)]) == 0
    said = capsys.readouterr().out
    assert ("Choice of layers of the encoder" in said) == (encoder == "latent")
    assert ("Depth weights of the encoder" in said) == (encoder == "dlcl")
    assert said.count("Choice of layers of the decoder; kept: probability of at least 0.5") == 1
    # Seven languages are more than one table holds.
    assert re.search(r"layer +a +b +c +d +e *\n", said)
    assert re.search(r"layer +f +g *\n", said)
    kept = sum(side.kept.sum() for side in sides)
    assert len(re.findall(r"0\.\d\d kept\b", said)) == kept > 30
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


# The first is no character, so no font has it. The second is in a font of symbols.
NOWHERE, SYMBOL = "\u0378", "\u2315"


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_characters_that_no_font_has(make_checkpoint, tmp_path, capsys, ending):
    path = tmp_path / f"layers.{ending}"
    arguments = [f"{NOWHERE} house {SYMBOL} $a_b$", "--output", str(path)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main(["mt", "show", make_checkpoint(**FUSED), *arguments]) == 0
    how = "left to the viewer's fonts" if ending == "svg" else "shown as codes"
    said = capsys.readouterr().err
    assert said == f"deepfast mt show: no font here has {NOWHERE}: {how}\n"
    if ending == "svg":
        drawn = path.read_text("utf-8")
        assert all(character in drawn for character in (NOWHERE, SYMBOL, ">$<"))


@pytest.mark.parametrize(
    "arguments",
    [[f"<de> {TEXT}"], [TEXT, "--language", "de"], [TEXT, "--side", "decoder"],
     [TEXT, "--side", "decoder", "--translation", "the old bridge"]],
)  # fmt: skip
def test_a_language_and_the_decoder(make_checkpoint, tmp_path, arguments):
    path = tmp_path / "layers.svg"
    words = [make_checkpoint(**FUSED), *arguments, "--output", str(path)]
    assert main(["mt", "show", *words]) == 0
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
def test_a_sentence_is_refused_with_a_sentence(
    make_checkpoint, capsys, changes, arguments, message
):
    assert main(["mt", "show", make_checkpoint(**changes), *arguments]) == 1
    assert message in capsys.readouterr().err
