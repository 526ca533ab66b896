"""Training steps of a causal language model: in the stages ratio, workload and curves.

workload is the step that Fast-AttnRes published for an H100 SXM (results/final_sweep/results.md in
github.com/jon123boss/fast-attnres): 24 layers, D=1024, 16 heads, SwiGLU of 2,816, 2 x 1,024 tokens,
32,768 words; every sublayer but the first, and the head, read the embedding and all sublayers
below: 48 reads. Published are 28.2 ms a step, and 29.95 with the kernels of fla; on another date,
in docs/current_24l_results.md, 28.4 and 29.97. That is the replay of a CUDA graph of zero_grad,
forward under bf16 autocast, cross-entropy, backward and fused AdamW; the model is compiled, with
fla's kernels as an op that the compiler does not trace. Here fla and Fast-AttnRes run as installed.
"""

import importlib
import importlib.util
from collections import namedtuple
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deepfast
from bench.gpu.rows import BF16, Item, Rows

EPS = 2**-23
HEAD_WIDTH = 64


Size = namedtuple("Size", "layers dim ffn batch length vocabulary")
PUBLISHED = Size(24, 1024, 2816, 2, 1024, 32768)
OF_RATIO = Size(30, 512, 1408, 8, 1024, 32768)
OF_CURVES = Size(12, 512, 1408, 8, 256, 4096)
TOY = Size(1, 32, 48, 1, 8, 64)

Read = Callable[[list[Tensor], Tensor], Tensor]
"""x from the sources and a query (D,)."""


