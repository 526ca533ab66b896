"""The measured numbers of the project's pages.

    python -m bench all                   # every number and docs/results.md: less than an hour
    python -m bench depth mixing          # some sections again
    python -m bench all --processor NAME  # of another machine: bench/results/results-NAME.csv
    python -m bench draw                  # pages and pictures from the files, without measuring
    python -m bench learned FOLDER RECIPE # adds the runs of a sweep to bench/results/learned.csv

Another machine may be this one with DEEPFAST_CPU_CAPABILITY=avx2 and ATEN_CPU_CAPABILITY=avx2.
Each section writes its rows when it ends. All forms of a section take turns, and a number is the
median over the rounds. --quick takes toy sizes and writes into a temporary folder.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from bench import learned, page
from bench.results import FOLDER, Result, path_of, read, result, write
from deepfast.measure.bench_ops import CASES, Sizes
from deepfast.measure.bench_ops import measure as measure_op
from deepfast.measure.forms import PER_ROW, RESIDUAL, STACK
from deepfast.measure.mixing import mixing
from deepfast.measure.settings import QUICK, Settings, Size
from deepfast.measure.stacks import ATTENTION, ATTENTION_PER_ROW, PLAIN_FORMS, policies, steps
from deepfast.measure.turns import COPY, GIB, Turns, keep_memory, measure
from deepfast.memory import plan

COMMAND = "python -m bench "
FULL = Settings(
    depths=(6, 12, 24, 48), step=Size(32, 32, 256), compile_up_to=24, rounds=5, cpu_time=True,
    mixing_depths=(6, 12, 24, 48), mixing=(1024, 256), mixing_forward=True,
)  # fmt: skip
TOY = replace(
    QUICK, depths=(2, 3), compile_up_to=2, step=Size(2, 8, 32), rounds=1, cpu_time=True,
    mixing_forward=True,
)  # fmt: skip
VARIANTS = (RESIDUAL, "deepfast", ATTENTION, PER_ROW, ATTENTION_PER_ROW, STACK)
MANY_LAYERS = 100
"""Layers where recompute policies are measured."""


def compared(section: str, groups: list[Turns], sizes: str, peak: str = "GiB") -> Iterator[Result]:
    """The time of each row over that of its base, its peak, in GiB or over that of the base, and
    the share of a copy's bandwidth where its bytes are known."""
    measure(groups)
    for row in (row for group in groups for row in group.rows if row.what != COPY):
        base, own = row.base, row.peak_bytes or 0
        numbers = {"GiB": [own / GIB] * (own > 0), page.OF_A_COPY: row.of_copy}
        if base is not None and base is not row:
            numbers["x"] = row.relative
            numbers["peak"] = [own / base.peak_bytes] if own and base.peak_bytes else []
        for unit in ("x", peak, page.OF_A_COPY):
            if numbers.get(unit):
                case = sizes, COMMAND + section, row.what, row.variant, row.depth
                yield result(numbers[unit], unit, *case)


def depth(settings: Settings) -> Iterator[Result]:
    """A step over depth."""
    sizes = f"{settings.step.tokens} tokens, D={settings.step.dim}, fp32"
    return compared("depth", steps(settings, RESIDUAL, VARIANTS), sizes)


def mixed(settings: Settings) -> Iterator[Result]:
    """The connection alone."""
    sizes = "{} tokens, D={}, fp32".format(*settings.mixing)
    return compared("mixing", mixing(settings), sizes)


def memory(settings: Settings) -> Iterator[Result]:
    """Recompute policies, and the deepest model that the planner fits into 24 GiB."""
    layers = MANY_LAYERS if settings.rounds > 1 else settings.depths[-1]
    settings = replace(settings, depths=(layers,), policy_depth=layers)
    size = settings.memory
    sizes = f"{size.tokens} tokens, D={size.dim}, fp32, {layers} layers"
    yield from compared("memory", policies(settings, PLAIN_FORMS), sizes)
    deepest = plan(budget="24GiB", dim=512, tokens=8192).sizes.num_layers
    sizes = "D=512, 8,192 tokens, Adam, a decoder of 6 layers"
    yield result([deepest], "layers", sizes, COMMAND + "memory", "planned in 24 GiB", "")


