"""Converts a checkpoint of fairseq, the DLCL authors' or a plain Transformer's, to one that
`deepfast translate` reads.

Dictionaries are fairseq's, a `token count` a line; give the same file twice where both languages
share one. Lines to translate must be split into tokens as in training; pieces that end in @@ are
joined again in the output."""

import argparse
import os

from deepfast.cli.translate import to_translate
from deepfast.mt.data import TokenVocabulary, read_dictionary

EXAMPLE = (
    "deepfast convert checkpoint_best.pt --source-dictionary dict.en.txt "
    "--target-dictionary dict.de.txt --output model.pt"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="FAIRSEQ", help="the checkpoint to convert")
    for side in ("source", "target"):
        parser.add_argument(f"--{side}-dictionary", required=True, metavar="FILE",
                            help=f"tokens of the {side} and their counts")  # fmt: skip
    parser.add_argument("--output", required=True, metavar="FILE", help="the checkpoint to write")
    parser.add_argument(
        "--unsafe", action="store_true", help="load objects of any class, which runs their code"
    )


def run(args: argparse.Namespace) -> int:
    from deepfast.mt.models import fairseq, kind_of
    from deepfast.mt.models.checkpoint import load_model
    from deepfast.mt.training.checkpoint import save_checkpoint

    if os.path.isdir(args.output):
        raise ValueError(f"--output: expected a file, got the folder {args.output}")
    content = fairseq.read_fairseq(args.checkpoint, unsafe=args.unsafe)
    config, weights = fairseq.convert(content)
    sizes = config.vocab_size, config.target_vocab_size or config.vocab_size
    dictionaries = []
    for side, rows in zip(("source", "target"), sizes, strict=True):
        path = getattr(args, f"{side}_dictionary")
        tokens, found = fairseq.layout(read_dictionary(path), rows, path)
        print(f"{side}: {found}")
        dictionaries.append(tokens)
    vocabulary = TokenVocabulary(*dictionaries)
    save_checkpoint(args.output, {
        "kind": kind_of(config), "config": vars(config), "model": weights,
        "vocabulary": vocabulary.to_bytes(),
    })  # fmt: skip
    # Read again as translation will: what was written is a whole model.
    model, _ = load_model(args.output)
    count = sum(p.numel() for p in model.parameters())
    print(f"model: {model.describe()}, {count:,} parameters, embeddings shared: "
          f"{config.share_embeddings}")  # fmt: skip
    print(to_translate(args.output))
    return 0
