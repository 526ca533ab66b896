"""Counts the variants of each kernel that Triton would compile; it compiles none.

Each case of `aot_cases.py` runs with several numbers of tokens, and with operands at odd addresses.
Then all boundaries of a block run over one set of buffers, whose parts begin at any address.

    python tests/kernels/variants.py
"""

import importlib
import json
import math

import aot
import aot_cases
import torch
from triton.runtime.jit import JITFunction

from deepfast.launches import LAUNCHES
from deepfast.selfcheck.operands import like_those_of
from tests.kernels.agreement import numbers

TOKENS = (8190, 8192, 4096, 4112, 33)
"""With and without the factor 16, for which Triton compiles a variant of its own."""

_seen: dict[str, set] = {}
KEYS = aot.Keys()


def _record(kernel, key, *_args, **_named) -> None:
    KEYS.add(kernel, key)
    _seen.setdefault(kernel.__name__, set()).add(key)


def variants(run, *each) -> dict[str, int]:
    """The variants of each kernel over ``run(x)`` for each x."""
    _seen.clear()
    for x in each:
        run(x)
    return {name: len(keys) for name, keys in sorted(_seen.items())}


def of_case(case) -> dict[str, list[int]]:
    """The variants for one number of tokens, and for all of them with the operands of their checks
    before first use."""

    def checked(a):
        launch = LAUNCHES[type(a).__name__]
        launcher(like_those_of(launch, a, None))
        launcher(a)

    def run(tokens):
        aot_cases.T = tokens or TOKENS[0]
        case.run(checked if tokens else launcher)

    launcher = case.launcher
    one, many = variants(run, None), variants(run, *TOKENS)
    return {name: [one[name], many[name]] for name in many}


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


def of_odd_operands(case) -> dict[str, list[int]]:
    """The variants for such operands, and for them and those of their check."""

    def run(checked):
        def call(a):
            launch = LAUNCHES[type(a).__name__]
            given = a._make(odd(o, x) for o, x in zip(launch.operands, a, strict=True))
            launcher(given)
            if checked:
                launcher(like_those_of(launch, given, torch.Generator()))

        case.run(call)

    aot_cases.T = 33
    launcher = case.launcher
    one, both = variants(run, False), variants(run, True)
    return {name: [one[name], both[name]] for name in both}


T, D, ROWS, START, END = 33, 64, 24, 8, 16


def of_block(op: str, tables: dict, **absent) -> dict[str, int]:
    """All boundaries of a block but the first and the last, whose launches differ in operands.

    tables: operands of which row k takes its entry in a table of all rows.
    """
    module = importlib.import_module(f"deepfast.kernels.{op}")
    names = f"{op}_forward", f"{op}_backward"
    # Meta tensors have no addresses.
    states, sizes = torch.zeros(ROWS + 1, T, D), {"T": T, "D": D, "R": ROWS, "S": ROWS + 1}
    made = {name: numbers(name, **sizes, **absent) for name in names}

    def run(k):
        pulls = list(range(k, END))
        own = {name: table[k] for name, table in tables.items()} | {
            "states": states, "k": k, "near": list(range(START, k + 1)), "grads": states,
            "grad_slot": k + 1, "pull_rows": pulls, "pull_slots": [row + 1 for row in pulls],
        }  # fmt: skip
        for name in names:
            given = {o: own.get(o, x) for o, x in made[name].items()}
            getattr(module, name)(LAUNCHES[name].record(**given))

    return variants(run, *range(START, END))


def of_blocks() -> dict[str, dict[str, int]]:
    (mean, rstd, source_rstd), norms = torch.zeros(3, ROWS, T), torch.zeros(2, ROWS, D)
    shared = {"seed": torch.zeros(ROWS, dtype=torch.int64), "out_mean": mean, "out_rstd": rstd}
    constant = {"source_rstd": source_rstd, "dnorm_weight": norms[0], "dnorm_bias": norms[1]}
    attention = {"partial_stats": torch.zeros(ROWS, 2, T)}
    return {
        "boundary": of_block("boundary", shared | constant),
        "attention_boundary": of_block(
            "attention_boundary", shared | attention, bias=None, dbias=None
        ),
    }


def main() -> None:
    aot.use_target(90)
    JITFunction._do_compile = _record
    cases = {case.name: of_case(case) for case in aot_cases.CASES}
    cases |= {f"{case.name}, odd operands": of_odd_operands(case) for case in aot_cases.CASES}
    found = {"cases": cases, "blocks": of_blocks(), "faults": KEYS.faults()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
