"""A CPU as a device that proves its kernels: Triton's in the interpreter, CUDA's emulated."""

import io
import json
from dataclasses import dataclass, field
from typing import ClassVar

import pytest

from deepfast import backend
from deepfast.cases import sizes, worker
from deepfast.proof import known, prove, ranks
from deepfast.proof import table as tables
from tests.proof import faults


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache folder, and nothing known."""
    monkeypatch.setenv("DEEPFAST_CACHE", str(tmp_path / "cache"))
    for name in ("DEEPFAST_PROOF", "DEEPFAST_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    known._tell_once.cache_clear()
    ranks._tell_no_store.cache_clear()
    tables._unwritable.clear()
    backend.forget()
    yield tmp_path / "cache"
    backend.forget()


@dataclass
class InProcess(prove.Runner):
    """Runs the items here, one after another: for kernels that do not end the process."""

    limits: prove.Limits = field(default_factory=lambda: prove.Limits(workers=1))
    runs: ClassVar[int] = 0

    def run(self, op, items):
        type(self).runs += 1
        job = {
            "op": op, "device": str(self.device), "thorough": self.thorough, "rounds": 1,
            "items": items,
        }  # fmt: skip
        out = io.StringIO()
        worker.Worker(job, out).run()
        for line in map(json.loads, out.getvalue().splitlines()):
            if "done" in line:
                yield items[line["done"]], line


@pytest.fixture
def device(monkeypatch):
    """Makes the CPU a device that proves Triton's kernels, in this process and in few cases."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setitem(backend.PROVABLE, "cpu", ("cuda", "triton"))
    monkeypatch.setattr(sizes, "cases", faults.few)
    # The order of the backends decides, because an interpreter is never the fastest.
    monkeypatch.setattr(prove, "time", lambda *_: None)
    monkeypatch.setattr(known, "make_runner", InProcess)
    monkeypatch.setattr(InProcess, "runs", 0)
    return InProcess


@pytest.fixture
def broken(monkeypatch):
    """``broken(names, fault)`` breaks layer_norm on these backends, in this process."""

    def install(names, fault):
        wrapped = faults.broken(backend._launchers, names, getattr(faults, fault))
        monkeypatch.setattr(backend, "_launchers", wrapped)

    return install