class Attention(nn.Module):
    """Causal attention: (B, S, D) to (B, S, D)."""

    def __init__(self, dim: int):
        super().__init__()
        self.query, self.key, self.value, self.out = (
            nn.Linear(dim, dim, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        shape = max(1, x.shape[-1] // HEAD_WIDTH), -1
        projections = (self.query, self.key, self.value)
        q, k, v = (linear(x).unflatten(-1, shape).transpose(1, 2) for linear in projections)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(a.transpose(1, 2).flatten(-2))


class SwiGLU(nn.Module):
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


class LanguageModel(nn.Module):
    """Tokens (B, S) to logits (B, S, V), no norm before the head; without ``read`` by residual
    sums."""

    def __init__(self, size: Size, read: Read | None = None):
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


def torch_read(sources: list[Tensor], query: Tensor) -> Tensor:
    v = torch.stack(sources).float()
    p = (F.rms_norm(v, v.shape[-1:], eps=EPS) @ query).softmax(0)
    return (p[..., None] * v).sum(0).to(sources[0].dtype)


def fla_read() -> Read:
    fused = importlib.import_module("fla.ops.attnres").fused_attnres

    def read(sources: list[Tensor], query: Tensor) -> Tensor:
        query = query.to(BF16)
        return fused(query, sources, torch.ones_like(query), rms_eps=EPS)

    return read


def fast_read() -> Read:
    attend = importlib.import_module("attnres").attnres
    return lambda sources, query: attend(tuple(sources), query.to(BF16), eps=EPS)


PLAIN, TORCH = "plain residual", "a read in torch"
DLCL, ATTNRES = "deepfast, dlcl", "deepfast, attnres"
CONNECTIONS: dict[str, dict] = {
    DLCL: {"connection": "dlcl"},
    ATTNRES: {
        "connection": "attnres",
        "eps": EPS,
        "state_dtype": None,
        "sublayers": (("norm1", "attention"), ("norm2", "feed_forward")),
    },
}
"""The options of `deepfast.connect`."""
READS: dict[str, Callable[[], Read]] = {
    TORCH: lambda: torch_read,
    "fla": fla_read,
    "attnres": fast_read,
}
"""What loads a read, by the form; those of other packages, by the package, need a GPU."""


def readers(rows: Rows) -> list[str]:
    """The forms with attention residuals that can run; torch's first."""
    peers = filter(importlib.util.find_spec, [] if rows.dry else ["fla", "attnres"])
    return [TORCH, ATTNRES, *peers]


class Step:
    """A training step of a form, whose models begin with equal weights."""

    def __init__(self, rows: Rows, size: Size, form: str, with_compiler: bool = False):
        self.device, generator = rows.device, torch.Generator().manual_seed(0)
        self.model = LanguageModel(size, READS[form]() if form in READS else None)
        drawn, queries = [p for p in self.model.parameters() if p.dim() > 1], self.model.queries
        if form in CONNECTIONS:
            depth = deepfast.connect(self.model, norm="pre", **CONNECTIONS[form])
            queries = depth.query[1:] if form == ATTNRES else []
        with torch.no_grad():
            for p in (*drawn, *queries):
                p.normal_(0.0, 0.02, generator=generator)
        parameters = self.model.to(rows.device).parameters()
        self.adam = torch.optim.AdamW(parameters, lr=1e-4, fused=True, capturable=not rows.dry)
        words = torch.randint(size.vocabulary, (2, size.batch, size.length), generator=generator)
        self.tokens, self.target = words.to(rows.device)
        self.loss = self._loss
        if with_compiler:
            # An eager run checks the names of the sublayers, which a graph cannot do.
            with torch.no_grad():
                self._loss()
            self.loss = rows.compiled(self._loss)

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


def ratio(rows: Rows) -> Iterator[Item]:
    """Steps with depth connections over those of the plain model, which is compiled too."""
    size = rows.size(OF_RATIO, TOY)

    def measure(form: str, with_compiler: bool) -> dict:
        return rows.timed(Step(rows, size, form, with_compiler).run)

    what = "training step, {} layers, D={}, F={}, {} x {} tokens, V={}".format(*size)
    yield what, f"{PLAIN}, compiled", partial(measure, PLAIN, True)
    for form in (PLAIN, DLCL, ATTNRES):
        yield what, form, partial(measure, form, False)


def workload(rows: Rows) -> Iterator[Item]:
    """Steps of each form in a CUDA graph, eager, and compiled in a CUDA graph as published."""
    size = rows.size(PUBLISHED, TOY)

    def measure(form: str, with_compiler: bool, graph: bool) -> dict:
        return rows.timed(Step(rows, size, form, with_compiler).run, graph=graph)

    ways = {"CUDA graph": (False, True), "eager": (False, False), "compiled": (True, True)}
    for way, how in ways.items():
        for form in (PLAIN, *readers(rows)):
            yield f"the step of Fast-AttnRes, {way}", form, partial(measure, form, *how)


def curves(rows: Rows) -> Iterator[Item]:
    """Losses of a smaller model in bf16: each form trains on the same words."""
    size, steps = rows.size((OF_CURVES, 200), (TOY, 4))
    generator = torch.Generator().manual_seed(3)
    after = torch.randperm(size.vocabulary, generator=generator)
    shape = (steps, size.batch, size.length)
    words = torch.randint(size.vocabulary, shape, generator=generator)
    # The word after three of four words is known, so there is something to learn.
    target = torch.randint(size.vocabulary, shape, generator=generator)
    target = torch.where(torch.rand(shape, generator=generator) < 0.75, after[words], target)
    what = f"mean loss of the last quarter of {steps} steps"

    def measure(form: str) -> dict:
        step, losses = Step(rows, size, form), []
        for batch in zip(words.to(rows.device), target.to(rows.device), strict=True):
            step.tokens, step.target = batch
            losses.append(step.run())
        found = torch.stack(losses).cpu()
        loss = float(found[-(steps // 4) :].mean())
        row = {"loss": loss, "losses": found[:: max(1, steps // 10)].tolist()}
        expected = rows.read().get(("curves", what, TORCH), {}).get("loss", loss)
        if not abs(loss / expected - 1) < 0.01:
            row["error"] = f"expected torch's loss of {expected:.4f} within 1%, got {loss:.4f}"
        return row

    for form in readers(rows):
        yield what, form, partial(measure, form)
