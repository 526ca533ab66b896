"""GPU benchmarks of whole stacks: mixing, a training step, the overhead of launches."""

import copy
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F

from bench.gpu.clock import Bench, Variant
from bench.gpu.launches import operands
from bench.gpu.ops import compiled, ours
from deepfast import backend, ops
from deepfast.clock import on_cpu
from deepfast.measure.clock import Row
from deepfast.measure.encoders import DROPOUT, PlainEncoder
from deepfast.measure.forms import FORMS, mixing_alone
from deepfast.nn import (
    DLCL,
    DepthHistory,
    LayerNorm,
    Packing,
    TransformerEncoder,
)

BF16 = torch.bfloat16


def mixing(bench: Bench) -> None:
    """The depth connection of a whole stack whose layers do nothing, forward and backward."""
    layers, T, D = bench.size((100, 8192, 512), (5, 8, 16))
    stacks = {by: DLCL(layers, D, backend=by).to(bench.device) for by in bench.backends("boundary")}
    dlcl = next(iter(stacks.values()))
    y = torch.randn(T, D, device=bench.device).to(BF16).requires_grad_()
    grad = torch.randn(T, D, device=bench.device).to(BF16)

    # On a GPU torch's layer-norm takes parameters only in the dtype of its input.
    low = copy.deepcopy(dlcl).to(BF16)

    def maker(form, module, graph=False):
        def step():
            leaves = [y, *module.parameters()]
            return torch.autograd.grad(mixing_alone(FORMS[form], module, y, None), leaves, grad)

        return lambda: Variant(run=step, graph=graph, graph_only=graph)

    forms = {}
    for by, stack in stacks.items():
        forms[f"deepfast, {by}"] = maker("deepfast", stack)
        # Toy sizes run without graphs: the form would be measured twice.
        if not bench.toy:
            forms[f"deepfast, {by}, CUDA graph"] = maker("deepfast", stack, graph=True)
    own = list(forms)
    forms["DenseFormer form"] = maker("DenseFormer form", low)
    # Two bytes for each element of every saved stack, and half as much again.
    needed = 3 * T * D * layers * (layers + 1) // 2
    if bench.toy or torch.cuda.mem_get_info()[0] > needed:
        forms["stack and sum"] = maker("stack and sum", low)
    else:
        bench.note(f"no stack and sum: it would need {needed / 2**30:.0f} GiB")
    what = f"mixing, forward + backward, L={layers}, T={T}, D={D}, bf16"
    timings = bench.case(what, forms, seconds=8.0)
    for fast in own:
        for slow, wanted in (("DenseFormer form", 8.0), ("stack and sum", 40.0)):
            there = fast in timings and slow in timings
            reached = timings[slow].median / timings[fast].median if there else None
            bench.target(f"{what}: {fast} against {slow}, times", reached, wanted)


def training(bench: Bench) -> None:
    _training(bench, bench.size((None, "triton", "cuda"), (None,)), True)


def ratio(bench: Bench) -> None:
    """The step of `training` in the two forms that matter most, for a first look."""
    _training(bench, (None,), False)


def _step(bench: Bench, module: torch.nn.Module, forward, x, target):
    """Forward under bf16 autocast, backward, Adam."""
    module.to(bench.device).train()
    on_gpu = bench.device == "cuda"
    adam = torch.optim.Adam(module.parameters(), lr=1e-4, fused=True, capturable=on_gpu)

    def step():
        with torch.autocast(bench.device, BF16):
            # Like an embedding's output, it needs a gradient.
            y = forward(x.detach().requires_grad_())
        loss = F.mse_loss(y.float(), target)
        loss.backward()
        adam.step()
        adam.zero_grad(set_to_none=True)
        return loss.detach()

    return step


class _Training:
    """A step of a 30-layer DLCL encoder and of the plain residual one on the same tokens.

    Sentences are equally long, so that no form computes padding. The residual stream is bf16 in
    both.
    """

    def __init__(self, bench: Bench):
        self.bench = bench
        self.sizes = bench.size((30, 512, 8, 2048), (1, 16, 2, 32))
        sentences, length = bench.size((256, 32), (2, 3))
        layers, D, _, ffn = self.sizes
        x, target = torch.randn(2, sentences, length, D, device=bench.device)
        self.plain_operands = x.to(BF16), target
        self.operands = x.flatten(0, 1), target.flatten(0, 1)
        # As with a padding mask, the layout of the sentences is on the device.
        padding = torch.zeros(sentences, length, dtype=torch.bool, device=bench.device)
        positions = torch.arange(sentences * length, device=bench.device)
        self.packing = Packing(sentences, length, positions, padding)
        self.what = (
            f"training step, {layers} layers, {sentences} sentences of {length}, D={D}, F={ffn}, "
            "bf16 autocast, Adam"
        )

    def plain(self, graph: bool) -> Callable[[], Variant]:
        def make():
            encoder = PlainEncoder(*self.sizes)
            self._compile(encoder)
            step = _step(self.bench, encoder, encoder, *self.plain_operands)
            return Variant(run=step, graph=graph, graph_only=graph)

        return make

    def deepfast(self, by: str | None, compiled: bool, graph: bool) -> Callable[[], Variant]:
        def make():
            encoder = TransformerEncoder(*self.sizes, dropout=DROPOUT, backend=by)
            if compiled:
                self._compile(encoder)
            step = _step(
                self.bench, encoder, lambda x: encoder.forward_packed(x, self.packing),
                *self.operands,
            )  # fmt: skip
            with backend.record() as seen:
                step()
            ran = ", ".join(f"{op} by {name}" for op, name in sorted(set(seen)))
            self.bench.note(f"{ours(by)}{', layers compiled' * compiled}: {ran}")
            return Variant(run=step, graph=graph, graph_only=graph)

        return make

    def _compile(self, encoder: torch.nn.Module) -> None:
        for layer in encoder.layers:
            layer.forward = compiled(layer.forward, self.bench.toy)


