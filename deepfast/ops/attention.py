"""Scaled dot-product attention over packed sentences."""

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from deepfast import backend as backends
from deepfast import checks
from deepfast.dtypes import compute_dtype
from deepfast.ops import common, torch_attention
from deepfast.ops.register import Op, watched

WIDEST = 256
"""Channels of a head that Triton's kernels hold."""

Window = tuple[int | None, int | None] | int | None


def _contiguous_channels(x: Tensor) -> Tensor:
    # `contiguous` returns a tensor without elements as it is, whatever its strides.
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def _launches(a) -> tuple[Any, dict]:
    """The launches of the backend that was requested, or of the default one; and their shared
    operands."""
    width = backends.attention_width(a.q.device, a.max_seqlen_q, a.max_seqlen_k)
    launch = common.launches("attention", a.backend, a.q, width)
    # After a failed check the default is torch's attention, which cannot go on with the results of
    # a forward pass that was made before.
    launch = launch or common.launches("attention", "reference", a.q, None)
    *names, _backend = _attention.operands._fields
    return launch, {name: getattr(a, name) for name in names}


def _forward(a):
    launch, shared = _launches(a)
    o = a.q.new_empty(a.q.shape)
    lse = a.q.new_empty(a.q.shape[1], a.q.shape[0], dtype=compute_dtype(a.q.dtype))
    launch.attention_forward(**shared, o=o, lse=lse)
    return o, lse


def _grad_forward(a):
    launch, shared = _launches(a)
    dq, dk, dv = (x.new_empty(x.shape) for x in (a.q, a.k, a.v))
    dout = _contiguous_channels(a.dout)
    launch.attention_backward(**shared, o=a.o, lse=a.lse, dout=dout, dq=dq, dk=dk, dv=dv)
    return dq, dk, dv


def _flops(a) -> int:
    """Both products of every sentence and head of q with all its keys, masked or not, as torch
    counts varlen attention. Where the lengths are not known, every sentence counts as the
    longest."""
    heads, dim = a.q.shape[1:]
    if type(a.cu_seqlens_q) is not Tensor or a.cu_seqlens_q.device.type == "meta":
        pairs = (a.cu_seqlens_q.shape[0] - 1) * a.max_seqlen_q * a.max_seqlen_k
    else:
        pairs = int((a.cu_seqlens_q.diff().long() * a.cu_seqlens_k.diff().long()).sum())
    return 2 * 2 * pairs * heads * dim


_attention_grad = Op(
    "attention_grad(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    "int left, int right, float scale, float dropout_p, Tensor? seed, str? backend) "
    "-> (Tensor dq, Tensor dk, Tensor dv)",
    _grad_forward,
    # Five products where forward has two: the recomputed scores, dv, dp, dq and dk.
    flops=lambda a: 5 * _flops(a) // 2,
)


def _backward(op, ctx, kept, grads):
    dq, dk, dv = _attention_grad(dout=grads.o, **kept)
    return {"q": dq, "k": dk, "v": dv}


_attention = Op(
    "attention(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, int left, int right, float scale, "
    "float dropout_p, Tensor? seed, str? backend) -> (Tensor o, Tensor lse)",
    _forward,
    flops=_flops,
    cast=("q", "k", "v"),
    grad=_attention_grad,
    backward=_backward,
    # The reference reads the lengths, which a graph cannot. Torch draws the dropout mask itself.
    plain=lambda a: (torch_attention.sdpa(a),),
    public=1,
)


def window_sides(op: str, window: object, causal: bool = False) -> tuple[int, int]:
    """The sides (left, right) of a window, see `attention`; -1 for a side without end."""
    sides = window if isinstance(window, tuple | list) else (window, window)
    if len(sides) != 2 or not all(w is None or (checks.is_whole(w) and w >= -1) for w in sides):
        raise ValueError(
            f"{op}: window must be None, an integer of at least 0, or a pair of them with None "
            f"or -1 for a side without end, got {window!r}"
        )
    left, right = (-1 if w is None else int(w) for w in sides)
    checks.whole(op, -1, window=max(left, right))
    return left, 0 if causal else right


