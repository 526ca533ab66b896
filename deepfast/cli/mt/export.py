"""Writes the model of a checkpoint, a folder of several ranks or a file, as a single file.

A name that ends in .safetensors gets the weights alone, with the model's kind, config and step as
metadata, for other programs. Any other name gets a file for `deepfast mt translate`, with the
vocabulary. Neither holds the state of the optimizer: no run can resume from it."""

import argparse
import json
from pathlib import Path

from deepfast.cli.mt.decoding import to_translate
from deepfast.cli.outputs import check_keeps_run, checkpoint_output
from deepfast.files import require, write_atomically

EXAMPLE = "deepfast mt export runs/deep/step-00001000 --output deep.pt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="the folder or file to read")
    parser.add_argument("--output", required=True, metavar="FILE",
                        help="the file to write: NAME.pt or NAME.safetensors")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    from deepfast.mt.models.checkpoint import load_model
    from deepfast.mt.training.checkpoint import load_checkpoint, save_checkpoint

    output = checkpoint_output(args.output)
    content = load_checkpoint(args.checkpoint, optimizer=False)
    check_keeps_run(output, args.checkpoint, content)
    for key in ("training", "files"):
        content.pop(key, None)
    weights, kind = content["model"], content.get("kind", "transformer")
    if Path(args.output).suffix == ".safetensors":
        metadata = {
            "kind": kind,
            "config": json.dumps(content["config"]),
            "step": str(content["step"]),
        }
        save = require("safetensors.torch", "exporting safetensors").save
        plain = {name: weight.contiguous().clone() for name, weight in weights.items()}
        write_atomically(output, save(plain, metadata))
    else:
        save_checkpoint(output, content)
        # Loads it as translation will, to check that the file is complete.
        load_model(args.output)
    print(f"{kind} of step {content['step']}, {sum(w.numel() for w in weights.values()):,} values")
    if Path(args.output).suffix != ".safetensors":
        print(to_translate(args.output))
    return 0