def _training(bench: Bench, backends: tuple[str | None, ...], whole: bool) -> None:
    """Steps of deepfast over the plain residual one, whose layers are compiled.

    backends: None is what deepfast chooses.
    whole: also with compiled layers, and without CUDA graphs.
    """
    case = _Training(bench)
    forms = {}
    # Toy sizes run without graphs: the forms would be measured twice.
    suffixes = bench.size({", CUDA graph": True} | ({"": False} if whole else {}), {"": False})
    for suffix, graph in suffixes.items():
        forms[f"residual, layers compiled{suffix}"] = case.plain(graph)
        for by in backends:
            forms[f"{ours(by)}{suffix}"] = case.deepfast(by, False, graph)
        if whole:
            forms[f"{ours(None)}, layers compiled{suffix}"] = case.deepfast(None, True, graph)
    timings = bench.case(case.what, forms, seconds=6.0)
    # Imported here, because it takes seconds and no other section needs it.
    from torch._dynamo.utils import counters

    bench.note(f"compiled {counters['stats']['unique_graphs']} graphs for all layers of both "
               f"encoders; graph breaks: {len(counters['graph_break'])}")  # fmt: skip
    for suffix in suffixes:
        base = timings.get(f"residual, layers compiled{suffix}")
        for name in forms:
            if not name.startswith(ours(None)) or name.endswith("CUDA graph") != bool(suffix):
                continue
            there = base is not None and name in timings
            reached = timings[name].median / base.median if there else None
            bench.target(f"{case.what}: {name} over the residual", reached, 1.0, at_most=True)


def launching(bench: Bench) -> None:
    for by in bench.backends("boundary"):
        bench.attempt(_boundary_launch, by)
    bench.attempt(_layer_norm_launch)


def _host_seconds(bench: Bench, run) -> list[float]:
    """Seconds until Python has queued the work, not until the GPU has done it."""
    seconds = []
    for turn in range(bench.size(30, 1)):
        elapsed = on_cpu(run)
        if bench.device == "cuda":
            torch.cuda.synchronize()
        if turn >= bench.size(5, 0):
            seconds.append(elapsed)
    return seconds


def _launch_row(bench: Bench, what: str, variant: str, seconds: list[float], calls: int) -> None:
    each = [s / calls for s in seconds]
    row = Row(what=what, variant=variant, seconds=each, note="eager: time until it is queued")
    bench.rows([row])


def _boundary_launch(bench: Bench, by: str) -> None:
    """The host time of a boundary with few tokens: dropout, residual, mixing, both LNs."""
    layers, T, D = bench.size((30, 16, 512), (1, 4, 16))
    dlcl = DLCL(layers, D, backend=by).to(bench.device)
    norm = LayerNorm(D, backend=by).to(bench.device)
    branch = torch.randn(T, D, device=bench.device, requires_grad=True)

    def forward():
        history, residual, n = DepthHistory(), None, branch
        for _ in range(layers + 1):
            residual, n = dlcl(
                n, history, residual=residual, dropout_p=0.1, out_norm=norm.as_output()
            )
        return n

    def without_grad():
        with torch.no_grad():
            forward()

    def both():
        torch.autograd.grad(forward().sum(), branch)

    what = f"launch cost of one boundary, {by}, T={T}, D={D}"
    for name, run in {"forward": without_grad, "forward + backward": both}.items():
        _launch_row(bench, what, name, _host_seconds(bench, run), layers + 1)
    # The launch alone, without autograd and modules.
    launch = backend.choose("boundary", by, bench.device, torch.float32)[1]
    given = operands("boundary_forward", T, D, torch.float32, bench.device, {"partial": None})
    calls = bench.size(50, 2)

    def launches():
        for _ in range(calls):
            launch.boundary_forward(**given)

    seconds = _host_seconds(bench, launches)
    _launch_row(bench, what, "the launch alone, forward", seconds, calls)
    if by == "cuda":
        reached = statistics.median(seconds) / calls * 1e6
        bench.target(f"{what}, the launch alone, us", reached, 10.0, at_most=True)


def _layer_norm_launch(bench: Bench) -> None:
    T, D = bench.size((16, 512), (4, 16))
    x, w, b = (torch.randn(n, device=bench.device) for n in ((T, D), D, D))
    forms = {
        f"deepfast, {by}": lambda by=by: ops.layer_norm(x, w, b, backend=by)
        for by in bench.backends("layer_norm")
    } | {"torch": lambda: F.layer_norm(x, (D,), w, b)}
    what, calls = f"launch cost of a layer-norm forward, T={T}, D={D}", bench.size(20, 2)
    for name, run in forms.items():
        seconds = _host_seconds(bench, lambda run=run: [run() for _ in range(calls)])
        _launch_row(bench, what, name, seconds, calls)
