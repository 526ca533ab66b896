"""Writes the model of a checkpoint as a single file, without the layers that latent depth does not
use and without the state of the optimizer: no run can resume from it.

A name that ends in .safetensors gets the weights alone, with the model's kind, config and step as
metadata, for other programs. Any other name gets a file for deepfast mt translate, with the
vocabulary. The checkpoint is a file, or the folder of a step.

Without the unused layers the outputs are the same. With latent.evaluation mean every layer is used:
those whose probability is below latent.threshold are removed, and the outputs change by their part.
--all-layers removes none.

For a model of several languages, --language keeps only the layers of that language. The result is a
plain Transformer whose source sentences still begin with the language's tag. Without --language,
every layer that some language uses stays."""

import argparse
import json

from deepfast.cli.mt.decoding import to_translate
from deepfast.cli.outputs import check_keeps_run, checkpoint_output
from deepfast.files import require, write_atomically
from deepfast.mt.models.checkpoint import load_checkpoint, model_of, save_checkpoint
from deepfast.mt.models.prune import SIDES, prune_checkpoint

EXAMPLE = """deepfast mt prune runs/phrases-latent/average.pt --language fr --output fr.pt
  deepfast mt prune runs/deep/step-00001000 --output deep.safetensors"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("checkpoint", help="written by deepfast mt train: a file or a folder")
    add("--output", required=True, help="the file to write: NAME.pt or NAME.safetensors")
    kept = parser.add_mutually_exclusive_group()
    kept.add_argument("--language", help="keep only the layers of this language")
    text = "keep the layers that are not used"
    kept.add_argument("--all-layers", action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    output = checkpoint_output(args.output)
    whole = load_checkpoint(args.checkpoint)
    # Refuses an unusable checkpoint with its own message.
    model_of(args.checkpoint, whole)
    check_keeps_run(output, args.checkpoint)
    content = whole
    latent = "latent" in [whole["config"].get(f"{side}_connection") for side in SIDES]
    if args.language or (latent and not args.all_layers):
        content = prune_checkpoint(content, args.language)
        for side in SIDES:
            before, after = (c["config"][f"{side}_layers"] for c in (whole, content))
            print(f"{side}: {after} of {before} layers")
    # The weights are mapped from their file, which the output may overwrite.
    weights = {name: weight.clone().contiguous() for name, weight in content["model"].items()}
    metadata = {
        "kind": content["kind"],
        "config": json.dumps(content["config"]),
        "step": str(content["step"]),
    }
    if output.suffix == ".safetensors":
        save = require("safetensors.torch", "writing safetensors").save
        write_atomically(output, save(weights, metadata))
    else:
        save_checkpoint(output, content | {"model": weights})
    before, after = (sum(w.numel() for w in c["model"].values()) for c in (whole, content))
    print(f"{metadata['kind']} of step {metadata['step']}, {after:,} of {before:,} parameters")
    if output.suffix != ".safetensors":
        languages = list(content["config"].get("languages") or [])
        print(to_translate(args.output, *(["--language", languages[0]] if languages else [])))
    return 0
