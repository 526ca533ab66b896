"""deepfast.ops.depth_attention against float64, on every backend."""

import pytest
import torch
import torch.nn.functional as F

from deepfast.ops import depth_attention

LOW = [torch.float32, torch.bfloat16, torch.float16]


def plain_form(sources, query=None, scores=None, norm_weight=None, norm="rms", eps=1e-6):
    """Stack, normalise, score, softmax, sum."""
    v = torch.stack(sources, -2)
    if scores is None:
        n = v if norm is None else F.rms_norm(v, v.shape[-1:], eps=eps)
        q = query if norm_weight is None else query * norm_weight
        scores = n @ q.mT if q.dim() == 2 else n @ q
    many = scores.dim() == v.dim()
    s = scores if many else scores.unsqueeze(-1)
    out, lse = s.softmax(-2).mT @ v, s.logsumexp(-2)
    return (out, lse) if many else (out.squeeze(-2), lse.squeeze(-1))


def operands(count, shape, hops, mode):
    """Sources, and the operands of their scores; their spread is about that of training."""
    *lead, dim = shape
    many = () if hops is None else (hops,)
    sources = [torch.randn(shape) * (1 + k % 3) + k % 2 for k in range(count)]
    if mode == "scores":
        return sources, {"scores": torch.randn(*lead, count, *many)}
    given = {"query": torch.randn(*many, dim) / dim**0.5}
    if mode == "gain":
        given["norm_weight"] = 1 + 0.3 * torch.randn(dim)
    return sources, given


def results(form, sources, given, dtype, given_dtype):
    sources = [s.detach().to(dtype).requires_grad_() for s in sources]
    given = {k: p.detach().to(given_dtype).requires_grad_() for k, p in given.items()}
    out, lse = form(sources, given)
    generator = torch.Generator().manual_seed(5)
    dout, dlse = (torch.randn(x.shape, generator=generator).to(dtype) for x in (out, lse))
    torch.autograd.backward((out, lse), (dout.to(out.dtype), dlse.to(lse.dtype)))
    found = {"out": out.detach(), "lse": lse.detach()}
    found |= {f"dsource{k}": s.grad for k, s in enumerate(sources)}
    return found | {f"d{name}": p.grad for name, p in given.items()}


def compare(tolerances, ran, backend, dtype, sources, given, **options):
    # Numbers that every dtype represents exactly: the forms differ only in their arithmetic.
    sources = [s.to(dtype).float() for s in sources]
    given = {k: p.to(dtype).float() for k, p in given.items()}

    def fused(s, p):
        return depth_attention(s, **p, **options, return_lse=True, backend=backend)

    def plain(s, p):
        return plain_form(s, **p, **options)

    with ran("depth_attention", backend):
        got = results(fused, sources, given, dtype, torch.float32)
    tolerances.assert_all_accurate(
        got, results(plain, sources, given, dtype, dtype),
        results(plain, sources, given, torch.float64, torch.float64), dtype,
    )  # fmt: skip
    assert got["out"].dtype == got["dsource0"].dtype == dtype
    assert got["lse"].dtype == torch.float32


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("mode", ["query", "gain", "scores"])
@pytest.mark.parametrize("hops", [None, 1, 3])
@pytest.mark.parametrize(
    ("count", "shape"), [(1, (3, 1)), (2, (2, 3, 17)), (7, (40, 64)), (33, (5, 255))], ids=str
)
def test_agrees(tolerances, ran, exact_backend, dtype, mode, hops, count, shape):
    compare(tolerances, ran, exact_backend, dtype, *operands(count, shape, hops, mode))


@pytest.mark.parametrize("hops", [None, 2])
@pytest.mark.parametrize("mode", ["query", "gain", "scores"])
def test_agrees_over_a_hundred_sources(tolerances, ran, exact_backend, mode, hops):
    args = operands(100, (6, 130), hops, mode)
    compare(tolerances, ran, exact_backend, torch.float32, *args)


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("hops", [None, 3])
def test_agrees_without_the_norm(tolerances, ran, exact_backend, dtype, hops):
    args = operands(7, (9, 33), hops, "query")
    compare(tolerances, ran, exact_backend, dtype, *args, norm=None)


@pytest.mark.parametrize("scale", [1e15, 1e-15])
def test_agrees_on_extreme_sources(tolerances, ran, exact_backend, scale):
    sources, given = operands(5, (8, 70), 2, "gain")
    sources = [s * scale for s in sources]
    compare(tolerances, ran, exact_backend, torch.float32, sources, given, eps=1e-36)


@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_scores_far_from_zero(tolerances, ran, exact_backend, offset):
    """Only differences of scores count; each exponential alone would overflow or underflow."""
    sources, given = operands(9, (4, 16), 2, "scores")
    # In steps that fp32 represents exactly there too.
    given["scores"] = (given["scores"] * 8).round() / 8 + offset
    compare(tolerances, ran, exact_backend, torch.float32, sources, given)


