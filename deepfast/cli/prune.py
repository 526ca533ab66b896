"""Leaves out the layers that latent depth does not use: a smaller checkpoint, the same outputs.

Of a model of several languages, --language keeps what this one uses: a plain Transformer, whose
source sentences still begin with the language's tag. Without it the layers stay that any language
uses."""

import argparse

from deepfast.cli.translate import to_translate
from deepfast.mt.models.checkpoint import load_model, read_checkpoint
from deepfast.mt.models.prune import SIDES, prune_checkpoint
from deepfast.mt.training.checkpoint import save_checkpoint

EXAMPLE = "deepfast prune runs/phrases-latent/average.pt --language fr --output fr.pt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="written by deepfast train")
    parser.add_argument("--output", required=True, help="the smaller checkpoint")
    parser.add_argument("--language", help="for this one alone")


def run(args: argparse.Namespace) -> int:
    # A checkpoint that cannot be used is refused in its own words.
    load_model(args.checkpoint)
    content = read_checkpoint(args.checkpoint)
    pruned = prune_checkpoint(content, args.language)
    # The weights are mapped from the file they came from, which the output may replace.
    pruned["model"] = {name: weight.clone() for name, weight in pruned["model"].items()}
    save_checkpoint(args.output, pruned)
    for side in SIDES:
        before, after = (c["config"][f"{side}_layers"] for c in (content, pruned))
        print(f"{side}: {after} of {before} layers")
    counts = (sum(w.numel() for w in c["model"].values()) for c in (content, pruned))
    print("{1:,} of {0:,} parameters".format(*counts))
    languages = list(pruned["config"]["languages"])
    print(to_translate(args.output, *(["--language", languages[0]] if languages else [])))
    return 0
