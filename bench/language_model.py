"""Causal language models of 24 layers, plain and with five depth connections, over seeds.

    python -m bench.language_model --train train.en.gz --dev val.en.gz --jobs 2

The model is a GPT of plain torch, which `deepfast.connect` connects. Rates by pilots, seeds, rows
and page are those of `deepfast mt sweep`; finished runs are not made again.
"""

import argparse
import math
import shlex
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deepfast
from deepfast import checks
from deepfast.machine import environment
from deepfast.measure.sweep_picture import write_page
from deepfast.memory.count import LiveBytes
from deepfast.mt.data import Vocabulary
from deepfast.mt.data.text import read_lines
from deepfast.mt.sweep.grid import SYSTEM, Pilots, Point
from deepfast.mt.sweep.one import MACHINE, parameters
from deepfast.mt.sweep.runs import INTERRUPTED, SETTINGS, Processes, Run, read_object, write_result
from deepfast.mt.sweep.stages import Sweep
from deepfast.mt.training.environment import peak_bytes
from deepfast.mt.training.run_folder import only_run

TWO_READS = {"sublayers": (("norm1", "attention"), ("norm2", "mlp"))}
SYSTEMS: dict[str, dict[str, Any] | None] = {
    "pre-norm": None,
    "DenseFormer": {"connection": "denseformer"},
    "ELC-BERT's form": {},
    "attention residuals": {"connection": "attnres"} | TWO_READS,
    "attention residuals, 8 blocks": {"connection": "block_attnres", "block": 3} | TWO_READS,
    "attention residuals, additive": {"connection": "attnres", "additive": "gated"} | TWO_READS,
}
"""Name -> arguments of `deepfast.connect`. A block of ELC-BERT does not add its input, which
`connect` cannot serve, so `Model.forward` calls DLCL itself."""
MEANING = "*dev NLL*, nats a token, of windows of 128 tokens: the lowest of the validations;"
POINTS = [Point(((SYSTEM, name),)) for name in SYSTEMS]
PILOTS = Pilots("lr", ("1e-3", "2e-3", "4e-3"), 500)
SIZES = {"layers": 24, "dim": 128, "heads": 4, "ffn_dim": 256, "vocab_size": 3000, "length": 128,
         "batch": 8, "dropout": 0.1, "warmup": 200, "validate_every": 150}  # fmt: skip


class Attention(nn.Module):
    """Causal attention of (B, T, D)."""

    def __init__(self, dim: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), self.dropout, self.training)


