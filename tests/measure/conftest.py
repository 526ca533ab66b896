"""A small report made once by the command itself, for all tests of its parts."""

import functools
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from deepfast.cli import main
from deepfast.measure import deepest, report_pictures, settings
from deepfast.measure.settings import QUICK


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """At these sizes a second thread does not help."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def _deepest_once():
    """The deepest models do not depend on the settings, and planning them takes a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deepest, "deepest", functools.cache(deepest.deepest))
        yield


@pytest.fixture(scope="session")
def tiny():
    """Settings of a sweep that takes a second."""
    return replace(QUICK, depths=(2, 4), mixing_depth=4, policy_depth=4)


@pytest.fixture(scope="session")
def finish():
    """Runs jobs to their end without output."""

    def run(jobs):
        while jobs:
            jobs.pop(0).run()

    return run


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """The files of a report that is smaller than a quick one."""
    for package in ("matplotlib", "jinja2", "rich", "sentencepiece", "sacrebleu", "num2words"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("report")
    small = replace(
        QUICK, depths=(2, 4), mixing_depth=4, policy_depth=4, steps=8, twin_steps=6, sentences=4
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "QUICK", small)
        assert main(["report", "--quick", "--trace", "--output", str(folder / "out")]) == 0
    page = (folder / "out" / "index.html").read_text("utf-8")
    report = json.loads((folder / "out" / "report.json").read_text("utf-8"))
    names = sorted(p.name for p in (folder / "out").iterdir())
    drawn = report_pictures.draw(report)
    return SimpleNamespace(page=page, report=report, drawn=drawn, folder=folder, names=names)
