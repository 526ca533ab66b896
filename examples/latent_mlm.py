"""A deep encoder with latent depth learns to fill in masked pieces of text.

    python examples/latent_mlm.py --layers 96 --keep 48 --steps 5000 --text train.en
    python examples/latent_mlm.py --layers 12 --keep 6 --steps 300     # on generated phrases
    python examples/latent_mlm.py --layers 12 --static                 # all layers, to compare with

The encoder has more layers than it needs. It learns a probability for each layer, and a term of the
loss pulls their sum to --keep. At the end the layers below the threshold are left out. Li et al.,
Deep Transformers with Latent Depth, 2020, train 96 layers so, and say that latent depth needs no
layer norms: --norm-type none leaves them out. Then each branch begins smaller, by the square root
of the number of branches. As in BERT, 15% of the pieces are to be predicted; of them 80% become a
mask, 10% another piece, 10% stay.
"""

import argparse
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

import deepfast
from deepfast import ops
from deepfast.mt.data import TokenBatches, Vocabulary, phrases, read_lines
from deepfast.mt.models.transformer import sinusoids

CHOSEN, MASKED, RANDOM = 0.15, 0.8, 0.1
IGNORED = -100


class MaskedLanguageModel(nn.Module):
    """An encoder whose output is multiplied by the embeddings of the pieces.

    keep: how many layers should stay; None for a static encoder, which uses all of them.
    """

    def __init__(
        self, pieces: int, layers: int, keep: float | None, dim: int, num_heads: int, steps: int,
        norm_type: str = "layer",
    ):  # fmt: skip
        super().__init__()
        self.dim, self.mask = dim, pieces
        # One embedding more than there are pieces, for the mask.
        self.embedding = nn.Embedding(pieces + 1, dim, padding_idx=0)
        nn.init.normal_(self.embedding.weight, std=dim**-0.5)
        latent = {"target_layers": keep, "target_weight": 0.1, "hard": True, "lr_scale": 20.0,
                  "soft_steps": steps // 4, "anneal_steps": steps // 4}  # fmt: skip
        self.encoder = deepfast.nn.TransformerEncoder(
            layers, dim, num_heads, 4 * dim, norm_type=norm_type, activation="gelu",
            **({"connection": "residual"} if keep is None
               else {"connection": "latent", "latent": latent}),
        )  # fmt: skip

        if norm_type == "none":
            # Otherwise the sum of the branches of 96 layers overflows before the first step.
            with torch.no_grad():
                for layer in self.encoder.layers:
                    layer.attention.out.weight.mul_((2 * layers) ** -0.5)
                    layer.feed_forward.down.weight.mul_((2 * layers) ** -0.5)

    @property
    def latent(self) -> deepfast.nn.LatentDepth | None:
        return self.encoder.latent

    def forward(self, pieces_BS: Tensor) -> Tensor:
        """(B, S, D)."""
        places = torch.arange(pieces_BS.shape[1], device=pieces_BS.device)
        x = self.embedding(pieces_BS) * self.dim**0.5 + sinusoids(places, self.dim)
        return self.encoder(x, pieces_BS == 0)

    def loss(self, pieces_BS: Tensor) -> Tensor:
        """Mean negative log-likelihood of the chosen pieces, with the penalty of latent depth."""
        seen, labels = hidden(pieces_BS, self.mask)
        nll = ops.linear_cross_entropy(
            self(seen).flatten(0, 1), self.embedding.weight[:-1], labels.flatten(),
            ignore_index=IGNORED,
        )  # fmt: skip
        return nll if self.latent is None else nll + self.latent.penalty()


def hidden(pieces_BS: Tensor, mask: int) -> tuple[Tensor, Tensor]:
    """What the model sees, and what it must predict: `IGNORED` where nothing was chosen."""
    real = pieces_BS != 0
    chosen = real & (torch.rand(pieces_BS.shape) < CHOSEN)
    # Each sentence has something to predict.
    chosen[:, 0] |= ~chosen.any(1)
    draw = torch.rand(pieces_BS.shape)
    seen = pieces_BS.masked_fill(chosen & (draw < MASKED), mask)
    other = chosen & (draw >= MASKED) & (draw < MASKED + RANDOM)
    # Pieces 0 to 3 are padding, unknown, begin and end.
    seen = torch.where(other, torch.randint(4, mask, pieces_BS.shape), seen)
    return seen, pieces_BS.masked_fill(~chosen, IGNORED)


def batches(lines: Sequence[str], vocabulary: Vocabulary, max_tokens: int) -> Iterator[Tensor]:
    """Endless batches of sentences of about one length, (B, S) with 0 at padding."""
    encoded = (vocabulary.encode(line) for line in lines)
    data = TokenBatches([(pieces, pieces) for pieces in encoded if pieces], max_tokens=max_tokens)
    while True:
        for batch in data:
            yield batch.source_BS


def train(
    lines: Sequence[str], *, layers: int, keep: float | None, dim: int, steps: int,
    num_heads: int = 4,
    vocab_size: int = 8000, max_tokens: int = 2048, lr: float = 1e-3, norm_type: str = "layer",
) -> tuple[MaskedLanguageModel, list[float]]:  # fmt: skip
    """Returns the model and the loss of every step."""
    torch.manual_seed(0)
    vocabulary = Vocabulary.train(lines, vocab_size, at_most=True)
    model = MaskedLanguageModel(len(vocabulary), layers, keep, dim, num_heads, steps, norm_type)
    latent = model.latent
    others = [p for p in model.parameters() if latent is None or p is not latent.logits]
    groups: list[dict] = [{"params": others}]
    if latent is not None:
        groups.append({"params": [latent.logits], "lr": lr * latent.lr_scale})
    optimizer = torch.optim.Adam(groups, lr=lr)
    losses = []
    source = batches(lines, vocabulary, max_tokens)
    for step in range(1, steps + 1):
        if latent is not None:
            latent.set_step(step)
        loss = model.loss(next(source))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 50 == 0 or step == steps:
            depth = layers if latent is None else latent.depth().item()
            print(f"step {step}: loss {losses[-1]:.3f}, expected layers {depth:.1f}")
    return model, losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", help="a text file, plain or gzip; default: generated phrases")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--keep", type=float, default=6, help="how many layers should stay")
    parser.add_argument("--static", action="store_true", help="use all layers; no latent depth")
    parser.add_argument("--norm-type", choices=("layer", "rms", "none"), default="layer")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    if args.text is None:
        lines = [source for source, _ in phrases("de", train=20_000, dev=0, test=0)["train"]]
    else:
        lines = read_lines(args.text)
    model, _ = train(
        lines, layers=args.layers, keep=None if args.static else args.keep, dim=args.dim,
        steps=args.steps, norm_type=args.norm_type,
    )  # fmt: skip
    if model.latent is None:
        return
    used = [k for k, kept in enumerate(model.eval().latent.keeps()) if kept]
    print(f"{len(used)} of {args.layers} layers stay: {used}")


if __name__ == "__main__":
    main()
