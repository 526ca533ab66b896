"""The comparisons with other systems, at toy sizes and without JoeyNMT."""

import argparse
import gzip
import importlib.util
import re

import pytest
import yaml

from bench import huggingface, joeynmt
from deepfast.mt.data import Vocabulary
from deepfast.mt.training import load_recipe


def test_beam_search_beside_transformers(capsys, threads):
    pytest.importorskip("transformers")
    sizes = ["--dims", "16", "--layers", "1+1", "--vocabulary", "50", "--sentences", "2"]
    with threads(1):
        assert huggingface.main([*sizes, "--length", "3", "--rounds", "1"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^\| 16 \| 1 \+ 1 \| \d+ \| \d+ \| \d+\.\d\d \|$", said, re.MULTILINE)


def test_without_transformers(capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert huggingface.main([]) == 0
    assert "transformers is not installed" in capsys.readouterr().out


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """What the comparison with JoeyNMT prepares from a few pairs."""
    monkeypatch.setattr(joeynmt, "PIECES", 36)
    lines = [f"A man with {n} dogs\n" for n in range(30)] + ["\n"]
    for language in joeynmt.LANGUAGES:
        (tmp_path / f"train.{language}.gz").write_bytes(gzip.compress("".join(lines).encode()))
    joeynmt.prepare(tmp_path, tmp_path)
    return tmp_path


def test_both_systems_get_the_same_pieces(folder):
    vocabulary = Vocabulary.load(folder / "pieces.model")
    lines = (folder / "train.en").read_text().splitlines()
    pieces = (folder / "train.pieces.en").read_text().splitlines()
    assert len(lines) == len(pieces) == 30
    assert [line.split() for line in pieces] == [vocabulary.pieces(line) for line in lines]
    known = (folder / "pieces.txt").read_text().split()
    assert {piece for line in pieces for piece in line.split()} <= set(known)


def test_the_recipes_are_of_one_model(folder):
    args = argparse.Namespace(layers=2, dim=16, ffn=32, num_heads=4, tokens=512, steps=4, window=2)
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(joeynmt.deepfast_recipe(folder, args)))
    ours, theirs = load_recipe(str(path)).to_dict(), joeynmt.joeynmt_config(folder, args)
    for side in ("encoder", "decoder"):
        other = theirs["model"][side]
        assert ours["model"][f"{side}_layers"] == other["num_layers"]
        assert ours["model"]["dim"] == other["hidden_size"]
        assert ours["model"]["ffn_dim"] == other["ff_size"]
        assert ours["model"]["dropout"] == other["dropout"]
        assert ours["model"]["norm"] == other["layer_norm"]
    assert ours["data"]["max_tokens"] == theirs["training"]["batch_size"]
    assert ours["optim"]["label_smoothing"] == theirs["training"]["label_smoothing"]
