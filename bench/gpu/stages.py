"""The stages ratio, plans and copy: training steps, launches, peaks, connections and ops beside
torch's."""

import statistics
from collections.abc import Callable, Iterator
from functools import cache, partial

import torch
import torch.nn.functional as F

from bench.gpu import workload
from bench.gpu.rows import BF16, Item, Rows
from deepfast import backend, memory, nn, ops
from deepfast.cases import sizes
from deepfast.cases.case import Case, torch_dropout
from deepfast.clock import on_cpu
from deepfast.measure import forms
from deepfast.measure.bench_ops import pass_of
from deepfast.measure.traffic import engine_moved

IN_SENTENCES = ("attention", "linear_cross_entropy", "peephole_lstm")
"""Ops whose typical calls have their own numbers of tokens."""


def ours(rows: Rows, op: str) -> dict[str, str]:
    """The backends that are measured, by the name of their form; varlen is torch's attention."""
    names = [by for by in ("triton", "cuda", "varlen") if (op, by) != ("attention", "cuda")]
    able = [by for by in names if backend.why_unable(op, by, rows.device, BF16) is None]
    return {f"deepfast, {by}": by for by in able}


# ---- ratio ---------------------------------------------------------------------------------------


def ratio(rows: Rows) -> Iterator[Item]:
    yield rows.copy()
    yield from workload.ratio(rows)
    yield from launches(rows)


def launches(rows: Rows) -> Iterator[Item]:
    """What Python takes until it has queued an op on few tokens."""
    layers, T, D = rows.size((30, 16, 512), (1, 4, 16))
    x, weight, bias = (torch.randn(n, device=rows.device) for n in ((T, D), D, D))

    def measure(run: Callable, calls: int = 1) -> dict:
        seconds = []
        for _ in range(rows.size(30, 1)):
            seconds.append(on_cpu(run) / calls)
            if not rows.dry:
                torch.cuda.synchronize()
        return {"seconds": statistics.median(seconds), "note": "of the host"}

    def stack(dlcl: nn.DLCL, norm: nn.LayerNorm) -> None:
        history, residual, n = nn.DepthHistory(), None, x
        options = {"dropout_p": 0.1, "out_norm": norm.as_output()}
        for _ in range(layers + 1):
            residual, n = dlcl(n, history, residual=residual, **options)

    torchs = partial(F.layer_norm, x, (D,), weight, bias)
    yield "launch of a layer_norm", "torch", partial(measure, torchs)
    for form, by in ours(rows, "layer_norm").items():
        run = partial(ops.layer_norm, x, weight, bias, backend=by)
        yield "launch of a layer_norm", form, partial(measure, run)
    for form, by in ours(rows, "boundary").items():
        parts = [kind.to(rows.device) for kind in (nn.DLCL(layers, D, backend=by), nn.LayerNorm(D))]
        run = partial(stack, *parts)
        yield "launch between two layers", form, partial(measure, run, layers + 1)


# ---- plans ---------------------------------------------------------------------------------------

PLANS = (
    (30, "dlcl", "none"), (30, "dlcl", "layer+input"), (30, "residual", "none"),
    (30, "attnres", "none"), (100, "dlcl", "none"), (100, "dlcl", "ffn"),
)  # fmt: skip
"""Layers, connection and recompute policy of an encoder."""
OF_PLANS = (8192, 512, 128)
"""Tokens, D and tokens of a sentence."""


def planned(layers: int, connection: str, policy: str) -> memory.Plan:
    T, D, length = OF_PLANS
    return memory.plan(
        budget="1TiB", num_layers=layers, dim=D, tokens=T, length=length, connection=connection,
        recompute=policy, vocab_size=0, decoder_layers=0,
    )  # fmt: skip


