"""The training step that Fast-AttnRes published for an H100, in the forms that people would use.

A causal language model of 24 layers, D=1024, 16 heads, SwiGLU of 2,816, 2 x 1,024 tokens, 32,768
words: every sublayer but the first, and the head, read the embedding and all sublayers below: 48
reads. Published for an H100 SXM (results/final_sweep/results.md in
github.com/jon123boss/fast-attnres): 28.2 ms a step, 29.95 with the kernels of fla; on another date,
in docs/current_24l_results.md, 28.4 and 29.97. That is the replay of a CUDA graph of zero_grad,
forward under bf16 autocast, cross-entropy, backward and fused AdamW; the model is compiled, with
fla's kernels as an op that the compiler does not trace. Here fla and Fast-AttnRes run as installed.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deepfast
from bench.gpu.clock import Bench, Variant
from bench.gpu.ops import BF16, others

EPS = 2**-23


@dataclass(frozen=True, kw_only=True)
class Model:
    """The sizes of a pre-norm causal language model with SwiGLU, and those of its batch."""

    layers: int
    dim: int
    ffn: int
    batch: int
    length: int
    vocabulary: int


PUBLISHED = Model(layers=24, dim=1024, ffn=2816, batch=2, length=1024, vocabulary=32768)
TOY = Model(layers=1, dim=32, ffn=48, batch=1, length=8, vocabulary=64)
HEAD_WIDTH = 64


class Attention(nn.Module):
    """Causal attention without biases: (B, S, D) to (B, S, D)."""

    def __init__(self, dim: int):
        super().__init__()
        self.query, self.key, self.value, self.out = (
            nn.Linear(dim, dim, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = max(1, x.shape[-1] // HEAD_WIDTH)
        q, k, v = (
            linear(x).unflatten(-1, (heads, -1)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(a.transpose(1, 2).flatten(-2))


class SwiGLU(nn.Module):
    """``W_3 (silu(W_1 x) * W_2 x)``."""

    def __init__(self, dim: int, ffn_dim: int):
        super().__init__()
        self.gate, self.up = (nn.Linear(dim, ffn_dim, bias=False) for _ in range(2))
        self.down = nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """A pre-norm layer with residual sums."""

    def __init__(self, dim: int, ffn_dim: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention, self.feed_forward = Attention(dim), SwiGLU(dim, ffn_dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


Read = Callable[[list[Tensor], Tensor], Tensor]
"""x from the sources and a query (D,)."""


class LanguageModel(nn.Module):
    """Tokens (B, S) to logits (B, S, V); no norm before the head.

    Args:
        read: None for residual sums.
    """

    def __init__(self, size: Model, read: Read | None = None):
        super().__init__()
        self.read = read
        self.words = nn.Embedding(size.vocabulary, size.dim)
        self.positions = nn.Parameter(torch.empty(size.length, size.dim))
        self.layers = nn.ModuleList(Layer(size.dim, size.ffn) for _ in range(size.layers))
        self.head = nn.Linear(size.dim, size.vocabulary, bias=False)
        # As published: the first read has only one source and no query.
        queries = 0 if read is None else 2 * size.layers
        self.queries = nn.ParameterList(torch.empty(size.dim) for _ in range(queries))

    def forward(self, tokens: Tensor) -> Tensor:
        x = (self.words(tokens) + self.positions).to(BF16)
        sources, queries = [x], iter(self.queries)
        for layer in self.layers:
            if self.read is None:
                x = layer(x)
                continue
            sources.append(layer.attention(layer.norm1(x)))
            x = self.read(sources, next(queries))
            sources.append(layer.feed_forward(layer.norm2(x)))
            x = self.read(sources, next(queries))
        return self.head(x)


def plain_read(sources: list[Tensor], query: Tensor) -> Tensor:
    """A read in torch's ops."""
    v = torch.stack(sources).float()
    p = (F.rms_norm(v, v.shape[-1:], eps=EPS) @ query).softmax(0)
    return (p[..., None] * v).sum(0).to(sources[0].dtype)


