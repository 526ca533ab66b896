"""Removes the layers that latent depth does not use: a smaller checkpoint with the same outputs.

With latent.evaluation mean every layer is used. Those whose probability is below latent.threshold
are removed, and the outputs change by their part.

For a model of several languages, --language keeps only the layers of that language. The result is a
plain Transformer whose source sentences still begin with the language's tag. Without --language,
every layer that some language uses stays."""

import argparse

from deepfast.cli.mt.decoding import to_translate
from deepfast.cli.outputs import check_keeps_run, checkpoint_output
from deepfast.mt.models.checkpoint import load_model, read_checkpoint
from deepfast.mt.models.prune import SIDES, prune_checkpoint
from deepfast.mt.training.checkpoint import save_checkpoint

EXAMPLE = "deepfast mt prune runs/phrases-latent/average.pt --language fr --output fr.pt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="written by deepfast mt train")
    parser.add_argument("--output", required=True, help="the smaller checkpoint to write")
    parser.add_argument("--language", help="keep only the layers of this language")


def run(args: argparse.Namespace) -> int:
    output = checkpoint_output(args.output)
    # Refuses an unusable checkpoint with its own message.
    load_model(args.checkpoint)
    content = read_checkpoint(args.checkpoint, optimizer=False)
    check_keeps_run(output, args.checkpoint, content)
    pruned = prune_checkpoint(content, args.language)
    # The weights are mapped from their file, which the output may overwrite.
    pruned["model"] = {name: weight.clone() for name, weight in pruned["model"].items()}
    save_checkpoint(output, pruned)
    for side in SIDES:
        before, after = (c["config"][f"{side}_layers"] for c in (content, pruned))
        print(f"{side}: {after} of {before} layers")
    counts = (sum(w.numel() for w in c["model"].values()) for c in (content, pruned))
    print("{1:,} of {0:,} parameters".format(*counts))
    languages = list(pruned["config"]["languages"])
    print(to_translate(args.output, *(["--language", languages[0]] if languages else [])))
    return 0