def test_a_gain_for_each_hop(exact_backend):
    sources, given = operands(4, (6, 10), 3, "query")
    gain = 1 + 0.3 * torch.randn(3, 10)
    got = depth_attention(sources, **given, norm_weight=gain, backend=exact_backend)
    for h in range(3):
        alone = depth_attention(
            sources, given["query"][h], norm_weight=gain[h], backend=exact_backend
        )
        torch.testing.assert_close(got[:, h], alone)


def test_a_source_left_out(exact_backend):
    """A score of -inf is a weight of zero, and has no gradient."""
    sources, given = operands(5, (6, 10), 2, "scores")
    sources = [s.requires_grad_() for s in sources]
    scores = given["scores"].clone()
    scores[:, :2] = -torch.inf
    scores.requires_grad_()
    out, lse = depth_attention(sources, scores=scores, return_lse=True, backend=exact_backend)
    (out.square().sum() + lse.sum()).backward()
    rest, given = [s.detach().requires_grad_() for s in sources[2:]], scores.detach()[:, 2:]
    given.requires_grad_()
    exact, exact_lse = depth_attention(rest, scores=given, return_lse=True, backend=exact_backend)
    (exact.square().sum() + exact_lse.sum()).backward()
    torch.testing.assert_close(out, exact)
    torch.testing.assert_close(lse, exact_lse)
    torch.testing.assert_close(scores.grad[:, 2:], given.grad)
    assert scores.grad[:, :2].eq(0).all()
    assert sources[0].grad.eq(0).all()
    torch.testing.assert_close(sources[3].grad, rest[1].grad)


@pytest.mark.parametrize("hops", [None, 2])
@pytest.mark.parametrize("place", [0, 2, 4])
def test_a_score_of_infinity_is_nan(exact_backend, hops, place):
    """Like torch.softmax: the result of its token is NaN, and no other."""
    sources, given = operands(5, (6, 10), hops, "scores")
    given["scores"][1, place] = torch.inf

    def fused(s, p):
        return depth_attention(s, **p, return_lse=True, backend=exact_backend)

    got = results(fused, sources, given, torch.float32, torch.float32)
    want = results(lambda s, p: plain_form(s, **p), sources, given, torch.float32, torch.float32)
    assert got["out"][1].isnan().all()
    for name in got.keys() - {"lse"}:
        torch.testing.assert_close(got[name], want[name], equal_nan=True, msg=name)
    assert torch.equal(got["lse"].isfinite(), want["lse"].isfinite())


@pytest.mark.parametrize("hops", [None, 3])
def test_merged_results_are_those_of_all_sources(exact_backend, hops):
    """Blocks of sources are computed alone and combined by their lse; values and gradients."""
    sources, given = operands(7, (4, 6), hops, "gain")
    leaves = [t.double().requires_grad_() for t in (*sources, *given.values())]
    query, gain = leaves[7:]

    def attend(part):
        return depth_attention(
            part, query, norm_weight=gain, return_lse=True, backend=exact_backend
        )

    (a, lse_a), (b, lse_b) = attend(leaves[:3]), attend(leaves[3:7])
    scores = torch.stack((lse_a, lse_b), -1)
    merged, lse = depth_attention([a, b], scores=scores, return_lse=True, backend=exact_backend)
    whole, whole_lse = attend(leaves[:7])
    torch.testing.assert_close(merged, whole)
    torch.testing.assert_close(lse, whole_lse)
    dout, dlse = torch.randn_like(whole), torch.randn_like(lse)
    got = torch.autograd.grad((merged, lse), leaves, (dout, dlse))
    exact = torch.autograd.grad((whole, whole_lse), leaves, (dout, dlse))
    for g, e in zip(got, exact, strict=True):
        torch.testing.assert_close(g, e)