def _fla_read() -> Read:
    fused = importlib.import_module("fla.ops.attnres").fused_attnres

    def read(sources: list[Tensor], query: Tensor) -> Tensor:
        query = query.to(BF16)
        return fused(query, sources, torch.ones_like(query), rms_eps=EPS)

    return read


def _fast_read() -> Read:
    function = importlib.import_module("attnres").attnres
    return lambda sources, query: function(tuple(sources), query.to(BF16), eps=EPS)


def made(size: Model, read: Read | None, connected: bool = False) -> LanguageModel:
    """A model; equal weights and equal queries in every form."""
    model, generator = LanguageModel(size, read), torch.Generator().manual_seed(0)
    drawn = [p for p in model.parameters() if p.dim() > 1]
    queries = [*model.queries]
    if connected:
        depth = deepfast.connect(
            model, norm="pre", connection="attnres", eps=EPS, state_dtype=None,
            sublayers=(("norm1", "attention"), ("norm2", "feed_forward")),
        )  # fmt: skip
        queries = [*depth.query[1:]]
    with torch.no_grad():
        for p in (*drawn, *queries):
            p.normal_(0.0, 0.02, generator=generator)
    return model


class Step:
    """A step of a model: what is timed, and its loss before the first update."""

    def __init__(self, model: LanguageModel, size: Model, device: str, compiled: str | None):
        model.to(device).train()
        generator = torch.Generator().manual_seed(2)
        words = torch.randint(size.vocabulary, (2, size.batch, size.length), generator=generator)
        self.tokens, self.target = words.to(device)
        self.device, self.model, self.loss = device, model, self._loss
        self.adam = torch.optim.AdamW(
            model.parameters(), lr=1e-4, fused=True, capturable=device == "cuda"
        )
        if compiled is not None:
            # An eager run checks the names of the sublayers, which a graph cannot do.
            with torch.no_grad():
                self._loss()
            self.loss = torch.compile(self._loss, fullgraph=True, backend=compiled)
        self.first = float(self.run())

    def _loss(self) -> Tensor:
        with torch.autocast(self.device, BF16):
            logits = self.model(self.tokens)
            return F.cross_entropy(logits.flatten(0, 1), self.target.flatten())

    def run(self) -> Tensor:
        self.adam.zero_grad(set_to_none=False)
        loss = self.loss()
        loss.backward()
        self.adam.step()
        return loss.detach()


PLAIN, OURS, IN_TORCH = "plain residual", "deepfast", "a read in torch"
COMPILED = ", compiled"


def _forms(bench: Bench, size: Model) -> dict[str, Callable[[], LanguageModel]]:
    forms: dict[str, Callable[[], LanguageModel]] = {
        PLAIN: partial(made, size, None),
        OURS: partial(made, size, None, connected=True),
        IN_TORCH: partial(made, size, plain_read),
    }
    loaded = {} if bench.toy else (
        others("fla", "fla", _fla_read) | others("attnres", "Fast-AttnRes", _fast_read)
    )  # fmt: skip
    return forms | {name: lambda load=load: made(size, load()) for name, load in loaded.items()}


def workload(bench: Bench) -> None:
    """Steps of every form, in a CUDA graph and eager."""
    # Toy sizes run without graphs: the forms would be measured twice.
    what, rows, losses = _steps(bench, bench.size(("", ", eager"), ("",)))
    if OURS not in rows:
        bench.error(what, f"{OURS!r} did not run, see the notes")
        return
    if IN_TORCH in rows:
        apart = abs(losses[OURS] - losses[IN_TORCH]) / losses[OURS]
        bench.target(f"{what}: loss of deepfast, apart from torch's", apart, 2e-3, at_most=True)


