"""`deepfast mt export`: a folder or a file becomes one file, or safetensors."""

import json
import os
import pickle
import warnings

import pytest
import torch
from safetensors import safe_open

from deepfast.cli import main
from deepfast.mt.data import TokenVocabulary
from deepfast.mt.models import TransformerConfig, build
from deepfast.mt.models.checkpoint import load_model
from deepfast.mt.models.checkpoint_folder import Reader
from deepfast.mt.training.checkpoint import save_checkpoint
from deepfast.mt.training.ranks import Ranks
from deepfast.mt.training.saving import save_folder

CONFIG = TransformerConfig(vocab_size=9, dim=8, num_heads=2, ffn_dim=16, encoder_layers=2,
                           decoder_layers=1, encoder_connection="latent")  # fmt: skip
ONES = torch.ones(8).numpy().tobytes()
"""The weights of a new layer norm."""


@pytest.fixture(params=["file", "folder", "old folder"])
def checkpoint(request, tmp_path):
    """A checkpoint of either form, and its weights. An old folder has no check sum of .metadata."""
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
            save_folder(path, content, tensors, Ranks())
    if request.param == "old folder":
        content = torch.load(path / "run.pt", weights_only=True)
        del content["files"][".metadata"]
        torch.save(content, path / "run.pt")
    return path, weights


def test_a_single_file_translates(checkpoint, tmp_path, capsys):
    path, weights = checkpoint
    out = tmp_path / "model.pt"
    assert main(["mt", "export", str(path), "--output", str(out)]) == 0
    assert f"deepfast mt translate {out}" in capsys.readouterr().out
    for one in (out, path):
        model, _ = load_model(one)
        assert all(torch.equal(w, weights[name]) for name, w in model.state_dict().items())
    assert "training" not in torch.load(out, weights_only=True)


def test_safetensors(checkpoint, tmp_path):
    path, weights = checkpoint
    out = tmp_path / "model.safetensors"
    assert main(["mt", "export", str(path), "--output", str(out)]) == 0
    with safe_open(out, "pt") as file:
        assert file.metadata()["step"] == "3"
        assert json.loads(file.metadata()["config"])["dim"] == 8
        assert set(file.keys()) == set(weights)
        assert all(torch.equal(file.get_tensor(name), w) for name, w in weights.items())


def flip(path, known):
    """Changes a bit within known bytes of a file."""
    data = bytearray(path.read_bytes())
    data[data.index(known) + 3] ^= 1
    path.write_bytes(data)


def shorten(path):
    """Makes a tensor's part on disk one row shorter in .metadata, as one bit there can."""
    metadata = Reader(path).read_metadata()
    metadata.state_dict_metadata["model.embedding.weight"].chunks[0].sizes = torch.Size((8, 8))
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def without_options(path):
    """Leaves out the optimizer's options, which a folder has beside its tensors."""
    content = torch.load(path / "run.pt", weights_only=True)
    torch.save(content | {"training": {}}, path / "run.pt")


def get_system(path):
    """As Python 3.11.0 writes a member of an enum, but of a module."""
    (path / ".metadata").write_bytes(b"cbuiltins\ngetattr\n(cposix\nsystem\nX\x01\x00\x00\x00xtR.")


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda p: (p / "run.pt").unlink(), "expected a checkpoint, got a folder without run.pt"),
        (lambda p: (p / ".metadata").unlink(), "got a folder without .metadata"),
        (shorten, "damaged in its file .metadata"),
        (get_system, "damaged in its file .metadata"),
        (lambda p: (p / "__0_0.distcp").unlink(), "__0_0.distcp: cannot be read (No such file"),
        (lambda p: (p / "__0_0.distcp").write_bytes(b"short"), "damaged in its file __0_0.distcp"),
        (lambda p: flip(p / "__0_0.distcp", ONES), "damaged in its file __0_0.distcp"),
        (lambda p: torch.save({"format": "x"}, p / "run.pt"), "got other torch.save content"),
        (lambda p: torch.save([1], p / "run.pt"), "got other torch.save content"),
        (lambda p: flip(p / "run.pt", b"deepfast-checkpoint"), "damaged in its part"),
        (without_options, "the checkpoint lacks what resuming needs"),
    ],
)
@pytest.mark.parametrize("checkpoint", ["folder"], indirect=True)
def test_a_damaged_folder_is_one_sentence(checkpoint, tmp_path, capsys, break_it, message):
    path, _ = checkpoint
    break_it(path)
    assert main(["mt", "export", str(path), "--output", str(tmp_path / "model.pt")]) == 1
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


class Evil:
    def __reduce__(self):
        return print, ("ran",)


@pytest.mark.parametrize(
    "data", [b"no", b"\x80\x04\x8c\x01\xff.", pickle.dumps({"a": 1}), pickle.dumps(Evil())]
)
@pytest.mark.parametrize("checkpoint", ["old folder"], indirect=True)
def test_metadata_without_a_check_sum_cannot_run_code(checkpoint, tmp_path, capsys, data):
    path, _ = checkpoint
    (path / ".metadata").write_bytes(data)
    assert main(["mt", "export", str(path), "--output", str(tmp_path / "model.pt")]) == 1
    captured = capsys.readouterr()
    assert "ran" not in captured.out
    assert "cut short or damaged" in captured.err


def test_pipes_are_neither_read_nor_replaced(checkpoint, tmp_path, capsys):
    path, _ = checkpoint
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert main(["mt", "export", str(path), "--output", str(pipe)]) == 1
    assert "pipe: expected a file, got a pipe or a device" in capsys.readouterr().err
    assert pipe.is_fifo()
    assert main(["mt", "export", str(pipe), "--output", str(tmp_path / "model.pt")]) == 1
    assert "pipe: expected a deepfast checkpoint, got no regular file" in capsys.readouterr().err


def test_a_link_stays_a_link(checkpoint, tmp_path):
    path, _ = checkpoint
    link = tmp_path / "link.pt"
    link.symlink_to("model.pt")
    assert main(["mt", "export", str(path), "--output", str(link)]) == 0
    assert link.is_symlink()
    load_model(tmp_path / "model.pt")


@pytest.mark.parametrize("command", ["export", "prune"])
def test_a_checkpoint_to_resume_from_stays(checkpoint, tmp_path, capsys, command):
    path, _ = checkpoint
    own = path if path.is_file() else path / "run.pt"
    link = tmp_path / "link.pt"
    link.symlink_to(own)
    before = own.read_bytes()
    for same in (own, link):
        assert main(["mt", command, str(path), "--output", str(same)]) == 1
        wanted = f"--output: expected another file than {path}, which a run can resume from"
        assert wanted in capsys.readouterr().err
    assert own.read_bytes() == before
    # A file without the state of the optimizer loses nothing.
    out = tmp_path / "model.pt"
    assert main(["mt", "export", str(path), "--output", str(out)]) == 0
    assert main(["mt", command, str(out), "--output", str(out)]) == 0