ALL_BITS = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [64, 1])
def test_one_source_is_its_own_result(exact_backend, dtype, dim):
    """Loads and stores convert exactly: ties, subnormals, infinities, NaN."""
    x = ALL_BITS.view(dtype).view(-1, dim)
    got = depth_attention([x], scores=torch.randn(len(x), 1), backend=exact_backend)
    torch.testing.assert_close(got, x, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("hops", [None, 2])
@pytest.mark.parametrize("mode", ["query", "gain", "scores"])
@pytest.mark.parametrize("norm", ["rms", None])
def test_gradcheck(exact_backend, mode, hops, norm):
    if norm is None and mode != "query":
        pytest.skip("there is no norm to leave out")
    sources, given = operands(3, (2, 4), hops, mode)
    leaves = [t.double().requires_grad_() for t in (*sources, *given.values())]

    def f(*args):
        named = dict(zip(given, args[3:], strict=True))
        return depth_attention(args[:3], **named, norm=norm, return_lse=True, backend=exact_backend)

    assert torch.autograd.gradcheck(f, leaves)


@pytest.mark.parametrize("shape", [(0, 7), (2, 0, 7)])
@pytest.mark.parametrize("mode", ["gain", "scores"])
def test_no_tokens(exact_backend, shape, mode):
    sources, given = operands(4, shape, 2, mode)
    leaves = [t.requires_grad_() for t in (*sources, *given.values())]
    out = depth_attention(leaves[:4], **given, backend=exact_backend)
    out.sum().backward()
    assert out.shape == (*shape[:-1], 2, 7)
    assert leaves[2].grad.shape == shape
    assert all(t.grad.eq(0).all() for t in leaves)


def test_strides_change_nothing(exact_backend):
    base = torch.randn(3, 10, 40)
    sources = [base[0, :, 3:22], base[1, :, :19], base[2].t()[:19].t()]
    scores = torch.randn(10, 2, 3).mT
    expected = depth_attention(
        [s.contiguous() for s in sources], scores=scores.contiguous(), backend=exact_backend
    )
    assert torch.equal(depth_attention(sources, scores=scores, backend=exact_backend), expected)


@pytest.mark.parametrize("used", ["out", "lse"])
def test_one_result_alone_is_used(exact_backend, used):
    sources, given = operands(4, (5, 9), 2, "gain")
    leaves = [t.double().requires_grad_() for t in (*sources, *given.values())]
    named = dict(zip(given, leaves[4:], strict=True))
    fused = depth_attention(leaves[:4], **named, return_lse=True, backend=exact_backend)
    plain = plain_form(leaves[:4], **named)
    which = ("out", "lse").index(used)
    got = torch.autograd.grad(fused[which].square().sum(), leaves)
    exact = torch.autograd.grad(plain[which].square().sum(), leaves)
    for g, e in zip(got, exact, strict=True):
        torch.testing.assert_close(g, e)


def test_memory_is_that_of_the_results(meter):
    """Nothing is stacked, and backward allocates only the gradients."""
    sources, given = operands(40, (100, 256), None, "query")
    with meter() as m:
        out = depth_attention(sources, **given, backend="cpu")
    statistics = 3 * 100 * 4
    assert m.peak <= out.nbytes + statistics + 10_000
    leaves = [s.requires_grad_() for s in sources]
    with meter() as m:
        out = depth_attention(leaves, **given, backend="cpu")
        out.backward(torch.ones_like(out))
    assert m.peak <= (40 + 2) * out.nbytes + statistics + 20_000


X = torch.ones(3, 4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"sources": []}, ValueError, "at least 1 tensor, got 0"),
        ({"sources": [X, 1]}, TypeError, r"sources\[1\] must be a tensor, got int"),
        (
            {"sources": [X, torch.ones(2, 4)]},
            ValueError,
            r"sources\[1\] must have sources\[0\]'s shape \(3, 4\), got \(2, 4\)",
        ),
        ({"query": None}, ValueError, "either query or scores, got neither"),
        ({"scores": torch.ones(3, 2)}, ValueError, "either query or scores, got both"),
        ({"query": torch.ones(5)}, ValueError, r"must be \(4,\) or \(H, 4\).*got \(5,\)"),
        ({"query": torch.ones(0, 4)}, ValueError, r"H >= 1, got \(0, 4\)"),
        ({"query": torch.ones(4, device="meta")}, ValueError, "query must be on cpu, got meta"),
        ({"norm": "layer"}, ValueError, "norm must be one of .*got 'layer'"),
        ({"norm_weight": torch.ones(3)}, ValueError, r"norm_weight must be \(4,\), got \(3,\)"),
        ({"norm_weight": X, "norm": None}, ValueError, "needs a query and norm='rms'"),
        (
            {"query": None, "scores": torch.ones(3, 3)},
            ValueError,
            r"scores must be \(3, 2\), got \(3, 3\)",
        ),
        (
            {"query": None, "scores": torch.ones(3, 5, 2)},
            ValueError,
            r"scores must be \(3, 2, 2\), got \(3, 5, 2\)",
        ),
        ({"eps": float("nan")}, ValueError, "depth_attention: eps must be a .* 0, got nan"),
    ],
)
def test_refuses(change, error, message):
    args = {"sources": [X] * 2, "query": torch.ones(4)} | change
    with pytest.raises(error, match=message):
        depth_attention(**args)


def test_one_dimensional_sources(exact_backend):
    sources = [torch.randn(8) for _ in range(3)]
    query = torch.randn(8)
    got, lse = depth_attention(sources, query, return_lse=True, backend=exact_backend)
    exact, exact_lse = plain_form(sources, query)
    torch.testing.assert_close(got, exact)
    torch.testing.assert_close(lse, exact_lse)
