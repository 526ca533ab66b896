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

from deepfast.version import __version__

ROOT = Path(__file__).parents[1]
SOURCES = ("csrc", "deepfast", "kernels")

SDIST = "from setuptools import build_meta; build_meta.build_sdist('dist')"

TRAIN = """
import pathlib, sys, torch
import deepfast
from deepfast import backend

torch.manual_seed(0)
assert pathlib.Path(deepfast.__file__).is_relative_to(sys.prefix), deepfast.__file__
encoder = deepfast.nn.TransformerEncoder(3, 16, 2, 32, connection="dlcl")
optimizer = torch.optim.SGD(encoder.parameters(), lr=0.01)
x, target = torch.randn(2, 4, 5, 16).unbind()
losses = []
with backend.record() as seen:
    for _ in range(3):
        loss = (encoder(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
assert losses[2] < losses[1] < losses[0], losses
print(*sorted({by for op, by in seen if op != "attention"}))
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
    assert f"python: [{tested}]" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()
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


def wheel_of(sdist, folder, **environment):
    """Builds the wheel from the sdist alone, with the torch that is installed here."""
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps")
    run(*pip, "-w", folder, sdist, cwd=folder, **environment)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def plain_wheel(sdist, tmp_path_factory):
    """A wheel built where no compiler is found: all but the library, in seconds."""
    return wheel_of(sdist, tmp_path_factory.mktemp("plain"), PATH="", CXX="")


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
    assert {"csrc/build.py", "csrc/cuda/row.h", "kernels/common.py"} <= wanted
    assert wanted <= found, sorted(wanted - found)
    rest = {name for name in found - wanted if not name.startswith("deepfast.egg-info/")}
    assert rest == {
        "CHANGELOG.md", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md",
        "constraints.txt", "pyproject.toml", "setup.cfg", "setup.py",
    }  # fmt: skip


@pytest.mark.exhaustive
def test_wheel_holds_the_package_alone(plain_wheel):
    found = {name for name in files(plain_wheel) if ".dist-info/" not in name}
    kernels = {f"deepfast/{name}" for name in of_tree("kernels")}
    assert len(kernels) > 10
    assert found == kernels | set(of_tree("deepfast"))


def installed(wheel, folder):
    """A virtual environment with the wheel, and of this one only torch and what torch needs."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    site = (
        folder
        / "lib"
        / f"python{sys.version_info.major}.{sys.version_info.minor}"
        / "site-packages"
    )
    todo, done = [Requirement("torch")], set()
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
    pip = (sys.executable, "-m", "pip", "-q", "--python", python, "install", "--no-index")
    run(*pip, wheel, cwd=folder)
    return python


@pytest.mark.exhaustive
def test_installs_and_trains_without_a_compiler(plain_wheel, tmp_path):
    python = installed(plain_wheel, tmp_path / "venv")
    assert run(python, "-c", TRAIN, cwd=tmp_path).split() == ["reference"]


@pytest.mark.exhaustive
def test_a_compiled_wheel_installs_and_runs_the_readme(sdist, tmp_path):
    """The whole compile, as a user does it: about four minutes of a processor."""
    python = installed(wheel_of(sdist, tmp_path), tmp_path / "venv")
    assert run(python, "-c", TRAIN, cwd=tmp_path).split() == ["cpu"]
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    assert len(blocks) >= 3
    run(python, "-c", "\n".join(blocks), cwd=tmp_path)
    assert run(tmp_path / "venv/bin/deepfast", "info", "--device", "cpu", cwd=tmp_path)
