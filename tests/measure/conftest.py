"""A small report made once by the command itself, for all tests of its parts."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from deepfast.cli import main
from deepfast.measure import settings

TINY = replace(settings.QUICK, depths=(2, 4), policy_depth=4)


@pytest.fixture
def tiny():
    """Settings of chapters that take a second."""
    return TINY


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """The files of a quick report without training."""
    for package in ("matplotlib", "jinja2"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "QUICK", TINY)
        assert main(["report", "--quick", "--no-training", "--output", str(folder)]) == 0
    page = (folder / "index.html").read_text("utf-8")
    report = json.loads((folder / "report.json").read_text("utf-8"))
    return SimpleNamespace(page=page, folder=folder, report=report)
