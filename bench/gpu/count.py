"""What a training step should take on a GPU, counted and not measured.

    python -m bench.gpu.count                                    # prints the tables
    python -m bench.gpu.count --write bench/results/count.md

A part of a step takes the longer of its floating-point operations and its bytes, each at a rate
that a chip reaches. Host time is that of `bench.launch_overhead`.
"""

import argparse
import textwrap
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch

from bench import record
from deepfast.depth.attention_residuals import AttentionPass
from deepfast.depth.dlcl import ConstantPass
from deepfast.depth.schedule import default_block, depth_pattern
from deepfast.files import write_atomically
from deepfast.measure.traffic import engine_moved

FORMS = {"dlcl": 1, "attnres": 2}
"""Connection -> reads of a layer."""
PULLED = {"dlcl": ConstantPass.pulled, "attnres": AttentionPass.pulled}
PUSHES = {"dlcl": "dlcl", "attnres": "attention_residuals"}
"""Connection -> the key of its push in results.csv."""
HOST = "Intel, AMX"
"""The processor whose host times the tables take."""


@dataclass(frozen=True)
class Chip:
    """What a chip reaches; per second."""

    name: str
    copy: float
    """Bytes, read plus written: 0.9 of the datasheet's number."""
    products: float = 6.0e14
    """Floating-point operations of bf16 products with some thousand rows: about 3/4 of what one of
    8,192^3 reaches."""
    attention: float = 3.0e14
    """The same in attention, for heads of 64."""
    gap: float = 1.5e-6
    """Seconds from one kernel of a CUDA graph to the next, with the start and end of both."""
    dlcl: tuple[float, float] = (0.9, 1.0)
    attnres: tuple[float, float] = (0.7, 0.25)
    """How near passes over far states come to a copy, by bench/results/limits.md at D=512: those
    over states, and those over gradients."""


H100 = Chip("H100", 3.0e12)
H200 = Chip("H200", 4.3e12, dlcl=(0.7, 0.75), attnres=(0.5, 0.18))


def chip(device: str) -> Chip | None:
    """The chip of the current GPU; None for another one, or a CPU."""
    name = torch.cuda.get_device_name() if device == "cuda" else ""
    return next((chip for chip in (H100, H200) if chip.name in name), None)


@dataclass(frozen=True, kw_only=True)
class Model:
    """A pre-norm transformer with causal attention, trained by fused AdamW under bf16 autocast."""

    layers: int
    dim: int
    ffn: int
    batch: int
    length: int
    vocabulary: int = 0
    """0: an encoder without a projection to words."""
    gated: bool = False
    """Whether a third projection gates the feed-forward block, as in SwiGLU."""
    causal: bool = False

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def state(self) -> int:
        """Bytes of a state in bf16."""
        return 2 * self.tokens * self.dim


FAST_ATTNRES = Model(
    layers=24, dim=1024, ffn=2816, batch=2, length=1024, vocabulary=32768, gated=True, causal=True
)  # fmt: skip
"""The model of docs/current_24l_results.md in github.com/jon123boss/fast-attnres; 16 heads."""


KERNELS = 40
"""Of a layer, forward and backward, with fused norms and activations."""


def layers(model: Model, chip: Chip) -> dict[str, float]:
    """Seconds of everything but the connection, by part."""
    T, D, F = model.tokens, model.dim, model.ffn
    per_layer = 4 * D * D + (3 if model.gated else 2) * D * F
    products = model.layers * per_layer + model.vocabulary * D
    weights = products + model.vocabulary * D
    attention = 3.5 * 4 * model.length * D * T * (0.5 if model.causal else 1) * model.layers
    # Forward, of each of two sublayers: a norm (one state read, one written) and a sum with the
    # residual (two read, one written); the activation. Backward moves twice that.
    elements = 2 * 5 * D + (3 if model.gated else 2) * F
    return {
        "matrix products": 6 * T * products / chip.products,
        "attention": attention / chip.attention,
        "norms, sums, activations": 3 * 2 * T * elements * model.layers / chip.copy,
        # Weights to bf16, their gradients back to fp32, six bytes each; a norm needs neither.
        "casts of autocast": 12 * products / chip.copy,
        # Logits are written in bf16, read, cast to fp32, read twice, and their gradient is written
        # and read in both dtypes.
        "loss": 24 * T * model.vocabulary / chip.copy,
        # Parameter, gradient and two moments are read; all but the gradient written; zeros.
        "AdamW and zero_grad": (28 + 4) * weights / chip.copy,
        "gaps between kernels": KERNELS * model.layers * chip.gap,
    }


# ---- the connection ------------------------------------------------------------------------------