class Block(nn.Module):
    """A pre-norm block. ``keeps``: whether its output begins with its input."""

    def __init__(self, dim: int, heads: int, ffn_dim: int, dropout: float, keeps: bool):
        super().__init__()
        self.keeps = keeps
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, dropout)
        up, down = nn.Linear(dim, ffn_dim), nn.Linear(ffn_dim, dim)
        self.mlp = nn.Sequential(up, nn.GELU(), down, nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        branch = self.attention(self.norm1(x))
        x = x + branch if self.keeps else branch
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """A GPT with learned positions and a tied head."""

    def __init__(self, system: str, settings: dict[str, Any]):
        super().__init__()
        self.sizes = s = settings
        dim, keeps = s["dim"], SYSTEMS[system] != {}
        self.words, self.places = nn.Embedding(s["vocab_size"], dim), nn.Embedding(s["length"], dim)
        self.blocks = nn.ModuleList(
            Block(dim, s["heads"], s["ffn_dim"], s["dropout"], keeps) for _ in range(s["layers"])
        )
        self.norm = nn.LayerNorm(dim)
        # As nanoGPT begins: the last matrix of each branch is smaller.
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                ends = name.endswith(("out.weight", "mlp.2.weight"))
                nn.init.normal_(weight, std=0.02 / (math.sqrt(2 * s["layers"]) if ends else 1))
        options = SYSTEMS[system]
        self.dlcl = None
        if options:
            deepfast.connect(self, "blocks", norm="pre", dim=dim, **options)
        elif options is not None:
            self.dlcl = deepfast.nn.DLCL(
                s["layers"], dim, norm=None, softmax=True, init="newest", output_row=False
            )

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) to (B, T, D)."""
        x = self.words(tokens) + self.places.weight
        x = F.dropout(x, self.sizes["dropout"], self.training)
        if self.dlcl is not None:
            history = deepfast.nn.DepthHistory()
            x = self.dlcl(x, history)
            for block in self.blocks:
                x = self.dlcl(block(x), history)
            return self.norm(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def loss(self, tokens: Tensor) -> Tensor:
        """The mean NLL of (B, T + 1) tokens after their first, nats."""
        x = self(tokens[:, :-1]).flatten(0, 1)
        return deepfast.ops.linear_cross_entropy(x, self.words.weight, tokens[:, 1:].flatten())


@dataclass(frozen=True, eq=False)
class TextRun(Run):
    """One run: ``recipe`` is a dictionary of plain values."""

    recipe: Any
    process = (sys.executable, "-m", "bench.language_model", "--run")
    parameters = 0

    @property
    def seed(self) -> int:
        return self.recipe["seed"]

    def settings(self) -> dict[str, Any]:
        return self.recipe

    completed = staticmethod(lambda plain: plain)


def streams(settings: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The tokens of the training and the dev text, each sentence with eos."""
    texts = [read_lines(settings[part]) for part in ("train", "dev")]
    vocabulary = Vocabulary.train(texts[0], settings["vocab_size"])
    return tuple(
        torch.tensor([i for line in text for i in (*vocabulary.encode(line), vocabulary.eos_id)])
        for text in texts
    )


def windows(stream: Tensor, starts: Tensor, length: int) -> Tensor:
    return stream[starts[:, None] + torch.arange(length + 1)]


@torch.no_grad()
def validate(model: Model, stream: Tensor) -> float:
    """NLL of windows side by side, nats a token."""
    length = model.sizes["length"]
    model.eval()
    starts = torch.arange(0, len(stream) - length, length)
    losses = [model.loss(windows(stream, part, length)) for part in starts.split(32)]
    model.train()
    return float(
        torch.stack(losses) @ torch.tensor([len(p) / len(starts) for p in starts.split(32)])
    )


class Training:
    """A model and its optimizer, on the stream of tokens ``learned``."""

    def __init__(self, settings: dict[str, Any], learned: Tensor):
        self.settings, self.learned, self.steps = settings, learned, 0
        torch.manual_seed(settings["seed"])
        self.model = Model(settings["system"], settings)
        self.order = torch.Generator().manual_seed(settings["seed"])
        self.optimizer = torch.optim.Adam(self.model.parameters(), betas=(0.9, 0.98), fused=True)

    def train_step(self) -> tuple[float, list[float]]:
        """One step on the next windows; returns the loss and the gradient norm of each block. It
        changes nothing where the loss or a gradient is not finite."""
        s = self.settings
        self.steps += 1
        starts = torch.randint(len(self.learned) - s["length"], (s["batch"],), generator=self.order)
        rise = min(self.steps / s["warmup"], (s["warmup"] / self.steps) ** 0.5)
        for group in self.optimizer.param_groups:
            group["lr"] = float(s["lr"]) * rise
        self.optimizer.zero_grad()
        loss = self.model.loss(windows(self.learned, starts, s["length"]))
        loss.backward()
        each = [nn.utils.get_total_norm([p.grad for p in block.parameters()])
                for block in self.model.blocks]  # fmt: skip
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if not math.isfinite(loss.item() + norm.item()):
            return math.nan, []
        self.optimizer.step()
        return loss.item(), [float(f"{norm:.4g}") for norm in each]

    def measure(self) -> int:
        """Bytes at the peak of a step, with parameters, gradients and Adam."""
        self.optimizer.zero_grad()
        with LiveBytes() as live:
            self.train_step()
        # Parameters and Adam's state are from before.
        return live.peak + 3 * 4 * parameters(self.model)


