"""What memory policies save and cost: `python -m bench.memory --output FILE`.

Bytes are counted, parameters and their gradients aside; times are medians of rounds in which the
policies take turns, on 2 threads.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bench.gpu.peers import PlainEncoder
from deepfast.measure.clock import interleave, ratio
from deepfast.measure.forms import StackAndSum
from deepfast.memory import POLICIES, LiveBytes, plan
from deepfast.nn import DLCL, Packing, TransformerEncoder

GIB = 1 << 30
LENGTH, DIM, HEADS = 32, 512, 8
DROPOUT = 0.1


class EagerDLCL(nn.Module):
    """Plain torch layers, joined by stacking and summing."""

    def __init__(self, layers: int):
        super().__init__()
        self.stack = PlainEncoder(layers, DIM, HEADS, 4 * DIM, DROPOUT)
        self.dlcl = DLCL(layers, DIM)

    def forward(self, x):
        connect = StackAndSum(self.dlcl)
        x = connect(x)
        for layer in self.stack.layers:
            x = connect(layer(x))
        return self.stack.norm(x)


class Checkpointed(nn.Module):
    """Plain residual, torch's checkpointing around each layer."""

    def __init__(self, layers: int):
        super().__init__()
        self.stack = PlainEncoder(layers, DIM, HEADS, 4 * DIM, DROPOUT)

    def forward(self, x):
        for layer in self.stack.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.stack.norm(x)


def activations(module: nn.Module, tokens: int, autocast: bool = False) -> int:
    """Peak bytes of a step on ``tokens``, in bf16 or under its autocast; parameters and their
    gradients, which are there before, aside."""
    dtype = torch.float32 if autocast else torch.bfloat16
    module.to(dtype)
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    x = torch.randn(tokens // LENGTH, LENGTH, DIM, dtype=dtype)
    with LiveBytes() as live:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = module(x)
        y.sum().backward()
        del y
    return live.peak


def per_token(module: nn.Module, tokens: int) -> float:
    """Bytes of activations a token under autocast: what does not grow with tokens, such as copies
    of weights, drops out."""
    more, less = (activations(module, n, autocast=True) for n in (tokens, tokens // 2))
    return (more - less) / (tokens - tokens // 2)


def _row(what: str, value: float, reach: float, *, at_most: bool, unit: str, **more) -> dict:
    met = value <= reach if at_most else value >= reach
    side = "at most" if at_most else "at least"
    print(f"{'ok  ' if met else 'MISS'} {what}: {value:.3f} {unit} ({side} {reach})  {more}",
          flush=True)  # fmt: skip
    return {"what": what, "value": round(value, 4), "unit": unit, "reach": f"{side} {reach}",
            "met": met, **more}  # fmt: skip


def _forms(layers: int) -> dict[str, nn.Module]:
    return {
        "history": TransformerEncoder(
            layers, DIM, HEADS, 4 * DIM, dropout=DROPOUT, memory="history"
        ),
        "stack and sum": EagerDLCL(layers),
        "checkpointed": Checkpointed(layers),
    }


def history_row(layers: int, tokens: int) -> dict:
    count = activations(_forms(layers)["history"], tokens)
    what = f"activations under history, L={layers}, T={tokens}, D={DIM}, bf16, dropout {DROPOUT}"
    return _row(what, count / GIB, 1.1, at_most=True, unit="GiB")


def ratio_rows(layers: int, tokens: int) -> list[dict]:
    """Against plain forms, which fit at fewer tokens: bytes a token under bf16 autocast, where the
    residual stream of plain PyTorch is fp32; and in pure bf16."""
    rows = []
    for how, count in (("bf16 autocast", per_token), ("pure bf16", activations)):
        found = {name: count(form, tokens) for name, form in _forms(layers).items()}
        where = f"L={layers}, D={DIM}, {how}, dropout {DROPOUT}, T={tokens}"
        bytes_ = {name: round(value) for name, value in found.items()}
        rows.append(_row(f"eager stack and sum over history, {where}",
                         found["stack and sum"] / found["history"], 90, at_most=False, unit="x",
                         bytes=bytes_))  # fmt: skip
        rows.append(_row(f"history over plain residual, checkpointed, {where}",
                         found["history"] / found["checkpointed"], 1.0, at_most=True, unit="x",
                         bytes=bytes_))  # fmt: skip
    return rows


def time_rows(layers: int, tokens: int, dim: int, rounds: int) -> list[dict]:
    """Steps of every policy over those of keep, fp32."""
    encoder = TransformerEncoder(layers, dim, dim // 64, 4 * dim, dropout=DROPOUT)
    packing, x = Packing(tokens // LENGTH, LENGTH), torch.randn(tokens, dim)

    def step(policy: str):
        def run():
            encoder.set_memory(policy)
            encoder.forward_packed(x, packing).sum().backward()
            encoder.zero_grad(set_to_none=True)

        return run

    timings = interleave({policy: step(policy) for policy in POLICIES}, repeats=rounds)
    seconds = {policy: round(t.median, 3) for policy, t in timings.items()}
    reach = {"lean": 1.15, "history": 1.4}
    return [
        _row(f"step of {policy} over keep, L={layers}, T={tokens}, D={dim}, fp32",
             ratio(timings[policy], timings["keep"]), reach.get(policy, 1.4), at_most=True,
             unit="x", seconds=seconds)
        for policy in POLICIES[1:]
    ]  # fmt: skip


def plan_row() -> dict:
    found = plan(budget="24GiB", width=DIM, tokens=8192)
    return _row("deepest encoder in 24 GiB by plan, D=512, T=8192, Adam, 6 decoder layers, V=32000",
                found.sizes.layers, 340, at_most=False, unit="layers")  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--layers", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--fewer", type=int, default=512, help="tokens of the plain forms")
    parser.add_argument("--timed-layers", type=int, default=60)
    parser.add_argument("--timed-tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("plan", "time", "bytes", "ratios"))
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    torch.set_num_threads(2)
    rows = []
    if args.only in (None, "plan"):
        rows.append(plan_row())
    if args.only in (None, "time"):
        rows += time_rows(args.timed_layers, args.timed_tokens, 256, args.rounds)
    if args.only in (None, "bytes"):
        rows.append(history_row(args.layers, args.tokens))
    if args.only in (None, "ratios"):
        rows += ratio_rows(args.layers, args.fewer)
    if args.output is not None:
        args.output.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
