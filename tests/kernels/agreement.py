"""One launch by some kernels and by the reference, on operands made from the table of launches."""

import pytest
import torch

from deepfast import backend
from deepfast.launches import LAUNCHES
from deepfast.ops.common import empty_slots
from deepfast.selfcheck.operands import READ_TOO, random

LOW = (torch.float32, torch.bfloat16, torch.float16)
SEED = torch.tensor(3 << 40)
BOTH = pytest.mark.parametrize("kernels", ["triton", "cuda"], indirect=True)
"""For a test of launches that CUDA C++ has too."""


def served(kernels: str, name: str) -> bool:
    return kernels == "triton" or name in backend.CUDA


ROWS, SLOT = 10, 4

SIZES = {"R": ROWS, "S": ROWS + 1, "B": 4, "K": 3, "H": 1, "V": 19, "P": 2, "N": 3}
NUMBERS = {
    **dict.fromkeys(("eps", "source_eps", "out_eps"), 1e-5),
    **dict.fromkeys(("rms", "source_rms", "out_rms", "accumulate", "reverse"), False),
    **dict.fromkeys(("norm", "norm_source", "write_grad"), True),
    **{"dropout_p": 0.3, "kind": "softmax", "label_smoothing": 0.1, "ignore_index": -1},
    **{"k": SLOT, "near": [2, 3, 4], "grad_slot": SLOT + 1, "out_rows": [1, 2, 3]},
    **{"pull_rows": [4, 5, 6, 7, 8, 9], "pull_slots": [5, 6, 7, 8, 9, 10]},
    **{"sources": [0, 1, 2], "rows": [4, 5, 7], "grad_slots": [5, 6, 8]},
}
ABSENT = {
    "depth_attention_forward": {"scores": None},
    "depth_attention_backward": {"scores": None, "dscores": None},
    "activation_forward": {"bias": None, "kind": "gelu"},
    "activation_backward": {"kind": "gelu"},
}
"""By launch what is not given together with the other operands of `numbers`."""


def plain(shape, dtype):
    return torch.empty(shape, dtype=dtype)


def apart(shape, dtype):
    """Rows as in a wider tensor: an odd distance apart."""
    return torch.empty(*shape[:-1], shape[-1] + 3, dtype=dtype)[..., : shape[-1]]


def numbers(name: str, *, choice: int = 0, lists: int = 3, **given) -> dict:
    """Every operand of a launch in fp32. ``given`` are sizes, and operands that are not random.

    Results begin with sevens: what a launch must not write, or not add to, is compared too.
    choice: which of its shapes a weight has. lists: the length of a list of tensors.
    """
    sizes, made = SIZES | {"K": lists} | given, {}
    for o in LAUNCHES[name].operands:
        if o.name in given:
            made[o.name] = given[o.name]
        elif not o.dtype:
            made[o.name] = NUMBERS[o.name]
        elif o.name == "seed":
            made[o.name] = SEED if given.get("dropout_p", 1) else None
        elif o.dtype == "int64":
            made[o.name] = torch.randint(sizes["V"], o.shape(sizes))
        else:
            shape = o.shape(sizes, min(choice, len(o.shapes) - 1))
            written = o.writes and o.name not in READ_TOO
            make = (lambda s=shape: torch.full(s, 7.0)) if written else None
            one = make or (lambda s=shape, n=o.name: random(n, s))
            made[o.name] = [one() for _ in range(lists)] if o.type == "Tensor[]" else one()
    return made


def run(launches, name: str, given: dict, storage, dtype, layout=plain) -> dict:
    """The operands after a launch that it writes. Those of ``storage`` are rounded to it first.

    grads may be "states": the gradients are then in the slots of the states.
    """
    compute, made = torch.float64 if dtype == torch.float64 else torch.float32, {}

    def stored(o, x):
        if o.dtype not in ("storage", "compute"):
            return x
        kind = dtype if o.dtype == "storage" else compute
        x = x.to(storage).to(dtype) if o.dtype == "storage" else x
        if not o.dense and o.shapes[0][0] in "SB":
            return empty_slots(len(x), layout(x.shape[1:], kind)).copy_(x)
        return (plain if o.dense else layout)(x.shape, kind).copy_(x)

    for o in LAUNCHES[name].operands:
        x = given[o.name]
        if x is None or not o.dtype:
            made[o.name] = list(x) if o.type == "int[]" else x
        elif not isinstance(x, str):
            made[o.name] = [stored(o, y) for y in x] if isinstance(x, list) else stored(o, x)
    made |= {name: made[x] for name, x in given.items() if name == "grads" and isinstance(x, str)}
    getattr(launches, name)(**made)
    results = {o.name: made[o.name] for o in LAUNCHES[name].operands if o.writes}
    results = {key: x for key, x in results.items() if x is not None and len(x)}
    return {key: torch.stack(x) if isinstance(x, list) else x for key, x in results.items()}


def agree(tolerances, kernels, name: str, dtype, layout=plain, **given) -> dict:
    """Compares the launch by ``kernels`` with float64; returns its results."""
    op, given = LAUNCHES[name].op, numbers(name, **given)
    reference = backend.choose(op, "reference", "cpu", torch.float32)[1]
    got = run(kernels(op), name, given, dtype, dtype, layout)
    exact = run(reference, name, given, dtype, torch.float64)
    near = run(reference, name, given, dtype, dtype)
    tolerances.assert_all_accurate(got, near, exact, dtype)
    return got
