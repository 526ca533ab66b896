"""Times ops beside plain PyTorch on this machine: forward, and forward with backward.

Both forms take turns in one process; times are medians. A ratio says how many times longer PyTorch
takes: the median over the rounds, so it can differ a little from the quotient of the two
medians. It is reliable only where nothing else runs. Without an op all are timed."""

import argparse
import json

from deepfast.cli.outputs import device_of

EXAMPLE = "deepfast bench layer_norm depth_mix --dtype bfloat16"
DTYPES = ("float32", "bfloat16", "float16", "float64")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ops", nargs="*", metavar="OP", help="such as layer_norm; default: all")
    parser.add_argument("--tokens", type=int, default=2048, help="default: 2048")
    parser.add_argument("--dim", type=int, default=512, help="channels; default: 512")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default: float32")
    parser.add_argument("--device", help="cpu or cuda; default: cuda where there is one")
    parser.add_argument("--rounds", type=int, default=5, help="timed runs of each; default: 5")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    import torch

    from deepfast import checks
    from deepfast.files import require
    from deepfast.measure import bench_ops
    from deepfast.measure.bench_ops import CASES, Sizes
    from deepfast.measure.clock import keep_memory
    from deepfast.measure.machine import cpu_model

    for op in args.ops:
        if op not in CASES:
            raise ValueError(f"expected an op of {', '.join(CASES)}, got {op!r}")
    checks.whole("bench", tokens=args.tokens, dim=args.dim, rounds=args.rounds)
    if args.dim % 2:
        raise ValueError(f"--dim: expected an even number, got {args.dim}")
    if not args.json:
        require("rich", "deepfast bench (--json needs no package)")
    device = str(device_of(args.device))
    sizes = Sizes(tokens=args.tokens, dim=args.dim, dtype=getattr(torch, args.dtype), device=device)
    keep_memory()
    rows = []
    for op in args.ops or CASES:
        rows += bench_ops.measure(op, sizes, args.rounds)
    name = cpu_model() if device == "cpu" else torch.cuda.get_device_name(device)
    about = f"{args.tokens:,} tokens, {args.dim} channels, {args.dtype}, {name}"
    if device == "cpu":
        about += f", {torch.get_num_threads()} threads"
    if args.json:
        print(json.dumps({"about": about, "rows": rows}, indent=2))
    else:
        show(about, rows)
    return 0


def show(about: str, rows: list[dict]) -> None:
    """Prints the table."""
    from rich.table import Column

    from deepfast.measure.console import show_table

    columns: list[Column | str] = [Column("op", no_wrap=True)]
    for what in ("forward\n", "+ backward\n"):
        columns += [f"{what}deepfast", "\ntorch", "\nratio"]
    cells: dict[str, list[str]] = {}
    for row in rows:
        own = cells.setdefault(row["op"], [row["op"]])
        own += [f"{row['seconds'][name] * 1e3:.2f}" for name in ("deepfast", "torch")]
        own.append(f"{row['ratio']:.2f}")
    print(f"{about}; milliseconds")
    show_table(columns, cells.values(), padding=(0, 1, 0, 0))
    print("What ran: deepfast's backend, and PyTorch's form")
    for row in rows:
        if row["pass"] == "forward":
            print(f"  {row['op']}: {row['backend']}; {row['torch_form']}")