def trainings(texts: dict[str, str], chosen: list[Point]) -> dict[Point, Training]:
    """The training of each system, on the same batches, for a measurement."""
    settings = SIZES | texts | {"seed": 1, "lr": PILOTS.values[0]}
    learned, _ = streams(settings)
    return {point: Training(settings | {"system": point.name}, learned) for point in chosen}


def train(settings: dict[str, Any]) -> dict[str, Any]:
    """One run; its result has the keys of a sweep's."""
    torch.set_num_threads(1)
    machine, began = environment(), time.perf_counter()
    learned, dev = streams(settings)
    training, length = Training(settings, learned), settings["length"]
    model, curve, norms, seconds = training.model, [], [], []
    for step in range(1, settings["steps"] + 1):
        start = time.perf_counter()
        loss, each = training.train_step()
        seconds.append(time.perf_counter() - start)
        if math.isnan(loss):
            return {"diverged": f"step {step}: the loss or a gradient is not finite"}
        if step in (1, settings["steps"]):
            norms.append({"step": step, "grad_norm_blocks": each})
        if step % settings["validate_every"] == 0 or step == settings["steps"]:
            curve.append([step, validate(model, dev)])
            print(f"step {step}: dev NLL {curve[-1][1]:.4f}", flush=True)
    return {key: machine[key] for key in MACHINE} | {
        "steps": settings["steps"], "seconds": time.perf_counter() - began, "curve": curve,
        "nll": min(nll for _, nll in curve), "bleu": None, "parameters": parameters(model),
        "step_seconds": statistics.median(seconds), "gradient_norms": norms,
        "target_tokens_per_second": settings["batch"] * length / statistics.median(seconds),
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--train", help="text, plain or gzip, a sentence in each line")
    parser.add_argument("--dev", help="text to validate on")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("runs/language_model"))
    parser.add_argument("--run", type=Path, help="the folder of one run, in its own process")
    args = parser.parse_args(argv)
    if args.run:
        settings = read_object(args.run / SETTINGS, seed=int)
        found = {"seed": settings["seed"]} | train(settings)
        write_result(args.run, found | {"process_bytes": peak_bytes(torch.device("cpu"))})
        return 0
    if not args.train or not args.dev:
        parser.error("expected --train and --dev, got none")
    checks.whole("language_model", seeds=args.seeds)
    checks.whole("language_model", 0, jobs=args.jobs)
    checks.whole("language_model", 2, steps=args.steps)
    if args.jobs:
        texts = streams(SIZES | {"train": args.train, "dev": args.dev})
        if min(map(len, texts)) <= SIZES["length"]:
            parser.error(f"expected texts of more than {SIZES['length']} tokens")
    pilots = replace(PILOTS, steps=min(PILOTS.steps, args.steps))
    settings = SIZES | {"train": args.train, "dev": args.dev, "steps": args.steps}
    options = [f"--{name}={getattr(args, name)}" for name in ("train", "dev", "seeds", "steps")]
    command = shlex.join(["python", "-m", "bench.language_model", *options])

    def run(point: Point, seed: int, where: Path, **changes: Any) -> Run:
        chosen = dict(text.split("=") for text in point.own) | changes
        own = settings | {"system": point.values[0], "seed": seed} | chosen
        return TextRun(point.name, own, where / point.folder / f"seed-{seed}")

    def trial(pilot: Point) -> Run:
        return run(pilot, 1, args.output / "pilots", lr=pilot.values[-1], steps=pilots.steps)

    def write(results: dict, tried: dict) -> None:
        write_page(args.output, results, command, pilots, tried, MEANING)

    seeds = range(1, args.seeds + 1)
    sweep = Sweep(
        POINTS,
        lambda point: [run(point, seed, args.output) for seed in seeds], pilots, trial, write,
    )  # fmt: skip
    with only_run(args.output, "--output"):
        succeeded = sweep.make(Processes(args.jobs, 1))
    print(args.output / "sweep.md")
    return int(not succeeded)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
