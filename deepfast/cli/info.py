"""Prints versions, how the compiled ops were built, and for each op which backend serves it and why
each other backend does not."""

import argparse
import json
import platform
from collections.abc import Iterator

import torch

from deepfast import backend
from deepfast.cli.outputs import device_of
from deepfast.dtypes import DTYPES, dtype_name
from deepfast.selfcheck import first_use, store
from deepfast.version import __version__

EXAMPLE = "deepfast info --dtype bfloat16"

MADE_OF = {
    **dict.fromkeys(("rms_norm", "add_layer_norm", "add_rms_norm"), ("layer_norm",)),
    "attention_residual": ("depth_attention", "layer_norm"),
    **dict.fromkeys(("norm_linear", "add_norm_linear"), ("layer_norm",)),
    "feed_forward": ("layer_norm", "activation"),
}
"""Ops without launches of their own, and the ops that serve them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", default=None, help="cpu or cuda; default: cuda where there is a GPU"
    )
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16, float16, float64")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def collect(device: torch.device, dtype: torch.dtype) -> dict:
    """Everything the command prints."""
    override = backend.requested_backend()
    if override not in (None, *backend.BACKENDS):
        names = ", ".join(backend.BACKENDS)
        raise ValueError(f"DEEPFAST_BACKEND: expected one of {names}, got {override!r}")
    return {
        "deepfast": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"cpu ({platform.processor() or platform.machine()})",
        "threads": torch.get_num_threads(),
        "dtype": dtype_name(dtype),
        "build": backend.build_info(),
        "override": override,
        "selfcheck": _selfcheck(device),
        "ops": {op: _choice(op, override, device, dtype) for op in backend.OPS},
        "made_of": MADE_OF,
    }


def _selfcheck(device: torch.device) -> dict:
    """Which checks of kernels were made on the device, and where their results are."""
    found: dict = {"mode": first_use.mode(), "file": None, "lines": []}
    if device.type in backend.CHECKED:
        results = store.of(device)
        found |= {"file": str(results.path), "lines": list(results.lines())}
    return found


def _choice(op: str, override: str | None, device: torch.device, dtype: torch.dtype) -> dict:
    """The backend that serves an op (None if the override cannot), and why the others do not."""
    refused = backend.explain(op, device, dtype)
    if override is not None:
        # An override may name a backend that `explain` does not list.
        refused[override] = backend.why_unable(op, override, device, dtype)
        if refused[override] is not None:
            return {"chosen": None, "refused": refused}
    chosen = backend.choose(op, override, device, dtype)[0]
    return {"chosen": chosen, "refused": refused}


def _lines(info: dict) -> Iterator[str]:
    """The choices as text."""
    override = info["override"] and f"DEEPFAST_BACKEND={info['override']}"
    later = (
        f"can serve, {override} asks for another"
        if override
        else "can serve, comes later in the order"
    )
    for op, choice in info["ops"].items():
        # backend.py names one backend for every op; for attention it is torch's sdpa.
        other = [b for b in backend.SDPA if b != "sdpa"] if op == "attention" else []
        names = {b: f"{b} (torch's sdpa under another name)" for b in other}
        chosen = choice["chosen"]
        yield f"{op}: {names.get(chosen, chosen or f'none, {override} cannot serve')}"
        for name, reason in choice["refused"].items():
            if name != chosen:
                yield f"    {names.get(name, name)}: {reason or later}"
    for op, parts in info["made_of"].items():
        served = [info["ops"][part]["chosen"] or "none" for part in parts]
        by = ", ".join(dict.fromkeys(served))
        yield f"{op}: {by}, made of {' and '.join(parts)} and torch's linear".replace(
            " and ", ", ", len(parts) - 1
        )


def _selfcheck_lines(found: dict) -> Iterator[str]:
    """Which checks were made, and what happens to a kernel that was not checked."""
    first = {
        "first-use": "a GPU checks each kernel at its first use; `deepfast selfcheck` checks all",
        "off": "DEEPFAST_SELFCHECK=off: no kernel is checked at its first use",
        "require": "DEEPFAST_SELFCHECK=require: a kernel that fails its check is an error",
    }[found["mode"]]
    made = f"{found['file']}; " if found["lines"] else "no check was made here; "
    yield f"check    {made}{first}"
    yield from (f"    {line}" for line in found["lines"])


def run(args: argparse.Namespace) -> int:
    device = device_of(args.device)
    dtype = getattr(torch, args.dtype, None)
    if dtype not in DTYPES:
        names = ", ".join(map(dtype_name, DTYPES))
        raise ValueError(f"--dtype: expected one of {names}, got {args.dtype!r}")
    info = collect(device, dtype)
    if args.json:
        print(json.dumps(info, indent=2))
        return 0
    print(f"deepfast {info['deepfast']}, torch {info['torch']}, Python {info['python']}")
    print(f"device   {info['device']}, {info['threads']} threads, {info['dtype']}")
    # Each op gives the reason why there is no CUDA.
    build = {k: v for k, v in info["build"].items() if v is not None and k != "no_cuda"}
    print("build    " + (build.get("missing") or ", ".join(f"{k} {v}" for k, v in build.items())))
    print(*_selfcheck_lines(info["selfcheck"]), sep="\n")
    if info["override"]:
        print(f"override DEEPFAST_BACKEND={info['override']}")
    print(*_lines(info), sep="\n")
    return 0
