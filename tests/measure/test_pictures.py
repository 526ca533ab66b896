"""Every picture, drawn once from small data: what it must show. A picture is a whole file or
none."""

import math
import random
import re
from dataclasses import replace

import pytest
import torch
from matplotlib.figure import Figure

from deepfast.files import DataError
from deepfast.measure import attention_picture, report_pictures
from deepfast.measure import weight_picture as weights
from deepfast.measure.connections import CONNECTIONS
from deepfast.measure.encoders import VARIANTS
from deepfast.measure.pictures import picture
from deepfast.measure.sweep_picture import draw
from deepfast.memory import POLICIES
from deepfast.mt.search.score import sentence_counts
from deepfast.mt.sweep.grid import Point, points
from deepfast.mt.sweep.table import (
    cells,
    differences,
    interval,
    page,
    resampled,
    sentence_interval,
)

MACHINE = {"cpu": "Some CPU", "torch": "2.0", "commit": None}
BLEU = {"test_bleu": 20.0, "nll": 1.5, "machine": MACHINE}
NORMS = {"grad_norm_encoder": [0.5, None], "grad_norm_decoder": [0.0, 0.25, 2.0]}
SIDE = weights.SideWeights("encoder, mean over 8 channels", torch.eye(4).cumsum(0))
CHOICE = weights.SideChoices(
    "decoder", ["de", "fr"], torch.tensor([[0.9, 0.1], [0.6, 0.7]]),
    torch.tensor([[True, False], [True, True]]), 0.5,
)  # fmt: skip


def results_of(*overs, seeds=2, **changes):
    runs = [{"seed": s + 1} | BLEU | {"test_bleu": 20.0 + s} | changes for s in range(seeds)]
    return {point: [dict(run) for run in runs] for point in points(overs)}


def words(svg):
    return set(re.findall(r"<text[^>]*>([^<]*)</text>", svg))


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
        lambda path: draw(results_of("norm=plain,$deep$"), path),
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
    assert {*texts.split("|")} <= words((tmp_path / "a.svg").read_text("utf-8"))


def test_every_picture_of_the_page(made):
    drawn = report_pictures.draw(made.report)
    assert drawn.keys() == report_pictures.PICTURES.keys()
    texts = {
        "time": (*VARIANTS, "Time of a step, seconds"),
        "memory": (*VARIANTS, "Peak memory of a step, GiB"),
        "connection-traffic": (*CONNECTIONS, "counted traffic, GB"),
        "connection-time": (*CONNECTIONS, "time, ms"),
        "connection-memory": (*CONNECTIONS, "peak memory, MiB"),
        "policies": (*POLICIES, "peak MiB, 8 layers"),
        "depth_memory": ("deepfast, none", "deepfast, layer+input", "200"),
        "losses": ("DLCL, pre-norm", "residual, post-norm", "token frequencies alone"),
        "weights": ("output", "input of layer"),
    }
    assert drawn.keys() == texts.keys()
    for name, svg in drawn.items():
        assert {*texts[name]} <= words(svg), name
        assert svg in made.page


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_a_failed_drawing_leaves_the_old_picture(tmp_path, monkeypatch, ending):
    path = tmp_path / f"run.{ending}"

    def drawn():
        with picture(path) as figure:
            figure.add_subplot().plot([1, 2])
        return path.read_bytes()

    before = drawn()
    assert before == drawn()
    assert before.startswith({"svg": b"<?xml", "png": b"\x89PNG"}[ending])

    def fail(self, file, **_):
        file.write(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises(OSError, match="No space left"):
        drawn()
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    monkeypatch.undo()
    with pytest.raises(DataError, match="cannot be written"), picture(tmp_path / "none" / "a.svg"):
        pass


# ---- sweeps --------------------------------------------------------------------------------------


def test_the_page_has_a_line_for_each_point_and_tells_what_failed():
    results = results_of("model.norm=pre,post", bleu_signature="case:lc")
    first, second = results
    results[second] = [
        {"seed": 1, "failed": "exit 1: data: no text"},
        {"seed": 2, "diverged": "step 3: the loss is nan", "machine": MACHINE},
    ]
    low, high = first.each("optim.lr", [1, 2])
    tried = replace(first, pilots=(low, high))
    results = {tried: results[first], second: results[second]}
    pilots = {low: [{"seed": 1, "nll": 2.0}], high: [{"seed": 1, "diverged": "x", "nll": None}]}
    text = page(results, pilots, "deepfast mt sweep x")
    assert "\nRuns: 4. cpu Some CPU; torch 2.0.\n" in text
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert lines[0].startswith("| system | dev NLL | difference | BLEU | difference |")
    assert lines[2:] == [
        "| model.norm=pre | 1.500 ± 0.000 | baseline | 20.5 ± 0.7 | baseline |  | 2 | - |",
        "| model.norm=post | - | - | - | - | - | 2, 1 diverged, 1 failed | - |",
    ]
    assert text.endswith("""
- model.norm=pre: dev NLL of pilots: optim.lr=1 2.000, optim.lr=2 -
- model.norm=pre, optim.lr=2, seed 1: diverged, x
- model.norm=post, seed 1: failed, exit 1: data: no text
- model.norm=post, seed 2: diverged, step 3: the loss is nan
""")
    assert "](sweep.svg)" in text
    assert "`case:lc`" in text


def test_differences_are_those_of_the_same_seed():
    base = [{"seed": seed, "nll": x} for seed, x in ((1, 2.0), (2, 3.0), (3, 2.5))]
    ours = [{"seed": seed, "nll": x} for seed, x in ((3, 2.1), (1, 1.5), (2, 2.4), (4, 9.0))]
    found = differences(ours, base, "nll")
    assert found == pytest.approx([-0.4, -0.5, -0.6])
    # t of 2 degrees of freedom, times 0.1 / sqrt(3).
    half = 4.302653 * 0.1 / math.sqrt(3)
    assert interval(found) == pytest.approx((-0.5 - half, -0.5 + half))
    assert interval([1.0]) is None
    assert interval([1.0, 1.0, 1.0]) == (1.0, 1.0)
    assert cells(ours, base)[1] == "-0.500 (-0.748 to -0.252)"
    assert cells(ours[:1], base)[1] == "-0.400"
    assert cells([], base) == ["-", "-", "-", "-", "-", "0", "-"]


def test_resampled_sentences_are_the_same_of_all_runs():
    rng = random.Random(0)
    references = [" ".join(rng.choices("abcdefg", k=rng.randint(4, 9))) for _ in range(200)]

    def run(kept, seed=1):
        lines = [" ".join(w for w in line.split() if rng.random() < kept) for line in references]
        return {"seed": seed, "sentences": sentence_counts(lines, references)}

    good, bad = [run(0.9, 1), run(0.9, 2)], [run(0.6, 1), run(0.6, 2)]
    low, high = sentence_interval(good, bad)
    assert 0 < low < high < 100
    # Paired: a run against itself has no noise, whatever sentences are drawn.
    assert sentence_interval(good, good) == (0.0, 0.0)
    assert resampled(good[0]["sentences"]).std() > 0
    assert sentence_interval(good, [{"seed": 1}]) is None
    assert sentence_interval(good, [run(0.9, 7)]) is None
