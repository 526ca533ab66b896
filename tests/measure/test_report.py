"""The command on tiny sizes: the page needs no other file and has all numbers."""

import json
import re
from dataclasses import replace

import pytest

from deepfast.cli import main
from deepfast.measure import page, report, report_pictures
from deepfast.measure.forms import STACK
from deepfast.measure.mixing import CONNECTIONS
from deepfast.measure.stacks import VARIANTS
from deepfast.measure.turns import COPY, Turns
from deepfast.memory import POLICIES


def test_the_page_needs_nothing_else(made):
    assert not re.search(r"<(script|link|img|iframe|object)|@import|url\((?!#)", made.page)
    assert not re.findall(r'(?:src|href)="(?!#|data:)', made.page)
    ids = re.findall(r'\bid="([^"]+)"', made.page)
    assert len(ids) == len(set(ids))
    assert {*re.findall(r'(?:href="|url\()#([^")]+)', made.page)} <= {*ids}
    # Nothing of the machine's folders is told.
    assert str(made.folder) not in made.page
    assert made.report["command"] == "deepfast report --quick --no-training"
    assert "Not measured: not asked for." in made.page


def test_every_variant_is_measured(made):
    found, settings = made.report, made.report["settings"]
    forms = [form for forms in CONNECTIONS.values() for form in forms]
    for chapter, depths, variants in (
        ("steps", settings["depths"], VARIANTS),
        ("policies", settings["depths"], POLICIES),
        ("mixing", settings["mixing_depths"], [COPY, *forms]),
    ):
        rows = [(row["depth"], row["variant"]) for row in found[chapter]]
        assert rows == [(depth, variant) for depth in depths for variant in variants]
        assert all(row["peak_bytes"] > 0 for row in found[chapter] if row["variant"] != COPY)
    timed = [row for row in found["policies"] if row["relative"]]
    for row in (*found["steps"], *found["mixing"], *timed):
        assert len(row["seconds"]) == settings["rounds"]
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["median_seconds"])
    # Where a form does not fit is predicted: never below the measurement.
    for row in (*found["steps"], *found["mixing"]):
        assert row["predicted_bytes"] is None or row["peak_bytes"] <= row["predicted_bytes"]
        if row in found["steps"] and row["variant"] == STACK:
            assert row["predicted_bytes"] <= 1.5 * row["peak_bytes"]
    copied = {row["variant"]: row["of_copy"] for row in found["mixing"]}
    assert copied[COPY] == 1
    assert copied["deepfast"] > 0
    # Policies are as predicted, and those of one depth are timed.
    assert all(row["predicted_over_peak"] == pytest.approx(1, 0.05) for row in found["policies"])
    assert [(row["depth"], row["variant"]) for row in timed] == [(4, p) for p in POLICIES]
    expected = [row["expected"] for row in timed]
    assert timed[0]["relative"] == expected[0] == 1
    assert expected == sorted(expected)
    assert expected[-1] > 1.1


def test_every_picture_of_the_page(made):
    drawn = report_pictures.draw(made.report)
    for name, texts in {
        "time": (*VARIANTS, "Time of a step, seconds", "4"),
        "memory": (*VARIANTS, "Peak memory of a step, GiB"),
        "mixing-time": (*CONNECTIONS, "Time, ms"),
        "mixing-memory": (*CONNECTIONS, "Peak memory, MiB"),
        "policies": (*POLICIES, "Peak memory of a step, MiB"),
    }.items():
        svg = drawn.pop(name)
        assert {*texts} <= {*re.findall(r"<text[^>]*>([^<]*)</text>", svg)}, name
        assert svg in made.page
    assert drawn == {"losses": None, "weights": None}


def test_what_does_not_fit_is_told_and_text_is_escaped(made):
    missing = {"seconds": [], "median_seconds": None, "note": "<b>does not fit"}
    rows = [row | missing for row in made.report["mixing"]]
    text = page.render(made.report | {"mixing": rows})
    last = made.report["settings"]["mixing_depths"][-1]
    for name in CONNECTIONS:
        assert f"{last} layers, {name} {STACK}: &lt;b&gt;does not fit." in text


def stop_in(monkeypatch, part, count):
    """Ctrl-C comes after so many pieces of a part."""
    work = part.work

    def stopped(self):
        for number, what in enumerate(work(self)):
            if number == count:
                raise KeyboardInterrupt
            yield what

    monkeypatch.setattr(part, "work", stopped)


def test_an_interrupted_report_keeps_what_was_measured(tiny, tmp_path, monkeypatch, capsys):
    # The memory of every variant at one depth, and one time.
    stop_in(monkeypatch, Turns, len(VARIANTS) + 1)
    found = report.make_report(tiny, "deepfast report")
    assert [row["variant"] for row in found["steps"] if row["median_seconds"]] == [VARIANTS[0]]
    # The command writes its page.
    stop_in(monkeypatch, Turns, 0)
    assert main(["report", "--quick", "--output", str(tmp_path)]) == 130
    text = (tmp_path / "index.html").read_text("utf-8")
    assert "This report was interrupted." in text
    assert "Not measured: interrupted." in text
    assert "<svg" not in text
    assert "index.html interrupted after" in capsys.readouterr().out


def test_a_training_that_fails_is_told_on_the_page(tiny, monkeypatch, capsys):
    monkeypatch.setattr(Turns, "work", lambda self: iter(()))
    found = report.make_report(replace(tiny, overrides=("model.dim=7",)), "deepfast report")
    assert found["training"]["status"].startswith("failed: ")
    assert "training failed" in capsys.readouterr().err
    assert "Not measured: failed: " in page.render(found)


@pytest.mark.slow
def test_the_whole_command_with_training(tmp_path):
    assert main(["report", "--quick", "--output", str(tmp_path)]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["index.html", "report.json"]
    training = json.loads((tmp_path / "report.json").read_text("utf-8"))["training"]
    assert {key: run["steps"] for key, run in training["runs"].items()} == {"dlcl": 20, "twin": 10}
    assert 0 <= training["bleu"] <= 100
    assert len(training["samples"]) == 8
    weights = training["weights"]
    assert len(weights) == len(weights[0]) == 7
    assert all(w == 0 for row, line in enumerate(weights) for w in line[row + 1 :])
    text = (tmp_path / "index.html").read_text("utf-8")
    for part in ("DLCL, pre-norm", "input of layer", "case:mixed"):
        assert part in text


def test_times_have_three_digits():
    assert [page.show(v, "seconds") for v in (None, 0.00123, 41.23)] == ["–", "1.23 ms", "41.2 s"]
