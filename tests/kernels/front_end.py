"""Sends every kernel that a launcher may launch through Triton's front end, without a GPU.

The front end makes Triton IR from the source. It checks types, which the interpreter does not. Any
three choices of `calls.choices` that callers make together occur together in a call. Of the first
calls of each launcher the program also compares the variants that Triton would compile: another
number of tokens, the operands of a check before first use and another row of a block need no
variant of their own.

    python -m tests.kernels.front_end                     # about 1,000 launches, a minute or two
    python -m tests.kernels.front_end --each 12           # the first 12 calls of each launcher
    PYTHONPATH=FOLDER python -m tests.kernels.front_end   # with the Triton installed in FOLDER
"""

import argparse
import itertools
import math
import os
import sys
import traceback
from collections import Counter

# Read when triton is imported. The interpreter compiles nothing.
os.environ["TRITON_INTERPRET"] = "0"
# The kernels that users run do not need this variable, so neither does this program.
os.environ.pop("TRITON_DEFAULT_FP_FUSION", None)

import torch
import triton
from triton._C.libtriton import ir
from triton.runtime.jit import JITFunction

from deepfast.launches import LAUNCHES
from deepfast.selfcheck.operands import like_those_of
from tests.kernels.agreement import numbers
from tests.kernels.calls import ROWS, chosen, covering, given_by, without_memory
from tests.kernels.without_gpu import Keys, launcher_of, use_target

KEYS = Keys()
compiled: set[tuple[str, str]] = set()
launched: dict[str, set[str]] = {}
"""The variants of each kernel since `variants` began."""


def to_ir(self, key, signature, device, constexprs, options, attrs, warmup) -> None:
    """Instead of JITFunction._do_compile."""
    KEYS.add(self, key)
    launched.setdefault(self.__name__, set()).add(str(key))
    if (self.__name__, str(key)) in compiled:
        return
    compiled.add((self.__name__, str(key)))
    if not options.enable_fp_fusion:
        raise ValueError(f"{self.__name__}: expected a launch with enable_fp_fusion=True")
    _, _, target, compiler, _ = self.device_caches[device]
    context = ir.context()
    ir.load_dialects(context)
    compiler.load_dialects(context)
    source = self.ASTSource(self, signature, constexprs, attrs)
    functions = compiler.get_codegen_implementation(options)
    source.make_ir(target, options, functions, compiler.get_module_map(), context)


def start(launch, launcher, v: dict) -> None:
    launcher(without_memory(launch, v))


# ---- how many variants there are ---------------------------------------------------------------

COMPARED = 4
"""Calls of each launcher whose variants are counted."""

TOKENS = (8190, 8192, 4096, 4112)
"""With and without the factor 16, for which Triton compiles a variant of its own."""


def variants(launcher, *records) -> dict[str, int]:
    launched.clear()
    for record in records:
        launcher(record)
    return {name: len(keys) for name, keys in launched.items()}


def odd(o, x):
    """An operand like x that begins at another alignment, with rows another distance apart."""
    if isinstance(x, list):
        return [odd(o, y) for y in x] if o.dtype else x
    if not isinstance(x, torch.Tensor) or x.dim() == 0:
        return x
    *more, width = x.shape
    wide = (*more, width + 3 * (o.dtype == "storage" and not o.dense))
    # Not a meta tensor, which has no address.
    return torch.empty(1 + math.prod(wide), dtype=x.dtype)[1:].view(wide)[..., :width]


def compare(launch, launcher, v: dict) -> None:
    record = without_memory(launch, v)
    alike = [without_memory(launch, v, T=n, Q=n) for n in TOKENS]
    alike += [like_those_of(launch, other, None) for other in alike]
    shifted = launch.record._make(map(odd, launch.operands, record))
    checked = like_those_of(launch, shifted, torch.Generator())
    for one, others in ((record, alike), (shifted, [checked])):
        alone, all_of_them = variants(launcher, one), variants(launcher, one, *others)
        if alone != all_of_them:
            raise ValueError(f"variants {alone} of one call, {all_of_them} with calls like it")


def compare_rows(op: str, tables: dict, **v) -> None:
    """All boundaries of a block but the first and the last, whose launches differ in operands.

    tables: operands of which row k takes its entry in a table of all rows.
    """
    # Meta tensors have no addresses.
    states = torch.zeros(ROWS + 1, 33, 64)
    for name in (f"{op}_forward", f"{op}_backward"):
        launch, records = LAUNCHES[name], []
        given = given_by(launch, chosen(launch, D=64, T=33, **v))
        made = numbers(name, **given | {"S": ROWS + 1, "R": ROWS})
        for k in range(8, 16):
            own = {operand: table[k] for operand, table in tables.items()}
            own |= {"states": states, "grads": states, "k": k, "grad_slot": k + 1}
            own |= {"near": list(range(8, k + 1)), "pull_rows": list(range(k, 16))}
            own["pull_slots"] = list(range(k + 1, 17))
            records.append(launch.record(*(own.get(o, x) for o, x in made.items())))
        found = variants(launcher_of(launch), *records)
        if set(found.values()) != {1}:
            raise ValueError(f"{name}: variants {found} of the boundaries of a block")


def compare_blocks() -> None:
    (mean, rstd, source_rstd), norms = torch.zeros(3, ROWS, 33), torch.zeros(2, ROWS, 64)
    tables = {"seed": torch.zeros(ROWS, dtype=torch.int64), "out_mean": mean, "out_rstd": rstd}
    constant = {"source_rstd": source_rstd, "dnorm_weight": norms[0], "dnorm_bias": norms[1]}
    compare_rows("boundary", tables | constant)
    stats = {"partial_stats": torch.zeros(ROWS, 2, 33)}
    compare_rows("attention_boundary", tables | stats, bias=False)


# ---- all launches ------------------------------------------------------------------------------


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
    use_target(90)
    # No kernel may leave the choice of fused multiply-adds to Triton, whose default changes.
    triton.knobs.language.default_fp_fusion = False
    JITFunction._do_compile = to_ir
    total, failed = 0, Counter()

    def attempt(what, run, *given):
        try:
            run(*given)
        except Exception as error:
            said = f"{what}: {innermost(error)}"
            failed[said] += 1
            if failed[said] == 1:
                print(given)
                traceback.print_exception(error)

    for launch in (launch for name, launch in LAUNCHES.items() if options.only in name):
        launcher, called = launcher_of(launch), Counter()
        missing = [o.name for o in launch.operands if o.type == "Tensor?"]
        for number, v in enumerate(itertools.islice(covering(launch, 3), options.each)):
            total += 1
            called.update((name, v[name]) for name in missing)
            attempt(launch.name, start, launch, launcher, v)
            if number < COMPARED:
                attempt(launch.name, compare, launch, launcher, v)
        if options.each is None:
            for name in missing:
                if not (called[name, True] and called[name, False]):
                    failed[f"{launch.name}: {name} was always given, or never"] += 1
    attempt("block", compare_blocks)
    failed.update(KEYS.faults())
    for said, count in failed.items():
        print(f"{count} times {said}")
    print(
        f"Triton {triton.__version__}: {total} launches, {len(compiled)} variants of kernels, "
        f"{failed.total()} failed"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
