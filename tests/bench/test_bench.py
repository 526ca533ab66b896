"""`python -m bench`: files keep their rows, and pages get their numbers."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from bench import __main__ as bench
from bench import learned, page
from bench.results import path_of, read, result, write


def number(values, variant="a", command="depth"):
    return result(values, "x", "toy", f"python -m bench {command}", "", variant, 6)


def test_a_section_takes_the_place_of_its_own_rows(tmp_path, monkeypatch, threads):
    path = path_of(tmp_path)
    write([number([1.0], "a"), number([2.0], "b"), number([3.0], "c", "ops"),
           number([4.0], "d", "gone")], path)  # fmt: skip
    monkeypatch.setattr(bench, "keep_memory", lambda: None)
    monkeypatch.setitem(bench.SECTIONS, "depth", lambda _: [number([5.0, 7.0, 6.0], "a")])
    with threads(1):
        bench.write_sections(["depth"], bench.TOY, path)
    rows = {row.variant: row for row in read(path).values()}
    assert rows.keys() == {"a", "c"}
    assert (rows["a"].value, rows["a"].low, rows["a"].high, rows["a"].depth) == (6, 5, 7, 6)
    before = path.read_bytes()
    write(read(path).values(), path)
    assert path.read_bytes() == before


def test_another_machine_is_shown_where_it_differs_by_more_than_the_noise(tmp_path):
    write([number([1.0, 1.2, 1.1], v) for v in ("deepfast", "plain residual")], path_of(tmp_path))
    other = [number([1.15, 1.3], "deepfast"), number([1.25, 1.3, 1.4], "plain residual")]
    write(other, path_of(tmp_path, "AVX2"))
    text = page.depths(page.Numbers(tmp_path), "x")
    assert "| deepfast: DLCL | 1.10 |" in text
    assert "| plain residual | 1.10; AVX2 1.30 |" in text


def test_the_blocks_of_a_page():
    text = f"a\n{page.BEGIN}old\n{page.END}b\n{page.BEGIN}{page.END}"
    text = page.filled(text, ["1\n", "2\n"])
    assert text == f"a\n{page.BEGIN}1\n{page.END}b\n{page.BEGIN}2\n{page.END}"
    assert page.filled(text, ["1\n", "2\n"]) == text
    with pytest.raises(ValueError, match="expected 1 generated blocks, got 2"):
        page.filled(text, ["1\n"])


def test_the_runs_of_a_sweep(tmp_path):
    """A run that is added again takes the place of the row; a curve keeps its last point."""
    recipe = {"output": "x", "optim": {"lr": 0.1}}
    machine = {"cpu": "C", "date": "2026-01-02T03:04", "commit": "abc"}
    for seed in (1, 2):
        folder = tmp_path / "pre-norm,30-layers" / f"seed-{seed}"
        folder.mkdir(parents=True)
        folder.joinpath("recipe.yaml").write_text(
            yaml.safe_dump(recipe | {"train": {"seed": seed}})
        )
        found = {"step": 21, "best_nll": 2.0 + seed, "average_nll": None, "test_bleu": 30.0,
                 "parameters": 7, "seconds": 1.2, "machine": machine}  # fmt: skip
        folder.joinpath("result.json").write_text(json.dumps(found))
        lines = [{"event": "valid", "step": step, "nll": 9 - step / 10} for step in range(1, 22)]
        folder.joinpath("metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    path = tmp_path / "learned.csv"
    for _ in range(2):
        learned.add(list(learned.runs(tmp_path, "multi30k-depth")), path)
    rows = learned.read(path)
    assert [(row["system"], row["seed"], row["nll"]) for row in rows] == [
        ("pre-norm, 30 layers", 1, 3.0), ("pre-norm, 30 layers", 2, 4.0),
    ]  # fmt: skip
    assert len({row["settings"] for row in rows}) == 1
    curve = rows[0]["curve"].split()
    assert len(curve) <= learned.POINTS
    assert curve[-1] == "21:6.9"
    table = page.learned_table(SimpleNamespace(runs=rows), "multi30k-depth")
    assert "| pre-norm, 30 layers | 3.500 ± 0.707 |  | 30.0 ± 0.0 |  | 2 |" in table
    assert page.less(rows, [rows[0] | {"seed": s, "nll": 2.0} for s in (1, 2)], "nll", 1) == (
        "+1.5 ± 6.4"
    )


@pytest.mark.slow
def test_every_section_at_toy_sizes(python):
    pytest.importorskip("transformers")
    said = python("-m", "bench", "all", "--quick").stdout
    folder = Path(said.splitlines()[-1])
    rows = read(path_of(folder)).values()
    assert {row.command for row in rows} == {f"python -m bench {name}" for name in bench.SECTIONS}
    assert all(row.value > 0 and row.low <= row.value <= row.high and row.sizes for row in rows)
    assert len(list(folder.glob("*.svg"))) == 5
    for name in page.BLOCKS:
        blocks = (folder / Path(name).name).read_text().split(page.BEGIN)[1:]
        assert all(re.search(r"\d\.\d", block.partition(page.END)[0]) for block in blocks)
    shutil.rmtree(folder)


@pytest.mark.slow
def test_the_benchmarks_of_pytest(python):
    words = "-q", "bench/ops.py", "--benchmark-disable", "-k", "add_rms_norm and float32"
    assert "2 passed" in python("-m", "pytest", *words).stdout
