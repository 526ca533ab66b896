"""A small report made once by the command itself, for all tests of its parts."""

import json
from types import SimpleNamespace

import pytest
import torch

from deepfast.cli import main
from deepfast.measure.settings import Settings, quick


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """At these sizes a second thread only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tiny():
    """Settings of a sweep that takes a second."""
    return quick(Settings(depths=(2, 4)))


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """The files of a quick report whose memory does not allow the deepest stack and sum."""
    for package in ("matplotlib", "jinja2", "rich", "sentencepiece", "sacrebleu", "num2words"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("report")
    command = ["report", "--quick", "--minutes", "0.4", "--memory-gib", "0.0008"]
    assert main([*command, "--output", str(folder / "out")]) == 0
    page = (folder / "out" / "index.html").read_text("utf-8")
    report = json.loads((folder / "out" / "report.json").read_text("utf-8"))
    names = sorted(p.name for p in (folder / "out").iterdir())
    return SimpleNamespace(page=page, report=report, folder=folder, names=names)
