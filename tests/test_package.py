"""The sdist and the wheel: which files they hold, and that they can be built, installed and used.

Both are built from a copy of the tree, because setuptools takes into an sdist what an older
egg-info beside setup.py lists.
"""

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

from deepfast import library
from deepfast.version import __version__

ROOT = Path(__file__).parents[1]
SOURCES = ("csrc", "deepfast", "kernels")
SDIST = "from setuptools import build_meta; build_meta.build_sdist('dist')"
PIP = (sys.executable, "-m", "pip")
# Only `pip` and the compilers below may run.
NO_COMPILER = {"PATH": "", "CXX": "", "CC": ""}
COMPILER = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
case "$2" in *.so) cp {library} "$2";; *) : > "$2";; esac
"""


def run(*command, cwd, **environment):
    """Runs a command in ``cwd`` without the tree on Python's path; returns what it printed."""
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=inherited | environment,
        capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def of_tree(*folders):
    """Every source below folders of the tree: nothing compiled, and no link."""
    found = {path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()}
    sources = {path.relative_to(ROOT) for path in found if path.suffix not in (".so", ".pyc")}
    return {str(path) for path in sources if not path.is_relative_to("deepfast/kernels")}


def compiler(folder, library):
    """A compiler that writes empty objects, and links them to a copy of ``library``."""
    path = folder / "compiler"
    path.write_text(COMPILER.format(library=library))
    path.chmod(0o755)
    return {"CXX": str(path), "PATH": os.defpath}


def install(what, folder):
    """Installs a wheel or sdist into a folder beside the packages of this environment; returns the
    options of `run` for commands that use it."""
    pip = (*PIP, "install", "-q", "--no-build-isolation", "--no-deps", "--target")
    run(*pip, folder / "site", what, cwd=folder, **NO_COMPILER)
    paths = {"PYTHONPATH": str(folder / "site"), "DEEPFAST_CACHE": str(folder / "cache")}
    return {"cwd": folder, **NO_COMPILER, **paths}


def test_one_list_of_pythons_and_one_version():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    prefix = "Programming Language :: Python :: 3."
    minors = [c.removeprefix(prefix) for c in config["project"]["classifiers"] if prefix in c]
    wheels = config["tool"]["cibuildwheel"]["build"].split()
    assert wheels == [f"cp3{minor}-*" for minor in minors]
    assert config["project"]["requires-python"] == f">=3.{minors[0]}"
    assert f"version: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    tree = tmp_path_factory.mktemp("tree")
    built = shutil.ignore_patterns("__pycache__", "*.so")
    for folder in (*SOURCES, "bench", "tests"):
        shutil.copytree(ROOT / folder, tree / folder, symlinks=True, ignore=built)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, tree)
    run(sys.executable, "-c", SDIST, cwd=tree)
    (found,) = (tree / "dist").iterdir()
    return found


@pytest.mark.slow
def test_an_sdist_installs_without_a_compiler(sdist, tmp_path):
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert all(m.isfile() or m.isdir() for m in members)
    found = {m.name.partition("/")[2] for m in members if m.isfile()}
    wanted = of_tree(*SOURCES)
    assert {"csrc/headers.py", "csrc/cuda/row.h", "kernels/common.py"} <= wanted
    assert wanted <= found, sorted(wanted - found)
    assert {name.partition("/")[0] for name in found - wanted if "/" in name} == {
        "deepfast.egg-info"
    }
    here = install(sdist, tmp_path)
    run(sys.executable, ROOT / "tests" / "installed.py", "reference", **here)
    said = run(sys.executable, "-m", "deepfast", "info", "--device", "cpu", **here)
    assert re.search("^build    the C.. ops of .* are not compiled; `deepfast build` ", said, re.M)


@pytest.mark.slow
@pytest.mark.skipif(not library.in_package().exists(), reason="needs the compiled ops")
def test_a_compiled_wheel_installs_without_a_compiler(sdist, tmp_path):
    """The compiler gives it the library of this tree."""
    wish = {"DEEPFAST_BUILD": "1", "DEEPFAST_BUILD_CUDA": "0"}
    wish |= compiler(tmp_path, library.in_package())
    pip = (*PIP, "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", tmp_path)
    run(*pip, sdist, cwd=tmp_path, **wish)
    (wheel,) = tmp_path.glob("*.whl")
    found = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    moved = {f"deepfast/{name}" for name in (*of_tree("csrc", "kernels"), library.file_name())}
    assert found == moved | of_tree("deepfast")
    here = install(wheel, tmp_path)
    run(sys.executable, ROOT / "tests" / "installed.py", "cpu", **here)
    said = run(sys.executable, "-m", "deepfast", "info", "--device", "cpu", **here)
    assert "layer_norm: cpu\n" in said
