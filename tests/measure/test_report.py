"""The whole command on tiny sizes: the page needs no other file and has all numbers."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from deepfast.cli import main
from deepfast.measure import deepest, page, report, report_pictures, results, trace
from deepfast.measure.clock import COPY
from deepfast.measure.encoders import VARIANTS
from deepfast.measure.progress import Job, Progress
from deepfast.measure.settings import QUICK
from deepfast.memory import POLICIES
from deepfast.memory.eager import EAGER

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Reader(HTMLParser):
    """Checks nesting, and collects attributes and text."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], []

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


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

    monkeypatch.setattr(trace.profile, "export_chrome_trace", killed)
    with pytest.raises(KeyboardInterrupt):
        trace.write(QUICK, path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_page_needs_nothing_else(made):
    reader = Reader()
    reader.feed(made.page)
    reader.close()
    assert reader.open == []
    assert not {"script", "link", "img", "iframe", "object"} & set(reader.tags)
    for tag, name, value in reader.attributes:
        if name in ("src", "href", "xlink:href"):
            assert value.startswith(("#", "data:")), (tag, name, value)
    assert not re.search(r"@import|url\((?!#)", made.page)
    assert ("meta", "name", "viewport") in reader.attributes
    # Time, memory; traffic, time, memory of connections; policies, the deepest models, memory over
    # depth; losses, weights.
    assert reader.tags.count("svg") == 10
    assert "deepfast" in reader.text
    ids = re.findall(r'\bid="([^"]+)"', made.page)
    assert len(ids) == len(set(ids))
    for reference in re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', made.page):
        assert set(reference) & set(ids)


def test_nothing_of_the_machine_s_folders_is_told(made):
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
    for row in report["steps"]:
        pair = row["variant"] in ("plain residual", "deepfast")
        assert len(row["seconds"]) == settings["rounds" if pair else "slow_rounds"]
        assert row["median_seconds"] > 0
        assert row["peak_bytes"] > 0
        assert row["tokens_per_second"] == pytest.approx(64 / row["median_seconds"])
        if row["predicted_bytes"]:
            assert row["peak_bytes"] <= row["predicted_bytes"] <= 1.5 * row["peak_bytes"]


def test_forms_agree_with_float64(made):
    rows = {(r["variant"], r["dtype"]): r for r in made.report["agreement"]["rows"]}
    assert rows.pop(("deepfast", "float64"))["gradients"] < 1e-12
    assert {v for v, _ in rows} == {
        "deepfast", "stack and sum", "DenseFormer form", "loop of adds",
    }  # fmt: skip
    for row in rows.values():
        assert row["loss"] < 1e-6
        assert row["gradients"] < 1e-5
        assert row["weight"] < 1e-5


def test_mixing_is_compared_with_the_copy(made):
    rows = {row["variant"]: row for row in made.report["mixing"]}
    assert rows[COPY]["fraction_of_copy"] == 1
    assert rows[COPY]["gb_per_second"] > 0.1
    assert all(row["fraction_of_copy"] > 0 for row in rows.values())


def test_the_training_chapter(made):
    training = made.report["training"]
    assert training["status"] == "measured"
    assert {key: run["steps"] for key, run in training["runs"].items()} == {"dlcl": 8, "twin": 6}
    assert all(run["curve"]["dev"] for run in training["runs"].values())
    scores = training["scores"]
    assert scores["sentences"] == 4
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
        "agreement", "a step", "mixing alone", "connections", "memory policies", "closed forms",
        "training", "total",
    }  # fmt: skip


class Stopped(Progress):
    """Ctrl-C comes before the n-th job."""

    def __init__(self, jobs, error=KeyboardInterrupt):
        super().__init__(terminal=False)
        self.jobs, self.error = jobs, error

    def _run(self, job):
        self.jobs -= 1
        if self.jobs < 0:
            raise self.error
        super()._run(job)


