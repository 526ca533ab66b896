"""A depth connection and fused ops in a training loop of your own.

    python examples/own_loop.py --layers 12 --steps 300

The model reads a sequence and writes it backwards. Every block reads a learned sum of all blocks
below it (DLCL). Sequences have different lengths and are packed, so nothing runs over padding.
"""

import argparse

import torch
from torch import Tensor, nn

import deepfast
from deepfast import ops

SYMBOLS, LONGEST = 10, 12


class Block(nn.Module):
    """A pre-norm Transformer block over packed tokens (T, D)."""

    def __init__(self, dim: int, num_heads: int, dropout: float):
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.norm1, self.norm2 = deepfast.nn.LayerNorm(dim), deepfast.nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        # The norm and the product in one op: the normalised x is not kept for backward.
        qkv = ops.norm_linear(x, self.norm1.weight, self.norm1.bias, self.qkv.weight, self.qkv.bias)
        q, k, v = qkv.unflatten(1, (3, self.num_heads, -1)).unbind(1)
        a = ops.attention(
            q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=LONGEST,
            max_seqlen_k=LONGEST,
        )  # fmt: skip
        # x + dropout(out(a)), its norm, and the feed-forward block.
        branch, x = ops.feed_forward(
            self.out(a.flatten(1)), self.norm2.weight, self.norm2.bias, self.up.weight,
            self.up.bias, self.down.weight, self.down.bias, residual=x, dropout_p=self.dropout,
            activation="gelu", activation_dropout_p=self.dropout, training=self.training,
        )  # fmt: skip
        return x + branch


class Reverser(nn.Module):
    """Blocks, each of which reads all blocks below it."""

    def __init__(self, layers: int, dim: int, num_heads: int = 4, dropout: float = 0.0):
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS, dim)
        self.from_start, self.from_end = nn.Embedding(LONGEST, dim), nn.Embedding(LONGEST, dim)
        self.blocks = nn.ModuleList(Block(dim, num_heads, dropout) for _ in range(layers))
        self.connect = deepfast.nn.DLCL(layers, dim)
        self.norm = deepfast.nn.LayerNorm(dim)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """(T, D), to be multiplied by the symbols' embeddings."""
        embedding = self.symbols(batch["symbols"]) + self.from_start(batch["from_start"])
        history = deepfast.nn.DepthHistory()  # one for each forward pass
        x = self.connect(embedding + self.from_end(batch["from_end"]), history)
        for block in self.blocks:
            x = self.connect(block(x, batch["cu_seqlens"]), history)
        return self.norm(x)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """The logits are never held at once."""
        return ops.linear_cross_entropy(self(batch), self.symbols.weight, batch["target"])


def make_batch(sentences: int) -> dict[str, Tensor]:
    """Random sequences one after another; sequence i is ``cu_seqlens[i] : cu_seqlens[i + 1]``."""
    lengths = torch.randint(1, LONGEST + 1, (sentences,)).tolist()
    sequences = [torch.randint(SYMBOLS, (length,)) for length in lengths]
    positions = [torch.arange(length) for length in lengths]
    return {
        "symbols": torch.cat(sequences),
        "target": torch.cat([sequence.flip(0) for sequence in sequences]),
        "from_start": torch.cat(positions),
        "from_end": torch.cat([position.flip(0) for position in positions]),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).int(),
    }


def train(layers: int, dim: int, steps: int, sentences: int = 64, lr: float = 3e-3) -> list[float]:
    """Returns the loss of every step."""
    torch.manual_seed(0)
    model = Reverser(layers, dim)
    nn.init.normal_(model.symbols.weight, std=dim**-0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for step in range(steps):
        loss = model.loss(make_batch(sentences))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 50 == 49 or step == steps - 1:
            print(f"step {step + 1}: loss {losses[-1]:.3f}")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    train(args.layers, args.dim, args.steps)


if __name__ == "__main__":
    main()
