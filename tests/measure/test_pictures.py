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
from deepfast.measure import attention_picture, pictures, report_pictures
from deepfast.measure import weight_picture as weights
from deepfast.measure.connections import CONNECTIONS
from deepfast.measure.encoders import VARIANTS
from deepfast.measure.pictures import picture
from deepfast.measure.sweep_picture import (
    caption,
    draw,
    draw_learning,
    marks,
    write_page,
)
from deepfast.memory import POLICIES
from deepfast.mt.search.score import sentence_counts
from deepfast.mt.sweep.grid import Pilots, points
from deepfast.mt.sweep.table import (
    cells,
    differences,
    diverged,
    interval,
    page,
    resampled,
    sentence_interval,
)

NUMBERS = "model.encoder_layers=6,12,30"
MACHINE = {"cpu": "Some CPU", "torch": "2.0", "commit": None}
BLEU = {"test_bleu": 20.0, "nll": 1.5, "curve": [[1, 2.0], [2, 1.5]], "machine": MACHINE}
NORMS = {"grad_norm_encoder": [0.5, None], "grad_norm_decoder": [0.0, 0.25, 2.0]}
SIDE = weights.SideWeights("encoder", torch.eye(4).cumsum(0), "mean over 8 channels")
CHOICE = weights.SideChoices(
    "decoder", ["de", "fr"], torch.tensor([[0.9, 0.1], [0.6, 0.7]]),
    torch.tensor([[True, False], [True, True]]), 0.5,
)  # fmt: skip


def results_of(*overs, seeds=2, **changes):
    runs = [{"seed": s + 1} | BLEU | {"test_bleu": 20.0 + s} | changes for s in range(seeds)]
    return {point: [dict(run) for run in runs] for point in points(overs)}


def sweep(*overs, **changes):
    results = results_of(*overs, **changes)
    return lambda path: draw(results, list(results), path)


def words(svg):
    return set(re.findall(r"<text[^>]*>([^<]*)</text>", svg))