def test_an_interrupted_report_keeps_what_was_measured(tiny):
    # The comparison with float64, the memory of two depths' five variants and one time.
    found = report.make_report(tiny, "deepfast report", Stopped(7))
    assert found["interrupted"]
    assert [row["variant"] for row in found["steps"] if row["median_seconds"]] == [VARIANTS[0]]
    text = page.render(found)
    assert "This report was interrupted." in text
    assert "Not measured: interrupted." in text
    assert all(card["value"] == "–" for card in results.headlines(found))
    assert page.render(report.make_report(tiny, "deepfast report", Stopped(0))).count("<svg") == 2


def test_an_interrupted_command_writes_its_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("deepfast.measure.progress.Progress", lambda: Stopped(3))
    assert main(["report", "--quick", "--output", str(tmp_path)]) == 130
    assert "This report was interrupted." in (tmp_path / "index.html").read_text("utf-8")
    assert "index.html interrupted after" in capsys.readouterr().out


class Some(Progress):
    """Only jobs of these parts run."""

    def __init__(self, *parts):
        super().__init__(terminal=False)
        self.parts = parts

    def run(self, jobs):
        super().run([job for job in jobs if job.part in self.parts])


def test_a_training_that_fails_is_told_on_the_page(tiny, capsys):
    settings = replace(tiny, depths=(2,), mixing_depth=2, overrides=("model.dim=7",))
    found = report.make_report(settings, "deepfast report", Some("memory policies", "training"))
    assert found["training"]["status"].startswith("failed: ")
    assert "training failed" in capsys.readouterr().err
    assert "Not measured: failed: " in page.render(found)
    assert "Not measured." in page.render(found), "no depth's policies were timed"


def test_a_plain_line_for_each_job(capsys):
    jobs = [Job("part", name, 10.0, lambda: None) for name in ("first", "second")]
    Progress(terminal=False).run(jobs)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["0:20", "left", "part:", "first"]
    assert lines[1].split() == ["0:07", "left", "part:", "second"]


def test_a_bar_on_a_terminal(capsys):
    ran = []
    progress = Progress(terminal=True)
    progress.run([Job("part", "only [job]", 1.0, lambda: ran.append(1))])
    assert ran == [1]
    assert progress.seconds.keys() == {"part"}


def test_hostile_text_is_escaped(made, monkeypatch):
    monkeypatch.setattr(report_pictures, "draw", lambda _: made.drawn)
    report = dict(made.report)
    sample = {"source": "<script>alert(1)</script>", "reference": "a", "hypothesis": "b"}
    report["training"] = report["training"] | {"samples": [sample]}
    assert "<script>" not in page.render(report)


# ---- the memory chapter --------------------------------------------------------------------------


def test_the_chapter_has_every_row(made):
    rows = made.report["policies"]["rows"]
    depths = made.report["settings"]["depths"]
    assert [(r["depth"], r["variant"]) for r in rows] == [(d, p) for d in depths for p in POLICIES]
    for row in rows:
        assert row["parameter_bytes"] > 0
        # Both numbers include the parameters, so their ratio is nearer to 1.
        assert abs(row["ratio_with_parameters"] - 1) <= abs(row["ratio"] - 1)
    for text in ("Policies: predicted and measured", "The deepest model that fits",
                 "whose projection shares the embedding", "Closed forms compared"):  # fmt: skip
        assert text in made.page


def test_every_picture_of_the_chapter_is_drawn(made):
    drawn = made.drawn
    for name in (*POLICIES, "peak MiB, 4 layers"):
        assert f">{name}</text>" in drawn["policies"]
    for name in (*EAGER, deepest.PLANNED, "16", "24", "GiB of the device"):
        assert f">{name}</text>" in drawn["deepest"]
    assert all(svg in made.page for svg in drawn.values())
    frugal = results.headlines(made.report)[-1]
    assert frugal["label"] == "less memory with policy history than with keep"
    assert f"<b>{frugal['value']}</b>" in made.page
