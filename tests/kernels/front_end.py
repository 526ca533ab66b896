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
from collections import Counter

# Read when triton is imported. The interpreter compiles nothing.
os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from triton._C.libtriton import ir
from triton.runtime.jit import JITFunction

from deepfast import backend
from deepfast.kernels.launch import Kernel
from deepfast.launches import LAUNCHES
from deepfast.selfcheck.operands import like_those_of
from tests.kernels.agreement import numbers
from tests.kernels.calls import ROWS, chosen, covering, given_by, without_memory
from tests.kernels.without_gpu import use_target

compiled: set[tuple[str, str]] = set()
launched: dict[str, set[str]] = {}
"""The variants of each kernel since `no_more_variants` began."""
keys: set[tuple] = set()
"""Kernels that Triton would compile: the name, its own key, and that of `deepfast.kernels.launch`,
which keeps compiled kernels. Where one differs the other must: two kernels with one key would be
mistaken for each other, and each key costs a check."""
variant = Kernel.variant


def remembered(self, *given):
    """Instead of Kernel.variant."""
    found = variant(self, *given)
    remembered.key = found[0]
    return found


def to_ir(self, key, signature, device, constexprs, options, attrs, warmup) -> None:
    """Instead of JITFunction._do_compile."""
    keys.add((self.__name__, str(key), remembered.key))
    launched.setdefault(self.__name__, set()).add(str(key))
    # Without the alignments, which change no type.
    kinds = self.__name__, str((signature, constexprs, options))
    if kinds in compiled:
        return
    compiled.add(kinds)
    _, _, target, compiler, _ = self.device_caches[device]
    context = ir.context()
    ir.load_dialects(context)
    compiler.load_dialects(context)
    source = self.ASTSource(self, signature, constexprs, attrs)
    functions = compiler.get_codegen_implementation(options)
    source.make_ir(target, options, functions, compiler.get_module_map(), context)


# ---- how many variants there are ---------------------------------------------------------------

COMPARED = 4
"""Calls of each launcher whose variants are counted."""

TOKENS = (8190, 8192, 4096, 4112)
"""With and without the factor 16, for which Triton compiles a variant of its own."""


def no_more_variants(launcher, record, others) -> None:
    """The calls ``others`` need no variant besides those of ``record``."""
    counts = []
    for records in ([record], [record, *others]):
        launched.clear()
        for one in records:
            launcher(one)
        counts.append({name: len(keys) for name, keys in launched.items()})
    if counts[0] != counts[1]:
        raise ValueError(f"variants {counts[0]} of one call, {counts[1]} with calls like it")


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
    no_more_variants(launcher, record, alike)
    shifted = launch.record._make(map(odd, launch.operands, record))
    checked = like_those_of(launch, shifted, torch.Generator())
    no_more_variants(launcher, shifted, [checked])


def compare_rows(launch, launcher) -> None:
    """All boundaries of a block but the first and the last, whose launches differ in operands: of
    those that each row has for itself row k takes its entry in a table of all rows."""
    v = chosen(launch, D=64, T=33, bias=False, dbias=False)
    made = numbers(launch.name, **given_by(launch, v) | {"S": ROWS + 1, "R": ROWS})
    # Meta tensors have no addresses.
    made |= dict.fromkeys(("states", "grads"), torch.zeros(ROWS + 1, 33, 64))
    tables = {
        o.name: made[o.name].expand(ROWS, *made[o.name].shape).contiguous()
        for o in launch.operands
        if o.dtype in ("compute", "int64") and made[o.name] is not None and "R" not in o.shapes[0]
    }
    records = []
    for k in range(8, 16):
        made |= {name: table[k] for name, table in tables.items()}
        made |= {"k": k, "near": list(range(8, k + 1)), "pull_rows": list(range(k, 16))}
        made |= {"grad_slot": k + 1, "pull_slots": list(range(k + 1, 17))}
        records.append(launch.record(*(made[o.name] for o in launch.operands)))
    no_more_variants(launcher, records[0], records[1:])


# ---- all launches ------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--each", type=int, help="calls of each launcher; all without it")
    options = parser.parse_args()
    use_target(90)
    JITFunction._do_compile, Kernel.variant = to_ir, remembered
    total = 0
    for launch in LAUNCHES.values():
        launcher = backend.launchers(launch.op, "triton")[launch.name]
        for number, v in enumerate(itertools.islice(covering(launch, 3), options.each)):
            total += 1
            try:
                launcher(without_memory(launch, v))
                if number < COMPARED:
                    compare(launch, launcher, v)
            except Exception as error:
                error.add_note(f"{launch.name} with {v}")
                raise
        if "boundary" in launch.name:
            compare_rows(launch, launcher)
    for which in (1, 2):
        for one, count in Counter((key[0], key[which]) for key in keys).items():
            if count > 1:
                sys.exit(f"expected one key of the other kind, got {count}: {one}")
    print(f"Triton {triton.__version__}: {total} launches, {len(compiled)} variants of kernels")


if __name__ == "__main__":
    main()
