"""Counts the variants of each kernel that Triton would compile; it compiles none.

Each case of `aot_cases.py` runs with several numbers of tokens. Then all boundaries of a block run
over one set of buffers, whose parts begin at any address.

    python tests/kernels/variants.py
"""

import importlib
import json

import aot
import aot_cases
import torch
from triton.runtime.jit import JITFunction

from deepfast.launches import LAUNCHES

TOKENS = (8190, 8192, 4096, 4112, 33)
"""With and without the factor 16, for which Triton compiles a variant of its own."""

_seen: dict[str, set] = {}


def _record(kernel, key, *_args, **_named) -> None:
    _seen.setdefault(kernel.__name__, set()).add(key)


def variants(run, *each) -> dict[str, int]:
    """The variants of each kernel over ``run(x)`` for each x."""
    _seen.clear()
    for x in each:
        run(x)
    return {name: len(keys) for name, keys in sorted(_seen.items())}


def of_case(case) -> dict[str, list[int]]:
    """The variants for one number of tokens, and for all of them."""

    def run(tokens):
        aot_cases.T = tokens
        case.call(launcher, **case.sizes)

    module = importlib.import_module(f"deepfast.kernels.{case.module}")
    launcher = getattr(module, case.call.__name__)
    one, many = variants(run, TOKENS[0]), variants(run, *TOKENS)
    return {name: [one[name], many[name]] for name in many}


T, D, ROWS, START, END = 33, 64, 24, 8, 16


def _block(op: str, of_row) -> dict[str, int]:
    """All boundaries of a block but the first and the last, whose launches differ in operands.

    of_row: (k, like) -> the op's own operands of row k.
    """
    module = importlib.import_module(f"deepfast.kernels.{op}")
    # Meta tensors have no addresses.
    states, like, channels = torch.zeros(ROWS + 1, T, D), torch.zeros(T, D), torch.zeros(D)
    seeds, (mean, rstd) = torch.zeros(ROWS, dtype=torch.int64), torch.zeros(2, ROWS, T)

    def run(k):
        pulls = list(range(k, END))
        given = of_row(k) | dict.fromkeys(
            ("branch", "residual", "partial", "x", "out", "dx", "dout", "pulled", "dbranch",
             "dresidual"), like,
        )  # fmt: skip
        given |= dict.fromkeys(
            ("out_norm_weight", "out_norm_bias", "dout_norm_weight", "dout_norm_bias"), channels
        )
        given |= {
            "dropout_p": 0.1, "seed": seeds[k], "states": states, "k": k, "out_eps": 1e-5,
            "near": list(range(START, k + 1)), "out_rms": False, "out_mean": mean[k],
            "out_rstd": rstd[k], "grads": states, "grad_slot": k + 1, "pull_rows": pulls,
            "pull_slots": [row + 1 for row in pulls],
        }  # fmt: skip
        for name in (f"{op}_forward", f"{op}_backward"):
            launch = LAUNCHES[name]
            getattr(module, name)(launch.record(*(given[o] for o in launch.names)))

    return variants(run, *range(START, END))


def of_block() -> dict[str, int]:
    weight, source_rstd = torch.zeros(ROWS, ROWS), torch.zeros(ROWS, T)
    norm_weight, norm_bias, *grads = torch.zeros(4, ROWS, D)
    return _block("boundary", lambda k: {
        "weight": weight, "dweight": weight, "norm_weight": norm_weight, "norm_bias": norm_bias,
        "dnorm_weight": grads[0][k], "dnorm_bias": grads[1][k], "norm_source": True,
        "source_eps": 1e-5, "source_rms": False, "source_rstd": source_rstd[k],
    })  # fmt: skip


def of_attention_block() -> dict[str, int]:
    (query, dquery), source_rstd = torch.zeros(2, ROWS, D), torch.zeros(ROWS, T)
    stats, far_stats = torch.zeros(ROWS, 3, T), torch.zeros(END - START, 2, T)
    return _block("attention_boundary", lambda k: {
        "query": query, "dquery": dquery, "bias": None, "dbias": None, "kind": "softmax",
        "eps": 1e-6, "source_rstd": source_rstd, "stats": stats,
        "partial_stats": far_stats[k - START],
    })  # fmt: skip


def main() -> None:
    aot.use_target(90)
    JITFunction._do_compile = _record
    cases = {case.name: of_case(case) for case in aot_cases.CASES}
    blocks = {"boundary": of_block(), "attention_boundary": of_attention_block()}
    print(json.dumps({"cases": cases, "blocks": blocks}))


if __name__ == "__main__":
    main()
