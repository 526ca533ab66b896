"""What memory policies save at full size: `python -m bench.memory --output FILE`.

Bytes are counted without parameters and their gradients. `deepfast report` measures what policies
cost in time.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from torch import nn

from deepfast.files import write_atomically
from deepfast.measure.clock import claim
from deepfast.measure.encoders import DROPOUT, PlainEncoder
from deepfast.memory import LiveBytes, plan
from deepfast.memory.eager import CHECKPOINTED, STACK
from deepfast.nn import TransformerEncoder

GIB = 1 << 30
LENGTH, DIM, HEADS = 32, 512, 8


def activations(module: nn.Module, tokens: int, autocast: bool = False) -> int:
    """Peak bytes of a step on ``tokens``, in bf16 or under bf16 autocast. Parameters and their
    gradients exist before the step and are not counted."""
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
    """Bytes of activations per token under autocast, from two sizes: bytes that do not grow with
    the tokens, such as copies of weights, cancel."""
    more, less = (activations(module, n, autocast=True) for n in (tokens, tokens // 2))
    return (more - less) / (tokens - tokens // 2)


def encoder(layers: int) -> nn.Module:
    """A DLCL encoder under the policy that saves most memory."""
    return TransformerEncoder(layers, DIM, HEADS, 4 * DIM, dropout=DROPOUT, memory="history")


def history_row(layers: int, tokens: int) -> dict:
    """Activations under the policy that saves most memory."""
    what = f"GiB of activations under history, L={layers}, T={tokens}, D={DIM}, bf16"
    return claim(what, activations(encoder(layers), tokens) / GIB, 1.1, at_most=True)


def ratio_rows(layers: int, tokens: int) -> list[dict]:
    """Ratios to the plain forms, at fewer tokens because these need more memory: per token under
    bf16 autocast, where plain PyTorch's residual stream is fp32, and in pure bf16."""
    rows = []
    for how, count in (("bf16 autocast", per_token), ("pure bf16", activations)):
        found = {"history": count(encoder(layers), tokens)} | {
            form: count(PlainEncoder(layers, DIM, HEADS, 4 * DIM, form=form), tokens)
            for form in (STACK, CHECKPOINTED)
        }
        where = f"L={layers}, D={DIM}, {how}, T={tokens}"
        history, stack, plain = (found[form] for form in ("history", STACK, CHECKPOINTED))
        what = f"bytes of stack and sum over history, {where}"
        rows.append(claim(what, stack / history, 90, bytes=found))
        what = f"bytes of history over plain residual, checkpointed, {where}"
        rows.append(claim(what, history / plain, 1.0, at_most=True, bytes=found))
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--layers", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--fewer", type=int, default=512, help="tokens of the plain forms")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    deepest = plan(budget="24GiB", width=DIM, tokens=8192).sizes.layers
    what = "deepest encoder in 24 GiB by plan, D=512, T=8192, Adam, 6 decoder layers, V=32000"
    rows = [
        claim(what, deepest, 340),
        history_row(args.layers, args.tokens),
        *ratio_rows(args.layers, args.fewer),
    ]
    if args.output is not None:
        write_atomically(args.output, (json.dumps(rows, indent=2) + "\n").encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
