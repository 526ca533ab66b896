"""`deepfast mt prune`: a folder or a file becomes one file, or safetensors, perhaps smaller."""

import json
import os
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from deepfast.cli import main
from deepfast.mt.models import TransformerConfig, build
from deepfast.mt.models.checkpoint import load_model
from deepfast.mt.training import saving
from deepfast.mt.training.ranks import Ranks
from tests.mt.models.kinds import save

CONFIG = TransformerConfig(vocab_size=9, dim=8, num_heads=2, ffn_dim=16, encoder_layers=2,
                           decoder_layers=1, decoder_connection="dlcl")  # fmt: skip


@pytest.fixture(params=["file", "folder"])
def checkpoint(request, tmp_path):
    """A checkpoint of either form, and its weights."""
    model = build(CONFIG)
    path = save(tmp_path / "model.pt", model)
    if request.param == "folder":
        content = torch.load(path, weights_only=True)
        path = tmp_path / "step-00000003"
        tensors = {f"model.{name}": tensor for name, tensor in content.pop("model").items()}
        saving._write_folder(path, content | {"training": {}}, tensors, Ranks())
    return path, model.state_dict()


def prune(path, output, *words):
    return main(["mt", "prune", str(path), "--output", str(output), *words])


def test_a_single_file_translates_and_safetensors_hold_the_weights(checkpoint, tmp_path, capsys):
    path, weights = checkpoint
    out = tmp_path / "out.pt"
    assert prune(path, out) == 0
    count = sum(weight.numel() for weight in weights.values())
    assert capsys.readouterr().out == (
        f"transformer of step 3, {count:,} of {count:,} parameters\n"
        f"to translate: deepfast mt translate {out} < FILE\n"
    )
    # A file without the state of the optimizer loses nothing.
    assert prune(out, out) == 0
    for one in (out, path):
        model, _ = load_model(one)
        assert all(torch.equal(w, weights[name]) for name, w in model.state_dict().items())
    assert "training" not in torch.load(out, weights_only=True)
    assert prune(path, tmp_path / "model.safetensors") == 0
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata()["step"] == "3"
        assert json.loads(file.metadata()["config"])["dim"] == 8
        assert set(file.keys()) == set(weights)
        assert all(torch.equal(file.get_tensor(name), w) for name, w in weights.items())


def test_layers_that_are_not_used_go(tmp_path, capsys):
    model, out = build(replace(CONFIG, encoder_layers=3, encoder_connection="latent")), "out.pt"
    with torch.no_grad():
        model.encoder.latent.logits.copy_(torch.tensor([[1.0, -1, 1]]))
    assert prune(save(tmp_path / "in.pt", model), tmp_path / out) == 0
    assert "encoder: 2 of 3 layers\n" in capsys.readouterr().out
    assert load_model(tmp_path / out)[0].config.encoder_layers == 2
    assert prune(save(tmp_path / "in.pt", build(CONFIG)), tmp_path / out, "--language", "fr") == 1
    assert "expected a pre-norm model with latent depth and lat" in capsys.readouterr().err


def test_pipes_and_checkpoints_to_resume_from_stay(checkpoint, tmp_path, capsys):
    path, _ = checkpoint
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    refused = [
        (path, pipe, "pipe: expected a file, got a pipe or a device"),
        (pipe, tmp_path / "out.pt", "pipe: expected a deepfast checkpoint, got no regular file"),
    ]
    if os.path.isdir(path):
        link = tmp_path / "link"
        link.symlink_to(path / "run.pt")
        wanted = f"--output: expected another file than {path}, which a run can resume from"
        refused += [(path, own, wanted) for own in (path / "run.pt", link)]
    for given, output, told in refused:
        assert prune(given, output) == 1
        assert told in capsys.readouterr().err
    assert pipe.is_fifo()
    load_model(path)
