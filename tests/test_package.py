"""The sdist and the wheel: which files they hold, and that they can be built, installed and used.

Both are built from a copy of the tree, because setuptools takes into an sdist what an older
egg-info beside setup.py lists.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from deepfast import library
from deepfast.version import __version__

ROOT = Path(__file__).parents[1]
SOURCES = ("csrc", "deepfast", "kernels")

SDIST = "from setuptools import build_meta; build_meta.build_sdist('dist')"
NO_COMPILER = {"PATH": "", "CXX": "", "CC": ""}


def run(*command, cwd, fails=False, **environment):
    """Runs a command in ``cwd`` without the tree on Python's path; returns what it printed."""
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=inherited | environment,
        capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert done.returncode == int(fails), done.stdout + done.stderr
    return done.stderr if fails else done.stdout


def of_tree(folder):
    """Every file below a folder of the tree that is a source: nothing compiled, and no link."""
    for path in sorted((ROOT / folder).rglob("*")):
        relative = path.relative_to(ROOT)
        built = "__pycache__" in relative.parts or path.suffix in (".so", ".pyc")
        if path.is_file() and not built and not relative.is_relative_to("deepfast/kernels"):
            yield str(relative)


def test_one_list_of_pythons_and_one_version():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    prefix = "Programming Language :: Python :: 3."
    minors = [c.removeprefix(prefix) for c in config["project"]["classifiers"] if prefix in c]
    wheels = config["tool"]["cibuildwheel"]["build"].split()
    assert wheels == [f"cp3{minor}-*" for minor in minors]
    assert config["project"]["requires-python"] == f">=3.{minors[0]}"
    tested = ", ".join(f'"3.{minor}"' for minor in minors)
    for workflow in ("ci.yml", "release.yml"):
        assert f"python: [{tested}]" in (ROOT / ".github" / "workflows" / workflow).read_text()
    assert f"version: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    tree = tmp_path_factory.mktemp("tree")
    built = shutil.ignore_patterns("__pycache__", "*.so")
    for folder in (*SOURCES, "bench", "tests", "docs"):
        shutil.copytree(ROOT / folder, tree / folder, symlinks=True, ignore=built)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, tree)
    run(sys.executable, "-c", SDIST, cwd=tree)
    (found,) = (tree / "dist").iterdir()
    return found


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """The wheel with the library, built from the sdist: about four minutes of a processor."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps")
    run(*pip, "-w", folder, sdist, cwd=folder, DEEPFAST_BUILD="1", DEEPFAST_BUILD_CUDA="0")
    (found,) = folder.glob("*.whl")
    return found


def files(path):
    """The files of an sdist, without its first folder, or of a wheel."""
    if path.suffix == ".whl":
        return set(zipfile.ZipFile(path).namelist())
    with tarfile.open(path) as archive:
        members = archive.getmembers()
    assert all(m.isfile() or m.isdir() for m in members)
    return {m.name.partition("/")[2] for m in members if m.isfile()}


@pytest.mark.exhaustive
def test_sdist_holds_what_the_build_reads(sdist):
    found = files(sdist)
    wanted = {name for folder in SOURCES for name in of_tree(folder)}
    assert {"csrc/headers.py", "csrc/cuda/row.h", "kernels/common.py"} <= wanted
    assert wanted <= found, sorted(wanted - found)
    rest = {name for name in found - wanted if not name.startswith("deepfast.egg-info/")}
    assert rest == {
        "CHANGELOG.md", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md",
        "constraints.txt", "pyproject.toml", "setup.cfg", "setup.py",
    }  # fmt: skip


@pytest.mark.exhaustive
def test_wheel_holds_the_package_and_its_sources(wheel):
    found = {name for name in files(wheel) if ".dist-info/" not in name}
    moved = {f"deepfast/{name}" for folder in ("csrc", "kernels") for name in of_tree(folder)}
    assert {"deepfast/csrc/cuda/row.h", "deepfast/kernels/common.py"} <= moved
    assert found == moved | set(of_tree("deepfast")) | {f"deepfast/{library.file_name()}"}


def installed(what, folder, *packages):
    """A virtual environment with a wheel or sdist, and of this one torch and what torch needs, and
    further packages. Without these pip installs the requirements."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    site = (
        folder
        / "lib"
        / f"python{sys.version_info.major}.{sys.version_info.minor}"
        / "site-packages"
    )
    todo, done = [Requirement(name) for name in ("torch", *packages)], set()
    while todo:
        wanted = todo.pop()
        # A requirement with extras, such as name[part], needs what the distribution has for them.
        for extra in {"", *wanted.extras}:
            if (wanted.name, extra) in done:
                continue
            done.add((wanted.name, extra))
            distribution = importlib.metadata.distribution(wanted.name)
            for top in {path.parts[0] for path in distribution.files} - {"..", "__pycache__"}:
                if not (site / top).exists():
                    (site / top).symlink_to(distribution.locate_file(top))
            needs = map(Requirement, distribution.requires or ())
            todo += [r for r in needs if r.marker is None or r.marker.evaluate({"extra": extra})]
    pip = (sys.executable, "-m", "pip", "-q", "--python", python, "install")
    pip += ("--no-index",) if packages else ("-c", ROOT / "constraints.txt")
    run(*pip, what, cwd=folder, **NO_COMPILER)
    return python


@pytest.mark.exhaustive
def test_installs_in_isolation_without_a_compiler(sdist, tmp_path):
    """As ``pip install .`` in an environment that has torch alone: fetches a few small packages."""
    python = installed(sdist, tmp_path / "venv")
    here = {"cwd": tmp_path, "DEEPFAST_CACHE": str(tmp_path / "cache"), **NO_COMPILER}
    run(python, ROOT / "tests" / "installed.py", "reference", **here)
    deepfast = tmp_path / "venv" / "bin" / "deepfast"
    said = run(deepfast, "info", "--device", "cpu", **here)
    assert re.search("^build    the C.. ops of .* are not compiled; `deepfast build` ", said, re.M)
    table = run(deepfast, "bench", "layer_norm", "--tokens", "64", "--rounds", "1", **here)
    assert re.search(r"^ +layer_norm +\S+ +reference ", table, re.MULTILINE)
    assert "found no C++ compiler" in run(deepfast, "build", fails=True, **here)
    # The sources are installed, and a compiler that writes nothing useful breaks no import.
    fake = tmp_path / "compiler"
    fake.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; : > "$2"\n')
    fake.chmod(0o755)
    assert "files to compile: about" in run(deepfast, "build", **here | {"CXX": str(fake)})
    said = run(deepfast, "info", "--device", "cpu", **here)
    assert "build    the C++ ops do not load: " in said


@pytest.mark.exhaustive
def test_a_compiled_wheel_installs_without_a_compiler(wheel, tmp_path):
    python = installed(wheel, tmp_path / "venv", "rich", "ninja", "pybind11")
    here = {"cwd": tmp_path, "DEEPFAST_CACHE": str(tmp_path / "cache"), **NO_COMPILER}
    run(python, ROOT / "tests" / "installed.py", "cpu", **here)
    said = run(tmp_path / "venv" / "bin" / "deepfast", "info", "--device", "cpu", **here)
    assert "layer_norm: cpu\n" in said
