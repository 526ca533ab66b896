"""depth_mix, mix_rows and pull_rows on a GPU."""

import pytest
import torch

from deepfast import backend, ops
from deepfast.depth.state import empty_slots

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS = 21
if torch.cuda.is_available():
    SHAPES, ODD, OP = [(4096, 512), (1024, 1024)], [(1023, 255), (0, 512), (1, 8)], (4096, 512)
    SLOTS, LARGE = 80, (65_536, 512)
else:
    SHAPES, ODD, OP, SLOTS, LARGE = [(5, 32)], [(3, 17), (0, 16)], (5, 32), 6, (4, 16)
# A full history, dilation, and lists that are no arithmetic progression.
LISTS = [
    (range(13), range(13, 18)),
    (range(1, 18, 4), [18, 20]),
    ([0, 1, 2, 5, 6, 9], [10, 11, 14]),
]


def common_arguments(twins, T, D, per_channel=False):
    weight = torch.randn((ROWS, ROWS, D) if per_channel else (ROWS, ROWS))
    return {
        "states": twins.Slots(torch.randn(ROWS + 1, T, D)),
        "weight": twins.Computed(weight),
        "norm_weight": twins.Computed(1 + 0.5 * torch.randn(ROWS, D)),
        "norm_bias": twins.Computed(torch.randn(ROWS, D)),
    }


def mix_arguments(twins, T, D, sources, rows, per_channel=False):
    return common_arguments(twins, T, D, per_channel) | {
        "sources": list(sources), "rows": list(rows), "accumulate": False,
        "out": twins.Result((len(rows), T, D), slots=True), "out_rows": list(range(len(rows))),
    }  # fmt: skip


def pull_arguments(twins, T, D, sources, rows, per_channel=False):
    given = common_arguments(twins, T, D, per_channel)
    grads = twins.Slots(torch.randn(ROWS + 1, T, D))
    return given | {
        "grads": grads, "grad_slots": [r + 1 for r in rows], "rows": list(rows),
        "sources": list(sources), "accumulate": False,
        "out": twins.Result((len(sources), T, D), slots=True),
        "out_rows": list(range(len(sources))),
        # Entries of other rows and sources must not change.
        "dweight": twins.Computed(torch.zeros_like(given["weight"].x)),
    }  # fmt: skip


def check(tolerances, by, twins, T, D, dtype, device, lists=LISTS[0], **options):
    far, near = lists
    given = mix_arguments(twins, T, D, far, near, **options)
    twins.assert_alike(tolerances, by, "boundary", "mix_rows", given, dtype, device)
    given = pull_arguments(twins, T, D, list(far)[:8], near, **options)
    twins.assert_alike(tolerances, by, "boundary", "pull_rows", given, dtype, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("T", "D"), SHAPES)
def test_launchers(by, tolerances, twins, device, T, D, dtype):
    check(tolerances, by, twins, T, D, dtype, device)


@pytest.mark.parametrize(("T", "D"), ODD)
def test_launchers_at_odd_sizes(by, tolerances, twins, device, T, D):
    check(tolerances, by, twins, T, D, torch.bfloat16, device)


@pytest.mark.parametrize("lists", LISTS[1:])
def test_other_lists(by, tolerances, twins, device, lists):
    check(tolerances, by, twins, *SHAPES[-1], torch.bfloat16, device, lists)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_weight_per_channel(by, tolerances, twins, device, dtype):
    check(tolerances, by, twins, *SHAPES[-1], dtype, device, per_channel=True)


def inputs(twins, count, T, D, apart=0):
    sources = {f"x{k}": twins.Stored(torch.randn(T, D), apart) for k in range(count)}
    return sources | {
        "weight": twins.Computed(torch.randn(count)),
        "norm_weight": twins.Computed(1 + 0.3 * torch.randn(count, D)),
        "norm_bias": twins.Computed(torch.randn(count, D)),
    }


def mix(weight, norm_weight, norm_bias, backend, **sources):
    return ops.depth_mix(
        list(sources.values()), weight, norm_weight=norm_weight, norm_bias=norm_bias,
        backend=backend,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_op(by, tolerances, twins, device, dtype):
    given = inputs(twins, 5, *OP)
    twins.assert_op_alike(tolerances, by, "depth_mix", mix, given, dtype, device)


@pytest.mark.parametrize("tokens", [0, 37])
def test_op_with_many_strided_sources(by, tolerances, twins, device, tokens):
    real = device == "cuda"
    given = inputs(twins, 35 if real else 17, tokens if real else 1, 100 if real else 20, 3)
    twins.assert_op_alike(tolerances, by, "depth_mix", mix, given, torch.bfloat16, device)


def test_20_runs_of_the_op_are_alike_to_the_bit(by, twins, device):
    repeats = 20 if device == "cuda" else 1
    twins.assert_repeatable(by, mix, inputs(twins, 5, *OP), torch.bfloat16, device, repeats)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_20_runs_of_the_launchers_are_alike_to_the_bit(by, twins, device, dtype):
    T, D = SHAPES[0]
    far, near = LISTS[0]
    for name, given in {
        "mix_rows": mix_arguments(twins, T, D, far, near),
        "pull_rows": pull_arguments(twins, T, D, list(far)[:8], near),
    }.items():
        runs = (
            twins.call("boundary", name, by, given, dtype, dtype, device)
            for _ in range(21 if device == "cuda" else 2)
        )
        first = next(runs)
        assert all(torch.equal(first[key], run[key]) for run in runs for key in first), name


def test_more_than_2_31_elements(by, tolerances, room, device):
    """Slots further apart than an int32 can count; some tokens are checked in float64."""
    room(10)
    T, D = LARGE
    dtype = torch.bfloat16
    like = torch.empty(T, D, dtype=dtype, device=device)
    states = empty_slots(SLOTS, like).normal_()
    weight = torch.randn(SLOTS, SLOTS, device=device) / SLOTS
    _, launch = backend.choose("boundary", by, torch.device(device).type, dtype)
    sources, rows = list(range(SLOTS - 2)), [SLOTS - 2, SLOTS - 1]
    tokens = slice(T - 3, T)

    def exact(w, picked):
        return torch.einsum("rk,ktd->rtd", w.double().cpu(), picked[:, tokens].double().cpu())

    out = empty_slots(2, like)
    launch.mix_rows(states, sources, weight, rows, None, None, out, [0, 1], False)
    expected = exact(weight[rows][:, sources], states[: SLOTS - 2])
    plain = expected.to(dtype)
    tolerances.assert_accurate(out[:, tokens].cpu(), plain, expected, dtype, "mix_rows")

    dweight = torch.zeros_like(weight)
    later = list(range(2, SLOTS))
    launch.pull_rows(
        states, later, later, states, [0, 1], weight, None, None, out, [0, 1], False, dweight
    )
    expected = exact(weight[later][:, [0, 1]].T, states[2:])
    plain = expected.to(dtype)
    tolerances.assert_accurate(out[:, tokens].cpu(), plain, expected, dtype, "pull_rows")
    last, first = states[SLOTS - 1].flatten(), states[1].flatten()
    expected = sum(
        (a.double() @ b.double()).cpu()
        for a, b in zip(last.split(1 << 24), first.split(1 << 24), strict=True)
    )
    plain = (last.float() * first.float()).sum().cpu()
    # Like the plain form, it multiplies rounded states and adds in fp32.
    tolerances.assert_accurate(
        dweight[SLOTS - 1, 1].cpu(), plain, expected.double(), torch.bfloat16, "dweight"
    )
