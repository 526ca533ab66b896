"""Every op against PyTorch, eager and under `torch.compile`: `python -m bench.compiled [ROW ...]`.

The peer of a row is the faster of the best eager form and of the same form under
``torch.compile(fullgraph=True, dynamic=False)``. All forms take turns on one thread, warmed up, and
freed memory is kept for all. Each ratio, the peer's time over deepfast's, goes to
bench/results/results.csv as soon as it is measured. All rows take about 10 minutes, half of it
compiling; ``--list`` names them.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial

import torch

from bench.record import record
from deepfast.cases import ops, sentences
from deepfast.cases.case import Case
from deepfast.measure.bench_ops import CASES, Sizes, connection, measure_case
from deepfast.measure.clock import keep_memory
from deepfast.measure.forms import ATTENTION_FORMS
from deepfast.nn import AttentionResiduals

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Make = Callable[[Sizes], Case]


def _mix(count: int, norm: tuple[str, ...] = ()) -> Make:
    return lambda s: ops.depth_mix("", s.rows, count, norm=norm)


def _attention_residuals(s: Sizes) -> Case:
    module = AttentionResiduals(s.layers, s.dim, reads=2)
    return connection(s, module, ATTENTION_FORMS, "list")


def _rows() -> dict[str, tuple[Make, Sizes]]:
    """Every row: the case, and the sizes of its operands."""
    size = partial(Sizes, dropout=0.0)
    found: dict[str, tuple[Make, Sizes]] = {}
    for name, dtype in DTYPES.items():
        for count in (8, 24, 60):
            found[f"depth_mix_{count}_{name}"] = _mix(count), size(tokens=2048, dtype=dtype)
        norms = _mix(24, ("weight", "bias"))
        found[f"depth_mix_norm_24_{name}"] = norms, size(tokens=2048, dtype=dtype)
    for tokens, dim in ((256, 512), (2048, 512), (8192, 1024)):
        for op in ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"):
            found[f"{op}_{tokens}"] = CASES[op], size(tokens=tokens, dim=dim)
    found["activation_gelu"] = (
        lambda s: ops.activation("", s.rows, "gelu"), size(tokens=2048, dim=2048)
    )  # fmt: skip
    found["feed_forward"] = CASES["feed_forward"], size(tokens=1024)
    found["attention"] = CASES["attention"], size(tokens=2048)
    found["peephole_lstm"] = CASES["peephole_lstm"], size(tokens=1024)
    for name, dtype in DTYPES.items():
        made = size(dtype=dtype)
        found[f"linear_cross_entropy_{name}"] = (
            lambda s: sentences.linear_cross_entropy("", s.rows, 16_000), made
        )  # fmt: skip
    for layers in (6, 12, 24):
        found[f"dlcl_{layers}"] = CASES["DLCL"], size(tokens=2048, dim=256, layers=layers)
    found["attention_residuals_6"] = _attention_residuals, size(tokens=2048, dim=256, layers=6)
    return found


ROWS = _rows()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="default: all")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--eager", action="store_true", help="no torch.compile; records nothing")
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    args = parser.parse_args(argv)
    if args.list:
        print(*ROWS, sep="\n")
        return 0
    torch.set_num_threads(1)
    keep_memory()
    for name in args.rows or ROWS:
        make, sizes = ROWS[name]
        torch.manual_seed(1)
        for row in measure_case(name, make(sizes), sizes, args.rounds, not args.eager):
            both = row["pass"] != "forward"
            times = ", ".join(f"{form} {s * 1e3:.3g} ms" for form, s in row["seconds"].items())
            what = f"{row['pass']}, T={sizes.tokens}, D={sizes.dim}: {row['torch_form']}; {times}"
            if args.eager:
                print(f"{row['ratio']:6.2f} {name}: {what}", flush=True)
                continue
            what = f"fastest of eager and compiled over deepfast: {what}"
            what += f"; compiling took {row['compile_seconds']:.0f} s"
            key = f"compiled_{name}" + "_backward" * both
            record(key, row["ratio"], "x", what, "python -m bench.compiled")
    return 0


if __name__ == "__main__":
    sys.exit(main())
