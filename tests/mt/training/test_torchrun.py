"""Runs under torchrun on ranks of this machine: the losses of one process, exact resumes, and
faults. Where a rank fails, all end within a minute with one sentence that names it, and the last
checkpoint stays. `test_ranks` tests in one process what does not need several.

Starting ranks takes seconds, so one start trains several recipes. This file is also the program of
the ranks:

    torchrun --nproc-per-node 2 test_torchrun.py FAULT:RANK:RECIPE ...

A fault comes in step 7 of the first start alone, not after torchrun has started the ranks again.
"""

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from deepfast.cli import main
from deepfast.mt.training import dump_recipe, load_checkpoint, saving, train
from deepfast.mt.training.ranks import restarts
from deepfast.mt.training.trainer import Trainer
from tests.mt.training.runs import (
    assert_losses_agree,
    assert_same_runs,
    full_disk,
    names,
    rows,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed"),
]

SAVED = "step-00000004"
KINDS = ("ddp", "fsdp")
# Rounding may move the input of a relu across 0, where its gradient jumps; gelu has no such place.
# The third layer keeps the gradients through a fusion above rounding.
PLAIN = {"model.dropout": 0.0, "model.activation": "gelu", "model.encoder_layers": 3,
         "train.max_steps": 12, "train.save_every": 3, "train.validate_every": 3,
         "train.keep_last": 9, "train.average_last": 2}  # fmt: skip
SILENT = "no answer, killed or stopped from outside"


def killed(trainer):
    os.kill(os.getpid(), signal.SIGKILL)


def stopped(trainer):
    os.kill(os.getpid(), signal.SIGSTOP)


def nan(trainer):
    """In what this rank computes; the parameters stay as they are on all ranks."""
    module = trainer.model.encoder.layers[1].feed_forward.down
    module.register_forward_hook(lambda module, inputs, output: output * torch.nan)


def stopped_before_save(trainer):
    """In what the first rank does while the others wait for it."""
    saving.make_folder = lambda folder: stopped(trainer)


FAULTS = {
    "nan": ("fsdp", nan, "step 7: the loss is nan; the first value that is not finite is the "
            "output of encoder.layers.1.feed_forward.down (Linear)"),
    "disk": ("fsdp", full_disk, "{folder}/step-00000008: the checkpoint cannot be written (No space"
             " left on device); earlier ones are intact"),
    "killed": ("ddp", killed, None),
    "stopped": ("fsdp", stopped, SILENT),
    "stopped_before_save": ("ddp", stopped_before_save, SILENT),
    # torchrun passes the signal on to all ranks.
    "scheduler": ("fsdp", lambda trainer: os.kill(os.getppid(), signal.SIGTERM), None),
    "torchrun_killed": ("ddp", lambda trainer: os.kill(os.getppid(), signal.SIGKILL), None),
}  # fmt: skip
"""Fault -> the kind of the ranks, what one of them does, and how the sentence begins with which all
end; None for faults with tests of their own."""


def wait_for_all(recipe):
    """Waits until all ranks have ended the run. The first one would else begin the next run alone,
    and wait there no longer than the timeout; with torch 2.15 the others notice a fault later."""
    Path(f"{recipe}.ended{os.environ['RANK']}").touch()
    every = [Path(f"{recipe}.ended{rank}") for rank in range(int(os.environ["WORLD_SIZE"]))]
    deadline = time.monotonic() + 60
    while not all(path.exists() for path in every) and time.monotonic() < deadline:
        time.sleep(0.02)


