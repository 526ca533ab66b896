"""Finding the compiled library, and compiling it: what happens where something is missing."""

import json
import os
import threading
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from deepfast import availability, backend, build, library
from deepfast.cli import main

BUILD = """rule compile
  command = {}
  description = $out
build one.o: compile
build _C.so: compile | one.o
"""
COMPILES = f"`{library.BUILD}` compiles them"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An empty folder in place of the package, and an empty cache."""
    folder = tmp_path / "a package"
    folder.mkdir()
    monkeypatch.setattr(library, "PACKAGE", folder)
    name = f"_C.now{{}}{library.SUFFIX}"
    monkeypatch.setattr(library, "file_name", lambda cuda=False: name.format(".cuda" * cuda))
    monkeypatch.setenv("DEEPFAST_CACHE", str(tmp_path / "the cache"))
    return folder


@pytest.fixture
def compiler(package, monkeypatch):
    """``compiler(command)``: two files that the command makes are the whole build."""
    monkeypatch.setattr(build, "compiler", lambda: "c++")
    monkeypatch.setattr(build, "work_folder", lambda: package.parent / "objects")

    def use(command):
        monkeypatch.setattr(build, "ninja_file", lambda *_: BUILD.format(command))

    return use


def test_the_name_has_a_digest_of_the_sources(monkeypatch, tmp_path):
    (tmp_path / "csrc" / "cpu").mkdir(parents=True)
    monkeypatch.setattr(library, "CSRC", tmp_path / "csrc")
    names = set()
    for text in ("int a;", "int b;", "int a;"):
        (tmp_path / "csrc" / "cpu" / "op.h").write_text(text)
        library.file_name.cache_clear()
        names.add(library.file_name())
    monkeypatch.undo()
    library.file_name.cache_clear()
    assert len(names) == 2
    assert library.file_name() not in names
    assert library.file_name().endswith(library.SUFFIX)


def test_a_library_that_cannot_be_used_is_a_reason(package):
    """One that is cut short would end the process with a bus error."""
    assert library.load()[1] == f"the C++ ops of {package} are not compiled; {COMPILES}"
    cached = library.cache_folder() / "torch-2.9.0" / library.file_name()
    cached.parent.mkdir(parents=True)
    for other in (package / f"_C.old{library.SUFFIX}", cached):
        other.write_text("not a library")
        said = f"{other} is built from other sources or for another torch; {COMPILES}"
        assert library.load() == (None, f"the C++ ops do not match: {said}")
        other.unlink()
    target = library.in_package()
    target.write_text("not a library")
    assert library.load()[1].startswith(f"the C++ ops do not load: {target}: ")
    whole = Path(torch._C.__file__).read_bytes()
    target.write_bytes(whole[: len(whole) // 2])
    said = f"the C++ ops do not load: {target} is cut short; {COMPILES}"
    assert library.load() == (None, said)


def test_a_library_with_cuda_comes_before_one_without(package, monkeypatch):
    """Environments share a cache, and only some of them have an nvcc; a wheel has no CUDA."""
    tried = []
    monkeypatch.setattr(library, "_cut_short", lambda path: tried.append(path) or True)
    library.in_cache().parent.mkdir(parents=True)
    for first, second in (
        (library.in_package(cuda=True), library.in_cache()),
        (library.in_cache(cuda=True), library.in_package()),
    ):
        first.touch()
        second.touch()
        library.load()
        assert tried == [first, second]
        tried.clear()
        first.unlink()
        second.unlink()


def test_without_the_library_torch_serves_and_info_says_why(monkeypatch, capsys):
    reason = "the C++ ops are not compiled"
    monkeypatch.setattr(availability, "C_OPS", None)
    monkeypatch.setattr(availability, "WHY_NO_C_OPS", reason)
    # Choices are kept.
    monkeypatch.setattr(backend, "_choices", {})
    assert main(["info", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"build    {reason}" in lines
    for op in backend.OPS:
        assert f"{op}: {'sdpa' if op == 'attention' else 'reference'}" in lines
    assert main(["info", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["build"] == {"missing": reason}
    assert backend.why_unable("layer_norm", "cpu", "cpu", torch.float32) == reason


def test_build_says_what_it_does(compiler, package, monkeypatch, capsys):
    """Where the package is read-only, the library is written into the cache."""
    monkeypatch.setattr(build, "why_no_cuda", lambda: "there is none")
    (package / f"_C.old{library.SUFFIX}").touch()
    compiler("echo compiled > $out")
    assert main(["build"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("The compiler is c++, jobs: ")
    assert "2 files to compile: about " in said
    assert "2/2 files" in said
    assert f"{library.in_package()}: done in " in said
    assert [path.name for path in package.iterdir()] == [library.file_name()]
    # For root every folder is writable.
    monkeypatch.setattr(os, "access", lambda path, mode: path != package)
    assert main(["build"]) == 0
    assert "0 files to compile: about 0 s." in capsys.readouterr().out
    assert library.in_cache().exists()
    monkeypatch.setattr(build, "why_no_cuda", lambda: None)
    assert build.choose_target() == library.in_cache(cuda=True)


def test_a_compiler_that_fails_is_one_sentence(compiler, package, capsys):
    program = package.parent / "fails.sh"
    program.write_text("echo first line; echo 'op.h:3: error: no such type'; exit 1")
    compiler(f"sh {program}")
    assert main(["build"]) == 1
    said = capsys.readouterr().err
    log = build.work_folder() / "build.log"
    assert (
        f"the build failed: op.h:3: error: no such type; the log is {log}; deepfast works" in said
    )
    assert "first line" in log.read_text()
    assert not any(package.iterdir())


@pytest.mark.parametrize(("variable", "value", "error"), [
    ("PATH", "", "found no C++ compiler: install g++ or clang++, or set CXX to one"),
    ("CXX", "/nope/g++", "CXX: expected a program, got '/nope/g++'"),
    ("MAX_JOBS", "0", "MAX_JOBS: expected a positive integer, got '0'"),
    ("MAX_JOBS", "all", "MAX_JOBS: expected a positive integer, got 'all'"),
])  # fmt: skip
def test_a_build_that_cannot_begin_is_one_sentence(
    package, monkeypatch, capsys, variable, value, error
):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv(variable, value)
    assert main(["build"]) == 1
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", f"deepfast build: {error}\n")


def test_a_second_process_waits_for_the_first(compiler, package):
    compiler("echo compiled > $out")
    build.work_folder().mkdir()
    begun = threading.Event()
    second = threading.Thread(
        target=build.compile_ops, args=(library.in_package(), lambda *_: begun.set())
    )
    with FileLock(build.work_folder() / "lock"):
        second.start()
        assert not begun.wait(0.5)
    second.join(30)
    assert begun.is_set()
    assert library.in_package().exists()
