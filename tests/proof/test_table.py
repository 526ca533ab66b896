"""The file of what is proved: its key, broken files, folders that cannot be written."""

import json

import pytest
import torch

from deepfast.proof import table as tables

CPU = torch.device("cpu")
OPS = {"layer_norm": {"float32": {"errors": {"triton": None}, "seconds": {"512": {"triton": 0.5}}}}}


@pytest.fixture
def key():
    return tables.make_key(CPU, None)


def kept(key, ops=OPS):
    table = tables.Table(key, ops)
    with tables.lock(key):
        tables.write(table)
    return tables.file_of(key)


def test_what_is_written_is_read(key, cache):
    assert tables.load(key).ops == {}
    path = kept(key)
    assert path.parent == cache
    found = tables.load(key)
    assert (found.ops, found.source) == (OPS, str(path))
    assert {p.suffix for p in cache.iterdir()} == {".json", ".lock"}


@pytest.mark.parametrize("field", ["device", "driver", "torch", "triton", "sources", "cuda"])
def test_another_key_is_another_file(key, field):
    kept(key)
    assert tables.load(key | {field: "another"}).ops == {}


def test_the_key_in_a_file_is_compared(key, caplog):
    """A file that was copied to the name of another key."""
    path = kept(key)
    other = key | {"torch": "9.9"}
    path.rename(tables.file_of(other))
    assert tables.load(other).ops == {}
    assert "is of another device or version; it is made anew" in caplog.text


BROKEN = {
    "empty": lambda text: "",
    "truncated": lambda text: text[: len(text) // 2],
    "no object": lambda text: "[1]",
    "no ops": lambda text: json.dumps({"key": json.loads(text)["key"]}),
    "no seconds": lambda text: text.replace('"seconds"', '"second"'),
    "wrong error": lambda text: text.replace("null", "3"),
    "wrong width": lambda text: text.replace('"512"', '"wide"'),
    "wrong time": lambda text: text.replace("0.5", '"0.5"'),
    "not text": lambda text: "\udcff" + text,
    "not a table": lambda text: text.replace('"errors": {', '"errors": [{').replace(
        "},\n", "}],\n", 1
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_file_is_told_and_made_anew(key, caplog, how):
    path = kept(key)
    text = path.read_text()
    path.write_text(BROKEN[how](text), errors="surrogateescape")
    assert path.read_bytes() != text.encode()
    assert tables.load(key).ops == {}
    (record,) = caplog.records
    assert str(path) in record.getMessage()
    assert "made anew" in record.getMessage()
    kept(key)
    assert tables.load(key).ops == OPS


def test_a_folder_that_cannot_be_written_is_told_once(key, tmp_path, monkeypatch, caplog):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("DEEPFAST_CACHE", str(file / "cache"))
    table = tables.Table(key, OPS)
    for _ in range(2):
        with tables.lock(key):
            tables.write(table)
    assert table.source is None
    (record,) = caplog.records
    assert "cannot be written" in record.getMessage()
    assert "DEEPFAST_CACHE names another folder" in record.getMessage()


def test_a_write_that_fails_leaves_nothing_behind(key, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    table = tables.Table(key, OPS)
    with tables.lock(key):
        tables.write(table)
    assert table.source is None
    assert "No space left on device" in caplog.text
    folder = tables.file_of(key).parent
    assert [p.name for p in folder.iterdir()] == [tables.file_of(key).with_suffix(".lock").name]


def test_a_packaged_table_saves_the_wait(key, tmp_path, monkeypatch):
    """The driver and the compiled library's bytes may differ, and nothing else."""
    packaged = tmp_path / "tables"
    packaged.mkdir()
    (packaged / "card.json").write_text(tables.Table(key, OPS).to_json())
    monkeypatch.setattr(tables, "PACKAGED", packaged)
    for field in ("driver", "library"):
        found = tables.load(key | {field: "another"})
        assert found.ops == OPS
        assert found.source == str(packaged / "card.json")
    assert tables.load(key | {"torch": "9.9"}).ops == {}
    kept(key, {})
    assert tables.load(key).ops == {}


def test_the_packaged_tables_are_tables():
    for path in tables.PACKAGED.glob("*.json"):
        assert tables.read(path, json.loads(path.read_text())["key"]).ops


def test_the_cache_folder_is_the_platforms(monkeypatch, tmp_path):
    monkeypatch.delenv("DEEPFAST_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    assert tables.cache_folder() == tmp_path / "deepfast"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert str(tables.cache_folder()) == "/home/somebody/.cache/deepfast"
    monkeypatch.setattr("sys.platform", "darwin")
    assert str(tables.cache_folder()) == "/home/somebody/Library/Caches/deepfast"
    monkeypatch.setattr("sys.platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    assert tables.cache_folder() == tmp_path / "deepfast"


def test_the_digest_is_of_the_sources():
    assert len(tables.digest()) == 16
    assert tables.digest() == tables.make_key(CPU, None)["sources"]


@pytest.mark.parametrize(
    ("queries", "keys", "length"), [(1, 0, 64), (64, 64, 64), (3, 65, 512), (9999, 1, 4096)]
)
def test_attention_is_timed_at_its_longest_sentence(queries, keys, length):
    assert tables.length(queries, keys) == length
