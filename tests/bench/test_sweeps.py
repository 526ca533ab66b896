"""The committed sweeps: their pages, pictures and numbers come from their rows."""

import json
import re
import shlex
import shutil
from importlib.metadata import version

import pytest

from bench import sweeps
from bench.record import FILE, read
from deepfast.cli import main

RESULTS = FILE.parent
SWEEPS = {"depth": "multi30k-depth", "depth_phrases": "phrases-depth"}
"""Folder -> the recipe of its systems."""
NOISE = 0.005
"""Nats between processors. On one processor the losses are the same, bit for bit; with AVX2 in
place of AVX-512 and AMX they differ by up to 0.0023, without vector instructions by 0.0024."""
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
    assert {"sweep.md", "sweep.svg", "sweep_curves.svg", "sweep_gradients.svg"} <= made.keys()
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


@pytest.mark.exhaustive
@pytest.mark.skipif("depth_phrases" not in PRESENT, reason="no rows")
def test_the_smallest_run_gives_the_losses_of_its_row(tmp_path):
    command = ["mt", "sweep", "phrases-depth", "--only", "pre-norm, 6 layers", "--seeds", "1"]
    assert main([*command, "--threads", "1", "--output", str(tmp_path)]) == 0
    (made,) = tmp_path.glob("pre-norm,*/seed-1/result.json")
    kept = RESULTS / "depth_phrases" / made.relative_to(tmp_path)
    curves = [json.loads(path.read_text())["curve"] for path in (made, kept)]
    assert [step for step, _ in curves[0]] == [step for step, _ in curves[1]]
    for (_, ours), (_, theirs) in zip(*curves, strict=True):
        assert ours == pytest.approx(theirs, abs=NOISE)


def test_rows_have_no_paths_of_a_machine():
    for name in PRESENT:
        for path in (RESULTS / name).rglob("settings.json"):
            assert not re.search(r'"/|~', path.read_text()), path
        assert not list((RESULTS / name).rglob("run/*.pt"))
