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


def of_block() -> dict[str, int]:
    """All boundaries of a block but the first and the last, whose launches differ in operands."""
    T, D, rows, start, end = 33, 64, 24, 8, 16
    kernels = importlib.import_module("deepfast.kernels.boundary")
    # Meta tensors have no addresses.
    states, like = torch.zeros(rows + 1, T, D), torch.zeros(T, D)
    weight, seeds = torch.zeros(rows, rows), torch.zeros(rows, dtype=torch.int64)
    source_rstd, mean, rstd = (torch.zeros(rows, T).unbind(0) for _ in range(3))
    norm_weight, norm_bias, *grads = torch.zeros(4, rows, D)

    def run(k):
        kernels.boundary_forward(
            like, like, 0.1, seeds[k], states, k, list(range(start, k + 1)), weight, norm_weight,
            norm_bias, True, 1e-5, False, like, norm_weight[0], norm_bias[0], 1e-5, False,
            like, like, source_rstd[k], mean[k], rstd[k],
        )  # fmt: skip
        pulls = list(range(k, end))
        kernels.boundary_backward(
            states, k, list(range(start, k + 1)), weight, norm_weight, norm_bias, True, False,
            like, norm_weight[0], norm_bias[0], False, source_rstd[k], mean[k], rstd[k], 0.1,
            seeds[k], like, like, states, k + 1, pulls, [row + 1 for row in pulls], like, like,
            like, weight, grads[0][k], grads[1][k], like[0], like[1],
        )  # fmt: skip

    return variants(run, *range(start, end))


def of_attention_block() -> dict[str, int]:
    """The same with attention residuals."""
    T, D, rows, start, end = 33, 64, 24, 8, 16
    kernels = importlib.import_module("deepfast.kernels.attention_boundary")
    states, like = torch.zeros(rows + 1, T, D), torch.zeros(T, D)
    query, dquery, seeds = *torch.zeros(2, rows, D), torch.zeros(rows, dtype=torch.int64)
    source_rstd, mean, rstd = torch.zeros(3, rows, T)
    stats, far_stats = torch.zeros(rows, 3, T), torch.zeros(end - start, 2, T)

    def run(k):
        near, far = list(range(start, k + 1)), (like, far_stats[k - start])
        kernels.attention_boundary_forward(
            like, like, 0.1, seeds[k], states, k, near, query, None, "softmax", 1e-6, *far,
            query[0], query[1], 1e-5, False, like, like, source_rstd, stats, mean[k], rstd[k],
        )  # fmt: skip
        pulls = list(range(k, end))
        kernels.attention_boundary_backward(
            states, k, near, query, None, "softmax", *far, query[0], query[1], False, source_rstd,
            stats, mean[k], rstd[k], 0.1, seeds[k], like, like, states, k + 1, pulls,
            [row + 1 for row in pulls], like, like, like, dquery, None, like[0], like[1],
        )  # fmt: skip

    return variants(run, *range(start, end))


def main() -> None:
    aot.use_target(90)
    JITFunction._do_compile = _record
    cases = {case.name: of_case(case) for case in aot_cases.CASES}
    blocks = {"boundary": of_block(), "attention_boundary": of_attention_block()}
    print(json.dumps({"cases": cases, "blocks": blocks}))


if __name__ == "__main__":
    main()