def _check_lengths(name: str, cu_seqlens: Tensor, tokens: int, longest: int) -> None:
    """Checks the values in ``cu_seqlens``, for the CPU only: reading a GPU's tensor would wait."""
    places = cu_seqlens.tolist()
    right = (places[0], places[-1]) == (0, tokens)
    if not right or not all(0 <= b - a <= longest for a, b in pairwise(places)):
        raise ValueError(
            f"attention: cu_seqlens_{name} must rise from 0 to the {tokens} tokens, by at most "
            f"max_seqlen_{name}={longest}, got {places}"
        )


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    window: Window = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    seed: int | Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """``dropout(softmax(scale * q k^T)) v`` for every sentence and head, without padding.

    Sentence i has queries ``cu_seqlens_q[i] : cu_seqlens_q[i + 1]`` and keys
    ``cu_seqlens_k[i] : cu_seqlens_k[i + 1]``. A query that sees no key gets 0.

    k and v may have fewer heads G than q (grouped-query attention): head h of q reads their head
    ``h // (H / G)``.

    Args:
        q: (T_q, H, d), fp32, bf16, fp16 or fp64. Under autocast fp32 is cast to its dtype.
        k, v: (T_k, G, d), G a divisor of H. An operand whose last stride is not 1 is copied; slices
            of one projection are not.
        cu_seqlens_q, cu_seqlens_k: (N + 1,) int32 on the same device, from 0 to T_q and to T_k;
            not checked on a GPU, since reading them would wait for it.
        max_seqlen_q, max_seqlen_k: at least the longest sentence.
        causal: the last query sees every key, the query before it all keys but the last, and so on.
        window: (left, right): query i of m, at place ``p = i + n - m`` among its n keys, sees only
            the keys ``p - left <= j <= p + right``. None or -1 is a side without end, an int w is
            (w, w), and ``causal`` makes right 0. For the last W tokens, with the query's own token
            among them, pass ``causal=True, window=W - 1``.
        dropout_p: probability that an attention weight becomes 0. The op does not know about
            training and evaluation: pass 0 in evaluation.
        scale: 1 / sqrt(d) where None.
        seed: seed of the dropout mask, an int or a 0-dim int64 tensor; None draws one from torch's
            generator of the device. torch's own backends draw their masks themselves.
        backend: see `deepfast.backend`; "sdpa" and "varlen" are torch's.

    Returns:
        (T_q, H, d).

    Raises: as every op, see `deepfast.ops`; of second derivatives and of forward mode torch's
    attention decides itself.

    Sources: Vaswani et al., Attention Is All You Need, 2017; Ainslie et al. 2023 for grouped
    queries; Beltagy et al. 2020 for windows.
    """
    op = "attention"
    checks.tensor(op, "q", q)
    common.fits(op, "q", q, ("T", "H", "d"), q)
    common.fits(op, "k", k, ("S", "G", q.shape[2]), q)
    common.fits(op, "v", v, tuple(k.shape), q)
    heads, of_keys = q.shape[1], k.shape[1]
    if not 0 < of_keys <= heads or heads % of_keys:
        raise ValueError(f"{op}: k must have a divisor of q's {heads} heads, got {of_keys}")
    common.fits(op, "cu_seqlens_q", cu_seqlens_q, ("N + 1",), q, torch.int32)
    common.fits(op, "cu_seqlens_k", cu_seqlens_k, tuple(cu_seqlens_q.shape), q, torch.int32)
    checks.whole(op, 0, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    checks.probability(op, dropout_p)
    checks.flag(op, causal=causal)
    sides = window_sides(op, window, causal)
    if cu_seqlens_q.device.type == "cpu" and not watched(cu_seqlens_q):
        _check_lengths("q", cu_seqlens_q, q.shape[0], max_seqlen_q)
        _check_lengths("k", cu_seqlens_k, k.shape[0], max_seqlen_k)
    q, k, v = common.autocast(q, k, v)
    checks.finite(op, "scale", 0 if scale is None else scale)
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    width = backends.attention_width(q.device, max_seqlen_q, max_seqlen_k)
    name = backends.chosen(op, backend, q.device, q.dtype, width)
    if name == "triton" and q.shape[-1] > WIDEST and backends.requested_backend(backend) is None:
        name = "sdpa"
    sizes = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *sides
    given = _attention.operands(q, k, v, *sizes, scale, dropout_p, None, name)
    if name in backends.SDPA:
        return torch_attention.sdpa(given)
    if name == "varlen":
        if dropout_p > 0:
            raise ValueError(f"{op}: torch's varlen attention has no dropout, got {dropout_p=}")
        return torch_attention.varlen(given)
    if name == "triton" and q.shape[-1] > WIDEST:
        raise ValueError(f"{op}: backend triton needs d <= {WIDEST}, got d={q.shape[-1]}")
    seed = common.draw_seed(op, seed, q.device) if dropout_p > 0 else None
    q, k, v = map(_contiguous_channels, (q, k, v))
    # A default is not requested by its name, so its kernels are checked before their first use.
    requested = None if backends.requested_backend(backend) is None else name
    return _attention(q, k, v, *sizes, scale, dropout_p, seed, requested)[0]
