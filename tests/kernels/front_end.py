"""Sends every kernel that a launcher may launch through Triton's front end, without a GPU.

The front end makes Triton IR from the source. It checks types, which the interpreter does not. A
launch varies in the operands of its table in `deepfast.launches`: each ``Tensor?`` is given or
None, each bool is True or False, a word is each of its words, and a tensor has each of its ranks.
Lists, dtypes and sizes take the values below. Any three of these choices occur together in a call,
unless the launcher's callers never make them together.

    python tests/kernels/front_end.py                     # about 1,000 launches, a minute or two
    python tests/kernels/front_end.py --each 12           # the first 12 calls of each launcher
    PYTHONPATH=FOLDER python tests/kernels/front_end.py   # with the Triton installed in FOLDER
"""

import argparse
import importlib
import itertools
import os
import random
import re
import sys
import traceback
from collections import Counter
from collections.abc import Iterator

# The kernels that users run do not need this variable, so neither does this program.
os.environ.pop("TRITON_DEFAULT_FP_FUSION", None)

import aot
import aot_cases
import torch
import triton
from triton._C.libtriton import ir
from triton.runtime.jit import JITFunction

from deepfast import backend
from deepfast.launches import LAUNCHES

# ---- the choices -------------------------------------------------------------------------------

ROWS, K = 24, 12  # rows of the depth weights, and the row of a boundary
VALUES = {
    "dtype": (torch.bfloat16, torch.float16, torch.float32),
    "dropout_p": (0.0, 0.1),
    "label_smoothing": (0.0, 0.1),
    "near": ((*range(8, K + 1),), (*range(8, K),), (K,), ()),
    "pull_rows": ((*range(K, 16),), (*range(K + 1, 16),), (K,), ()),
    "sources": ((0,), (*range(8),), (0, 1, 3, 4)),
    "rows": ((16,), (*range(16, ROWS),), (16, 17, 19)),
    "reach": ((-1, -1), (-1, 0), (255, 0), (16, 16)),
    "length": (64, 128, 1024),
}
"""The values of an operand, or of a choice that decides several operands."""

SIZES = {
    "T": (33,), "R": (ROWS,), "S": (ROWS + 1,), "B": (8,), "Q": (33,), "N": (3,), "P": (2,),
    "D": (80, 512, 4096), "H": (1, 8), "K": (3, 17), "V": (300, 32000), "E": (32, 64, 128),
    "G": (1, 2),
}  # fmt: skip
"""The sizes behind the letters of the table; the heads of attention are H * G."""


def choices(launch) -> dict[str, tuple]:
    """Everything in which calls of a launch differ, with its values."""
    found = {"dtype": VALUES["dtype"]}
    for o in launch.operands:
        for letter in re.findall("[A-Z]", "".join(map("".join, o.shapes))):
            found[letter] = SIZES[letter]
        if o.type == "Tensor?":
            found[o.name] = (True, False)
        elif o.type == "bool":
            found[o.name] = (False, True)
        elif o.type == "str":
            found[o.name] = o.words
        elif o.name in VALUES and not o.dtype:
            found[o.name] = VALUES[o.name]
        if len(o.shapes) > 1:
            found[o.shapes] = range(len(o.shapes))
        if o.name == "left":
            found |= {"reach": VALUES["reach"], "length": VALUES["length"]}
    return found


def allowed(launch, v: dict) -> dict:
    """The choices, with those changed that the launcher's callers never make together."""
    name, v = launch.name, dict(v)

    def only(condition, *operands):
        for operand in operands:
            if operand in v:
                v[operand] = v[operand] and bool(condition)

    def exactly(condition, *operands):
        v.update({operand: bool(condition) for operand in operands if operand in v})

    exactly(v.get("dropout_p", 0), "seed")
    if name.startswith("layer_norm"):
        exactly(not v["rms"], "mean")
        exactly(v.get("residual") or v["dropout_p"], "sum")
    elif "boundary" in name:
        output = "out" if name.endswith("forward") else "dout"
        only(v[output], "out_norm_weight", "out_norm_bias", "dout_norm_weight", "dout_norm_bias")
        exactly(v[output], "out_rstd")
        exactly(v[output] and not v["out_rms"], "out_mean")
        exactly(v.get("norm_source"), "source_rstd")
    elif name.startswith("depth_mix"):
        exactly(v["norm"], "mean", "rstd")
    elif name.startswith("depth_attention"):
        exactly(not v["query"], "scores")
        only(v["query"], "norm", "dquery")
        only(v["scores"], "dscores")
        # Weights that are given and not scores need no softmax and so no statistics.
        v["most"] = v["most"] or v["query"]
        exactly(v["most"], "lse", "total", "out")
        only(v["most"], "dlse")
    elif name.startswith("peephole"):
        exactly(v.get("c"), "gates")
    if launch.op == "attention_boundary":
        softmax = v["kind"] == "softmax"
        exactly(softmax, "stats", "out_stats")
        exactly(softmax and v.get("partial"), "partial_stats")
        only(v.get("bias") and v.get("dquery"), "dbias")
    return v


