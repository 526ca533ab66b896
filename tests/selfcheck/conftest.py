"""A CPU as a device whose kernels are checked: Triton's in the interpreter, CUDA's emulated."""

import pytest

from deepfast import backend
from deepfast.selfcheck import first_use, store


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache folder, and nothing known."""
    monkeypatch.setenv("DEEPFAST_CACHE", str(tmp_path / "cache"))
    for name in ("DEEPFAST_SELFCHECK", "DEEPFAST_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    store.tell_once.cache_clear()
    backend.forget()
    yield tmp_path / "cache"
    backend.forget()


@pytest.fixture
def device(monkeypatch):
    """Makes the CPU a device with checks; returns the launches that were checked, in order."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setitem(backend.CHECKED, "cpu", ("cuda", "triton"))
    seen, fault = [], first_use.fault

    def counted(launch, *given):
        seen.append(launch.name)
        return fault(launch, *given)

    monkeypatch.setattr(first_use, "fault", counted)
    return seen
