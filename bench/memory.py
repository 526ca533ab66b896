"""What recompute policies save at full size: `python -m bench.memory`.

Bytes are counted without parameters and their gradients. `deepfast report` measures what policies
cost in time. The numbers go to bench/results/results.csv.
"""

import argparse
import sys

import torch
from torch import nn

from bench.record import record
from deepfast.measure.encoders import CHECKPOINTED, DROPOUT, STACK, PlainEncoder
from deepfast.memory import LiveBytes, plan
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
    return TransformerEncoder(layers, DIM, HEADS, 4 * DIM, dropout=DROPOUT, recompute="layer+input")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--fewer", type=int, default=512, help="tokens of the plain forms")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    command, sizes = "python -m bench.memory", f"L={args.layers}, D={DIM}"
    what = f"predicted: deepest encoder in 24 GiB, D={DIM}, T=8192, Adam, 6 decoder layers"
    deepest = plan(budget="24GiB", dim=DIM, tokens=8192).sizes.num_layers
    record("deepest_24gib", deepest, "layers", what, command, "any")
    what = f"activations of a step under layer+input, {sizes}, T={args.tokens}, bf16"
    found = activations(encoder(args.layers), args.tokens)
    record(f"history_gib_{args.layers}", found / GIB, "GiB", what, command)
    # At fewer tokens, because plain forms need more memory. Under autocast the residual stream of
    # plain PyTorch is fp32.
    for name, how, count in (
        ("autocast", "bytes per token, bf16 autocast", per_token),
        ("bf16", "bytes, pure bf16", activations),
    ):
        history = count(encoder(args.layers), args.fewer)
        stack, checkpointed = (
            count(PlainEncoder(args.layers, DIM, HEADS, 4 * DIM, form=form), args.fewer)
            for form in (STACK, CHECKPOINTED)
        )
        what = f"{how}: stack and sum over layer+input, {sizes}, T={args.fewer}"
        record(f"history_stack_{name}_{args.layers}", stack / history, "x", what, command)
        what = f"{how}: layer+input over plain residual with checkpointing, {sizes}, T={args.fewer}"
        key = f"history_checkpointed_{name}_{args.layers}"
        record(key, history / checkpointed, "x", what, command)
    return 0


if __name__ == "__main__":
    sys.exit(main())
