"""Generation speed in target tokens a second over encoder and decoder depth.

    python -m bench.generation
    python -m bench.generation --device cuda --size base --encoder 6,12,18,24,30,36

As in Figure 4 (encoder depth) and Table 5 (decoder depth) of Wang et al. 2019: pre-norm, 32
sentences, beam 4. The weights are random, so a search ends at --length tokens in all models alike.
The models take turns, medians are reported; a ratio is to the first model of its table, the median
over the rounds.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch

from deepfast.machine import cpu_model
from deepfast.measure.clock import interleave, keep_memory, ratio
from deepfast.mt.models import Transformer, TransformerConfig
from deepfast.mt.search import DecodingOptions, beam_search

SIZES = {
    "small": {"dim": 128, "num_heads": 4, "ffn_dim": 512, "vocab_size": 2000},
    "base": {"dim": 512, "num_heads": 8, "ffn_dim": 2048, "vocab_size": 32000},
}
SENTENCES, BEAM, PLAIN = 32, 4, 6
EOS = 3


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def search(model: Transformer, source_BS: torch.Tensor, length: int) -> int:
    """Target tokens of the best translations, eos included."""
    options = DecodingOptions(beam=BEAM, max_length=length)
    found = beam_search(model, source_BS, options)
    if source_BS.is_cuda:
        torch.cuda.synchronize()
    return sum(len(best[0].tokens) + 1 for best in found)


def make(size: str, encoder: int, decoder: int, device: str) -> Transformer:
    torch.manual_seed(1)
    config = TransformerConfig(encoder_layers=encoder, decoder_layers=decoder, norm="pre",
                               encoder_connection="dlcl", **SIZES[size])  # fmt: skip
    return Transformer(config).to(device).eval()


def table(
    depths: Sequence[tuple[int, int]], run: Callable[[int, int], Callable[[], int]], rounds: int
) -> list[str]:
    """Lines of a Markdown table: tokens a second of every pair of depths, in turns."""
    variants = {f"{encoder} + {decoder}": run(encoder, decoder) for encoder, decoder in depths}
    tokens = {name: variant() for name, variant in variants.items()}
    rows = interleave(variants, repeats=rounds)
    first = next(iter(rows))
    lines = ["| encoder + decoder layers | target tokens/s | ratio |", "|---|---|---|"]
    for name, row in rows.items():
        relative = ratio(rows[first], row) * tokens[name] / tokens[first]
        lines.append(f"| {name} | {tokens[name] / row.median:.0f} | {relative:.2f} |")
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--encoder", type=numbers, default=[6, 12, 20, 30], help="with 6 decoder")
    parser.add_argument("--decoder", type=numbers, default=[4, 6, 8], help="with 6 encoder layers")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--length", type=int, default=25, help="tokens of source and translation")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    if args.device == "cpu":
        keep_memory()
    sizes = SIZES[args.size]
    source = torch.randint(4, sizes["vocab_size"], (SENTENCES, args.length), device=args.device)
    source[:, -1] = EOS

    def run(encoder: int, decoder: int) -> Callable[[], int]:
        model = make(args.size, encoder, decoder, args.device)
        return partial(search, model, source, args.length)

    cuda = args.device.startswith("cuda")
    where = (
        torch.cuda.get_device_name()
        if cuda
        else f"{cpu_model()}, {torch.get_num_threads()} threads"
    )
    print(f"{SENTENCES} sentences of {args.length} tokens, beam {BEAM}, {sizes['dim']} channels, "
          f"{sizes['vocab_size']} pieces, float32, {where}, torch {torch.__version__}")  # fmt: skip
    for depths in ([(n, PLAIN) for n in args.encoder], [(PLAIN, n) for n in args.decoder]):
        print("", *table(depths, run, args.rounds), sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
