"""One answer for all processes: those of a machine, a killed one, and the ranks of a group."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.proof.test_first_use import norm, served

pytestmark = pytest.mark.exhaustive
ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys, time
from tests.proof import faults
import torch
from deepfast import backend, ops
from deepfast.proof import known, prove, table as tables
backend.PROVABLE["cpu"] = ("triton",)
backend.provable = lambda op, at: {"triton": ["float32"]}

class Given(prove.Runner):
    def run(self, op, items):
        print("proving", flush=True)
        time.sleep(1)
        for item in items:
            yield item, {"error": None}

prove.time = lambda *_: None
known.make_runner = Given
"""


def start(program, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM + program], cwd=ROOT, stdout=subprocess.PIPE, text=True,
        stderr=subprocess.STDOUT, env=os.environ | {"TRITON_INTERPRET": "1"} | environment,
    )  # fmt: skip


def test_of_two_processes_one_proves(cache):
    program = "print(backend.choose('layer_norm', None, 'cpu', torch.float32, 8)[0])"
    said = [process.communicate(timeout=120)[0] for process in [start(program), start(program)]]
    assert [text.splitlines()[-1] for text in said] == ["triton"] * 2, said
    assert "".join(said).count("proving\n") == 1


def test_a_killed_process_leaves_no_broken_file(device, cache):
    """Its workers end with it, and the next process proves."""
    program = """
known.make_runner = lambda device: prove.Runner(
    device, prelude="from tests.proof import faults; faults.install(('triton',), 'hang')")
backend.choose('layer_norm', None, 'cpu', torch.float32, 8)
"""
    process = start(program)
    try:
        lock = None
        while lock is None and process.poll() is None:
            time.sleep(0.05)
            lock = next(cache.glob("*.lock"), None)
        time.sleep(0.3)
        workers = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True
        ).stdout.split()
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert len(workers) == 1
    assert not list(cache.glob("*.json"))
    deadline = time.monotonic() + 60
    while alive(int(workers[0])):
        assert time.monotonic() < deadline, "the worker outlived its parent"
        time.sleep(0.1)
    norm()
    assert served() == "triton"
    assert len(list(cache.glob("*.json"))) == 1


def alive(pid):
    """Whether a process runs; one that nobody waits for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


RANKS = """
import os
import torch.distributed as dist

def rank(number, errors, folder, early):
    os.environ["DEEPFAST_CACHE"] = f"{folder}/{number}"
    key = tables.make_key(torch.device("cpu"), None) | ({"torch": "9.9"} if number == 3 else {})
    seconds = {"8": {"triton": 1.0 + 2 * number, "reference": 2.5}}
    entry, fine = ({"errors": e, "seconds": seconds} for e in (errors, {"triton": None}))
    known._tables["cpu"] = tables.Table(
        key, {"layer_norm": {"float32": entry}, "activation": {"float32": fine}}
    )
    choose = lambda op: backend.choose(op, None, "cpu", torch.float32, 8)[0]
    said = [choose("layer_norm")] if early else []
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=4)
    dist.barrier()
    if number:
        dist.distributed_c10d._get_default_store().wait(["first"])
    try:
        said += map(choose, ["activation", "layer_norm"] if early else ["layer_norm"])
    except backend.BackendError as error:
        said.append(str(error))
    if not number:
        dist.distributed_c10d._get_default_store().set("first", "")
    with open(f"{folder}/said-{number}", "w") as file:
        file.write("\\n".join(said))
    dist.barrier()

folder, children = os.environ["FOLDER"], []
for number, error in enumerate((None, None, "wrong", None)):
    child = os.fork()
    if child == 0:
        try:
            rank(number, {"triton": error}, folder, os.environ["EARLY"])
        finally:
            sys.stdout.flush()
            os._exit(0)
    children.append(child)
for child in children:
    os.waitpid(child, 0)
"""


@pytest.mark.parametrize("early", [False, True])
def test_ranks_take_one_answer_or_stop_with_the_difference(tmp_path, early):
    """Rank 1's own times would choose the reference. `early`: a first choice comes before the
    process group, and is compared at the next one."""
    process = start(RANKS, FOLDER=str(tmp_path), EARLY="1" if early else "")
    output, _ = process.communicate(timeout=120)
    said = [(tmp_path / f"said-{rank}").read_text().split("\n") for rank in range(4)]
    same = "layer_norm float32: rank {} differs from rank 0"
    late = ["triton"] * (2 if early else 1)
    before = (["triton"], *[["reference"]] * 3) if early else ([],) * 4
    assert said == [
        before[0] + late,
        before[1] + late,
        [*before[2], f"{same.format(2)}, where these backends are proved: triton: wrong"],
        [*before[3], f"{same.format(3)}: torch is 9.9, not {torch.__version__}"],
    ], output
