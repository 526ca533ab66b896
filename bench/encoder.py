"""A training step of deepfast's encoder beside `torch.nn.TransformerEncoder`.

    python -m bench.encoder --threads 1
    python -m bench.encoder --layers 30 --dim 512

Two batches: sentences of 14 +- 4 words, which torch pads and masks, and sentences of one length
without a mask. deepfast has plain residual connections and DLCL. Pre-norm, dropout 0.1. A step is
forward, backward and Adam, fp32. The models take turns in one process; a ratio is torch's time over
deepfast's, the median over the rounds.
"""

import argparse
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

from deepfast.machine import cpu_model
from deepfast.measure.clock import interleave, keep_memory, ratio
from deepfast.nn import TransformerEncoder

HEADS, DROPOUT, MEAN, DEVIATION = 4, 0.1, 14, 4


def lengths(sentences: int, ragged: bool) -> Tensor:
    """Words of each sentence."""
    if not ragged:
        return torch.full((sentences,), MEAN)
    drawn = MEAN + DEVIATION * torch.randn(sentences)
    return drawn.round().long().clamp(min=1)


def models(layers: int, dim: int) -> dict[str, nn.Module]:
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(
        dim, HEADS, 4 * dim, DROPOUT, batch_first=True, norm_first=True
    )
    sizes = (layers, dim, HEADS, 4 * dim)
    # In torch's layer one number is the dropout of branches, attention weights and activations.
    dropout = {"dropout": DROPOUT, "attention_dropout": DROPOUT, "activation_dropout": DROPOUT}
    # torch packs padded sentences only in evaluation, without gradients.
    return {
        "torch": nn.TransformerEncoder(
            layer, layers, nn.LayerNorm(dim), enable_nested_tensor=False
        ),
        "residual": TransformerEncoder(*sizes, connection="residual", **dropout),
        "DLCL": TransformerEncoder(*sizes, connection="dlcl", **dropout),
    }


def step(model: nn.Module, x: Tensor, padding: Tensor | None) -> Callable[[], None]:
    """A whole step on x (B, S, D); padding (B, S), True where there is no word."""
    adam = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    words = None if padding is None else (~padding).unsqueeze(-1)
    name = (
        "src_key_padding_mask" if isinstance(model, nn.TransformerEncoder) else "key_padding_mask"
    )

    def run() -> None:
        y = model(x, **{name: padding})
        (y if words is None else y * words).square().sum().backward()
        adam.step()
        model.zero_grad(set_to_none=True)

    return run


def table(layers: int, dim: int, sentences: int, rounds: int) -> list[str]:
    """Lines of a Markdown table."""
    lines = ["| sentences | torch, ms | residual, ms | ratio | DLCL, ms | ratio |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    torch.manual_seed(0)
    for ragged, title in ((True, f"of {MEAN} +- {DEVIATION} words"), (False, f"of {MEAN} words")):
        words = lengths(sentences, ragged)
        padding = torch.arange(int(words.max())) >= words[:, None] if ragged else None
        x = torch.randn(sentences, int(words.max()), dim)
        rows = interleave(
            {name: step(model, x, padding) for name, model in models(layers, dim).items()},
            repeats=rounds,
        )
        cells = [f"{rows['torch'].median * 1e3:.0f}"]
        for name in ("residual", "DLCL"):
            cells += [f"{rows[name].median * 1e3:.0f}", f"{ratio(rows['torch'], rows[name]):.2f}"]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return lines


def parse(
    parser: argparse.ArgumentParser, argv: list[str] | None, rounds: int
) -> argparse.Namespace:
    """Adds --threads and --rounds, and sets the process up for timing."""
    parser.add_argument("--threads", type=int, help="default: torch's own")
    parser.add_argument("--rounds", type=int, default=rounds)
    args = parser.parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    keep_memory()
    return args


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--sentences", type=int, default=64)
    args = parse(parser, argv, rounds=9)
    print(
        f"{args.layers} layers, {args.dim} channels, {args.sentences} sentences, float32, "
        f"{cpu_model()}, {torch.get_num_threads()} threads, torch {torch.__version__}\n"
    )
    print("\n".join(table(args.layers, args.dim, args.sentences, args.rounds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
