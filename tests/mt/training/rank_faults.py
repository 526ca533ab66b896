"""Run by test_torchrun.py under torchrun: trains recipes, and in each one rank fails.

    torchrun --nproc-per-node 2 rank_faults.py FAULT:RANK:STEP:RECIPE ...

A fault comes only in the first start, not after torchrun has started the ranks again. A fault
key=value is one of the recipe: that rank trains another one. With the fault `none` none fails.
"""

import errno
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import torch

from deepfast.cli import main
from deepfast.mt.training import saving
from deepfast.mt.training.ranks import restarts
from deepfast.mt.training.trainer import Trainer


def none(trainer):
    pass


def killed(trainer):
    os.kill(os.getpid(), signal.SIGKILL)


def stopped(trainer):
    os.kill(os.getpid(), signal.SIGSTOP)


def nan(trainer):
    """In what this rank computes; the parameters stay as they are on all ranks."""
    module = trainer.model.encoder.layers[1].feed_forward.down
    module.register_forward_hook(lambda module, inputs, output: output * torch.nan)


def memory(trainer):
    def exhausted(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.\nMore lines.")

    trainer.model.decoder.layers[0].register_forward_pre_hook(exhausted)


def in_save(trainer, act):
    """Calls ``act`` when a checkpoint is written, after the metrics before it."""
    metrics = os.stat(os.path.join(trainer.recipe.output, "metrics.jsonl"))

    def fsync(descriptor):
        if not os.path.samestat(os.fstat(descriptor), metrics):
            act()

    os.fsync = fsync


def disk(trainer):
    def full():
        raise OSError(errno.ENOSPC, "No space left on device")

    in_save(trainer, full)


def vanished(trainer):
    shutil.rmtree(trainer.recipe.output)


def killed_in_save(trainer):
    in_save(trainer, lambda: os.kill(os.getpid(), signal.SIGKILL))


def stopped_before_save(trainer):
    """In what the first rank does while the others wait for it."""
    saving._begin = lambda path: stopped(trainer)


def scheduler(trainer):
    """SIGTERM to torchrun, which passes it on to all ranks."""
    os.kill(os.getppid(), signal.SIGTERM)


def torchrun_killed(trainer):
    os.kill(os.getppid(), signal.SIGKILL)


def wait_for_all(recipe, seconds=60):
    """Waits until all ranks have ended the run. The first one would else begin the next run alone,
    and wait there no longer than the timeout; with torch 2.15 the others notice a fault later."""
    Path(f"{recipe}.ended{os.environ['RANK']}").touch()
    every = [Path(f"{recipe}.ended{rank}") for rank in range(int(os.environ["WORLD_SIZE"]))]
    deadline = time.monotonic() + seconds
    while not all(path.exists() for path in every) and time.monotonic() < deadline:
        time.sleep(0.02)


if __name__ == "__main__":
    torch.set_num_threads(1)
    original, fsync = Trainer.train_step, os.fsync
    for word in sys.argv[1:]:
        fault, rank, step, recipe = word.split(":", 3)

        def train_step(self, fault=fault, rank=rank, step=int(step), recipe=recipe):
            if os.environ["RANK"] == rank and restarts() == 0 and self.step + 1 == step:
                Path(f"{recipe}.began").touch()
                globals()[fault](self)
            original(self)

        Trainer.train_step, os.fsync = train_step, fsync
        other = [fault] if "=" in fault and os.environ["RANK"] == rank else []
        code = main(["train", recipe, *other])
        print(f"{fault}: rank {os.environ['RANK']} ends with {code}", flush=True)
        if word != sys.argv[-1]:
            wait_for_all(recipe)
    sys.exit(code)