def train_as_a_rank(words):
    """The program of a rank; returns the exit code of the last run."""
    torch.set_num_threads(1)
    original, fsync = Trainer.train_step, os.fsync
    for word in words:
        fault, rank, recipe = word.split(":", 2)

        def train_step(self, fault=fault, rank=rank, recipe=recipe):
            due = os.environ["RANK"] == rank and restarts() == 0 and self.step == 6
            if due and fault in FAULTS:
                Path(f"{recipe}.began").touch()
                FAULTS[fault][1](self)
            original(self)

        Trainer.train_step, os.fsync = train_step, fsync
        code = main(["mt", "train", recipe])
        print(f"{fault}: rank {os.environ['RANK']} ends with {code}", flush=True)
        if word != words[-1]:
            wait_for_all(recipe)
    return code


class Done:
    """What the ranks said, torchrun's exit code, and the seconds from the last fault to the end."""

    def __init__(self, process, began):
        self.out, self.error, self.code = process.stdout, process.stderr, process.returncode
        self.seconds = time.time() - began.stat().st_mtime if began.exists() else None
        self.told = re.findall(r"^deepfast mt train: (.*)$", self.error, re.MULTILINE)


@pytest.fixture
def torchrun(make_recipe, tmp_path):
    """torchrun(ranks, {name: changes}) trains recipes, each into a folder of its name. In the
    recipe of a fault's name one rank fails."""

    def run(size, recipes, *options, rank=1):
        words = []
        for name, changes in recipes.items():
            output = {"output": str(tmp_path / changes.get("output", name))}
            path = tmp_path / f"{name}.yaml"
            path.write_text(dump_recipe(make_recipe(changes | output)))
            words.append(f"{name}:{rank}:{path}")
        process = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
             str(size), *options, __file__, *words],
            capture_output=True, text=True, timeout=400, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        return Done(process, Path(f"{path}.began"))

    return run


MODELS = {
    "latent": {"model.decoder_connection": "latent", "model.decoder_layers": 3,
               "model.latent": {"hard": True, "kl_weight": 0.1, "lr_scale": 10.0},
               "optim.accumulate": 2},
    "attention residuals": {"model.encoder_connection": "attnres", "recompute": "layer+input"},
    "fusion": {"model.encoder_fusion": "attention", "recompute": "layer", "optim.accumulate": 4},
    "transparent": {"model.cross_attention": "transparent", "model.mixture_dropout": 0.0},
    "lstm": {"model": {"kind": "fast_forward_lstm", "dim": 16, "dropout": 0.0}},
    "growing": {"grow": {"train": {"max_steps": 12}}},
    "Adam anew, all micro-batches at once": {
        "optim.restart_step": 7, "optim.restart_lr": 1e-3, "optim.accumulate": 2,
        "train.validate_bleu": True, "memory_budget": "1GiB"},
}  # fmt: skip
# FSDP takes a model apart; DDP minds parameters without a gradient and layers that run again.
SHARED = [("fsdp", name) for name in MODELS] + [("ddp", n) for n in ("latent", "fusion", "growing")]