def op_cases(settings: Settings) -> Iterator[tuple[str, Sizes]]:
    """Every op at one size in two dtypes, some at others."""
    if settings.rounds == 1:
        yield "layer_norm", Sizes(tokens=8, dim=16)
        return
    for op in CASES:
        for dtype in (torch.float32, torch.bfloat16):
            yield op, Sizes(tokens=2048, dtype=dtype)
    for op in ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"):
        for tokens, dim in ((256, 512), (8192, 1024)):
            yield op, Sizes(tokens=tokens, dim=dim)
    for sources in (8, 60):
        yield "depth_mix", Sizes(tokens=2048, sources=sources)


def ops(settings: Settings) -> Iterator[Result]:
    """The faster of eager and compiled torch over deepfast, every op."""
    for op, sizes in op_cases(settings):
        dtype = "fp32" if sizes.dtype == torch.float32 else "bf16"
        name = f"`{op}`, {sizes.tokens} x {sizes.dim}, {dtype}"
        if op == "depth_mix":
            name += f", {sizes.sources} states"
        for row in measure_op(op, sizes, settings.rounds, compiled=True):
            times = ", ".join(f"{form} {s * 1e3:.3g} ms" for form, s in row["seconds"].items())
            what = f"{row['torch_form']}; {times}; compiled in {row['compile_seconds']:.0f} s"
            case = what, COMMAND + "ops", name, row["pass"]
            yield result(row["ratios"], "x", *case)


def models(settings: Settings) -> Iterator[Result]:
    """Models of other packages."""
    from bench import models as other

    names = tuple(other.MODELS) if settings.rounds > 1 else ("torch's encoder", "GPT-2")
    depths = ((6, 6), (30, 6), (12, 1)) if settings.rounds > 1 else ((1, 1),)
    sentences = settings.step.batch
    few = sentences // 4 or 1
    sizes = f"{few * other.LENGTH} tokens, D={other.DIM}, fp32"
    yield from compared("models", other.models(settings, few, names), sizes, "peak")
    sizes = f"{sentences} sentences of {other.TOKENS} tokens, D={other.DIM}, beam {other.BEAM}"
    yield from compared("models", other.beam(settings, depths), sizes)


SECTIONS: dict[str, Callable[[Settings], Iterable[Result]]] = {
    "depth": depth, "mixing": mixed, "memory": memory, "ops": ops, "models": models,
}  # fmt: skip


def write_sections(names: Iterable[str], settings: Settings, path: Path) -> None:
    """Measures sections; each takes the place of its rows in the file when it ends."""
    # Other work disturbs one thread less than two.
    torch.set_num_threads(1)
    keep_memory()
    for name in names:
        torch.manual_seed(1)
        rows = []
        for row in SECTIONS[name](settings):
            what = ", ".join(str(part) for part in row.key[1:4] if part)
            print(f"{row.value:>10g} {row.unit}: {what}", flush=True)
            rows.append(row)
        # Rows that no section writes go.
        others = [COMMAND + other for other in SECTIONS if other != name]
        write([*(row for row in read(path).values() if row.command in others), *rows], path)


def main(argv: list[str] | None = None) -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=formatter
    )
    tasks = ("all", "draw", "learned", *SECTIONS)
    parser.add_argument("tasks", nargs="+", metavar="TASK", help=", ".join(tasks))
    parser.add_argument("--processor", metavar="NAME", help="of another machine's file")
    parser.add_argument("--quick", action="store_true", help="toy sizes, a temporary folder")
    args = parser.parse_args(argv)
    if args.tasks[0] == "learned":
        if len(args.tasks) != 3:
            parser.error("learned: expected the folder of a sweep and its recipe")
        learned.add(list(learned.runs(Path(args.tasks[1]), args.tasks[2])))
        return 0
    for name in args.tasks:
        if name not in tasks:
            parser.error(f"expected tasks of {', '.join(tasks)}, got {name!r}")
    folder = Path(tempfile.mkdtemp(prefix="deepfast-bench-")) if args.quick else FOLDER
    path = path_of(folder, args.processor)
    sections = [name for name in SECTIONS if {name, "all"} & {*args.tasks}]
    write_sections(sections, TOY if args.quick else FULL, path)
    page.draw(folder, folder if args.quick else None)
    print(f"{folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
