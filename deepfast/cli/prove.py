"""Finds out which kernels are right and fast on this machine's GPU, and keeps the answer.

Every op runs on small random inputs, forward and backward, in processes of its own, and is held to
float64. The right kernels are timed beside torch's own form. Without this command the same is done
for each op at its first use. Exit code 1: a kernel failed, or memory ran out and nothing is
kept of that op; then the next backend serves."""

import argparse
import itertools
import json
from pathlib import Path

import torch

from deepfast import backend
from deepfast.cli.outputs import device_of
from deepfast.files import check_writable, write_atomically
from deepfast.measure.console import progress
from deepfast.proof import known
from deepfast.proof import table as tables

EXAMPLE = "deepfast prove --op layer_norm --op boundary"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(backend.OPS)
    parser.add_argument("--op", action="append", help=f"one of {names}; default: all")
    parser.add_argument("--device", default="cuda", help="a GPU, as cuda:1; default: the current")
    parser.add_argument("--thorough", action="store_true", help="more sizes; takes minutes")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--write", metavar="FILE", type=Path, help="write the table to FILE too")


def run(args: argparse.Namespace) -> int:
    if args.write is not None:
        check_writable(args.write)
    for op in args.op or ():
        if op not in backend.OPS:
            raise ValueError(f"--op: expected one of {', '.join(backend.OPS)}, got {op!r}")
    expected = "a GPU such as cuda:1 (elsewhere there is nothing to prove)"
    device = device_of(args.device, expected, backend.PROVABLE)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    wanted = {op: backend.provable(op, device) for op in args.op or backend.OPS}
    table = known.table(device, backend.cuda_build())
    found = {op: kernels for op, kernels in wanted.items() if kernels}
    finished = itertools.count(1)
    with tables.lock(table.key), progress(len(found)) as step:

        def told(op: str) -> None:
            step(next(finished), f"times, after {op}")
            if not args.json:
                print(*tables.lines(table, [op]), sep="\n", flush=True)

        step(0, "correctness of every op")
        table.ops = tables.load(table.key).ops
        known.run(table, found, device, thorough=args.thorough, told=told)
    backend.forget()
    if args.write is not None:
        write_atomically(args.write, table.to_json().encode())
    if args.json:
        print(json.dumps({"source": table.source, **json.loads(table.to_json())}, indent=2))
    else:
        print(f"kept in {table.source or 'no file'}")
    entries = [e for op in wanted for e in {**table.lost, **table.ops}.get(op, {}).values()]
    failed = any(error is not None for e in entries for error in e["errors"].values())
    return 1 if failed or table.lost else 0
