"""The picture of a sweep, from results that were made up."""

import math
import re

import pytest

from deepfast.measure.sweep_picture import caption, draw, marks
from deepfast.mt.sweep.grid import points
from deepfast.mt.sweep.table import cells, diverged, page

BLEU = {"bleu": 20.0, "nll": 1.5, "curve": [[1, 2.0], [2, 1.5]]}


def results_of(*overs, seeds=2, **changes):
    chosen = points(overs)
    return {point: [{"seed": s + 1} | BLEU | {"bleu": 20.0 + s} | changes for s in range(seeds)]
            for point in chosen}  # fmt: skip


def drawn(results, tmp_path, points=None):
    path = tmp_path / "sweep.svg"
    draw(results, points or list(results), path)
    return path.read_text()


def words(svg):
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def test_numbers_are_an_axis(tmp_path):
    results = results_of("model.encoder_layers=6,12,30", "model.norm=pre,post")
    said = words(drawn(results, tmp_path))
    assert {"6", "12", "30", "pre", "post", "model.encoder_layers", "model.norm"} <= set(said)
    assert {"BLEU", "dev NLL, nats"} <= set(said)
    assert "Mean of 2 seeds; bars: standard deviation." in said


def test_names_have_a_line_each(tmp_path):
    results = results_of("model.encoder_connection=residual,dlcl", seeds=1)
    said = words(drawn(results, tmp_path))
    assert {"residual", "dlcl", "model.encoder_connection", "One seed."} <= set(said)


@pytest.mark.parametrize("over", ["model.dim=8,16,32", "model.norm=a,b,c"])
def test_several_seeds_have_error_bars(tmp_path, over):
    """matplotlib draws the bars of a curve as one collection of lines, with a path for each."""

    def lengths(seeds):
        results = results_of(over, seeds=seeds, nll=None)
        results[list(results)[2]][-1]["bleu"] += 2.0
        svg = drawn(results, tmp_path)
        bars = re.findall(r'<g id="LineCollection_\d+">(.*?)</g>', svg, re.DOTALL)
        ends = re.findall(r'd="M (\S+) (\S+)\s+L (\S+) (\S+)\s+"', " ".join(bars))
        return [math.dist((float(a), float(b)), (float(c), float(d))) for a, b, c, d in ends]

    assert lengths(1) == []
    first, second, last = lengths(2)
    assert first > 1
    # BLEU 20 and 21, and 20 and 23.
    assert (second, last) == pytest.approx((first, 3 * first), rel=1e-3)


def test_some_points_are_still_missing(tmp_path):
    results = results_of("model.dim=8,16,32")
    last = list(results)[-1]
    assert "32" in words(drawn({last: results[last]}, tmp_path, list(results)))


def test_marks_have_a_deviation_and_gaps():
    results = results_of("model.dim=8,16")
    second = list(results)[1]
    results[second] = [{"seed": 1, "failed": "exit 1"}, {"seed": 2} | BLEU]
    (curve,) = marks(results, "bleu", ["8", "16"]).values()
    assert curve[0].mean == 20.5
    assert curve[0].deviation == pytest.approx(math.sqrt(0.5))
    assert curve[1].deviation is None
    results[second] = [{"seed": 1, "failed": "exit 1"}]
    (curve,) = marks(results, "bleu", ["8", "16"]).values()
    assert math.isnan(curve[1].mean)


def test_the_caption_tells_what_is_missing(tmp_path):
    results = results_of("model.dim=8,16")
    first, second = results
    results[second] = [{"seed": 1, "failed": "x"}, {"seed": 2, "diverged": "step 3"}]
    assert caption(results) == (
        "Mean of 1 to 2 seeds; bars: standard deviation. 1 of 4 runs diverged, 1 of 4 runs failed."
    )
    nothing = {first: [{"seed": 1, "failed": "x"}]}
    assert "No result. 1 of 1 runs failed." in words(drawn(nothing, tmp_path, [first, second]))


def test_without_a_test_part_there_is_one_panel(tmp_path):
    results = results_of("model.dim=8,16", bleu=None)
    said = words(drawn(results, tmp_path))
    assert "dev NLL, nats" in said
    assert "BLEU" not in said


def test_the_page_has_a_line_for_each_point_and_tells_what_failed():
    results = results_of("model.norm=pre,post", "model.dlcl={norm: null}")
    second = list(results)[1]
    results[second] = [
        {"seed": 1, "failed": "exit 1: data: no text"},
        {"seed": 2, "diverged": "step 3: the loss is nan", "live_bytes": 2**20},
    ]
    text = page(results, "deepfast sweep x", "this machine")
    assert text.startswith("# model.norm and model.dlcl\n")
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert lines[0].startswith("| `model.norm` | `model.dlcl` | parameters | dev NLL | BLEU |")
    assert lines[2].startswith("| pre | {norm: null} | - | 1.500 ± 0.000 | 20.5 ± 0.7 |")
    assert lines[2].endswith("| 2 | 0 of 2 | - |")
    assert lines[3].startswith("| post | {norm: null} | - | - | - |")
    assert lines[3].endswith("| 1 MiB | - | 1 | 1 of 1 | 1 of 2 |")
    assert "- model.norm=post, model.dlcl={norm: null}, seed 1: exit 1: data: no text\n" in text
    assert "seed 2: diverged, step 3: the loss is nan\n" in text
    assert "](sweep.svg)" in text


def test_a_run_without_validation_or_with_losses_that_are_null():
    assert not diverged({"curve": []})
    assert diverged({"curve": [[1, 2.0], [2, None]]})
    assert cells([]) == ["-", "-", "-", "-", "-", "-", "0", "-"]
