"""The committed sweeps: their pages, pictures and numbers come from their rows."""

import re
import shlex
import shutil
from importlib.metadata import version

import pytest

from bench import sweeps
from bench.record import FILE, read
from deepfast.cli import main

RESULTS = FILE.parent
SWEEPS = {"depth": "multi30k-depth"}
"""Folder -> the recipe of its systems."""
PRESENT = [name for name in SWEEPS if (RESULTS / name / "sweep.md").exists()]


@pytest.mark.parametrize("name", PRESENT)
def test_the_page_and_the_pictures_are_those_of_the_rows(name, tmp_path):
    kept = RESULTS / name
    shutil.copytree(kept, tmp_path / name)
    for path in (tmp_path / name).glob("sweep*"):
        path.unlink()
    command = shlex.split(re.search(r"^`(.*)`$", (kept / "sweep.md").read_text(), re.MULTILINE)[1])
    output = ["--jobs", "0", "--output", str(tmp_path / name)]
    assert main([*command[1:], *output]) == 0
    made = {path.name: path.read_text() for path in (tmp_path / name).glob("sweep*.[ms][dv]*")}
    assert made.keys() == {"sweep.md", "sweep.svg"}
    assert made["sweep.md"] == (kept / "sweep.md").read_text()
    for picture in set(made) - {"sweep.md"}:
        same_picture(made[picture], (kept / picture).read_text())


def same_picture(made: str, kept: str) -> None:
    """Another matplotlib draws the same texts at places of its own."""
    if f"Matplotlib v{version('matplotlib')}" in kept:
        assert made == kept
    texts = [re.findall(r"<text[^>]*>([^<]*)</text>", svg) for svg in (made, kept)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", PRESENT)
def test_the_numbers_are_those_of_the_rows(name, tmp_path):
    recipe, folder = SWEEPS[name], RESULTS / name
    recorded = read()
    for key, (value, spread, unit, _) in sweeps.values(recipe, folder).items():
        row = recorded[key, "any"]
        assert (row.value, row.spread, row.unit) == (float(f"{value:.4g}"), spread, unit)
    if sweeps.picture(recipe, folder, tmp_path / "time.svg"):
        same_picture((tmp_path / "time.svg").read_text(), (folder / "time.svg").read_text())


def test_rows_have_no_paths_of_a_machine():
    for name in PRESENT:
        for path in (RESULTS / name).rglob("recipe.yaml"):
            assert not re.search(r": /|~", path.read_text()), path
        assert not list((RESULTS / name).rglob("*.pt"))
