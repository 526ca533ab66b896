"""One launch by some kernels and by the reference, on random operands."""

import torch

from deepfast import backend
from deepfast.launches import LAUNCHES
from deepfast.ops.common import empty_slots
from deepfast.selfcheck.operands import READ_TOO, random
from tests.kernels.calls import NUMBERS, ROWS, filled, lists
from tests.tolerances import assert_all_accurate

LOW = (torch.float32, torch.bfloat16, torch.float16)
SEED = torch.tensor(3 << 40)


def served(by: str, name: str) -> bool:
    """Whether a backend's own launch has what `agree` compares. Statistics of the CPU's attention
    residuals have another meaning than the reference's."""
    op = LAUNCHES[name].op
    return name in backend.CUDA if by == "cuda" else by == "triton" or op not in ATTENTION


ATTENTION = ("attention", "attention_boundary")
SIZES = {"R": ROWS, "S": ROWS + 1, "K": 3, "H": 1, "V": 19, "P": 2, "N": 3}
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


def numbers(name: str, *, rank: int = 0, **given) -> dict:
    """Every operand of a launch in fp32. ``given`` are sizes, and operands that are not random.

    Results begin with sevens: what a launch must not write, or not add to, is compared too.
    rank: which of its shapes a weight has.
    """
    given = SIZES | lists(name, given)

    def tensor(o, shape):
        if o.name == "seed":
            return SEED if given.get("dropout_p", 1) else None
        if o.name == "target":
            target = torch.randint(given["V"], shape)
            target[1::3] = NUMBERS["ignore_index"]
            return target
        if o.dtype == "int64":
            return torch.randint(given["P"] + 1, shape)
        written = o.writes and o.name not in READ_TOO
        return torch.full(shape, 7.0) if written else random(o.name, shape)

    return filled(LAUNCHES[name], given, rank, tensor)


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
    if isinstance(given.get("grads"), str):
        made["grads"] = made["states"]
    getattr(launches, name)(**made)
    results = {o.name: made[o.name] for o in LAUNCHES[name].operands if o.writes}
    results = {key: x for key, x in results.items() if x is not None and len(x)}
    return {key: torch.stack(x) if isinstance(x, list) else x for key, x in results.items()}


def reference_of(op: str):
    return backend.choose(op, "reference", "cpu", torch.float32)[1]


def agree(kernels, name: str, dtype, layout=plain, *, again=False, **given) -> dict:
    """Compares the launch by ``kernels`` with float64, and to the bit with a run ``again``; returns
    its results."""
    op, given = LAUNCHES[name].op, numbers(name, **given)
    got = run(kernels(op), name, given, dtype, dtype, layout)
    exact = run(reference_of(op), name, given, dtype, torch.float64)
    near = run(reference_of(op), name, given, dtype, dtype)
    assert_all_accurate(got, near, exact, dtype)
    if again:
        same = run(kernels(op), name, given, dtype, dtype, layout)
        assert all(torch.equal(got[key], same[key]) for key in got)
    return got
