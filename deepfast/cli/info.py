"""Prints versions, how the compiled ops were built, and for each op the backend that serves it
and why each other one does not."""

import argparse
import json
import platform

import torch

from deepfast import backend
from deepfast.version import __version__

EXAMPLE = "deepfast info --dtype bfloat16"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default=None, help="cpu or cuda; default: cuda where it is")
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16, float16, float64")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def collect(device: str, dtype: torch.dtype) -> dict:
    """Everything the command prints."""
    ops = {}
    for op in backend.OPS:
        reasons = backend.explain(op, device, dtype)
        ops[op] = {"chosen": backend.choose(op, None, device, dtype)[0], "refused": reasons}
    return {
        "deepfast": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name()
        if device == "cuda"
        else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
        "build": backend.build_info(),
        "ops": ops,
    }


def run(args: argparse.Namespace) -> int:
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"--device: expected cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device: expected a device that is here, got 'cuda': no GPU found")
    dtype = getattr(torch, args.dtype, None)
    if dtype not in backend.DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in backend.DTYPES)
        raise ValueError(f"--dtype: expected one of {names}, got {args.dtype!r}")
    info = collect(device, dtype)
    if args.json:
        print(json.dumps(info, indent=2))
        return 0
    print(f"deepfast {info['deepfast']}, torch {info['torch']}, Python {info['python']}")
    print(f"device   {info['device']}, {info['threads']} threads, {info['dtype']}")
    print("build    " + ", ".join(f"{k} {v}" for k, v in info["build"].items() if v is not None))
    for op, choice in info["ops"].items():
        print(f"{op}: {choice['chosen']}")
        for name, reason in choice["refused"].items():
            if name != choice["chosen"]:
                print(f"    {name}: {reason or 'can serve, comes later in the order'}")
    return 0
