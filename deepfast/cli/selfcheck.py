"""Compares all kernels with float64 on this machine's GPU, in all cases and dtypes, and times them.

Each op, backend and dtype runs in a process of its own, forward and backward. The kernels that are
right are timed against torch's own form. Without this command, each kernel is checked in one case
before its first use. Each result is kept at once, and a second run checks only what has none. Exit
code 1: a kernel failed; then the next backend serves."""

import argparse
import json
from pathlib import Path

import torch

from deepfast import backend
from deepfast.cli.outputs import device_of
from deepfast.files import check_writable, write_atomically
from deepfast.selfcheck import full, store

EXAMPLE = "deepfast selfcheck --op layer_norm --op boundary"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(backend.OPS)
    parser.add_argument("--op", action="append", help=f"one of {names}; default: all")
    parser.add_argument("--device", help="a GPU, as cuda:1; default: the current")
    parser.add_argument("--thorough", action="store_true", help="more sizes; takes minutes")
    parser.add_argument("--again", action="store_true", help="also kernels that were right before")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--write", metavar="FILE", type=Path, help="write that JSON to FILE too")


def run(args: argparse.Namespace) -> int:
    if args.write is not None:
        check_writable(args.write)
    for op in args.op or ():
        if op not in backend.OPS:
            raise ValueError(f"--op: expected one of {', '.join(backend.OPS)}, got {op!r}")
    expected = "a GPU such as cuda:1 (elsewhere there is nothing to check)"
    device = device_of(args.device, expected, backend.CHECKED)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    wanted = backend.checkable(args.op or backend.OPS, device)
    results, lines = store.of(device), []

    def say(line: str) -> None:
        lines.append(line)
        if not args.json:
            print(line, flush=True)

    options = {"thorough": args.thorough, "again": args.again}
    fine = full.check(results, wanted, device, **options, say=say)
    backend.forget()
    found = {"file": str(results.path), "key": results.key, "lines": lines}
    text = json.dumps(found, indent=2) + "\n"
    if args.write is not None:
        write_atomically(args.write, text.encode())
    print(text if args.json else f"kept in {results.path}")
    return 0 if fine else 1
