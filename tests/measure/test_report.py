"""The whole command on tiny sizes: its page stands alone, its numbers are all there."""

import re
from html.parser import HTMLParser

import pytest

from deepfast.cli import main
from deepfast.measure import (
    deepest,
    memory_chapter,
    memory_pictures,
    page,
    results,
)
from deepfast.measure.rows import DOES_NOT_FIT, MEASURED, NOT_MEASURED
from deepfast.measure.settings import Deadline
from deepfast.memory import POLICIES
from deepfast.memory.eager import EAGER

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Reader(HTMLParser):
    """Checks nesting, and collects attributes and text."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture
def reader(made):
    found = Reader()
    found.feed(made.page)
    found.close()
    assert found.open == []
    return found


def test_two_files_are_written(made):
    assert made.names == ["index.html", "report.json"]


def test_the_page_needs_nothing_else(made, reader):
    assert not {"script", "link", "img", "iframe", "object"} & set(reader.tags)
    for tag, name, value in reader.attributes:
        if name in ("src", "href", "xlink:href"):
            assert value.startswith(("#", "data:")), (tag, name, value)
    assert not re.search(r"@import|url\((?!#)", made.page)
    assert ("meta", "name", "viewport") in reader.attributes


def test_ids_are_unique_and_references_resolve(made):
    ids = re.findall(r'\bid="([^"]+)"', made.page)
    assert len(ids) == len(set(ids))
    for reference in re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', made.page):
        assert set(reference) & set(ids)


def test_pictures_are_inline(made, reader):
    # Time, memory; the deepest models, memory over depth; losses, weights; policies where there
    # was time for them.
    timed = made.report["memory"]["times"]["depth"] is not None
    assert reader.tags.count("svg") == 6 + timed
    assert "deepfast" in reader.text


def test_nothing_of_the_machine_s_folders_is_told(made):
    assert str(made.folder) not in made.page
    assert "/tmp/" not in made.page
    assert made.report["command"] == "deepfast report --minutes 0.4 --quick --memory-gib 0.0008"


def test_what_does_not_fit_is_a_row(made, reader):
    (row,) = [r for r in made.report["sweep"]["rows"] if r["status"] == DOES_NOT_FIT]
    assert (row["variant"], row["depth"]) == ("stack and sum", 8)
    assert row["median_seconds"] is None
    assert "needs" in row["note"]
    assert f"does not fit: {row['note']}" in "".join(reader.text)


def test_every_variant_has_a_row_at_every_depth(made):
    report = made.report
    assert (report["format"], report["version"]) == ("deepfast report", 1)
    seen = {(r["depth"], r["variant"]) for r in report["sweep"]["rows"]}
    assert len(seen) == len(report["sweep"]["rows"]) == 3 * 5
    for row in report["sweep"]["rows"]:
        if row["status"] == MEASURED:
            assert row["median_seconds"] > 0
            assert row["peak_bytes"] > 0
            assert row["tokens_per_second"] == pytest.approx(64 / row["median_seconds"])
            assert row["training_step_seconds"] > row["median_seconds"]
        else:
            assert row["note"]


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


def test_mixing_is_set_against_the_copy(made):
    assert made.report["mixing"]["copy_bytes_per_second"] > 1e8
    for row in made.report["mixing"]["rows"]:
        assert row["fraction_of_copy"] > 0


def test_the_training_chapter(made):
    training = made.report["training"]
    assert training["status"] == "measured"
    for run in training["runs"].values():
        assert run["steps"] >= 1
        assert run["curve"]["dev"]
    scores = training["scores"]
    assert 1 <= scores["sentences"] <= 6
    assert "case:mixed" in scores["bleu_signature"]
    assert "case:lc" in scores["bleu_lowercase_signature"]
    weights = training["weights"]
    assert len(weights) == len(weights[0]) == 7
    assert all(w == 0 for row, line in enumerate(weights) for w in line[row + 1 :])
    # What any model must beat lies between certainty and all tokens alike.
    assert 0 < training["unigram_nll"] < 6


def test_environment_and_parts_are_told(made):
    environment = made.report["environment"]
    for key in ("cpu", "cores", "threads", "torch", "deepfast", "build", "date", "backends"):
        assert environment[key]
    assert made.report["seconds"].keys() >= {"sweep", "mixing", "training", "translation", "total"}


def test_a_page_without_training_or_times_says_so(made):
    report = dict(made.report, training={"status": "failed: no text"})
    rows = [
        r | {"median_seconds": None, "seconds": [], "peak_bytes": None, "status": "not measured",
             "note": "0 s were left"}
        for r in report["sweep"]["rows"]
    ]  # fmt: skip
    report["sweep"] = {"rows": rows}
    report["agreement"] = report["agreement"] | {"rows": []}
    report["mixing"] = {"copy_bytes_per_second": None, "rows": []}
    text = page.render(report)
    assert "Not measured: failed: no text" in text
    assert "not measured: 0 s were left" in text
    assert all(card["value"] == "–" for card in results.headlines(report))


def test_hostile_text_is_escaped(made):
    report = dict(made.report)
    sample = {"source": "<script>alert(1)</script>", "reference": "a", "hypothesis": "b"}
    report["training"] = report["training"] | {"samples": [sample]}
    assert "<script>" not in page.render(report)


# ---- the memory chapter --------------------------------------------------------------------------


def test_without_time_nothing_is_measured_and_the_page_says_so(tiny, made):
    memory = memory_chapter.memory(tiny, Deadline(0), lambda line: None)
    assert {row["status"] for row in memory["peaks"] + memory["held"]} == {NOT_MEASURED}
    assert {row["ratio"] for row in memory["peaks"] + memory["held"]} == {None}
    assert memory["times"]["rows"] == []
    assert memory_chapter.spread(memory["held"]) is None
    assert memory_chapter.frugal(memory) is None
    text = page.render(made.report | {"memory": memory})
    assert "not measured: 0 s of the time budget were left" in text
    assert "Not measured: 0 s of the time budget were left, too few for one round." in text
    assert "predicted over measured" not in text


def test_the_chapter_is_in_the_report(made):
    memory = made.report["memory"]
    assert memory["status"] == "measured"
    assert made.report["seconds"]["memory"] > 0
    assert len(memory["peaks"]) == 3 * len(POLICIES)
    for row in memory["peaks"]:
        assert row["parameter_bytes"] > 0
        if row["status"] == MEASURED:
            # What both numbers have in common brings them nearer to each other.
            assert abs(row["ratio_with_parameters"] - 1) <= abs(row["ratio"] - 1)
    for text in ("Policies: predicted and measured", "The deepest model that fits",
                 "shared with\na projection", "Closed forms held to measurement"):  # fmt: skip
        assert text in made.page


def test_with_time_every_picture_of_the_chapter_is_drawn(tiny, made):
    memory = memory_chapter.memory(tiny, Deadline(120), lambda line: None)
    assert {row["status"] for row in memory["peaks"] + memory["held"]} == {MEASURED}
    drawn = memory_pictures.draw(memory)
    for name in (*POLICIES, f"peak MiB, {memory['times']['depth']} layers"):
        assert f">{name}</text>" in drawn["policies"]
    for name in (*EAGER, deepest.PLANNED, "16", "24", "GiB of the device"):
        assert f">{name}</text>" in drawn["deepest"]
    text = page.render(made.report | {"memory": memory})
    for svg in drawn.values():
        assert svg in text
    saved = memory_chapter.frugal(memory)["saved"]
    assert f"<b>{saved:.2f}×</b>less memory with policy" in text


def test_a_report_without_the_chapter_says_so(made):
    text = page.render(made.report | {"memory": {"status": "not asked for"}})
    assert "Not measured: not asked for." in text
    assert "less memory with policy" not in text


@pytest.mark.parametrize("arguments", [["--minutes", "0"], ["--depths", "0"]])
def test_impossible_settings_are_one_sentence(arguments, tmp_path, capsys):
    assert main(["report", "--output", str(tmp_path), *arguments]) == 1
    assert "expected" in capsys.readouterr().err
