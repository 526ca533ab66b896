"""`deepfast export`: a folder or a file becomes one file, or safetensors."""

import json
import pickle
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open

from deepfast.cli import main
from deepfast.mt.data import TokenVocabulary
from deepfast.mt.models import TransformerConfig, build
from deepfast.mt.models.checkpoint import FORMAT, VERSION, load_model
from deepfast.mt.models.checkpoint_folder import check_sum
from deepfast.mt.training.checkpoint import save_checkpoint

CONFIG = TransformerConfig(vocab_size=9, dim=8, heads=2, ffn_dim=16, encoder_layers=2,
                           decoder_layers=1)  # fmt: skip


@pytest.fixture(params=["file", "folder"])
def checkpoint(request, tmp_path):
    """A checkpoint of either form, and its weights."""
    model = build(CONFIG)
    vocabulary = TokenVocabulary(["a", "b", "c", "d", "e"]).to_bytes()
    content = {"step": 3, "kind": "transformer", "config": vars(CONFIG), "recipe": {},
               "vocabulary": vocabulary}  # fmt: skip
    weights = model.state_dict()
    if request.param == "file":
        path = tmp_path / "step-00000003.pt"
        save_checkpoint(path, content | {"model": weights, "training": {}})
    else:
        path = tmp_path / "step-00000003"
        tensors = {f"model.{name}": tensor for name, tensor in weights.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            dcp.save(tensors, checkpoint_id=path, no_dist=True)
        files = {file.name: check_sum(file) for file in path.glob("*.distcp")}
        content |= {"format": FORMAT, "version": VERSION, "files": files}
        torch.save(content, path / "run.pt")
    return path, weights


def test_a_single_file_translates(checkpoint, tmp_path, capsys):
    path, weights = checkpoint
    out = tmp_path / "model.pt"
    assert main(["export", str(path), "--output", str(out)]) == 0
    assert f"deepfast translate {out}" in capsys.readouterr().out
    for one in (out, path):
        model, _ = load_model(one)
        assert all(torch.equal(w, weights[name]) for name, w in model.state_dict().items())
    assert "training" not in torch.load(out, weights_only=True)


def test_safetensors(checkpoint, tmp_path):
    path, weights = checkpoint
    out = tmp_path / "model.safetensors"
    assert main(["export", str(path), "--output", str(out)]) == 0
    with safe_open(out, "pt") as file:
        assert file.metadata()["step"] == "3"
        assert json.loads(file.metadata()["config"])["dim"] == 8
        assert set(file.keys()) == set(weights)
        assert all(torch.equal(file.get_tensor(name), w) for name, w in weights.items())


def flip(path):
    """One bit in the middle of the tensors."""
    data = bytearray((path / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (path / "__0_0.distcp").write_bytes(data)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda p: (p / "run.pt").unlink(), "expected a checkpoint, got a folder without run.pt"),
        (lambda p: (p / ".metadata").unlink(), "got a folder without .metadata"),
        (lambda p: (p / ".metadata").write_bytes(b"no"), "cut short or damaged"),
        (lambda p: (p / "__0_0.distcp").unlink(), "__0_0.distcp: cannot be read (No such file"),
        (lambda p: (p / "__0_0.distcp").write_bytes(b"short"), "damaged in its file __0_0.distcp"),
        (flip, "damaged in its file __0_0.distcp"),
        (lambda p: torch.save({"format": "x"}, p / "run.pt"), "got other torch.save content"),
    ],
)
@pytest.mark.parametrize("checkpoint", ["folder"], indirect=True)
def test_a_damaged_folder_is_one_sentence(checkpoint, tmp_path, capsys, break_it, message):
    path, _ = checkpoint
    break_it(path)
    assert main(["export", str(path), "--output", str(tmp_path / "model.pt")]) == 1
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("checkpoint", ["folder"], indirect=True)
def test_metadata_cannot_run_code(checkpoint, tmp_path, capsys):
    class Evil:
        def __reduce__(self):
            return print, ("ran",)

    path, _ = checkpoint
    (path / ".metadata").write_bytes(pickle.dumps(Evil()))
    assert main(["export", str(path), "--output", str(tmp_path / "model.pt")]) == 1
    captured = capsys.readouterr()
    assert "ran" not in captured.out
    assert "cut short or damaged" in captured.err
