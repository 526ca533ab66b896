"""The file of results: its key, broken lines, folders that cannot be written."""

import ctypes
import time
from types import SimpleNamespace

import pytest
import torch

from deepfast.files import cache_folder
from deepfast.selfcheck import store

CPU = torch.device("cpu")
KERNELS = "layer_norm", "triton", "float32"
LINE = dict(zip(("op", "backend", "dtype"), KERNELS, strict=True))
FIRST = LINE | {"launch": "layer_norm_forward", "variant": [8, True, None]}


@pytest.fixture
def key():
    return store.make_key(CPU)


def test_what_is_added_is_read(key, cache):
    written = store.load(key)
    written.add(**FIRST, error=None)
    written.add(**FIRST | {"variant": [9]}, error="wrong")
    found = store.load(key)
    assert found == written
    assert found.right == {KERNELS: {("layer_norm_forward", 8, True, None)}}
    assert found.wrong == {KERNELS: "wrong"}
    assert list(found.lines()) == [
        "layer_norm triton float32: variants right at first use: 1; NOT USED: wrong"
    ]
    # A later selfcheck replaces what was found at first use.
    written.add(**LINE, error=None, date="2030-01-01")
    assert store.load(key).wrong == {}
    assert "full selfcheck on 2030-01-01" in next(store.load(key).lines())
    assert [path.parent for path in cache.iterdir()] == [cache]


def test_another_key_is_another_file(key):
    store.load(key).add(**FIRST, error="wrong")
    for field in ("deepfast", "sources", "library", "torch", "device", "driver"):
        assert key[field]
        assert store.load(key | {field: "another"}).wrong == {}


def test_a_broken_line_is_left_out(key, caplog):
    written = store.load(key)
    written.add(**FIRST, error=None)
    text = written.path.read_text()
    broken = ["{", "[1]", "{}", '{"op": 1}', "\udcff", '{"error": 1}', "null"]
    lines = [*broken, text]
    written.path.write_text("\n".join(lines), errors="surrogateescape")
    found = store.load(key)
    assert (found.right, found.wrong) == (written.right, written.wrong)
    assert caplog.text.count("has an invalid line") == len(broken)


def test_a_folder_that_cannot_be_written_is_told_once(key, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DEEPFAST_CACHE", str(tmp_path / "file" / "cache"))
    written = store.load(key)
    for _ in range(2):
        written.add(**FIRST, error="wrong")
    assert written.wrong == {KERNELS: "wrong"}
    (record,) = caplog.records
    assert "cannot be written" in record.getMessage()
    assert "set DEEPFAST_CACHE to another folder" in record.getMessage()


def test_the_check_of_another_machine(key):
    """Only its time is known."""
    for wrong, hours in ((0, 0.1), (1, 2)):
        process = ["another machine", 1, None, time.time() - hours * 3600]
        store.load(key).add(**FIRST, process=process, ended=False)
        assert len(store.load(key).wrong) == wrong
    store.load(key).add(**LINE, error=None, date="2030-01-01")
    assert store.load(key).wrong == {}


def test_the_cache_folder_is_the_users(monkeypatch, tmp_path):
    monkeypatch.delenv("DEEPFAST_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "deepfast"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert str(cache_folder()) == "/home/somebody/.cache/deepfast"


def test_each_kind_of_gpu_has_its_own_results(monkeypatch):
    names = ["card a", "card b", "card b"]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda at: names[at.index])
    monkeypatch.setattr(store, "_driver", lambda: "1.0")
    a, b, c = (store.of(torch.device("cuda", i)) for i in range(3))
    assert b is c
    assert a.path != b.path


def test_without_the_file_of_the_driver_its_library_says_the_version(monkeypatch, tmp_path):
    def version(number):
        number._obj.value = 13000

    library = SimpleNamespace(cuDriverGetVersion=version)
    monkeypatch.setattr(store, "Path", lambda _path: tmp_path / "none")
    monkeypatch.setattr(ctypes, "CDLL", {"libcuda.so.1": library}.__getitem__)
    assert store._driver() == "13000"
