"""deepfast.ops.depth_mix against float64, on every backend."""

import pytest
import torch
import torch.nn.functional as F

from deepfast.backend import BackendError
from deepfast.ops import depth_mix

LOW = [torch.float32, torch.bfloat16, torch.float16]


def plain_form(sources, weight, gain, shift):
    """Stack, multiply, sum."""
    if gain is not None or shift is not None:
        sources = [
            F.layer_norm(s, s.shape[-1:], None if gain is None else gain[k],
                         None if shift is None else shift[k])
            for k, s in enumerate(sources)
        ]  # fmt: skip
    w = weight.view(len(sources), *(1,) * (sources[0].dim() - 1), weight[0].numel())
    return (torch.stack(sources) * w).sum(0)


def operands(count, shape, kind, norm, dtype):
    dim = shape[-1]
    sources = [(torch.randn(shape) * (1 + k % 3) + k % 2).to(dtype) for k in range(count)]
    weight = torch.randn(count, dim) if kind == "vector" else torch.randn(count)
    gain = torch.randn(count, dim) if norm in ("both", "gain") else None
    shift = torch.randn(count, dim) if norm in ("both", "shift") else None
    return sources, weight, gain, shift


def grads_of(form, sources, weight, gain, shift, dout, dtype, weight_dtype):
    sources = [s.detach().to(dtype).requires_grad_() for s in sources]
    weight, gain, shift = (
        None if p is None else p.detach().to(weight_dtype).requires_grad_()
        for p in (weight, gain, shift)
    )
    out = form(sources, weight, gain, shift)
    out.backward(dout.to(out.dtype))
    result = {"out": out.detach(), "dweight": weight.grad}
    result |= {f"dsource{k}": s.grad for k, s in enumerate(sources)}
    result |= {} if gain is None else {"dgain": gain.grad}
    return result | ({} if shift is None else {"dshift": shift.grad})


def compare(tolerances, ran, backend, dtype, args):
    dout = torch.randn(args[0][0].shape).to(dtype)
    with ran("depth_mix", backend):
        got = grads_of(
            lambda s, w, g, b: depth_mix(s, w, norm_weight=g, norm_bias=b, backend=backend),
            *args, dout, dtype, torch.float32,
        )  # fmt: skip
    plain = grads_of(plain_form, *args, dout, dtype, dtype)
    exact = grads_of(plain_form, *args, dout, torch.float64, torch.float64)
    tolerances.assert_all_accurate(got, plain, exact, dtype)
    assert got["out"].dtype == got["dsource0"].dtype == dtype
    assert got["dweight"].dtype == torch.float32


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("kind", ["scalar", "vector"])
@pytest.mark.parametrize("norm", [None, "both", "gain", "shift"])
@pytest.mark.parametrize(
    ("count", "shape"), [(1, (3, 1)), (2, (2, 3, 17)), (7, (70, 64)), (33, (5, 255))], ids=str
)
def test_agrees(tolerances, ran, backend, dtype, kind, norm, count, shape):
    if shape[-1] == 1 and norm is not None:
        # One normalised channel is always 0: only rounding could be compared.
        shape = (3, 5)
    compare(tolerances, ran, backend, dtype, operands(count, shape, kind, norm, dtype))


@pytest.mark.parametrize("kind", ["scalar", "vector"])
def test_agrees_over_a_hundred_sources(tolerances, ran, backend, kind):
    args = operands(100, (6, 130), kind, "both", torch.float32)
    compare(tolerances, ran, backend, torch.float32, args)


@pytest.mark.parametrize("scale", [1e15, 1e-15])
def test_agrees_on_extreme_values(tolerances, ran, backend, scale):
    sources, *rest = operands(5, (8, 70), "scalar", "both", torch.float32)
    args = ([s * scale for s in sources], *rest)
    compare(tolerances, ran, backend, torch.float32, args)


def test_agrees_on_a_large_mean(tolerances, ran, backend):
    sources, *rest = operands(40, (40, 130), "scalar", "both", torch.float32)
    args = ([s * 0.05 + 1000 for s in sources], *rest)
    compare(tolerances, ran, backend, torch.float32, args)


# ---- weights of each token -----------------------------------------------------------------------


def of_tokens(count, shape, streams, dtype=torch.float64):
    sources = [torch.randn(shape).to(dtype) for _ in range(count)]
    many = () if streams is None else (streams,)
    return sources, torch.randn(*shape[:-1], count, *many).to(dtype)


