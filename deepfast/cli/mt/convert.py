"""Converts a fairseq checkpoint, of the DLCL authors' code or of a plain Transformer, to one that
`deepfast mt translate` reads.

The dictionaries are fairseq's: one `token count` per line. Give the same file twice if both
languages share one. Lines to translate must be split into tokens as in training. In the output,
pieces that end in @@ are joined to the next piece."""

import argparse

from deepfast.cli.mt.decoding import to_translate
from deepfast.cli.outputs import check_other, checkpoint_output
from deepfast.mt.data import TokenVocabulary, read_dictionary

EXAMPLE = (
    "deepfast mt convert checkpoint_best.pt --source-dictionary dict.en.txt "
    "--target-dictionary dict.de.txt --output model.pt"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="FAIRSEQ", help="the checkpoint to convert")
    for side in ("source", "target"):
        parser.add_argument(f"--{side}-dictionary", required=True, metavar="FILE",
                            help=f"tokens of the {side} and their counts")  # fmt: skip
    parser.add_argument("--output", required=True, metavar="FILE", help="the checkpoint to write")
    text = "load objects of any class, which can run any code: only for files you trust"
    parser.add_argument("--unsafe", action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    from deepfast.mt.models import fairseq, kind_of
    from deepfast.mt.models.checkpoint import load_model
    from deepfast.mt.training.checkpoint import save_checkpoint

    output = checkpoint_output(args.output)
    check_other(output, [args.checkpoint, args.source_dictionary, args.target_dictionary])
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
    save_checkpoint(output, {
        "kind": kind_of(config), "config": vars(config), "model": weights,
        "vocabulary": vocabulary.to_bytes(),
    })  # fmt: skip
    # Loads it as translation will, to check that the file is complete.
    model, _ = load_model(args.output)
    count = sum(p.numel() for p in model.parameters())
    print(
        f"model: {model.describe()}, {count:,} parameters, embeddings shared: "
        f"{config.share_embeddings}"
    )
    print(to_translate(args.output))
    return 0
