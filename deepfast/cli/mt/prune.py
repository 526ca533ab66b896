"""Writes the model of a checkpoint as a single file, without the layers that latent depth does not
use and without the state of the optimizer: no run can resume from it.

A name that ends in .safetensors gets the weights alone, with the model's kind, config and step as
metadata, for other programs. Any other name gets a file for deepfast mt translate, with the
vocabulary. The checkpoint is a file, or the folder of a step.

The outputs are the same. So all layers stay with latent.evaluation mean, which uses each of them,
and in a post-norm model, which applies the norms of unused layers.

For a model of several languages, --language keeps only the layers of that language. The result is a
plain Transformer whose source sentences still begin with the language's tag. Without --language,
every layer that some language uses stays."""

import argparse
import json
from dataclasses import asdict

from deepfast.cli.mt.decoding import to_translate
from deepfast.cli.outputs import check_keeps_run, checkpoint_output
from deepfast.files import require, write_atomically
from deepfast.mt.models.checkpoint import load_checkpoint, model_of, save_checkpoint
from deepfast.mt.models.prune import prune

EXAMPLE = """deepfast mt prune runs/phrases-latent/average.pt --language fr --output fr.pt
  deepfast mt prune runs/deep/step-00001000 --output deep.safetensors"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("checkpoint", help="written by deepfast mt train: a file or a folder")
    add("--output", required=True, help="the file to write: NAME.pt or NAME.safetensors")
    add("--language", help="keep only the layers of this language")


def run(args: argparse.Namespace) -> int:
    output = checkpoint_output(args.output)
    content = load_checkpoint(args.checkpoint)
    model = model_of(args.checkpoint, content)
    check_keeps_run(output, args.checkpoint)
    config, weights = prune(model, args.language)
    weights = {name: weight.contiguous() for name, weight in weights.items()}
    metadata = {
        "kind": content["kind"],
        "config": json.dumps(asdict(config)),
        "step": str(content["step"]),
    }
    if output.suffix == ".safetensors":
        save = require("safetensors.torch", "writing safetensors").save
        write_atomically(output, save(weights, metadata))
    else:
        save_checkpoint(output, content | {"config": asdict(config), "model": weights})
    for side in ("encoder", "decoder"):
        before, after = (getattr(c, f"{side}_layers") for c in (model.config, config))
        if after < before:
            print(f"{side}: {after} of {before} layers")
    before, after = (sum(w.numel() for w in x.values()) for x in (model.state_dict(), weights))
    print(f"{metadata['kind']} of step {metadata['step']}, {after:,} of {before:,} parameters")
    if output.suffix != ".safetensors":
        languages = list(getattr(config, "languages", ()))
        print(to_translate(args.output, *(["--language", languages[0]] if languages else [])))
    return 0