def compiled(bench: Bench) -> None:
    """The same with model and loss under torch.compile, as published; it takes a minute or more for
    each form."""
    _steps(bench, ("", COMPILED))


def _steps(bench: Bench, suffixes: tuple[str, ...]) -> tuple:
    """Title, rows and first losses of every form, each in these ways."""
    size = bench.size(PUBLISHED, TOY)
    forms = _forms(bench, size)
    # At toy size a graph is traced and no code generated.
    ways = {"": (None, True), COMPILED: (bench.size("inductor", "aot_eager"), True),
            ", eager": (None, False)}  # fmt: skip
    steps: dict[tuple, Step] = {}
    losses: dict[str, float] = {}

    def maker(name: str, suffix: str) -> Callable[[], Variant]:
        backend, graph = ways[suffix]

        def make() -> Variant:
            if (name, backend) not in steps:
                steps[name, backend] = Step(forms[name](), size, bench.device, backend)
            step = steps[name, backend]
            losses[name + suffix] = step.first
            return Variant(run=step.run, graph=graph)

        return make

    makers = {
        name + suffix: maker(name, suffix) for suffix in suffixes for name in forms
        # The kernels of fla break a compiler's graph.
        if suffix != COMPILED or name != "fla"
    }  # fmt: skip
    what = (
        f"Fast-AttnRes' step: {size.layers} layers, D={size.dim}, F={size.ffn}, {size.batch} x "
        f"{size.length} tokens, V={size.vocabulary}"
    )
    # A read in torch keeps some 30 GiB.
    rows = bench.case(what, makers, seconds=10.0, may_fail=True)
    for name, row in rows.items():
        base = rows.get(PLAIN + name.partition(",")[1] + name.partition(",")[2])
        ratio = f", {row.median / base.median:.3f} of {base.variant!r}" if base else ""
        bench.note(f"{name}: loss {losses[name]:.4f}{ratio}")
    return what, rows, losses


def curves(bench: Bench) -> None:
    """Losses of a smaller model over some steps in bf16: every form trains on the same words."""
    size = bench.size(
        Model(layers=12, dim=512, ffn=1408, batch=8, length=256, vocabulary=4096), TOY
    )
    steps = bench.size(200, 3)
    generator = torch.Generator().manual_seed(3)
    after = torch.randperm(size.vocabulary, generator=generator)
    shape = (steps, size.batch, size.length)
    words = torch.randint(size.vocabulary, shape, generator=generator).to(bench.device)
    # The word after three of four words is known, so there is something to learn.
    target = torch.randint(size.vocabulary, shape, generator=generator)
    known = torch.rand(shape, generator=generator) < 0.75
    target = torch.where(known, after[words.cpu()], target).to(bench.device)
    losses = {}
    for name, (make, compiled) in _curve_forms(bench, size).items():
        try:
            step, found = Step(make(), size, bench.device, compiled), []
            for step.tokens, step.target in zip(words, target, strict=True):
                found.append(step.run())
        except Exception as error:
            bench.error(f"curves: {name}", f"{type(error).__name__}: {error}")
            continue
        losses[name] = torch.stack(found).cpu()
        bench.curve(f"{name}, {size.layers} layers, bf16", losses[name].tolist())
    for name in losses.keys() - {IN_TORCH} if IN_TORCH in losses else ():
        last = max(1, steps // 4)
        ratio = (losses[name] / losses[IN_TORCH])[-last:].mean() - 1
        bench.target(f"curves: mean loss of the last {last} steps, {name} over {IN_TORCH}, less 1",
                     abs(float(ratio)), 0.01, at_most=True)  # fmt: skip


def _curve_forms(bench: Bench, size: Model) -> dict[str, tuple]:
    forms = _forms(bench, size)
    del forms[PLAIN]
    found = {name: (make, None) for name, make in forms.items()}
    return found | {IN_TORCH + COMPILED: (forms[IN_TORCH], bench.size("inductor", "aot_eager"))}
