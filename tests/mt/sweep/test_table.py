"""The page of a sweep: its table, and the intervals in it."""

import math
import random
from dataclasses import replace

import pytest

from deepfast.mt.search.score import sentence_counts
from deepfast.mt.sweep.grid import points
from deepfast.mt.sweep.table import cells, differences, interval, page, resampled, sentence_interval

MACHINE = {"cpu": "Some CPU", "torch": "2.0", "commit": None}
RUN = {"test_bleu": 20.0, "nll": 1.5, "machine": MACHINE, "bleu_signature": "case:lc"}


def test_the_page_has_a_line_for_each_point_and_tells_what_failed():
    first, second = points(["model.norm=pre,post"])
    finished = [RUN | {"seed": 1}, RUN | {"seed": 2, "test_bleu": 21.0}]
    failed = [
        {"seed": 1, "failed": "exit 1: data: no text"},
        {"seed": 2, "diverged": "step 3: the loss is nan", "machine": MACHINE},
    ]
    low, high = first.each("optim.lr", [1, 2])
    tried = replace(first, pilots=(low, high))
    results = {tried: finished, second: failed}
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
    assert resampled(good[0]["sentences"]).std() > 0
    # Paired: a run against itself has no noise, whatever sentences are drawn.
    assert sentence_interval(good, good) == (0.0, 0.0)
    for other in ({"seed": 1}, run(0.9, 7)):
        assert sentence_interval(good, [other]) is None