DRAWN = {
    "weights and choices": (
        lambda path: weights.draw([SIDE], [CHOICE], path),
        "encoder, mean over 8 channels: 10 of 10 weights|output|input of layer|"
        "decoder: choice of layers|de: 1 of 2|fr: 2 of 2|probability",
    ),
    "one source": (
        lambda path: weights.draw_source([SIDE, SIDE], 2, path),
        "weight of y2|encoder, mean over 8 channels|input of layer (4: the output)",
    ),
    "attention": (
        lambda path: attention_picture.draw(
            torch.full((2, 2, 3), 1 / 3), ["a", "$b$"], path, title="encoder"
        ),
        "a|$b$|hop 1|hop 2|words|encoder|layer (0: the embedding)|weight",
    ),
    "parts of a text": (
        lambda path: pictures.parts(["1 to 9", "10"], [20.25, None], path),
        "BLEU by the words of a source|1 to 9|10|20.2",
    ),
    "sweep over numbers": (
        sweep(NUMBERS, "model.norm=pre,post"),
        "6|12|30|pre|post|model.encoder_layers|model.norm|BLEU|dev NLL, nats|"
        "Mean of 2 seeds; bars: standard deviation.",
    ),
    "sweep over names": (
        sweep("model.encoder_connection=residual,dlcl", seeds=1),
        "residual|dlcl|BLEU|dev NLL, nats|One seed.",
    ),
    "seeds of systems": (
        sweep("norm=plain,deep", seeds=3, nll=None),
        "plain|deep|BLEU|Mean of 3 seeds; each seed a circle.",
    ),
    "learning": (
        lambda path: draw_learning(
            results_of("norm=plain,deep", curve=[[100, 4.0], [200, None]], step_seconds=0.5), path
        ),
        "plain|deep|norm|dev NLL, nats|optimizer steps|minutes",
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


def test_several_seeds_have_error_bars(tmp_path):
    """matplotlib draws the bars of a curve as one collection of lines, with a path for each."""

    def lengths(seeds):
        results = results_of("model.dim=8,16,32", seeds=seeds, nll=None)
        results[list(results)[2]][-1]["test_bleu"] += 2.0
        draw(results, list(results), tmp_path / "sweep.svg")
        svg = (tmp_path / "sweep.svg").read_text()
        bars = re.findall(r'<g id="LineCollection_\d+">(.*?)</g>', svg, re.DOTALL)
        ends = re.findall(r'd="M (\S+) (\S+)\s+L (\S+) (\S+)\s+"', " ".join(bars))
        return [math.dist((float(a), float(b)), (float(c), float(d))) for a, b, c, d in ends]

    assert lengths(1) == []
    first, second, last = lengths(2)
    assert first > 1
    # BLEU 20 and 21, and 20 and 23.
    assert (second, last) == pytest.approx((first, 3 * first), rel=1e-3)


def test_marks_have_a_deviation_and_gaps():
    results = results_of("model.dim=8,16")
    second = list(results)[1]
    results[second] = [{"seed": 1, "failed": "exit 1"}, {"seed": 2} | BLEU]
    (curve,) = marks(results, "test_bleu", ["8", "16"]).values()
    assert curve[0].mean == 20.5
    assert curve[0].deviation == pytest.approx(math.sqrt(0.5))
    assert curve[1].deviation is None
    results[second] = [{"seed": 1, "failed": "exit 1"}]
    (curve,) = marks(results, "test_bleu", ["8", "16"]).values()
    assert math.isnan(curve[1].mean)


def test_the_caption_tells_what_is_missing(tmp_path):
    def said(results, every):
        draw(results, every, tmp_path / "sweep.svg")
        return words((tmp_path / "sweep.svg").read_text())

    results = results_of("model.dim=8,16", test_bleu=None)
    first, second = results
    # Without a test part there is one panel. A point may have no runs so far.
    only = said({second: results[second]}, [first, second])
    assert {"dev NLL, nats", "16"} <= only
    assert "BLEU" not in only
    results[second] = [{"seed": 1, "failed": "x"}, {"seed": 2, "diverged": "step 3"}]
    assert caption(results, numeric=True) == (
        "Mean of 1 to 2 seeds; bars: standard deviation. 1 of 4 runs diverged, 1 of 4 runs failed."
    )
    nothing = {first: [{"seed": 1, "failed": "x"}]}
    assert "No result. 1 of 1 runs failed." in said(nothing, [first, second])
    write_page(tmp_path, nothing, "deepfast mt sweep x", None, {})
    assert {"optimizer steps", "minutes"} <= words((tmp_path / "sweep_curves.svg").read_text())


def test_the_page_has_a_line_for_each_point_and_tells_what_failed():
    results = results_of("model.norm=pre,post", "model.dlcl={norm: null}", bleu_signature="case:lc")
    results[list(results)[1]] = [
        {"seed": 1, "failed": "exit 1: data: no text"},
        {"seed": 2, "diverged": "step 3: the loss is nan", "machine": MACHINE},
    ]
    text = page(results, "deepfast mt sweep x")
    assert text.startswith("# model.norm and model.dlcl\n")
    assert "\n3 runs, 0.0 hours together, Some CPU, torch 2.0.\n" in text
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert lines[0].startswith("| `model.norm` | `model.dlcl` | dev NLL | difference | BLEU |")
    assert lines[2].startswith("| pre | {norm: null} | 1.500 ± 0.000 | baseline | 20.5 ± 0.7 |")
    assert lines[2].endswith("| baseline |  | 2 | - | - | - |")
    assert lines[3] == (
        "| post | {norm: null} | - | - | - | - | - | 2, 1 diverged, 1 failed | - | - | - |"
    )
    name = "- model.norm=post, model.dlcl={norm: null}, seed"
    assert f"{name} 1: failed, exit 1: data: no text\n" in text
    assert f"{name} 2: diverged, step 3: the loss is nan\n" in text
    assert "](sweep.svg)" in text
    assert "`case:lc`" in text


def test_the_page_has_the_pilots():
    (first, second) = results = results_of("norm=plain,deep")
    pilots = Pilots(key="optim.lr", values=["1", "2"], steps=500)
    first, second = (replace(point, pilots=pilots.of(point)) for point in results)
    results = dict(zip((first, second), results.values(), strict=True))
    low, high = ({"seed": 1, "machine": MACHINE, "nll": nll} for nll in (1.0, 2.0))
    tried = {first: dict(zip(first.pilots, (high, low), strict=True)),
             second: {second.pilots[0]: {"seed": 1, "failed": "x"}}}  # fmt: skip
    lines = page(results, "x", pilots, tried).splitlines()
    assert "4 runs and 2 pilots, 0.0 hours together, Some CPU, torch 2.0." in lines
    assert "| norm=plain | 2.000 | **1.000** |" in lines
    assert "| norm=deep | - | - |" in lines


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
    assert cells([{"curve": []} | run for run in ours], base)[1] == "-0.500 (-0.748 to -0.252)"
    moved = [run | {"curve": [], "nll": run["nll"] + 0.4} for run in ours]
    assert cells(moved, base)[1] == "-0.100 (-0.348 to +0.148), inside the noise"
    assert cells(moved[:1], base)[1] == "+0.000"


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


def test_a_run_without_validation_or_with_losses_that_are_null():
    assert not diverged({"curve": []})
    assert diverged({"curve": [[1, 2.0], [2, None]]})
    nothing = ["-", "-", "-", "-", "-", "0", "-", "-", "-"]
    assert cells([], [{"seed": 1, "nll": 1.0}]) == nothing
