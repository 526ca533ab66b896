"""A small report made once by the command itself, for all tests of its parts."""

import functools
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from deepfast.cli import main
from deepfast.measure import memory_steps
from deepfast.measure.settings import QUICK


@pytest.fixture(autouse=True, scope="session")
def _quick():
    """The deepest models do not depend on the settings, and planning them takes a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_steps, "deepest", functools.cache(memory_steps.deepest))
        yield


@pytest.fixture
def tiny():
    """Settings of chapters that take a second."""
    return replace(QUICK, depths=(2, 4), mixing_depth=4, policy_depth=4)


@pytest.fixture
def measured():
    """Runs the jobs of a chapter without output; returns its rows."""

    def run(groups):
        jobs = [job for group in groups for job in group.jobs()]
        while jobs:
            jobs.pop(0).run()
        return [row for group in groups for row in group.rows]

    return run


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """The files of a quick report."""
    for package in ("matplotlib", "jinja2", "sentencepiece", "sacrebleu", "num2words"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("report")
    assert main(["report", "--quick", "--trace", "--output", str(folder / "out")]) == 0
    page = (folder / "out" / "index.html").read_text("utf-8")
    report = json.loads((folder / "out" / "report.json").read_text("utf-8"))
    names = sorted(p.name for p in (folder / "out").iterdir())
    return SimpleNamespace(page=page, report=report, folder=folder, names=names)
