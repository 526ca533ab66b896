"""`deepfast mt prune`: a folder or a file becomes one file, or safetensors, perhaps smaller."""

import json
import os

import pytest
import torch
from safetensors import safe_open

from deepfast.cli import main
from deepfast.mt.models.checkpoint import load_model
from deepfast.mt.training import saving
from deepfast.mt.training.ranks import Ranks
from tests.mt.models.kinds import make, save


@pytest.fixture(params=["file", "folder"])
def checkpoint(request, tmp_path):
    """A checkpoint of either form, and its weights."""
    model = make("dlcl", torch.float32)
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
        assert json.loads(file.metadata()["config"])["dim"] == 12
        assert set(file.keys()) == set(weights)
        assert all(torch.equal(file.get_tensor(name), w) for name, w in weights.items())


def test_a_checkpoint_to_resume_from_stays(checkpoint, tmp_path, capsys):
    path, _ = checkpoint
    if os.path.isdir(path):
        link = tmp_path / "link"
        link.symlink_to(path / "run.pt")
        for own in (path / "run.pt", link):
            assert prune(path, own) == 1
            assert f"another file than {path}, which a run can resume" in capsys.readouterr().err
        load_model(path)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert prune(path, pipe) == 1
    assert "pipe: expected a file, got a pipe or a device" in capsys.readouterr().err
