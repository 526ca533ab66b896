"""The site: every page, public name and environment variable is on it."""

import re
from pathlib import Path

import pytest

import deepfast

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def test_each_page_is_in_the_navigation():
    listed = set(re.findall(r": ([\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert pages <= listed
    for name in listed - pages:
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("part", ["ops", "nn", "memory"])
def test_each_public_name_is_in_the_api_reference(part):
    public = {f"deepfast.{part}.{name}" for name in getattr(deepfast, part).__all__}
    text = (DOCS / "api" / f"{part}.md").read_text()
    assert set(re.findall(r"heading: (\S+)", text)) == public


def read_variables():
    """The variables of deepfast that the code names: in Python all, in C++ those of getenv."""
    files = [ROOT / "setup.py", ROOT / "Makefile"]
    for folder in ("deepfast", "kernels", "bench"):
        files += (ROOT / folder).rglob("*.py")
    for path in files:
        yield from re.findall(r"\bDEEPFAST_[A-Z_]+", path.read_text())
    for path in (ROOT / "csrc").rglob("*.cpp"):
        yield from re.findall(r'getenv\("(\w+)"', path.read_text())


def test_each_environment_variable_is_explained():
    explained = set(re.findall(r"`(DEEPFAST_\w+)`", (DOCS / "environment.md").read_text()))
    assert explained == set(read_variables())
    assert "DEEPFAST_CPU_CAPABILITY" in explained
