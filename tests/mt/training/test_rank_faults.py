"""Runs under torchrun in which one rank fails: all end within a minute with one sentence that names
the rank, and the last checkpoint stays."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from deepfast.mt.training import dump_recipe, load_checkpoint
from deepfast.mt.training.lock import only_run

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch without distributed"
)

PROGRAM = Path(__file__).with_name("rank_faults.py")
AT, SAVED = 7, "step-00000004"
SENTENCES = {
    "nan": f"rank 1: step {AT}: the loss is nan; the first value that is not finite is the output "
    "of encoder.layers.1.feed_forward.down (Linear)",
    "nan_gradient": f"rank 1: step {AT}: the gradient of the output of "
    "encoder.layers.1.feed_forward.up (Linear) is not finite",
    "memory": "rank 1: out of memory (CUDA out of memory. Tried to allocate 20 GiB.)",
    "disk": "rank 1: {folder}/step-00000008: the checkpoint cannot be written (No space left on "
    "device); earlier ones are intact",
    "killed": "rank 1: no answer, killed or stopped from outside",
    "killed_in_save": "rank 1: no answer, killed or stopped from outside",
    "stopped": "rank 1: no answer, killed or stopped from outside",
}


@pytest.fixture
def fail(make_recipe, tmp_path):
    """fail(ranks, faults): what the ranks said, torchrun's exit code, and the seconds from the last
    fault to the end."""

    def run(size, faults, *options, kind="ddp", rank=1, program=PROGRAM):
        words = []
        for fault in faults:
            changes = {"parallel.kind": kind, "parallel.timeout": 8.0,
                       "output": str(tmp_path / fault)}  # fmt: skip
            path = tmp_path / f"{fault}.yaml"
            path.write_text(dump_recipe(make_recipe(changes)))
            words.append(f"{fault}:{rank}:{AT}:{path}")
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
             str(size), *options, str(program), *words],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        began = Path(f"{path}.began")
        seconds = time.time() - began.stat().st_mtime if began.exists() else None
        return done.stdout, done.stderr, done.returncode, seconds

    return run


def told(error):
    """The sentences of the ranks among torchrun's own lines."""
    return re.findall(r"^deepfast train: (.*)$", error, re.MULTILINE)


def checkpoints(folder):
    return sorted(path.name for path in folder.iterdir() if "step-" in path.name)


def check(folder, fault, sentences, rank=1):
    expected = SENTENCES[fault].format(folder=folder).replace("rank 1", f"rank {rank}")
    assert [s for s in sentences if s.startswith(expected)], sentences
    # A rank that is killed while it writes leaves a hidden folder, which the next run removes.
    assert [name for name in checkpoints(folder) if not name.endswith(".part")] == [SAVED]
    assert load_checkpoint(folder / SAVED)["step"] == 4


def test_each_fault_is_one_sentence_on_all_ranks(fail, tmp_path):
    faults = ["nan", "nan_gradient", "disk", "memory", "told_to_stop"]
    with only_run(tmp_path / "locked"):
        out, error, code, _ = fail(2, ["locked", "vanished", *faults])
    sentences = told(error)
    assert len(sentences) == 6, error
    locked, vanished, *sentences = sentences
    expected = f"rank 0: {tmp_path / 'locked'}: expected a folder in which nothing runs"
    assert locked.startswith(expected)
    folder = tmp_path / "vanished"
    # No checkpoint is named, because none is left.
    assert re.fullmatch(
        f"rank 0: {folder}/metrics.jsonl: expected the file that .* during the run", vanished
    )
    assert not folder.exists()
    for fault in faults[:-1]:
        check(tmp_path / fault, fault, sentences)
        assert out.count(f"{fault}: rank 0 ends with 1") == 1, out + error
        assert out.count(f"{fault}: rank 1 ends with 1") == 1, out + error
    assert all(s.endswith(f"; last checkpoint: {tmp_path / fault / SAVED}")
               for s, fault in zip(sentences, faults, strict=False))  # fmt: skip
    last = tmp_path / "told_to_stop" / f"step-{AT:08d}"
    assert f"SIGTERM on rank 1: stopped after step {AT}; continue from {last}" in out
    assert load_checkpoint(last)["step"] == AT
    assert out.count("ends with 143") == 2
    assert code != 0


def test_ranks_with_other_recipes_are_refused(fail, tmp_path):
    others = {
        "optim.lr=0.5": "optim.lr 0.005 -> 0.5",
        "resume=true": "resume False -> True",
        "grow.train.max_steps=3": "grow None -> {'train': {'max_steps': 3}}",
        "model.dlcl.window=2": "model.dlcl None -> {'window': 2}",
    }
    out, error, code, _ = fail(2, list(others))
    assert told(error) == [f"rank 1: expected the recipe of rank 0, got another one ({change})"
                           for change in others.values()]  # fmt: skip
    assert out.count("ends with 1") == 2 * len(others)
    assert code != 0
    assert not any((tmp_path / other).exists() for other in others)


def test_a_killed_rank_is_named_and_the_run_goes_on(fail, tmp_path):
    out, error, code, seconds = fail(2, ["killed"], "--max-restarts", "1")
    assert code == 0, error
    assert seconds < 100
    (sentence,) = told(error)
    assert sentence.startswith(SENTENCES["killed"])
    folder = tmp_path / "killed"
    assert f"resumed from {folder / SAVED} at step 4" in out
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    assert [row["step"] for row in lines if row["event"] == "train"] == list(range(1, 13))
    for rank in (0, 1):
        assert "step     12" in (folder / "logs" / f"rank-{rank}.log").read_text()


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", SENTENCES)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize(("size", "rank"), [(2, 0), (4, 2)])
def test_every_fault_ends_all_ranks_within_a_minute(fail, tmp_path, fault, kind, size, rank):
    _, error, code, seconds = fail(size, [fault], kind=kind, rank=rank)
    assert code != 0
    # torchrun waits 30 s before it kills a rank that is stopped.
    assert seconds < 60
    sentences = told(error)
    assert len(sentences) == 1, error
    check(tmp_path / fault, fault, sentences, rank)


@pytest.mark.exhaustive
def test_a_first_rank_that_is_stopped_while_it_works_for_all_is_named(fail, tmp_path):
    _, error, code, seconds = fail(2, ["stopped_before_save"], rank=0)
    assert code != 0
    assert seconds < 60
    (sentence,) = told(error)
    check(tmp_path / "stopped_before_save", "stopped", [sentence], rank=0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_scheduler_stops_all_ranks_with_a_checkpoint(fail, tmp_path, kind):
    out, _, code, seconds = fail(2, ["scheduler"], kind=kind)
    assert code != 0
    assert seconds < 60
    (step,) = re.findall(r"SIGTERM on rank \d: stopped after step (\d+); continue from", out)
    assert load_checkpoint(tmp_path / "scheduler" / f"step-{int(step):08d}")["step"] == int(step)


@pytest.mark.exhaustive
def test_ranks_end_without_torchrun(fail, tmp_path):
    out, error, _, seconds = fail(2, ["torchrun_killed"])
    assert seconds < 60
    sentences = told(error)
    assert sentences
    for sentence in sentences:
        assert re.match(r"rank \d: torchrun does not answer, killed from outside; last", sentence)
    assert out.count("ends with 1") == 2
    assert checkpoints(tmp_path / "torchrun_killed")[-1] == SAVED
