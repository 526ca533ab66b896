"""Beam search of deepfast beside `generate` of Hugging Face transformers, at the same sizes.

    python -m bench.huggingface
    python -m bench.huggingface --dims 256 --layers 30+6,12+1

A `MarianMTModel` and a `Transformer` of the same widths, depths and vocabulary, both post-norm with
relu, fp32. Times are CPU seconds of one thread, which other work beside it disturbs less than
the clock. The weights are random and eos is made unlikely, so every search takes --length tokens
and then eos, in both systems. They take turns in one process; the ratio is the median over the
rounds. Needs `pip install transformers`; without it the command says so and ends.
"""

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from bench.generation import EOS, numbers, search
from deepfast.clock import on_cpu
from deepfast.machine import cpu_model
from deepfast.measure.clock import interleave, keep_memory, ratio
from deepfast.mt.models import Transformer, TransformerConfig

UNLIKELY = -30.0
"""What is added to the logit of eos."""
HEADS, BEAM = 4, 4


class Endless(Transformer):
    """A model that ends no sentence before the search does."""

    def project(self, x: torch.Tensor) -> torch.Tensor:
        logits = super().project(x)
        logits[:, EOS] += UNLIKELY
        return logits


def deepfast_run(
    dim: int, encoder: int, decoder: int, vocab_size: int, source: torch.Tensor, length: int
) -> Callable[[], int]:
    torch.manual_seed(1)
    config = TransformerConfig(
        dim=dim, num_heads=HEADS, ffn_dim=4 * dim, encoder_layers=encoder, decoder_layers=decoder,
        vocab_size=vocab_size, norm="post", encoder_connection="residual",
    )  # fmt: skip
    return partial(search, Endless(config).eval(), source, length)


def huggingface_run(
    dim: int, encoder: int, decoder: int, vocab_size: int, source: torch.Tensor, length: int
) -> Callable[[], int]:
    from transformers import MarianConfig, MarianMTModel

    torch.manual_seed(1)
    config = MarianConfig(
        vocab_size=vocab_size, decoder_vocab_size=vocab_size, d_model=dim,
        encoder_layers=encoder, decoder_layers=decoder,
        encoder_ffn_dim=4 * dim, decoder_ffn_dim=4 * dim,
        encoder_attention_heads=HEADS, decoder_attention_heads=HEADS,
        activation_function="relu", scale_embedding=True, max_position_embeddings=512,
        pad_token_id=0, bos_token_id=2, eos_token_id=EOS, decoder_start_token_id=2,
        forced_eos_token_id=EOS,
    )  # fmt: skip
    model = MarianMTModel(config).eval()
    model.final_logits_bias[:, EOS] = UNLIKELY
    mask = torch.ones_like(source)

    def run() -> int:
        found = model.generate(
            source, attention_mask=mask, num_beams=BEAM, do_sample=False,
            max_new_tokens=length + 1, length_penalty=1.0,
        )  # fmt: skip
        # Without the token that starts the decoder.
        return found[:, 1:].numel()

    return run


def depths(text: str) -> list[tuple[int, int]]:
    return [
        (int(encoder), int(decoder))
        for encoder, decoder in (part.split("+") for part in text.split(","))
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dims", type=numbers, default=[128, 256])
    parser.add_argument("--layers", type=depths, default=[(4, 4), (6, 6), (30, 6), (12, 1)])
    parser.add_argument("--vocabulary", type=int, default=8000)
    parser.add_argument("--sentences", type=int, default=32)
    parser.add_argument("--length", type=int, default=25, help="tokens of source and translation")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    if importlib.util.find_spec("transformers") is None:
        print("bench.huggingface: transformers is not installed, so nothing is compared")
        return 0
    import transformers

    keep_memory()
    source = torch.randint(4, args.vocabulary, (args.sentences, args.length))
    source[:, -1] = EOS
    print(f"{args.sentences} sentences of {args.length} tokens, beam {BEAM}, {args.vocabulary} "
          f"pieces, float32, {cpu_model()}, {torch.get_num_threads()} threads, torch "
          f"{torch.__version__}, transformers {transformers.__version__}\n")  # fmt: skip
    print(
        "| channels | encoder + decoder layers | deepfast, target tokens/s | transformers | ratio |"
    )
    print("|---|---|---|---|---|", flush=True)
    for dim in args.dims:
        for encoder, decoder in args.layers:
            sizes = dim, encoder, decoder, args.vocabulary, source, args.length
            runs = {"deepfast": deepfast_run(*sizes), "transformers": huggingface_run(*sizes)}
            tokens = {name: run() for name, run in runs.items()}
            if len(set(tokens.values())) > 1:
                raise RuntimeError(f"expected translations of the same lengths, got {tokens}")
            rows = interleave(
                runs, repeats=args.rounds, clock=partial(on_cpu, now=time.process_time)
            )
            ours, theirs = (tokens[name] / rows[name].median for name in runs)
            factor = ratio(rows["transformers"], rows["deepfast"])
            print(f"| {dim} | {encoder} + {decoder} | {ours:.0f} | {theirs:.0f} | {factor:.2f} |",
                  flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
