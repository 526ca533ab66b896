"""Every op against PyTorch, eager and under `torch.compile`: `python -m bench.compiled [ROW ...]`.

The peer of a row is the faster of the best eager form and of the same form under
``torch.compile(fullgraph=True, dynamic=False)``; where matrix products take the time, also with
``mode="max-autotune-no-cudagraphs"``. All forms take turns on one thread, warmed up, and freed
memory is kept for all. Each ratio, the peer's time over deepfast's, goes to
bench/results/results.csv as soon as it is measured. The rows ``inside_*`` compare a model with
deepfast's ops in it, eager, with the same model under `torch.compile`. ``--list`` names the rows.
Without names all run but two that compile for ten minutes or more: about 20 minutes.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from bench.record import record
from deepfast import connect
from deepfast.cases import ops, sentences
from deepfast.cases.case import Case
from deepfast.depth.schedule import default_block
from deepfast.measure.bench_ops import CASES, Sizes, connection, measure_case, under_compiler
from deepfast.measure.clock import interleave, keep_memory, ratio
from deepfast.measure.forms import (
    ATTENTION_FORMS,
    AttentionForm,
    DLCLForm,
    listed_attention,
    loop_of_adds,
)
from deepfast.nn import DLCL, AttentionResiduals, TransformerEncoder

COMMAND = "python -m bench.compiled"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Row:
    """What is measured: a case, and the peers that are added to its eager form."""

    make: Callable[[Sizes], Case]
    sizes: Sizes
    compiled: bool = True
    """Whether the eager form is also measured under `torch.compile`."""
    products: bool = False
    """Whether matrix products take the time, so that a compiler can tune them."""
    slow: bool = False
    """Whether compiling takes many minutes, so that the row is measured only where it is named."""

    def peers(self, case: Case) -> dict[str, Callable]:
        found = {"compiled": under_compiler(case)} if self.compiled else {}
        if self.products:
            found["max-autotune"] = under_compiler(case, mode="max-autotune-no-cudagraphs")
        return found


class InBlocks(DLCLForm):
    """DLCL in deepfast's order as plain PyTorch code. Where a block of rows begins, each of them
    gets its sum over all states below; a row then adds the states of its block."""

    def __init__(self, dlcl: DLCL):
        super().__init__(loop_of_adds, dlcl)
        self.rows = len(dlcl.weight)
        self.block = default_block(self.rows)

    def __call__(self, y: torch.Tensor) -> torch.Tensor:
        self.push(self.norm(y))
        row, weight = self.count, self.dlcl.weight
        begin = row - row % self.block
        if row == begin:
            below = range(begin, min(begin + self.block, self.rows)) if begin else ()
            self.far = [self.mix(self.states[:begin], weight[r, :begin]) for r in below]
        self.count += 1
        near = self.mix(self.states[begin:], weight[row, begin : row + 1])
        return near + self.far[row - begin] if begin else near


def _mix(count: int, norm: tuple[str, ...] = ()) -> Callable[[Sizes], Case]:
    return lambda s: ops.depth_mix("", s.rows, count, norm=norm)


def _stack(module: type[DLCL | AttentionResiduals], forms: dict, plain: str, **options) -> Callable:
    return lambda s: connection(s, module(s.layers, s.dim, **options), forms, plain)


def _rows() -> dict[str, Row]:
    size = partial(Sizes, dropout=0.0)
    found: dict[str, Row] = {}
    for name, dtype in DTYPES.items():
        for count in (8, 24, 60):
            found[f"depth_mix_{count}_{name}"] = Row(_mix(count), size(tokens=2048, dtype=dtype))
        norms = _mix(24, ("weight", "bias"))
        found[f"depth_mix_norm_24_{name}"] = Row(norms, size(tokens=2048, dtype=dtype))
    for tokens, dim in ((256, 512), (2048, 512), (8192, 1024)):
        for op in ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"):
            found[f"{op}_{tokens}"] = Row(CASES[op], size(tokens=tokens, dim=dim))
    gelu = partial(ops.activation, "", kind="gelu")
    found["activation_gelu"] = Row(lambda s: gelu(s.rows), size(tokens=2048, dim=2048))
    found["feed_forward"] = Row(CASES["feed_forward"], size(tokens=1024), products=True)
    found["attention"] = Row(CASES["attention"], size(tokens=2048))
    found["peephole_lstm"] = Row(CASES["peephole_lstm"], size(tokens=1024))
    for name, dtype in DTYPES.items():
        loss = partial(sentences.linear_cross_entropy, "", vocabulary=16_000)
        found[f"linear_cross_entropy_{name}"] = Row(
            lambda s, loss=loss: loss(s.rows), size(dtype=dtype), products=True
        )
    stack = partial(size, tokens=2048, dim=256)
    blocks, two = {"loop in blocks": InBlocks}, {"reads": 2}
    for layers in (6, 12, 24, 48):
        found[f"dlcl_{layers}"] = Row(CASES["DLCL"], stack(layers=layers), slow=layers == 48)
        if layers <= 24:
            in_blocks = _stack(DLCL, blocks, "loop in blocks")
            found[f"dlcl_{layers}_blocks"] = Row(in_blocks, stack(layers=layers))
    found["attention_residuals_6"] = Row(
        _stack(AttentionResiduals, ATTENTION_FORMS, "list", **two), stack(layers=6)
    )
    each = torch.compile(listed_attention, fullgraph=True, dynamic=False)
    forms = {"compiled function for each row": partial(AttentionForm, each)}
    found["attention_residuals_24"] = Row(
        _stack(AttentionResiduals, forms, *forms, **two),
        stack(layers=24),
        compiled=False,
        slow=True,
    )
    return found


ROWS = _rows()


def measure(name: str, rounds: int, eager: bool) -> None:
    """Measures a row in both passes; records it unless its peers are only ``eager``."""
    row = ROWS[name]
    case, sizes = row.make(row.sizes), row.sizes
    peers = {} if eager else row.peers(case)
    for found in measure_case(name, case, sizes, rounds, peers):
        both = found["pass"] != "forward"
        times = ", ".join(f"{form} {s * 1e3:.3g} ms" for form, s in found["seconds"].items())
        what = f"{found['pass']}, T={sizes.tokens}, D={sizes.dim}: {found['torch_form']}; {times}"
        if eager:
            print(f"{found['ratio']:6.2f} {name}: {what}", flush=True)
            continue
        what = f"fastest of eager and compiled over deepfast: {what}"
        if peers:
            what += f"; compiling took {found['compile_seconds']:.0f} s"
        record(f"compiled_{name}" + "_backward" * both, found["ratio"], "x", what, COMMAND)


# ---- deepfast inside of a compiled model ---------------------------------------------------------

LAYERS, SENTENCES, LENGTH, DIM = 12, 64, 32, 256


def _encoder(plain: bool = False) -> nn.Module:
    return TransformerEncoder(LAYERS, DIM, 4, 4 * DIM, connection="residual" if plain else "dlcl")


def _connected(plain: bool = False) -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        DIM, 4, 4 * DIM, dropout=0.1, batch_first=True, norm_first=True
    )
    encoder = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(DIM), enable_nested_tensor=False)
    if not plain:
        connect(encoder, "layers", norm="pre", dim=DIM)
    return encoder


MODELS = {"inside_encoder": _encoder, "inside_connect": _connected}
"""A model whose layers are its ``layers``."""


def inside(name: str, rounds: int) -> None:
    """A training step of a model: eager over compiled layers, and over the model compiled whole;
    and compiled whole over the plain model, without the connection, compiled whole."""

    def step(run: Callable, model: nn.Module) -> None:
        run(x).square().mean().backward()
        model.zero_grad(set_to_none=True)

    x = torch.randn(SENTENCES, LENGTH, DIM)
    eager, layers, whole = (MODELS[name]() for _ in range(3))
    plain = MODELS[name](plain=True)
    for layer in layers.layers:
        layer.compile(dynamic=False)
    forms = {
        "eager": partial(step, eager, eager),
        "layers": partial(step, layers, layers),
        "model": partial(step, torch.compile(whole, dynamic=False, fullgraph=True), whole),
        "plain": partial(step, torch.compile(plain, dynamic=False, fullgraph=True), plain),
    }
    seconds = {}
    for form, run in forms.items():
        begin = time.perf_counter()
        run()
        seconds[form] = time.perf_counter() - begin
    found = interleave(forms, repeats=rounds)
    about = f"a step of {LAYERS} layers, T={SENTENCES * LENGTH}, D={DIM}"
    for form in ("layers", "model"):
        what = f"{about}: eager over compiled {form}; first call {seconds[form]:.0f} s"
        record(f"{name}_{form}", ratio(found["eager"], found[form]), "x", what, COMMAND)
    what = f"{about}, compiled whole: with the connection over the plain model"
    record(f"{name}_over_plain", ratio(found["model"], found["plain"]), "x", what, COMMAND)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="default: all quick ones")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--eager", action="store_true", help="no torch.compile; records nothing")
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    args = parser.parse_args(argv)
    if args.list:
        print(*ROWS, *MODELS, sep="\n")
        return 0
    for name in args.rows:
        if name not in (*ROWS, *MODELS):
            parser.error(f"expected rows that --list names, got {name!r}")
    torch.set_num_threads(1)
    # One variant for each number of states.
    torch._dynamo.config.recompile_limit = 128
    keep_memory()
    quick = [name for name, row in ROWS.items() if args.eager or not row.slow]
    for name in args.rows or [*quick, *([] if args.eager else MODELS)]:
        torch.manual_seed(1)
        if name in MODELS:
            inside(name, args.rounds)
        else:
            measure(name, args.rounds, args.eager)
    return 0


if __name__ == "__main__":
    sys.exit(main())
