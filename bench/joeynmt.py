"""Training speed beside JoeyNMT 2.3: target tokens a second, padding not counted.

    python -m bench.joeynmt JOEYNMT_PYTHON data/multi30k
    python -m bench.joeynmt JOEYNMT_PYTHON data/multi30k --layers 6 --dim 256 --ffn 512

JOEYNMT_PYTHON is the Python of an environment with `joeynmt==2.3.0`; the folder has train.en.gz
and train.de.gz. Both systems train the same post-norm Transformer on the same pieces of one joint
vocabulary, in batches of 2,048 tokens, with Adam, dropout 0.3 and label smoothing 0.1, fp32, on
one thread each, as whole processes in turns. Each speed is what the system logs over its windows
after the first; the ratio is the median over the rounds.
"""

import argparse
import gzip
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml
from sentencepiece import SentencePieceProcessor

from deepfast.machine import cpu_model
from deepfast.mt.data import Vocabulary
from deepfast.mt.data.vocabulary import SPECIALS

LANGUAGES = "en", "de"
PIECES, DROPOUT, SMOOTHING, RATE = 5000, 0.3, 0.1, 1e-3


def prepare(folder: Path, data: Path) -> None:
    """Text, one vocabulary, and the same pieces separated by spaces for JoeyNMT."""
    texts = {}
    for language in LANGUAGES:
        lines = gzip.decompress((data / f"train.{language}.gz").read_bytes()).decode().splitlines()
        texts[language] = [line.lower().strip() for line in lines]
    pairs = [pair for pair in zip(*texts.values(), strict=True) if all(pair)]
    texts = dict(zip(LANGUAGES, map(list, zip(*pairs, strict=True)), strict=True))
    vocabulary = Vocabulary.train([line for lines in texts.values() for line in lines], PIECES)
    vocabulary.save(folder / "pieces.model")
    processor = SentencePieceProcessor(model_proto=vocabulary.to_bytes())
    pieces = [processor.id_to_piece(i) for i in range(len(SPECIALS), len(vocabulary))]
    (folder / "pieces.txt").write_text("\n".join(pieces) + "\n")
    for language, lines in texts.items():
        pieces = [" ".join(vocabulary.pieces(line)) for line in lines]
        for name, part in (("train", slice(None)), ("dev", slice(20))):
            (folder / f"{name}.{language}").write_text("\n".join(lines[part]) + "\n")
            (folder / f"{name}.pieces.{language}").write_text("\n".join(pieces[part]) + "\n")


def joeynmt_config(folder: Path, args: argparse.Namespace) -> dict:
    side = {
        "type": "transformer", "num_layers": args.layers, "num_heads": args.num_heads,
        "embeddings": {"embedding_dim": args.dim, "scale": True, "dropout": DROPOUT},
        "hidden_size": args.dim, "ff_size": args.ffn, "dropout": DROPOUT, "layer_norm": "post",
    }  # fmt: skip
    text = {"level": "word", "voc_file": str(folder / "pieces.txt"), "max_length": 256}
    return {
        "name": "speed", "model_dir": str(folder / "joeynmt"), "use_cuda": False,
        "data": {
            "train": str(folder / "train.pieces"), "dev": str(folder / "dev.pieces"),
            "dataset_type": "plain",
            "src": {"lang": "en", **text}, "trg": {"lang": "de", **text},
        },
        "testing": {"beam_size": 1, "batch_size": 32, "eval_metrics": []},
        "training": {
            "optimizer": "adam", "adam_betas": [0.9, 0.98], "learning_rate": RATE,
            "scheduling": "warmupinversesquareroot", "learning_rate_warmup": 1000,
            "normalization": "tokens", "label_smoothing": SMOOTHING, "loss": "crossentropy",
            "batch_size": args.tokens, "batch_type": "token", "epochs": 100,
            "updates": args.steps, "logging_freq": args.window,
            "validation_freq": 1000 * args.steps, "overwrite": True, "shuffle": True,
            "early_stopping_metric": "loss", "use_cuda": False,
        },
        "model": {"initializer": "xavier_uniform", "tied_embeddings": True, "tied_softmax": True,
                  "encoder": side, "decoder": side},
    }  # fmt: skip


def deepfast_recipe(folder: Path, args: argparse.Namespace) -> dict:
    data = {
        f"{part}_{side}": str(folder / f"{part}.{language}")
        for part in ("train", "dev")
        for side, language in zip(("source", "target"), LANGUAGES, strict=True)
    }
    return {
        "data": data | {"vocabulary": str(folder / "pieces.model"), "max_tokens": args.tokens,
                        "max_length": 256},
        "model": {
            "dim": args.dim, "num_heads": args.num_heads, "ffn_dim": args.ffn,
            "encoder_layers": args.layers, "decoder_layers": args.layers,
            "encoder_connection": "residual", "norm": "post", "dropout": DROPOUT,
        },
        "optim": {"lr": RATE, "warmup": 1000, "betas": [0.9, 0.98], "clip_norm": None,
                  "label_smoothing": SMOOTHING},
        "train": {"device": "cpu", "threads": 1, "max_steps": args.steps,
                  "validate_every": 1000 * args.steps, "save_every": 1000 * args.steps,
                  "log_every": args.window},
        "output": str(folder / "deepfast"),
    }  # fmt: skip


def run(command: list[str], folder: Path) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    return done.stdout


def joeynmt_speed(python: str, folder: Path, args: argparse.Namespace) -> float:
    config = folder / "joeynmt.yaml"
    config.write_text(yaml.safe_dump(joeynmt_config(folder, args)))
    # Its own Python must not see the packages of this one.
    command = ["env", "-u", "PYTHONPATH", python, "-m", "joeynmt", "train", config.name, "-t"]
    out = run(command, folder)
    speeds = [float(x) for x in re.findall(r"Tokens per Sec:\s*([\d.]+)", out)]
    return statistics.median(speeds[1:])


def deepfast_speed(folder: Path, args: argparse.Namespace) -> float:
    recipe = folder / "deepfast.yaml"
    recipe.write_text(yaml.safe_dump(deepfast_recipe(folder, args)))
    shutil.rmtree(folder / "deepfast", ignore_errors=True)
    run([sys.executable, "-m", "deepfast", "mt", "train", recipe.name], folder)
    rows = map(json.loads, (folder / "deepfast" / "metrics.jsonl").read_text().splitlines())
    speeds = [row["target_tokens_per_second"] for row in rows if row["event"] == "train"]
    return statistics.median(speeds[1:])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("python", help="Python with joeynmt 2.3")
    parser.add_argument("data", type=Path, help="folder with train.en.gz and train.de.gz")
    parser.add_argument("--layers", type=int, default=4, help="of encoder and decoder each")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--ffn", type=int, default=256)
    parser.add_argument("--num-heads", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048, help="of a batch")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--window", type=int, default=10, help="steps between two lines of the log")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, args.data)
        print(f"{args.layers} + {args.layers} layers, {args.dim} channels, {PIECES} pieces, "
              f"batches of {args.tokens} tokens, float32, one thread, {cpu_model()}\n")  # fmt: skip
        print("| round | deepfast, target tokens/s | JoeyNMT | ratio |\n|---|---|---|---|")
        ratios = []
        for number in range(1, args.rounds + 1):
            ours, theirs = deepfast_speed(folder, args), joeynmt_speed(args.python, folder, args)
            ratios.append(ours / theirs)
            print(f"| {number} | {ours:.0f} | {theirs:.0f} | {ratios[-1]:.2f} |", flush=True)
    print(f"\nmedian of the ratios: {statistics.median(ratios):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
