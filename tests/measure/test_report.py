"""The whole command on tiny sizes: the page needs no other file and has all numbers."""

import io
import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from deepfast.measure.connections import CONNECTIONS, OURS, PLAIN

from deepfast.cli import main
from deepfast.measure import page, report, steps
from deepfast.measure.encoders import VARIANTS
from deepfast.measure.jobs import Job, run_jobs
from deepfast.measure.settings import QUICK
from deepfast.memory import POLICIES

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Reader(HTMLParser):
    """Checks nesting, and collects tags and attributes."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.attributes = [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert tag in VOID or self.open.pop() == tag


def test_the_trace_is_one_step_with_our_names(made):
    assert made.names == ["index.html", "report.json", "trace.json"]
    events = json.loads((made.folder / "out" / "trace.json").read_text())["traceEvents"]
    names = [event.get("name") for event in events]
    assert names.count("training step") == 1
    depth = min(QUICK.depths)
    assert [names.count(f"layer {number}") for number in range(depth + 1)] == [1] * depth + [0]
    assert names.count("deepfast::boundary") == depth + 1


def test_a_trace_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "trace.json"
    path.write_text("old")

    def killed(_, name):
        Path(name).write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(steps.profile, "export_chrome_trace", killed)
    with pytest.raises(KeyboardInterrupt):
        steps.write_trace(QUICK, path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_page_needs_nothing_else(made):
    reader = Reader(made.page)
    assert not {"script", "link", "img", "iframe", "object"} & set(reader.tags)
    for tag, name, value in reader.attributes:
        if name in ("src", "href", "xlink:href"):
            assert value.startswith(("#", "data:")), (tag, name, value)
    assert not re.search(r"@import|url\((?!#)", made.page)
    assert ("meta", "name", "viewport") in reader.attributes
    ids = re.findall(r'\bid="([^"]+)"', made.page)
    assert len(ids) == len(set(ids))
    for reference in re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', made.page):
        assert set(reference) & set(ids)
    # Nothing of the machine's folders is told.
    assert str(made.folder) not in made.page
    assert "/tmp/" not in made.page
    assert made.report["command"] == "deepfast report --quick"


def test_every_variant_is_measured_at_every_depth(made):
    report, settings = made.report, made.report["settings"]
    assert (report["format"], report["version"]) == ("deepfast report", 2)
    assert not report["interrupted"]
    assert [(row["depth"], row["variant"]) for row in report["steps"]] == [
        (depth, variant) for depth in settings["depths"] for variant in VARIANTS
    ]
    # Each variant has as many runs as the others.
    timed = [row for row in report["policies"]["rows"] if row["depth"] == settings["policy_depth"]]
    for row in (*report["steps"], *report["mixing"], *report["connections"], *timed):
        assert len(row["seconds"]) == settings["rounds"]
    for row in report["steps"]:
        assert row["median_seconds"] > 0
        assert row["peak_bytes"] > 0
        assert row["tokens_per_second"] == pytest.approx(64 / row["median_seconds"])
    depths = settings["connection_depths"]
    assert len(report["connections"]) == len(depths) * len(CONNECTIONS) * len((OURS, PLAIN))
    assert len(report["policies"]["rows"]) == len(settings["depths"]) * len(POLICIES)
    for text in (
        "Other connections over depth", "Traffic is counted, not measured",
        "layers plain PyTorch takes", "Policies: predicted and measured",
        "The deepest model that fits", "whose projection shares the embedding",
        "Whole steps, counted",
    ):  # fmt: skip
        assert text in made.page
    frugal = page.headlines(report)[-1]
    assert frugal["label"] == "less memory with recompute=layer+input than without"
    assert f"<b>{frugal['value']}</b>" in made.page


def test_what_does_not_fit_is_told_and_hostile_text_is_escaped(made):
    report = dict(made.report)
    report["connections"] = [
        row | {"seconds": [], "median_seconds": None, "note": "does not fit"}
        if row["variant"].endswith(PLAIN) else row
        for row in report["connections"]
    ]  # fmt: skip
    sample = {"source": "<script>alert(1)</script>", "reference": "a", "hypothesis": "b"}
    report["training"] = report["training"] | {"samples": [sample]}
    text = page.render(report)
    assert text.count("does not fit") == len(report["connections"]) // 2
    assert "layers plain PyTorch takes" not in text
    assert "<script>" not in text


def test_the_training_chapter(made):
    training = made.report["training"]
    assert training["status"] == "measured"
    assert {key: run["steps"] for key, run in training["runs"].items()} == {"dlcl": 20, "twin": 10}
    assert all(run["curve"]["dev"] for run in training["runs"].values())
    scores = training["scores"]
    assert scores["sentences"] == 6
    assert "case:mixed" in scores["bleu_signature"]
    assert "case:lc" in scores["bleu_lowercase_signature"]
    weights = training["weights"]
    assert len(weights) == len(weights[0]) == 7
    assert all(w == 0 for row, line in enumerate(weights) for w in line[row + 1 :])
    # The NLL of token frequencies is between that of certainty and of equal probabilities.
    assert 0 < training["unigram_nll"] < 6


def test_environment_and_parts_are_told(made):
    environment = made.report["environment"]
    for key in ("cpu", "cores", "threads", "torch", "deepfast", "build", "date", "backends"):
        assert environment[key]
    assert made.report["seconds"].keys() == {
        "agreement", "a step", "mixing alone", "connections", "recompute policies", "whole steps",
        "training", "total",
    }  # fmt: skip


def stop_after(monkeypatch, count):
    """Ctrl-C comes after so many jobs."""

    def run(jobs, seconds):
        run_jobs(jobs[:count], seconds)
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "run_jobs", run)


def test_an_interrupted_report_keeps_what_was_measured(tiny, tmp_path, monkeypatch, capsys):
    # The comparison with float64, the memory of two depths' five variants and one time.
    stop_after(monkeypatch, 7)
    found = report.make_report(tiny, "deepfast report")
    assert found["interrupted"]
    assert [row["variant"] for row in found["steps"] if row["median_seconds"]] == [VARIANTS[0]]
    text = page.render(found)
    assert "This report was interrupted." in text
    assert "Not measured: interrupted." in text
    assert all(card["value"] == "–" for card in page.headlines(found))
    # The command writes its page.
    stop_after(monkeypatch, 0)
    assert main(["report", "--quick", "--output", str(tmp_path)]) == 130
    text = (tmp_path / "index.html").read_text("utf-8")
    assert "This report was interrupted." in text
    assert text.count("<svg") == 1
    assert "index.html interrupted after" in capsys.readouterr().out


def test_a_training_that_fails_is_told_on_the_page(tiny, monkeypatch, capsys):
    def some(jobs, seconds):
        wanted = ("recompute policies", "training")
        jobs = [job for job in jobs if job.part in wanted]
        assert {job.part for job in jobs} == set(wanted)
        run_jobs(jobs, seconds)

    monkeypatch.setattr(report, "run_jobs", some)
    settings = replace(tiny, depths=(2,), mixing_depth=2, overrides=("model.dim=7",))
    found = report.make_report(settings, "deepfast report")
    assert found["training"]["status"].startswith("failed: ")
    assert "training failed" in capsys.readouterr().err
    assert "Not measured: failed: " in page.render(found)
    assert "Not measured." in page.render(found), "no depth's policies were timed"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_on_standard_error_of_a_terminal_alone(monkeypatch, capsys, terminal):
    if terminal:
        monkeypatch.setattr("sys.stderr", Terminal())
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "80")
    ran, seconds = [], {}
    jobs = [Job("part", f"only [job {n}]", lambda n=n: ran.append(n)) for n in (1, 2)]
    run_jobs(jobs, seconds)
    assert ran == [1, 2]
    assert seconds.keys() == {"part"}
    assert capsys.readouterr() == ("", "")
    if terminal:
        said = sys.stderr.getvalue()
        assert "1/2" in said
        assert "part: only [job 2]" in said


@pytest.mark.parametrize(
    ("seconds", "value", "label"),
    [(2.0, "2×", "faster than stack"), (0.5, "2×", "slower than stack")],
)
def test_a_main_result_says_slower_where_it_is(seconds, value, label):
    times = {VARIANTS[0]: seconds, "deepfast": 1.0}
    rows = [{"depth": 6, "variant": v, "median_seconds": s} for v, s in times.items()]
    card = page._card(rows, [VARIANTS[0]], "deepfast", "faster than stack")
    assert (card["value"], card["label"]) == (value, label)
