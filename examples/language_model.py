"""A causal language model of plain torch with a depth connection of your choice.

    python examples/language_model.py --train train.en.gz --dev val.en.gz --connection denseformer

The model is a GPT of 24 layers. `deepfast.connect` connects its list of blocks; the training loop
does not change. It prints the NLL of the dev text in nats a token, of windows of 128 tokens.
"""

import argparse
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deepfast
from deepfast.mt.data import Vocabulary
from deepfast.mt.data.text import read_lines

SUBLAYERS = {"sublayers": (("norm1", "attention"), ("norm2", "mlp"))}
CONNECTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "dlcl": {"connection": "dlcl"},
    "denseformer": {"connection": "denseformer"},
    "attnres": {"connection": "attnres"} | SUBLAYERS,
    "block_attnres": {"connection": "block_attnres", "block": 3} | SUBLAYERS,
    "additive": {"connection": "attnres", "additive": "gated"} | SUBLAYERS,
}
"""Name -> arguments of `deepfast.connect`."""
BATCH, WARMUP, EVERY = 8, 200, 150


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
    """A pre-norm block."""

    def __init__(self, dim: int, heads: int, ffn_dim: int, dropout: float):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, dropout)
        up, down = nn.Linear(dim, ffn_dim), nn.Linear(ffn_dim, dim)
        self.mlp = nn.Sequential(up, nn.GELU(), down, nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """A GPT with learned positions and a tied head."""

    def __init__(
        self, connection: str, vocab_size: int, *, layers: int = 24, dim: int = 128, heads: int = 4,
        ffn_dim: int = 256, length: int = 128, dropout: float = 0.1,
    ):  # fmt: skip
        super().__init__()
        self.dropout, self.length = dropout, length
        self.words, self.places = nn.Embedding(vocab_size, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, ffn_dim, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        # As nanoGPT begins: the last matrix of each branch is smaller.
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                ends = name.endswith(("out.weight", "mlp.2.weight"))
                nn.init.normal_(weight, std=0.02 / (math.sqrt(2 * layers) if ends else 1))
        if options := CONNECTIONS[connection]:
            deepfast.connect(self, "blocks", norm="pre", dim=dim, **options)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) to (B, T, D)."""
        x = self.words(tokens) + self.places.weight
        x = F.dropout(x, self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def loss(self, tokens: Tensor) -> Tensor:
        """The mean NLL of (B, T + 1) tokens after their first, nats."""
        x = self(tokens[:, :-1]).flatten(0, 1)
        return deepfast.ops.linear_cross_entropy(x, self.words.weight, tokens[:, 1:].flatten())


def stream(lines: list[str], vocabulary: Vocabulary) -> Tensor:
    """The tokens of a text, each sentence with eos."""
    return torch.tensor(
        [i for line in lines for i in (*vocabulary.encode(line), vocabulary.eos_id)]
    )


def windows(tokens: Tensor, starts: Tensor, length: int) -> Tensor:
    return tokens[starts[:, None] + torch.arange(length + 1)]


@torch.no_grad()
def validate(model: Model, dev: Tensor) -> float:
    """NLL of windows side by side, nats a token."""
    model.eval()
    starts = torch.arange(0, len(dev) - model.length, model.length)
    losses = [model.loss(windows(dev, part, model.length)) for part in starts.split(32)]
    model.train()
    sizes = torch.tensor([len(part) / len(starts) for part in starts.split(32)])
    return float(torch.stack(losses) @ sizes)


def train(
    texts: tuple[list[str], list[str]], connection: str, *, steps: int, seed: int = 1,
    lr: float = 4e-3, vocab_size: int = 3000, **sizes: Any,
) -> list[float]:  # fmt: skip
    """Trains on the first text; returns the NLL of the second, every 150 steps and at the end."""
    vocabulary = Vocabulary.train(texts[0], vocab_size)
    learned, dev = (stream(text, vocabulary) for text in texts)
    torch.manual_seed(seed)
    model = Model(connection, vocab_size, **sizes)
    if min(len(learned), len(dev)) <= model.length:
        raise ValueError(f"expected texts of more than {model.length} tokens")
    order = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), fused=True)
    found = []
    for step in range(1, steps + 1):
        starts = torch.randint(len(learned) - model.length, (BATCH,), generator=order)
        for group in optimizer.param_groups:
            group["lr"] = lr * min(step / WARMUP, (WARMUP / step) ** 0.5)
        optimizer.zero_grad()
        model.loss(windows(learned, starts, model.length)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % EVERY == 0 or step == steps:
            found.append(validate(model, dev))
            print(f"step {step}: dev NLL {found[-1]:.4f}", flush=True)
    print(f"{connection}: lowest dev NLL {min(found):.3f}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--train", required=True, help="text, plain or gzip, a sentence a line")
    parser.add_argument("--dev", required=True, help="text to validate on")
    parser.add_argument("--connection", choices=CONNECTIONS, default="attnres")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    texts = read_lines(args.train), read_lines(args.dev)
    train(texts, args.connection, steps=args.steps, seed=args.seed, lr=args.lr)


if __name__ == "__main__":
    main()
