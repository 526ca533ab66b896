"""Measures training steps of encoders of 6 to 100 layers, deepfast against other ways to compute
DLCL, trains a 30-layer translation model, and writes one HTML page that needs nothing else.

The work is the same on every machine, so the pages of two machines can be compared. It takes
about 7 minutes on 2 slow cores. Ctrl-C ends it early and keeps what was measured."""

import argparse
from dataclasses import replace
from pathlib import Path

from deepfast.files import check_writable, make_folder, require

EXAMPLE = "deepfast report --output report"
INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", default="report", type=Path, help="folder for the page")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--full", action="store_true", help="larger sizes, about half an hour")
    sizes.add_argument("--quick", action="store_true", help="tiny sizes, half a minute, to look")
    parser.add_argument("--no-training", action="store_true", help="measure only")
    text = "also the loop of adds under torch.compile, up to 12 layers; a minute more"
    parser.add_argument("--compile", action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    # Missing packages are reported now, not after minutes of measurements.
    for package in ("matplotlib", "jinja2"):
        require(package, "deepfast report")
    from deepfast.measure import page
    from deepfast.measure.report import make_report
    from deepfast.measure.settings import DEFAULT, FULL, QUICK

    settings = FULL if args.full else QUICK if args.quick else DEFAULT
    settings = replace(
        settings, training=not args.no_training, compile_up_to=12 if args.compile else 0
    )
    # The command that makes the same report, without the output folder.
    options = [n for n in ("full", "quick", "no_training", "compile") if getattr(args, n)]
    command = " ".join(["deepfast report", *(f"--{name.replace('_', '-')}" for name in options)])
    make_folder(args.output)
    check_writable(args.output / page.PAGE)
    report = make_report(settings, command)
    path = page.write(report, args.output)
    after = "interrupted after" if report["interrupted"] else "after"
    print(f"{path} {after} {report['seconds']:.0f} s")
    return INTERRUPTED if report["interrupted"] else 0