def tokens_form(sources, weight):
    """Stack, and a product for each token."""
    stack = torch.stack(sources, -2)
    if weight.dim() < stack.dim():
        return (weight.unsqueeze(-2) @ stack).squeeze(-2)
    return weight.mT @ stack


def token_grads(form, sources, weight, dtype, weight_dtype):
    sources = [s.detach().to(dtype).requires_grad_() for s in sources]
    weight = weight.detach().to(weight_dtype).requires_grad_()
    out = form(sources, weight)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    out.backward(dout.to(dtype).to(out.dtype))
    found = {"out": out.detach(), "dweight": weight.grad}
    return found | {f"dsource{k}": s.grad for k, s in enumerate(sources)}


def compare_tokens(tolerances, ran, backend, dtype, sources, weight):
    sources, weight = [s.to(dtype).float() for s in sources], weight.to(dtype).float()

    def fused(s, w):
        return depth_mix(s, w, backend=backend)

    with ran("depth_attention", backend):
        got = token_grads(fused, sources, weight, dtype, torch.float32)
    plain = token_grads(tokens_form, sources, weight, dtype, dtype)
    exact = token_grads(tokens_form, sources, weight, torch.float64, torch.float64)
    tolerances.assert_all_accurate(got, plain, exact, dtype)
    assert got["out"].dtype == got["dsource0"].dtype == dtype


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("streams", [None, 1, 3, 4])
@pytest.mark.parametrize(
    ("count", "shape"), [(1, (3, 1)), (2, (2, 3, 17)), (7, (40, 64)), (33, (5, 255))], ids=str
)
def test_weights_of_each_token(tolerances, ran, exact_backend, dtype, streams, count, shape):
    compare_tokens(tolerances, ran, exact_backend, dtype, *of_tokens(count, shape, streams))


