"""Finding the compiled library, and compiling it: what happens where something is missing."""

import json
import os
import shutil
import sys
import threading
from pathlib import Path

import pytest
import torch
from filelock import FileLock

import deepfast
from deepfast import availability, backend, build, library
from deepfast.cli import main

BUILD = """rule compile
  command = {}
  description = $out
build one.o: compile
build _C.so: compile | one.o
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An empty folder in place of the package, and an empty cache."""
    folder = tmp_path / "a package"
    folder.mkdir()
    monkeypatch.setattr(library, "PACKAGE", folder)
    monkeypatch.setattr(
        library, "file_name", lambda cuda=False: f"_C.now{'.cuda' * cuda}{library.SUFFIX}"
    )
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


@pytest.mark.parametrize("place", ["package", "cache"])
def test_a_library_with_another_key_is_ignored(package, place):
    assert library.load()[1].startswith(f"the C++ ops of {package} are not compiled; ")
    other = package / f"_C.old{library.SUFFIX}"
    if place == "cache":
        other = library.cache_folder() / "torch-2.9.0" / library.file_name()
    other.parent.mkdir(parents=True, exist_ok=True)
    other.write_text("not a library")
    module, reason = library.load()
    assert module is None
    assert f"{other} is built from other sources or for another torch; `{library.BUILD}`" in reason


def test_a_library_that_does_not_load_is_a_reason(package):
    library.in_package().write_text("not a library")
    module, reason = library.load()
    assert module is None
    assert reason.startswith("the C++ ops do not load: ")
    assert str(library.in_package()) in reason


@pytest.mark.slow
@pytest.mark.skipif(not backend.compiled(), reason="there is no library to cut")
def test_a_library_that_is_cut_short_is_a_reason(python, tmp_path):
    """To load it would end the process with a bus error."""
    whole = Path(sys.modules["deepfast._C"].__file__)
    cut = tmp_path / "cut.so"
    cut.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    code = f"from deepfast import library; library.in_package = lambda cuda: {str(cut)!r}; "
    code += "print(library.load()[1])"
    said = python("-c", code, DEEPFAST_CACHE=str(tmp_path)).stdout
    assert said == f"the C++ ops do not load: {cut} is cut short; `{library.BUILD}` compiles them\n"


@pytest.mark.parametrize("clone", [False, True])
def test_the_command_compiles_this_copy(python, tmp_path, clone):
    """In a clone's folder `deepfast build` may be the command of an installed copy."""
    copy = tmp_path / "deepfast"
    copy.mkdir()
    for name in ("__init__", "files", "library", "version"):
        shutil.copy(Path(deepfast.__file__).with_name(f"{name}.py"), copy)
    if clone:
        (tmp_path / "setup.py").touch()
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); "
    code += "from deepfast import library; print(library.CSRC, library.BUILD)"
    command = "python -m deepfast build" if clone else "deepfast build"
    assert python("-c", code).stdout == f"{tmp_path / 'csrc'} {command}\n"


def test_import_works_with_a_library_of_another_key(python, tmp_path):
    """As after a change of the sources: the name that is expected is another."""
    code = (
        "from deepfast import library; library.file_name = lambda cuda=False: 'other.so'\n"
        "import torch, deepfast; from deepfast import backend\n"
        "deepfast.ops.layer_norm(torch.ones(2, 4), None, None)\n"
        "print(backend.choose('layer_norm', None, 'cpu', torch.float32)[0])"
    )
    assert python("-c", code, DEEPFAST_CACHE=str(tmp_path)).stdout == "reference\n"


def test_without_the_library_torch_serves_and_info_says_why(package, monkeypatch, capsys):
    reason = f"the C++ ops of {package} are not compiled; `{library.BUILD}` compiles them"
    assert library.load() == (None, reason)
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


def test_build_says_what_it_does(compiler, package, capsys):
    (package / f"_C.old{library.SUFFIX}").touch()
    compiler("echo compiled > $out")
    assert main(["build"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("The compiler is c++, jobs: ")
    assert "2 files to compile: about " in said
    assert "2/2 files" in said
    assert f"{library.in_package()}: done in " in said
    assert [path.name for path in package.iterdir()] == [library.file_name()]
    assert main(["build"]) == 0
    assert "0 files to compile: about 0 s." in capsys.readouterr().out


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
    ("CXX", "'", """CXX: expected a program, got "'\""""),
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


def test_a_read_only_package_gets_its_library_in_the_cache(compiler, package, monkeypatch):
    # For root every folder is writable.
    monkeypatch.setattr(os, "access", lambda path, mode: path != package)
    compiler("echo compiled > $out")
    assert main(["build"]) == 0
    assert library.in_cache().exists()
    assert not any(package.iterdir())


def test_a_library_with_cuda_comes_before_one_without(compiler, package, monkeypatch):
    """Two environments have the same torch and one cache; only the second has an nvcc."""
    compiler("echo compiled > $out")
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: path != package)
        patch.setattr(build, "why_no_cuda", lambda: "no nvcc was found")
        assert main(["build"]) == 0
    monkeypatch.setattr(build, "why_no_cuda", lambda: None)
    assert main(["build"]) == 0
    tried = []
    monkeypatch.setattr(library, "_cut_short", lambda path: tried.append(path) or True)
    library.load()
    assert [path.parent for path in tried] == [package, library.in_cache().parent]
    # The other way round: a wheel has a library without CUDA, and the cache has one with it.
    tried[0].rename(library.in_cache().parent / tried[0].name)
    tried[1].rename(package / tried[1].name)
    tried.clear()
    library.load()
    assert [path.parent for path in tried] == [library.in_cache().parent, package]


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