def far_passes(rows: int, block: int) -> int:
    """Blocks with far rows in forward; backward has as many."""
    return -(-rows // block) - 1


def moved(form: str, rows: int, block: int, dim: int, chip: Chip) -> float:
    """States that our kernels read and write in one step. What a far pass moves counts as the
    states that a copy moves in the pass's time."""
    states: float = engine_moved(depth_pattern(rows, None, 1, 1), block=block)
    share_of_rows, share_of_pull = getattr(chip, form)
    for start in range(0, rows, block):
        end = min(start + block, rows)
        count = end - start
        # Forward and recompute read far states and write sums; the pull reads the far gradients and
        # its states, and writes sums.
        states += 2 * (start + count) * (start > 0) * (1 / share_of_rows - 1)
        states += (rows - end + 2 * count) * (end < rows) * (1 / share_of_pull - 1)
        # A pull for more states than a launch takes reads the far gradients again.
        again = -(-count // PULLED[form]) - 1
        states += again * (rows - end) * (end < rows) / share_of_pull
    if form == "attnres":
        # For the gradient of the queries each pull stores a number for each token, row and state,
        # reads it, and reads its states again.
        states += 2 * 4 * rows * (rows + 1) / 2 / (2 * dim) + 2 * rows
    return states


def per_read(rows: int) -> int:
    """The same with one kernel for each read, whose gradients autograd adds up. The k-th row reads
    k sources and writes their sum; in backward it reads sources and gradient and writes k
    gradients, of which k - 1 are added to others."""
    return sum((k + 1) + (k + 1 + k) + 3 * (k - 1) for k in range(1, rows + 1))


def plain_sums(model: Model) -> int:
    """States that the residual sums of the plain model move, which a connection replaces."""
    return 2 * 3 * 3 * model.layers


def connection(model: Model, chip: Chip, rows: int, form: str, block: int | None = None) -> float:
    """Seconds of the connection's kernels in a CUDA graph, beyond those of the plain sums.

    form: "dlcl" or "attnres", by our kernels; "per read": attention residuals with a kernel each.
    """
    if form == "per read":
        states = per_read(rows) - plain_sums(model)
        # A read each way, the gradient of its query, and autograd's additions of gradients.
        return states * model.state / chip.copy + (3 * rows + rows * rows / 2) * chip.gap
    block = block or default_block(rows, "cuda", PULLED[form])
    states = moved(form, rows, block, model.dim, chip) - plain_sums(model)
    # Of a push a kernel each way and the sums of partial gradients; of far rows two forward passes,
    # the pull and its sums. The gradient of the queries takes one kernel more in each.
    more = form == "attnres"
    kernels = (3 + more) * rows + (4 + more) * far_passes(rows, block)
    return states * model.state / chip.copy + kernels * chip.gap


def step(model: Model, chip: Chip, form: str) -> float:
    """Seconds of a step of a model whose layers read twice each, in a CUDA graph."""
    rows = 2 * model.layers + 1
    return sum(layers(model, chip).values()) + connection(model, chip, rows, form)


class Host:
    """Seconds of host time in eager code, as `bench.launch_overhead` measured them."""

    def __init__(self):
        rows = {key: row.value for (key, p), row in record.read().items() if p == HOST}
        self.us = {key.partition("_")[2]: us for key, us in rows.items()
                   if key.startswith(("launch_", "push_", "host_"))}  # fmt: skip

    def far(self, form: str) -> float:
        """The launches of a block with far rows: two passes in forward and recompute, a pull."""
        names = ("attend_rows", "attend_pull") if form == "attnres" else ("mix_rows", "pull_rows")
        return (2 * self.us[names[0]] + self.us[names[1]]) * 1e-6

    def connection(self, form: str, rows: int, block: int) -> float:
        push = self.us[PUSHES[form]] * 1e-6
        return rows * push + far_passes(rows, block) * self.far(form)

    def layers(self, count: int) -> float:
        return count * self.us["layer"] * 1e-6


# ---- the tables ----------------------------------------------------------------------------------

TEXTS = {
    "Counted, not measured: steps on a GPU": """\
`python -m bench.gpu.count --write bench/results/count.md`. Nothing was run on a GPU. Assumed of an
H100: a copy moves 3.0 TB/s (bytes read plus written), bf16 products reach 600 TFLOP/s, attention
300, a kernel of a CUDA graph starts 1.5 us after the one before it. Passes over far states reach
the share of a copy that `limits.md` counts for them at D=512: DLCL 0.9 and 1.0, attention residuals
0.7 in forward and 0.25 in backward (H200: 0.7, 0.75, 0.5, 0.18); all other kernels reach a copy.
Host times are those of `python -m bench.launch_overhead` (HOST): lower bounds, without the driver
and torch's allocator.""",
    "The published step of Fast-AttnRes": """\
24 layers, D=1024, SwiGLU of 2,816, 2 x 1,024 tokens, V=32,768, 48 reads of all sources below; one
CUDA graph of zero_grad, forward, loss, backward and AdamW, the model compiled. Published for an
H100: 28.2 ms, and 29.95 with the kernels of fla. Both have a kernel for each read, so the count
below for that form shows how near it comes. `make gpu STAGE=workload` measures the step.""",
    "Rows of a block": """\
Time of the connection alone for other blocks than the one chosen, over that one's; below 1 the
other one is faster. Each cell has two numbers: in a CUDA graph, and in eager code where the GPU
waits for the launches of far rows. `deepfast.depth.schedule.default_block` counts states, for every
T and D: a larger block also holds two more states for each of its rows.""",
    "When a step waits for the host": """\
Milliseconds of one step in eager code, F = 4 D, sentences of 128: the host's time for the layers
(of plain torch) and for the connection, and what the GPU needs for both. A CUDA graph takes the
host's part away. *Before*: with the measured ratio of a push whose launches went through Triton's
own way.""",
}


def _titled(number: int) -> list[str]:
    """A title with its text."""
    title, text = list(TEXTS.items())[number]
    wrapped = textwrap.wrap(text.replace("HOST", HOST), 118, break_on_hyphens=False)
    return ["#" * (1 + (number > 0)) + f" {title}", "", *wrapped, ""]


def _table(head: str, rows: list[list]) -> list[str]:
    cells = [name.strip() for name in head.split("|")]
    lines = [cells, ["---"] * len(cells), *rows]
    return ["| " + " | ".join(map(str, line)) + " |" for line in lines] + [""]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def workload_table() -> list[str]:
    m, chips = FAST_ATTNRES, (H100, H200)
    lines = _titled(1)
    parts = [layers(m, chip) for chip in chips]
    rows = [[name, *(_ms(part[name]) for part in parts)] for name in parts[0]]
    rows += [["*plain residual*", *(_ms(sum(part.values())) for part in parts)]]
    for name, form in (("a kernel for each read", "per read"), ("deepfast", "attnres")):
        rows += [
            [f"*with attention residuals, {name}*", *(_ms(step(m, chip, form)) for chip in chips)]
        ]
    return lines + _table("part, ms | H100 | H200", rows)


def mixing(form: str, rows: int, block: int, T: int, D: int, gap: float) -> float:
    """Seconds of the connection alone, with ``gap`` for the launches of a block's far rows."""
    seconds = moved(form, rows, block, D, H100) * 2 * T * D / H100.copy
    return seconds + far_passes(rows, block) * gap


def block_table() -> list[str]:
    host, rows, sizes = Host(), [], ((2048, 1024), (8192, 512), (8192, 1024))
    for form, depth, (T, D) in product(FORMS, (12, 24, 48, 96), sizes):
        count = FORMS[form] * depth + 1
        chosen = default_block(count, "cuda", PULLED[form])
        cells = [form, depth, T, D, chosen]
        for block in (4, 8, 16):
            times = [
                mixing(form, count, block, T, D, gap) / mixing(form, count, chosen, T, D, gap)
                for gap in (5 * H100.gap, host.far(form))
            ]
            cells.append(", ".join(f"{time:.2f}" for time in times))
        rows.append(cells)
    head = "connection | layers | T | D | chosen | " + " | ".join(
        f"{block} rows: graph, eager" for block in (4, 8, 16)
    )
    return _titled(2) + _table(head, rows)


def host_table() -> list[str]:
    host, rows, sizes = Host(), [], ((2048, 512), (8192, 512), (8192, 1024), (32768, 1024))
    for form, depth, (T, D) in product(FORMS, (24, 48), sizes):
        count = FORMS[form] * depth + 1
        model = Model(layers=depth, dim=D, ffn=4 * D, batch=T // 128, length=128)
        block = default_block(count, "cuda", PULLED[form])
        theirs, ours = host.layers(depth), host.connection(form, count, block)
        kernels = sum(layers(model, H100).values())
        states = moved(form, count, block, D, H100) * model.state / H100.copy
        times = theirs, ours * host.us[f"before_{PUSHES[form]}"], ours, kernels, states
        waits = "host" if theirs + ours > kernels + states else "GPU"
        rows.append([form, depth, T, D, *map(_ms, times), waits])
    head = (
        "connection | layers | T | D | host: layers | host: connection, before | now | "
        "GPU: layers | GPU: connection | waits for"
    )
    return _titled(3) + _table(head, rows)


def page() -> str:
    parts = (_titled(0), workload_table(), block_table(), host_table())
    return "\n".join(line for part in parts for line in part)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.count", description=__doc__)
    parser.add_argument("--write", metavar="FILE", type=Path, help="write the page to FILE")
    args = parser.parse_args(argv)
    if args.write is None:
        print(page())
    else:
        write_atomically(args.write, page().encode())


if __name__ == "__main__":
    main()