@pytest.mark.parametrize("dim", [1, 17, 64, 255, 512])
@pytest.mark.parametrize("count", [1, 2, 7, 33, 97])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_weights_of_each_token_in_float64(backend, count, dim):
    args = *of_tokens(count, (3, dim), 4), torch.float64, torch.float64
    got = token_grads(lambda s, w: depth_mix(s, w, backend=backend), *args)
    exact = token_grads(tokens_form, *args)
    for name, value in exact.items():
        torch.testing.assert_close(got[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("streams", [None, 2])
def test_gradcheck_of_weights_of_each_token(exact_backend, streams):
    sources, weight = of_tokens(3, (4, 5), streams)
    leaves = [t.requires_grad_() for t in (*sources, weight)]

    def f(*args):
        return depth_mix(args[:3], args[3], backend=exact_backend)

    assert torch.autograd.gradcheck(f, leaves)


def test_weights_of_each_token_need_no_stack(meter):
    sources, weight = of_tokens(40, (100, 256), 4, torch.float32)
    leaves = [s.requires_grad_() for s in sources]
    weight.requires_grad_()
    with meter() as m:
        out = depth_mix(leaves, weight, backend="cpu")
    assert m.peak <= out.nbytes + 1000
    dout = torch.ones_like(out)
    with meter() as m:
        out.backward(dout)
    assert m.peak <= 40 * sources[0].nbytes + weight.nbytes + 10_000


def test_weights_of_each_token_are_bit_identical_again(exact_backend):
    args = *of_tokens(7, (70, 64), 4, torch.float32), torch.float32, torch.float32

    def run():
        return token_grads(lambda s, w: depth_mix(s, w, backend=exact_backend), *args)

    first, second = run(), run()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("shape", [(0, 7), (2, 0, 7)])
def test_weights_of_no_token(exact_backend, shape):
    sources, weight = of_tokens(4, shape, 2, torch.float32)
    leaves = [t.requires_grad_() for t in (*sources, weight)]
    out = depth_mix(leaves[:4], leaves[4], backend=exact_backend)
    out.sum().backward()
    assert out.shape == (*shape[:-1], 2, 7)
    assert [t.grad.shape for t in leaves] == [t.shape for t in leaves]


ALL_BITS = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("factor", [1.0, 1 + 2**-9, 0.75, 3.0, 2**-12, 1 - 2**-12])
@pytest.mark.parametrize("dim", [64, 1])
def test_agrees_on_every_16_bit_value(backend, dtype, factor, dim):
    """Loads and stores convert exactly as torch does: ties, subnormals, infinities, NaN."""
    x = ALL_BITS.view(dtype).view(-1, dim)
    got = depth_mix([x], torch.tensor([factor]), backend=backend)
    torch.testing.assert_close(got, (x.float() * factor).to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", ["scalar", "vector"])
@pytest.mark.parametrize("norm", [None, "both", "gain", "shift"])
def test_gradcheck(exact_backend, kind, norm):
    sources, *params = operands(3, (4, 5), kind, norm, torch.float64)
    given = [p.double().requires_grad_() for p in params if p is not None]
    sources = [s.requires_grad_() for s in sources]

    def f(*args):
        weight, *rest = args[3:]
        gain = rest.pop(0) if norm in ("both", "gain") else None
        shift = rest.pop(0) if norm in ("both", "shift") else None
        return depth_mix(args[:3], weight, norm_weight=gain, norm_bias=shift, backend=exact_backend)

    assert torch.autograd.gradcheck(f, (*sources, *given))


def test_one_tensor_as_several_sources(exact_backend):
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, dtype=torch.float64, requires_grad=True)
    depth_mix([x, x, x], weight, backend=exact_backend).sum().backward()
    torch.testing.assert_close(x.grad, weight.detach().sum().expand(4, 6))
    torch.testing.assert_close(weight.grad, x.detach().sum().expand(3))


def test_memory_is_that_of_the_result(meter):
    """Nothing is stacked and nothing normalised is stored."""
    sources, weight, gain, shift = operands(40, (100, 256), "scalar", "both", torch.float32)
    weight.requires_grad_()
    with meter() as m:
        out = depth_mix(sources, weight, norm_weight=gain, norm_bias=shift, backend="cpu")
    statistics = 2 * 40 * 100 * 4
    assert m.peak <= out.nbytes + statistics + 10_000


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"sources": []}, ValueError, "at least 1 tensor, got 0"),
        ({"sources": [torch.ones(3, 4), 1]}, TypeError, r"sources\[1\] must be a tensor, got int"),
        (
            {"sources": [torch.ones(3, 4), torch.ones(2, 4)]},
            ValueError,
            r"sources\[1\] must have sources\[0\]'s shape \(3, 4\), got \(2, 4\)",
        ),
        ({"sources": [torch.ones(3, 4), torch.ones(3, 4).half()]}, ValueError, "torch.float32"),
        (
            {"sources": [torch.ones(3, 4), torch.ones(3, 4, device="meta")]},
            ValueError,
            "device cpu, got meta",
        ),
        (
            {"weight": torch.ones(3)},
            ValueError,
            r"must be \(2,\) or \(2, 4\), or for each token \(3, 2\) or \(3, 2, S\), got \(3,\)",
        ),
        ({"weight": torch.ones(3, 5, 2)}, ValueError, r"or \(3, 2, S\), got \(3, 5, 2\)"),
        (
            {"weight": torch.ones(3, 2), "norm_bias": torch.ones(2, 4)},
            ValueError,
            "norm_bias must be None with weights of each token",
        ),
        (
            {"sources": [torch.ones(2, 2)] * 2, "weight": torch.ones(2, 2)},
            ValueError,
            r"one for each channel or one for each token; .*as \(2, 2, 1\)",
        ),
        ({"weight": torch.ones(2, 1)}, ValueError, r"got \(2, 1\)"),
        ({"weight": torch.ones(2, device="meta")}, ValueError, "weight must be on cpu"),
        ({"norm_weight": torch.ones(4)}, ValueError, r"norm_weight must be \(2, 4\), got \(4,\)"),
        ({"norm_bias": torch.ones(3, 4)}, ValueError, r"norm_bias must be \(2, 4\)"),
        ({"eps": float("nan")}, ValueError, "depth_mix: eps must be a number .* 0, got nan"),
        ({"backend": "cuda"}, BackendError, "without CUDA|on cpu, not cuda"),
    ],
)
def test_refuses(change, error, message):
    args = {"sources": [torch.ones(3, 4)] * 2, "weight": torch.ones(2)} | change
    with pytest.raises(error, match=message):
        depth_mix(**args)


def test_one_dimensional_sources(backend):
    sources = [torch.randn(8) for _ in range(3)]
    out = depth_mix(sources, torch.ones(3), norm_bias=torch.zeros(3, 8), backend=backend)
    exact = sum(torch.nn.functional.layer_norm(s, (8,)) for s in sources)
    torch.testing.assert_close(out, exact)
