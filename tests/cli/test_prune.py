"""`deepfast mt prune`: a folder or a file becomes one file, or safetensors, perhaps smaller."""

import json
import os
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from deepfast.cli import main
from deepfast.mt.data import Vocabulary
from deepfast.mt.models import TransformerConfig, build
from deepfast.mt.models.checkpoint import load_model, save_checkpoint
from deepfast.mt.training import saving
from deepfast.mt.training.ranks import Ranks

CONFIG = TransformerConfig(vocab_size=9, dim=8, num_heads=2, ffn_dim=16, encoder_layers=2,
                           decoder_layers=1, decoder_connection="dlcl")  # fmt: skip
LATENT = replace(CONFIG, encoder_layers=3, encoder_connection="latent")


def saved(folder, config=CONFIG):
    """A checkpoint file of a run, and its weights."""
    model = build(config)
    vocabulary = Vocabulary.train(["a b c d e"] * 9, 9, whole_words=True).to_bytes()
    content = {"step": 3, "kind": "transformer", "config": vars(config), "recipe": {},
               "vocabulary": vocabulary}  # fmt: skip
    path = folder / "best.pt"
    weights = model.state_dict()
    save_checkpoint(path, content | {"model": weights})
    return path, weights


@pytest.fixture(params=["file", "folder"])
def checkpoint(request, tmp_path):
    """A checkpoint of either form, and its weights."""
    path, weights = saved(tmp_path)
    if request.param == "folder":
        content = torch.load(path, weights_only=True)
        path = tmp_path / "step-00000003"
        tensors = {f"model.{name}": tensor for name, tensor in content.pop("model").items()}
        saving._write_folder(path, content | {"training": {}}, tensors, Ranks())
    return path, weights


def prune(path, output, *words):
    return main(["mt", "prune", str(path), "--output", str(output), *words])


def test_a_single_file_translates(checkpoint, tmp_path, capsys):
    path, weights = checkpoint
    out = tmp_path / "model.pt"
    assert prune(path, out) == 0
    count = sum(weight.numel() for weight in weights.values())
    assert capsys.readouterr().out == (
        f"transformer of step 3, {count:,} of {count:,} parameters\n"
        f"to translate: deepfast mt translate {out} < FILE\n"
    )
    for one in (out, path):
        model, _ = load_model(one)
        assert all(torch.equal(w, weights[name]) for name, w in model.state_dict().items())
    assert "training" not in torch.load(out, weights_only=True)


def test_safetensors(checkpoint, tmp_path):
    path, weights = checkpoint
    out = tmp_path / "model.safetensors"
    assert prune(path, out) == 0
    with safe_open(out, "pt") as file:
        assert file.metadata()["step"] == "3"
        assert json.loads(file.metadata()["config"])["dim"] == 8
        assert set(file.keys()) == set(weights)
        assert all(torch.equal(file.get_tensor(name), w) for name, w in weights.items())


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_layers_that_are_not_used_go_unless_all_are_wanted(tmp_path, capsys, ending):
    path, _ = saved(tmp_path, LATENT)
    content = torch.load(path, weights_only=True)
    content["model"]["encoder.latent.logits"] = torch.tensor([[1.0, -1, 1]])
    torch.save(content, path)
    for words, layers in (([], 2), (["--all-layers"], 3)):
        out = tmp_path / f"model.{ending}"
        assert prune(path, out, *words) == 0
        assert ("encoder: 2 of 3 layers\n" in capsys.readouterr().out) == (layers == 2)
        if ending == "pt":
            assert load_model(out)[0].config.encoder_layers == layers
        else:
            with safe_open(out, "pt") as file:
                assert json.loads(file.metadata()["config"])["encoder_layers"] == layers


def test_a_language_needs_latent_depth(tmp_path, capsys):
    path, _ = saved(tmp_path)
    assert prune(path, tmp_path / "model.pt", "--language", "fr") == 1
    assert "expected a model with latent depth, got one without" in capsys.readouterr().err


def test_pipes_are_neither_read_nor_replaced(checkpoint, tmp_path, capsys):
    path, _ = checkpoint
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert prune(path, pipe) == 1
    assert "pipe: expected a file, got a pipe or a device" in capsys.readouterr().err
    assert pipe.is_fifo()
    assert prune(pipe, tmp_path / "model.pt") == 1
    assert "pipe: expected a deepfast checkpoint, got no regular file" in capsys.readouterr().err


def test_a_link_stays_a_link(checkpoint, tmp_path):
    path, _ = checkpoint
    link = tmp_path / "link.pt"
    link.symlink_to("model.pt")
    assert prune(path, link) == 0
    assert link.is_symlink()
    load_model(tmp_path / "model.pt")


@pytest.mark.parametrize("checkpoint", ["folder"], indirect=True)
def test_a_checkpoint_to_resume_from_stays(checkpoint, tmp_path, capsys):
    path, _ = checkpoint
    own = path / "run.pt"
    link = tmp_path / "link.pt"
    link.symlink_to(own)
    before = own.read_bytes()
    for same in (own, link):
        assert prune(path, same) == 1
        wanted = f"--output: expected another file than {path}, which a run can resume from"
        assert wanted in capsys.readouterr().err
    assert own.read_bytes() == before
    # A file without the state of the optimizer loses nothing.
    out = tmp_path / "model.pt"
    assert prune(path, out) == 0
    assert prune(out, out) == 0