def plans(rows: Rows) -> Iterator[Item]:
    """Peaks of training steps by torch's allocator, for the page that has the plans beside them."""
    T, D, length = rows.size(OF_PLANS, (16, 16, 8))

    def measure(layers: int, connection: str, policy: str) -> dict:
        heads = max(1, D // workload.HEAD_WIDTH)
        options = {"dropout": 0.1, "connection": connection, "recompute": policy}
        encoder = nn.TransformerEncoder(layers, D, heads, 4 * D, **options).to(rows.device)
        adam = torch.optim.Adam(encoder.parameters(), fused=True)
        x = torch.randn(T, D, device=rows.device)
        grad = torch.randn_like(x).to(BF16)
        for step in range(7):
            if step == 2 and not rows.dry:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            with torch.autocast(rows.device, BF16):
                state = x.to(BF16).requires_grad_()
                y = encoder.forward_packed(state, nn.Packing(T // length, length))
            y.backward(grad.to(y.dtype))
            adam.step()
            adam.zero_grad()
        if rows.dry:
            return {"note": "no peak"}
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        note = f"{planned(layers, connection, policy).peak / reserved:.3f} of it planned"
        return {"peak_bytes": peak, "reserved_bytes": reserved, "note": note}

    for layers, connection, policy in rows.size(PLANS, ((2, "dlcl", "none"),)):
        what = f"{layers} layers, {connection}, {policy}"
        yield what, "peak", partial(measure, layers, connection, policy)


# ---- copy ----------------------------------------------------------------------------------------


def copy(rows: Rows) -> Iterator[Item]:
    yield rows.copy()
    yield from connections(rows)
    for op in sizes.KERNELS:
        for width in sizes.widths(op, rows.device)[:: rows.size(2, 3)]:
            # The operands of the others are larger than L2: each form moves them through memory.
            many = rows.size(None if op in IN_SENTENCES else (1 << 25) // width, None)
            case = sizes.typical(op, width, rows.device, tokens=many)
            yield from of_case(rows, f"{op}, {case.name}", case)


def of_case(rows: Rows, what: str, case: Case) -> Iterator[Item]:
    """A call forward alone, and with its backward, by each form."""
    # Torch's ops are fastest where parameters are in bf16 too.
    own = cache(partial(case.leaves, BF16, BF16, rows.device))
    low = cache(partial(case.of_one_dtype, BF16, rows.device))
    variants: dict[str, tuple[Callable, Callable]] = {}
    if case.plain is not None:
        plain = partial(case.plain, torch_dropout)
        variants = {
            "torch": (lambda: plain, low),
            "torch.compile": (lambda: rows.compiled(plain), low),
        }
    for name, by in ours(rows, case.op).items():
        variants[name] = partial(partial, case.run, backend=by), own

    def measure(load: Callable, leaves: Callable, backward: bool) -> dict:
        nbytes = sum(moved.nbytes(BF16) for moved in case.moved[: 1 + backward])
        return rows.timed(pass_of(load(), leaves(), backward), nbytes)

    passes = (("forward", False), ("forward and backward", True))
    for which, backward in rows.size(passes, passes[1:]):
        for name, made in variants.items():
            yield f"{what}, {which}", name, partial(measure, *made, backward)


def connections(rows: Rows) -> Iterator[Item]:
    """The connection of a whole stack whose layers do nothing, forward and backward."""
    layers, T, D = rows.size((48, 8192, 512), (5, 8, 16))
    y = torch.randn(T, D, device=rows.device).to(BF16).requires_grad_()
    grad = torch.randn(T, D, device=rows.device).to(BF16)

    def measure(form: Callable, module: torch.nn.Module, nbytes: int = 0) -> dict:
        leaves = [y, *module.to(rows.device).parameters()]

        def run():
            x = forms.mixing_alone(form, module, y)
            return torch.autograd.grad(x, leaves, grad)

        return rows.timed(run, nbytes)

    for kind, plain, names in (
        (nn.DLCL, forms.FORMS, (forms.STACK, forms.DENSEFORMER)),
        (nn.AttentionResiduals, forms.ATTENTION_FORMS, (forms.STACK,)),
    ):
        what = f"{kind.__name__}, {layers} layers that do nothing, T={T}, D={D}"
        for name in names:
            # On a GPU torch's norms take parameters only in the dtype of their input.
            yield what, name, partial(measure, plain[name], kind(layers, D).to(BF16))
        for name, by in ours(rows, kind.pass_kind.op).items():
            module = kind(layers, D, backend=by)
            states = engine_moved(kind(layers, 4), device_type=rows.device)
            yield what, name, partial(measure, forms.deepfast, module, states * y.nbytes)
