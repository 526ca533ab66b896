"""A CPU as a device that proves its kernels: Triton's in the interpreter, CUDA's emulated."""

from typing import ClassVar

import pytest

from deepfast import backend
from deepfast.proof import known, prove
from deepfast.proof import table as tables


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache folder, and nothing known."""
    monkeypatch.setenv("DEEPFAST_CACHE", str(tmp_path / "cache"))
    for name in ("DEEPFAST_PROOF", "DEEPFAST_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    tables.tell_once.cache_clear()
    backend.forget()
    yield tmp_path / "cache"
    backend.forget()


class Given(prove.Runner):
    """Runs nothing: every backend has the error that is given."""

    runs: ClassVar[int] = 0
    error: ClassVar[str | None] = None

    def run(self, op, items):
        type(self).runs += 1
        for item in items:
            yield item, {"error": self.error}


@pytest.fixture
def device(monkeypatch):
    """Makes the CPU a device where Triton's kernels are proved in float32; the proofs are given."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setitem(backend.PROVABLE, "cpu", ("cuda", "triton"))
    whole = backend.provable
    monkeypatch.setattr(
        backend, "provable", lambda op, at: {by: ["float32"] for by in whole(op, at)}
    )
    # The order of the backends decides, because an interpreter is never the fastest.
    monkeypatch.setattr(prove, "time", lambda *_: None)
    monkeypatch.setattr(known, "make_runner", Given)
    monkeypatch.setattr(Given, "runs", 0)
    monkeypatch.setattr(Given, "error", None)
    return Given
