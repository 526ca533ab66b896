"""Measures training steps of encoders of 6 to 100 layers, deepfast beside other ways to compute
DLCL, trains a 30-layer translation model, and writes one HTML page that needs nothing else."""

import argparse
from dataclasses import replace
from pathlib import Path

EXAMPLE = "deepfast report --output report --minutes 6.2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", default="report", type=Path, help="folder of the page")
    parser.add_argument("--minutes", type=float, default=6.2, help="wall time of the whole report")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, half a minute, to look")
    parser.add_argument("--no-training", action="store_true", help="measure only")
    parser.add_argument("--no-memory", action="store_true", help="leave memory policies out")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--depths", type=int, nargs="+", metavar="L", help="default 6 30 60 100")
    parser.add_argument("--rounds", type=int, help="timed runs where affordable, default 5")
    parser.add_argument("--memory-gib", type=float, metavar="N",
                        help="memory a step may take; default: what is free")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    from deepfast.mt.data.errors import require

    # Missing packages are named before minutes of measuring, not after.
    for package in ("matplotlib", "jinja2", "rich"):
        require(package, "deepfast report")
    from deepfast.measure import page, terminal
    from deepfast.measure.report import make_report
    from deepfast.measure.settings import Settings, quick

    given = {"minutes": args.minutes, "depths": args.depths, "rounds": args.rounds}
    settings = Settings(**{name: value for name, value in given.items() if value is not None})
    if args.quick:
        settings = quick(settings)
        if args.depths:
            settings = replace(settings, depths=tuple(args.depths))
    settings = replace(
        settings,
        training=not args.no_training,
        memory=not args.no_memory,
        compiled=settings.compiled and not args.no_compile,
        memory_bytes=None if args.memory_gib is None else int(args.memory_gib * 2**30),
    )
    args.output.mkdir(parents=True, exist_ok=True)
    report = make_report(settings, command_line(args), lambda line: print(line, flush=True))
    path = page.write(report, args.output)
    terminal.show(report)
    print(f"{path} after {report['seconds']['total']:.0f} s")
    return 0


def command_line(args: argparse.Namespace) -> str:
    """The command that asks for the same report, without the place of the output."""
    words = ["deepfast", "report", "--minutes", f"{args.minutes:g}"]
    for name in ("quick", "no_training", "no_memory", "no_compile"):
        words += [f"--{name.replace('_', '-')}"] if getattr(args, name) else []
    if args.depths:
        words += ["--depths", *map(str, args.depths)]
    if args.rounds:
        words += ["--rounds", str(args.rounds)]
    if args.memory_gib:
        words += ["--memory-gib", f"{args.memory_gib:g}"]
    return " ".join(words)
