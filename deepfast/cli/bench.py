"""Times ops against plain PyTorch on this machine: forward, and forward with backward.

All forms take turns in one process, with as many runs each; times are medians. A ratio says how
many times longer the fastest form of PyTorch takes: the median over the rounds, so it can differ a
little from the quotient of two medians. It is reliable only where nothing else runs. The last
column is the bandwidth as a share of a plain copy's: of the bytes that the op has to move, and
empty where matrix products take the time. Without an op all are timed. --compile also times
PyTorch's form under torch.compile: a few seconds to a minute for each op. Ctrl-C prints what was
measured so far."""

import argparse
import json

from deepfast.cli.outputs import device_of

EXAMPLE = "deepfast bench layer_norm depth_mix --dtype bfloat16"
SLOWER = "*"
DTYPES = ("float32", "bfloat16", "float16", "float64")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ops", nargs="*", metavar="OP", help="such as layer_norm; default: all")
    parser.add_argument("--quick", action="store_true", help="few tokens and rounds, in 10 seconds")
    parser.add_argument("--tokens", type=int, help="default: 1024; with --quick 256")
    parser.add_argument("--dim", type=int, default=512, help="channels; default: 512")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default: float32")
    parser.add_argument("--device", help="cpu or cuda; default: cuda where there is one")
    parser.add_argument("--rounds", type=int, help="runs of each; default: 5; with --quick 3")
    parser.add_argument("--compile", action="store_true", help="time torch.compile's form, too")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    import torch

    from deepfast import checks
    from deepfast.machine import cpu_model
    from deepfast.measure import bench_ops
    from deepfast.measure.bench_ops import CASES, Sizes
    from deepfast.measure.console import progress
    from deepfast.measure.turns import keep_memory

    for op in args.ops:
        if op not in CASES:
            raise ValueError(f"expected an op of {', '.join(CASES)}, got {op!r}")
    tokens, rounds = (256, 3) if args.quick else (1024, 5)
    tokens = tokens if args.tokens is None else args.tokens
    rounds = rounds if args.rounds is None else args.rounds
    checks.whole("bench", **{"--tokens": tokens, "--dim": args.dim, "--rounds": rounds})
    if args.dim % 2:
        raise ValueError(f"--dim: expected an even number, got {args.dim}")
    device = str(device_of(args.device))
    sizes = Sizes(tokens=tokens, dim=args.dim, dtype=getattr(torch, args.dtype), device=device)
    name = cpu_model() if device == "cpu" else torch.cuda.get_device_name(device)
    about = f"{tokens:,} tokens, {args.dim} channels, {args.dtype}, {name}"
    if device == "cpu":
        about += f", {torch.get_num_threads()} threads"
    ops, rows, complete = args.ops or list(CASES), [], False
    keep_memory()
    try:
        with progress(len(ops)) as step:
            for done, op in enumerate(ops):
                step(done, op)
                for row in bench_ops.measure(op, sizes, rounds, args.compile):
                    rows.append(row)
        complete = True
    finally:
        # Also what was measured before Ctrl-C or an error.
        if rows and args.json:
            print(json.dumps({"about": about, "complete": complete, "rows": rows}, indent=2))
        elif rows:
            show(about, rows)
    return 0


def show(about: str, rows: list[dict]) -> None:
    """Prints a table for each pass."""
    from rich.table import Column

    from deepfast.measure.console import show_table

    op, backend = (Column(name, no_wrap=True) for name in ("op", "backend"))
    compiling = [row["compile_seconds"] for row in rows if row["compile_seconds"] is not None]
    compiled = ["compiled"] if compiling else []
    columns: list[Column | str] = [op, "deepfast", backend, "torch", *compiled]
    columns += "ratio", "of a copy"
    print(f"{about}; milliseconds")
    for what in dict.fromkeys(row["pass"] for row in rows):
        cells = (_cells(row) for row in rows if row["pass"] == what)
        show_table(columns, cells, title=what)
    if any(row["ratio"] < 1 for row in rows):
        print(f"{SLOWER} PyTorch is faster")
    if compiling:
        print(f"torch.compile took {sum(compiling):.0f} s")
    print("What torch runs")
    forms = {row["op"]: row["torch_form"] for row in rows}
    print(*(f"  {op}: {form}" for op, form in forms.items()), sep="\n")


def _cells(row: dict) -> list[str]:
    times = {
        form: f"{s * 1e3:.2f}" if s >= 1e-4 else f"{s * 1e3:.4f}"
        for form, s in row["seconds"].items()
    }
    compiled = [times["compiled"]] if "compiled" in times else []
    ratio, fraction = row["ratio"], row["fraction_of_copy"]
    return [
        row["op"], times["deepfast"], row["backend"], times["torch"], *compiled,
        f"{ratio:.2f}" + SLOWER * (ratio < 1), "" if fraction is None else f"{fraction:.0%}",
    ]  # fmt: skip