def calls(launch, patience: int = 40) -> Iterator[dict]:
    """Choices of calls in which any three that callers allow together occur together.

    Each call is the one of eight drawn at random that has the most new threes.
    """
    draw, axes = random.Random(launch.name), choices(launch)
    seen, idle = set(), 0
    while idle < patience:
        drawn = [
            allowed(launch, {key: draw.choice(values) for key, values in axes.items()})
            for _ in range(8)
        ]
        threes = [set(itertools.combinations(v.items(), 3)) - seen for v in drawn]
        best = max(range(len(drawn)), key=lambda i: len(threes[i]))
        new = threes[best]
        idle = 0 if new else idle + 1
        if new:
            seen |= new
            yield drawn[best]


def launcher_of(launch):
    files = backend.KERNEL_FILES[launch.op]
    modules = [importlib.import_module(f"deepfast.kernels.{file}") for file in files]
    return next(getattr(m, launch.name) for m in modules if hasattr(m, launch.name))


def run(launcher, launch, v: dict) -> None:
    """Calls a launcher with these choices; its tensors have no memory."""
    sizes = {letter: v.get(letter, values[0]) for letter, values in SIZES.items()}
    if launch.op == "attention":
        sizes["H"] *= sizes["G"]
    ints = {"k": K, "grad_slot": K + 1, "ignore_index": -100}
    if launch.op == "attention":
        ints |= dict(zip(("left", "right"), v["reach"], strict=True))
        ints |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), v["length"])
    for rows, slots in (("pull_rows", "pull_slots"), ("rows", "grad_slots")):
        if rows in v:
            ints[slots] = [row + 1 for row in v[rows]]
    if "rows" in v:
        written = v["sources"] if "pull" in launch.name else v["rows"]
        ints["out_rows"] = list(range(len(written)))
    kinds = {"storage": v["dtype"], "compute": torch.float32}
    kinds |= {"int32": torch.int32, "int64": torch.int64}
    given = {}
    for o in launch.operands:
        if o.type == "Tensor?" and not v[o.name]:
            given[o.name] = None
        elif o.dtype:
            x = aot_cases.tensor(*o.shape(sizes, v.get(o.shapes, 0)), dtype=kinds[o.dtype])
            given[o.name] = [x] * sizes["K"] if o.type == "Tensor[]" else x
        elif o.name in ints or o.name in v:
            value = ints[o.name] if o.name in ints else v[o.name]
            given[o.name] = list(value) if o.type == "int[]" else value
        else:
            given[o.name] = {"float": 1e-5}[o.type]
    launcher(launch.record(**given))


# ---- the front end -----------------------------------------------------------------------------

_seen: Counter = Counter()
KEYS = aot.Keys()


def to_ir(self, key, signature, device, constexprs, options, attrs, warmup) -> None:
    """Instead of JITFunction._do_compile."""
    KEYS.add(self, key)
    _seen[self.__name__, str(key)] += 1
    if _seen[self.__name__, str(key)] > 1:
        return
    if not options.enable_fp_fusion:
        raise ValueError(f"{self.__name__}: expected a launch with enable_fp_fusion=True")
    _, _, target, compiler, _ = self.device_caches[device]
    context = ir.context()
    ir.load_dialects(context)
    compiler.load_dialects(context)
    source = self.ASTSource(self, signature, constexprs, attrs)
    functions = compiler.get_codegen_implementation(options)
    source.make_ir(target, options, functions, compiler.get_module_map(), context)


def innermost(error: BaseException) -> str:
    """The message of the error that started it, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[-300:] or type(error).__name__


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="launches whose name holds this text")
    parser.add_argument("--each", type=int, help="calls of each launcher; all without it")
    options = parser.parse_args()
    aot.use_target(90)
    # No kernel may leave the choice of fused multiply-adds to Triton, whose default changes.
    triton.knobs.language.default_fp_fusion = False
    JITFunction._do_compile = to_ir
    chosen = [launch for name, launch in LAUNCHES.items() if options.only in name]
    total, failed = 0, Counter()
    for launch in chosen:
        launcher, called = launcher_of(launch), Counter()
        for v in itertools.islice(calls(launch), options.each):
            total += 1
            called.update((o.name, v[o.name]) for o in launch.operands if o.type == "Tensor?")
            try:
                run(launcher, launch, v)
            except Exception as error:
                said = f"{launch.name}: {innermost(error)}"
                failed[said] += 1
                if failed[said] == 1:
                    print(f"{v}:")
                    traceback.print_exception(error)
        if options.each is None:
            for o in launch.operands:
                if o.type == "Tensor?" and not (called[o.name, True] and called[o.name, False]):
                    failed[f"{launch.name}: {o.name} was always given, or never"] += 1
    failed.update(KEYS.faults())
    for said, count in failed.items():
        print(f"{count} times {said}")
    print(
        f"Triton {triton.__version__}: {total} launches of {len(chosen)} launchers, "
        f"{len(_seen)} variants of kernels, {failed.total()} launches failed"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
