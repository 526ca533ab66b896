"""The functions that kernels and hosts share, compiled for the host: conversions between
dtypes, dropout, the shape of a row."""

import importlib
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import include_paths

from deepfast.reference.dropout import philox

SOURCE = Path(__file__).with_suffix(".cpp")


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    """The ops of test_device_functions.cpp."""
    build = importlib.import_module("tests.cuda.build")
    try:
        build.compiler()
    except build.BuildError as error:
        pytest.skip(f"the device functions are not compiled: {error}")
    library = tmp_path_factory.mktemp("functions") / "libdevice_functions.so"
    flags = [flag for flag in build.FLAGS if flag != "-DDEEPFAST_EMULATE"]
    done = subprocess.run(
        [
            build.compiler(), *flags, f"-I{build.ROOT / 'csrc'}",
            *(f"-isystem{path}" for path in include_paths()),
            "-shared", SOURCE, "-o", library,
            f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10",
        ],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    torch.ops.load_library(library)
    return torch.ops.deepfast_device_functions


def bits_of(x):
    return x.view(torch.int16 if x.element_size() == 2 else torch.int32)


def floats_of(bits):
    """fp32 values of these patterns, given as numbers below 2^32."""
    return torch.as_tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def patterns(dtype):
    """fp32 values that are not trivial to narrow, by name."""
    yield "each value of the narrow type", torch.arange(65536).to(torch.int16).view(dtype).float()
    yield "any pattern", floats_of(torch.randint(0, 2**32, (1 << 20,)))
    # Halfway between every two neighbours of the narrow type, one fp32 below and one above: among
    # them all subnormals, the step to normal numbers, and the step from the largest to infinity.
    lower = torch.arange(0x7C00 if dtype == torch.float16 else 0x7F80)
    low, high = ((lower + i).to(torch.int16).view(dtype).double() for i in (0, 1))
    high[-1] = 2 * torch.finfo(dtype).max - low[-2]
    halfway = bits_of(((low + high) / 2).float()).long()
    ties = floats_of(torch.cat([halfway - 1, halfway, halfway + 1]).clamp(min=0))
    yield "ties and their neighbours", torch.cat([ties, -ties])
    # NaNs whose fraction would be lost if its low bits were cut off.
    nans = [sign | 0x7F800000 | 1 << bit for sign in (0, 1 << 31) for bit in range(23)]
    yield "NaN", floats_of([*nans, 0x7FFFFFFF, 0xFFFFFFFF])
    yield (
        "infinities",
        torch.tensor([torch.inf, -torch.inf, 3.4e38, -3.4e38, 65520, -65520, 0, -0.0]),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_values_narrow_to_nearest_even(dtype, functions):
    for name, values in patterns(dtype):
        values = torch.nn.functional.pad(values, (0, -len(values) % 8))
        got, expected = torch.empty(len(values), dtype=dtype), values.to(dtype)
        functions.narrow(values, dtype == torch.float16, bits_of(got))
        # Signs of zeros count. A NaN may be any NaN.
        assert torch.equal(got.isnan(), expected.isnan()), name
        wrong = (bits_of(got) != bits_of(expected)) & ~expected.isnan()
        assert not wrong.any(), f"{name}: {got[wrong][:8]} instead of {expected[wrong][:8]}"


def mask_of(seed, first, tokens, dim, p):
    """`dropout_mask` of tokens from ``first`` on, from the same generator."""
    words = torch.arange(dim // 8).expand(tokens, -1)
    t = (torch.arange(tokens) + first).unsqueeze(1).expand_as(words)
    words = torch.stack(philox(seed, words, t & 0xFFFFFFFF, t >> 32), dim=-1)
    draws = torch.stack([words & 0xFFFF, words >> 16], dim=-1).view(tokens, dim)
    threshold = int(p * 65536 + 0.5)
    return (draws >= threshold).float() * (65536 / (65536 - threshold))


@pytest.mark.parametrize("first", [0, 2**31 - 2, 2**32 - 2, 2**32 + 5, 2**40])
def test_tokens_count_in_64_bits(first, functions):
    x = torch.ones(4, 64)
    functions.drop(x, torch.tensor(7), first, 0.3)
    assert torch.equal(x, mask_of(7, first, 4, 64, 0.3))


@pytest.mark.parametrize(
    "p", [0.0, 1e-6, 1e-5, 0.1, 0.3, 1 / 3, 0.5, 0.9, 1 - 1e-5, 1 - 1e-6, 1.0, 0.5 / 65536]
)
def test_threshold_of_a_probability(p, functions):
    out = torch.empty(2, dtype=torch.float64)
    functions.dropout_factors(p, out)
    threshold = int(p * 65536 + 0.5)
    scale = 65536 / (65536 - threshold) if threshold < 65536 else 0.0
    assert out.tolist() == [threshold, scale]


@pytest.mark.parametrize("aligned", [False, True])
def test_every_channel_has_one_owner(aligned, functions):
    dims = torch.arange(8, 8193, 8) if aligned else torch.arange(1, 8193)
    chunks, lanes, threads = (torch.empty_like(dims) for _ in range(3))
    functions.row(dims, aligned, chunks, lanes, threads)
    assert (lanes & (lanes - 1) == 0).all()
    assert set(chunks.tolist()) == ({2, 3} if aligned else {2})
    # Lane l holds channels 8 (c lanes + l) and on, c below `chunks`: each number below 8 chunks
    # lanes once.
    assert (8 * chunks * lanes >= dims).all()
    for count, many in torch.stack([lanes, chunks], 1).unique(dim=0).tolist():
        lane, c, i = torch.meshgrid(
            torch.arange(count), torch.arange(many), torch.arange(8), indexing="ij"
        )
        owned = 8 * (c * count + lane) + i
        assert torch.equal(owned.flatten().sort().values, torch.arange(8 * many * count))
    # No more lanes than a row needs, whole rows in a block, whole warps, at most as many threads as
    # registers leave room for.
    assert ((4 * chunks * lanes < dims) | (lanes == 1)).all()
    assert (threads % lanes == 0).all()
    assert (threads % 32 == 0).all()
    assert ((threads >= 128) & (threads <= torch.where(chunks == 2, 512, 256))).all()
