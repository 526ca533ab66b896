"""Pictures of models and sweeps, drawn once from small data: what they must show. A picture is a
whole file or none."""

import re

import pytest
import torch
from matplotlib.figure import Figure

from deepfast.measure import attention_picture
from deepfast.measure import weight_picture as weights
from deepfast.measure.pictures import picture
from deepfast.measure.report_pictures import memory_curves
from deepfast.measure.sweep_picture import draw
from deepfast.memory import plan
from deepfast.mt.sweep.grid import Point, points

RUNS = [{"seed": seed, "test_bleu": 20.0 + seed, "nll": 1.5} for seed in (1, 2)]
SIDE = weights.SideWeights("encoder, mean over 8 channels", torch.eye(4).cumsum(0))
CHOICE = weights.SideChoices(
    "decoder", ["de", "fr"], torch.tensor([[0.9, 0.1], [0.6, 0.7]]),
    torch.tensor([[True, False], [True, True]]), 0.5,
)  # fmt: skip
DRAWN = {
    "weights and choices": (
        lambda path: weights.draw([SIDE], [CHOICE], path),
        "encoder, mean over 8 channels: 10 of 10 weights|output|input of layer|"
        "decoder: choice of layers|de: 1 of 2|fr: 2 of 2|probability",
    ),
    "attention": (
        lambda path: attention_picture.draw(
            torch.full((2, 2, 3), 1 / 3), ["a", "$b$"], path, title="encoder"
        ),
        "a|$b$|hop 1|hop 2|words|encoder|layer (0: the embedding)|weight",
    ),
    "sweep": (
        lambda path: draw(dict.fromkeys(points(["norm=plain,$deep$"]), RUNS), path),
        "norm=plain|norm=$deep$|BLEU|dev NLL, nats|each seed a circle, the mean a bar",
    ),
    "sweep without a result": (
        lambda path: draw({Point("deep"): [{"seed": 1, "failed": "x"}]}, path),
        "deep|BLEU|dev NLL, nats",
    ),
}  # fmt: skip
"""Name -> what draws it, and texts that it has."""


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_has_its_texts(tmp_path, name):
    drawing, texts = DRAWN[name]
    drawing(tmp_path / "a.svg")
    found = re.findall(r"<text[^>]*>([^<]*)</text>", (tmp_path / "a.svg").read_text("utf-8"))
    assert {*texts.split("|")} <= {*found}


def test_the_predicted_curves_are_the_planners():
    sizes = {"dim": 64, "tokens": 1024, "vocab_size": 400, "decoder_layers": 0}
    known = plan(budget="1TiB", num_layers=20, recompute="ffn", **sizes)
    layers, gib = memory_curves(known.sizes)["ffn"][2]
    assert (layers, gib * 2**30) == (20, known.peak)


def test_a_failed_drawing_leaves_the_old_picture(tmp_path, monkeypatch):
    path = tmp_path / "run.svg"

    def drawn():
        with picture(path) as figure:
            figure.add_subplot().plot([1, 2])
        return path.read_bytes()

    before = drawn()
    assert before == drawn()
    monkeypatch.setattr(Figure, "savefig", lambda self, file, **_: file.write(b"half") / 0)
    with pytest.raises(ZeroDivisionError):
        drawn()
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