def test_ranks_train_and_resume_as_one_process(torchrun, make_recipe, tmp_path):
    """Two ranks, all models; two ranks again, to the bit; two and then four and then one."""

    def alone(name, changes):
        recipe = make_recipe(changes | {"output": str(tmp_path / name)})
        return train(recipe, quiet=True).output

    begun = {"train.max_steps": 6, "train.average_last": 0}
    # The second validation, right before the save at step 6, is worse than the first.
    restarted = PLAIN | {"optim.accumulate": 3, "model.dropout": 0.2, "optim.restart_step": 4,
                         "optim.restart_lr": 3.0}  # fmt: skip
    two, four = {}, {"of-one": PLAIN | {"parallel.kind": "fsdp", "resume": True}}
    for kind in KINDS:
        own = {"parallel.kind": kind}
        two[f"{kind}-whole"] = restarted | own
        two[f"{kind}-first"] = restarted | own | begun | {"output": f"{kind}-again"}
        two[f"{kind}-again"] = restarted | own | {"resume": True}
        two[f"{kind}-half"] = PLAIN | own | begun
        four[f"{kind}-half"] = PLAIN | own | {"train.max_steps": 9, "resume": True}
    for kind, name in SHARED:
        two[f"{kind}-{name}"] = PLAIN | {"parallel.kind": kind} | MODELS[name]
    done = torchrun(2, two)
    assert done.code == 0, done.error
    for kind in KINDS:
        assert_same_runs(tmp_path / f"{kind}-whole", tmp_path / f"{kind}-again")
        best = [row["best"] for row in rows(tmp_path / f"{kind}-whole", "valid")]
        assert best[:2] == [True, False]
        shutil.copytree(tmp_path / f"{kind}-half", tmp_path / f"{kind}-of-two")
    ones = {name: alone(f"one {name}", PLAIN | changes) for name, changes in MODELS.items()}
    for kind, name in SHARED:
        folder = tmp_path / f"{kind}-{name}"
        assert_losses_agree(ones[name], folder / "stage2" if name == "growing" else folder)

    one = alone("of-one", PLAIN)
    whole = shutil.copytree(one, tmp_path / "whole")
    for step in (6, 9, 12):
        shutil.rmtree(one / f"step-{step:08d}")
    done = torchrun(4, four)
    assert done.code == 0, done.error
    assert_losses_agree(whole, one)
    for kind, ranks in itertools.product(KINDS, ("half", "of-two")):
        path = alone(f"{kind}-{ranks}", PLAIN | {"resume": True})
        assert_losses_agree(whole, path)
        assert (path / "step-00000012").is_dir()


def faulty(fault):
    return {fault: {"parallel.timeout": 8.0, "parallel.kind": FAULTS[fault][0]}}


def test_a_killed_rank_is_named_and_the_run_goes_on(torchrun, tmp_path):
    done = torchrun(2, faulty("killed"), "--max-restarts", "1")
    assert done.code == 0, done.error
    assert done.seconds < 100
    (sentence,) = done.told
    assert sentence.startswith(f"rank 1: {SILENT}")
    folder = tmp_path / "killed"
    assert f"resumed from {folder / SAVED} at step 4" in done.out
    assert [row["step"] for row in rows(folder, "train")] == list(range(1, 9))


@pytest.mark.parametrize("fault", [fault for fault, (*_, told) in FAULTS.items() if told])
def test_every_fault_ends_all_ranks_within_a_minute(torchrun, tmp_path, fault):
    """The first of two ranks, or the third of three."""
    kind, _, told = FAULTS[fault]
    size, rank = (2, 0) if kind == "ddp" else (3, 2)
    done = torchrun(size, faulty(fault), rank=rank)
    assert done.code != 0
    # torchrun waits 30 s before it kills a rank that is stopped.
    assert done.seconds < 60
    (sentence,) = done.told
    folder = tmp_path / fault
    assert sentence.startswith(f"rank {rank}: {told.format(folder=folder)}")
    assert [name for name in names(folder) if name.startswith("step-")] == [SAVED]
    assert load_checkpoint(folder / SAVED)["step"] == 4


def test_a_scheduler_stops_all_ranks_with_a_checkpoint(torchrun, tmp_path):
    done = torchrun(2, faulty("scheduler"))
    assert done.code != 0
    assert done.seconds < 60
    (step,) = re.findall(r"SIGTERM: stopped after step (\d+); continue from", done.out)
    assert load_checkpoint(tmp_path / "scheduler" / f"step-{int(step):08d}")["step"] == int(step)


def test_ranks_end_without_torchrun(torchrun, tmp_path):
    done = torchrun(2, faulty("torchrun_killed"))
    assert done.seconds < 60
    assert done.told
    for sentence in done.told:
        assert re.match(r"rank \d: torchrun does not answer, killed from outside; last", sentence)
    assert done.out.count("ends with 1") == 2
    assert names(tmp_path / "torchrun_killed")[-1] == SAVED


if __name__ == "__main__":
    sys.exit(train_as_a_rank(sys.argv[1:]))
