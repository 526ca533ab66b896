"""The chapter on connections over depth: forms that compute the same, its rows and its pictures."""

from dataclasses import replace

import pytest
import torch

from deepfast.measure import page, turns
from deepfast.measure.connections import (
    CONNECTIONS,
    OURS,
    PLAIN,
    ConnectionCase,
    connections,
    pairs,
    ratios,
)
from deepfast.measure.rows import Row

FORMS = [f"{name}: {form}" for name in CONNECTIONS for form in (OURS, PLAIN)]


@pytest.fixture(scope="module")
def rows(tiny, finish):
    found = []
    finish(connections(replace(tiny, connection_depths=(4, 9), connection_tokens=128), found))
    return found


@pytest.mark.parametrize("name", CONNECTIONS)
def test_both_forms_compute_the_same(tiny, name):
    case = ConnectionCase(tiny, 9, [Row(variant=v) for v in FORMS])
    connection, module = CONNECTIONS[name], case.modules[name].double()
    y, grad = case.y.detach().double().requires_grad_(), case.grad.double()
    found = []
    for form in (connection.ours, connection.plain):
        x = connection.run(form, module, y, grad)
        found.append([x, y.grad, *(p.grad for p in module.parameters())])
        y.grad = None
        module.zero_grad()
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain)


def test_every_form_is_measured_at_every_depth(tiny, rows):
    assert [(row.depth, row.variant) for row in rows] == [(d, v) for d in (4, 9) for v in FORMS]
    for row in rows:
        slow = row.variant.endswith(PLAIN)
        count = tiny.connection_slow_rounds if slow else tiny.connection_rounds
        assert len(row.seconds) == count
        assert row.nbytes > 0
        assert row.peak_bytes > 0
        if slow:
            assert row.peak_bytes <= row.predicted_bytes


def test_deepfast_moves_and_keeps_less(rows):
    for ours, plain in pairs([row.as_dict() for row in rows if row.depth == 9]):
        assert ours["what"] == plain["what"]
        assert ours["nbytes"] < plain["nbytes"]
        assert ours["peak_bytes"] < plain["peak_bytes"]


def test_ratios_are_those_of_the_greatest_depth(rows):
    rows = [row.as_dict() for row in rows]
    found = ratios(rows)
    assert found.keys() == CONNECTIONS.keys()
    ours, plain = pairs(rows)[len(CONNECTIONS)]
    assert (ours["depth"], ours["what"]) == (9, "DLCL")
    assert found["DLCL"]["memory"] == plain["peak_bytes"] / ours["peak_bytes"]
    # At twice the depth: plain PyTorch's traffic by four, that of blocks by two.
    assert 2 < found["attention in blocks"]["plain_growth"] < found["DLCL"]["plain_growth"] < 4
    plain["median_seconds"] = None
    assert "DLCL" not in ratios(rows)


def test_a_stack_that_does_not_fit_is_not_run(tiny, finish, monkeypatch):
    monkeypatch.setattr(turns, "free_bytes", lambda: turns.GIB + 1)
    rows = []
    finish(connections(tiny, rows))
    for row in rows:
        assert bool(row.note) == row.variant.endswith(PLAIN) == (not row.seconds)
    assert ratios([row.as_dict() for row in rows]) == {}


def test_the_page_has_the_chapter(made):
    rows = made.report["connections"]
    depths = made.report["settings"]["connection_depths"]
    assert [(r["depth"], r["variant"]) for r in rows] == [(d, v) for d in depths for v in FORMS]
    drawn = {name: svg for name, svg in made.drawn.items() if name.startswith("connection-")}
    assert all(svg in made.page for svg in drawn.values())
    for name in CONNECTIONS:
        assert all(f">{name}</text>" in svg for svg in drawn.values())
    for text in ("Other connections over depth", "Traffic is counted, not measured",
                 "layers plain PyTorch takes"):  # fmt: skip
        assert text in made.page


def test_what_does_not_fit_is_told_on_the_page(made):
    report = dict(made.report)
    report["connections"] = [
        row | {"seconds": [], "median_seconds": None, "note": "does not fit"}
        if row["variant"].endswith(PLAIN) else row
        for row in report["connections"]
    ]  # fmt: skip
    text = page.render(report)
    assert text.count("does not fit") == len(report["connections"]) // 2
    assert "layers plain PyTorch takes" not in text
