"""Checkpoint files: writing and reading them, averages, and one sentence for every unfit file."""

import contextlib
import random
import sys

import pytest
import torch

from deepfast.mt.models import TransformerConfig
from deepfast.mt.models.checkpoint import (
    FORMAT,
    VERSION,
    CheckpointError,
    average_checkpoints,
    check_config,
    load_checkpoint,
    load_model,
    save_checkpoint,
)
from tests.mt.models.kinds import SOME, SOURCE, TARGET, learning, make, save

DAMAGED = r"^\S+model\.pt: expected a deepfast checkpoint, got a file of another kind, or one that "


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.pt"


@pytest.fixture
def content(path):
    """The content of a checkpoint file, which is at `path`."""
    return load_checkpoint(save(path, make("frozen", torch.float32)))


@pytest.mark.parametrize("name", [*SOME, "own embeddings", "rms", "frozen"])
def test_a_checkpoint_gives_the_same_model(name, path, monkeypatch):
    # A file needs no torch.distributed.checkpoint, which takes a second to import.
    for package in ("deepfast.mt.models.checkpoint_folder", "torch.distributed.checkpoint"):
        monkeypatch.setitem(sys.modules, package, None)
    model = make(name, torch.float32)
    save(path, model)
    loaded, vocabulary = load_model(path)
    # The weights are copies, so the file may be deleted.
    path.write_bytes(b"")
    assert vocabulary == bytes(range(256))
    assert not any(module.training for module in loaded.modules())
    assert learning(loaded).keys() == learning(model).keys()
    with torch.no_grad():
        assert torch.equal(loaded(SOURCE, TARGET), model(SOURCE, TARGET))


def test_bfloat16_weights_and_a_backend_of_another_machine(content, path):
    content["model"] = {name: w.bfloat16() for name, w in content["model"].items()}
    content["config"]["backend"] = "triton"
    save_checkpoint(path, content)
    model, _ = load_model(path)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.config.backend is None


def test_a_damaged_byte_is_an_error_or_changes_nothing(content, path):
    """Of the tensors each is an error; in the archive some are padding or times."""
    data = path.read_bytes()
    for fraction in (0.001, 0.9, 0.999):
        path.write_bytes(data[: int(len(data) * fraction)])
        with pytest.raises(CheckpointError, match=DAMAGED):
            load_model(path)
    weights = content["model"]["encoder.layers.0.feed_forward.up.weight"].numpy().tobytes()
    draw = random.Random(1)
    inside = data.index(weights) + draw.randrange(len(weights))
    contents = data.rindex(b"PK\x01\x02")
    # A first byte of a name that UTF-8 does not have, and the flag that it is UTF-8.
    places = [inside, contents + 46, contents + 9, *draw.sample(range(len(data)), 30)]
    for place in (*places, *range(contents, len(data), 11)):
        damaged = bytearray(data)
        damaged[place] ^= draw.randrange(1, 256)
        path.write_bytes(damaged)
        with contextlib.suppress(CheckpointError):
            found = load_checkpoint(path)
            assert place != inside
            assert all(torch.equal(w, content["model"][n]) for n, w in found["model"].items())
            assert found["vocabulary"] == content["vocabulary"]


class Evil:
    """Prints where it is unpickled."""

    def __reduce__(self):
        return print, ("ran",)


HEAD = {"format": FORMAT, "version": VERSION}


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        (None, r"model\.pt: there is no such file"),
        (..., r"model\.pt: expected a checkpoint, such as .*/best\.pt, got a folder that is no"),
        *((data, DAMAGED) for data in (b"", b"text\n", b"\x80\x02]q\x00.")),
        (HEAD | {"config": Evil()}, DAMAGED),
        *((data, "got other torch.save content") for data in ({"a": 3}, torch.ones(3))),
        (HEAD | {"version": 2}, f"expected a checkpoint of version {VERSION}, got version 2"),
        (HEAD, r"expected a checkpoint with its tensors, got run\.pt of a step"),
    ],
)
def test_what_is_no_checkpoint(path, written, sentence, capsys):
    if written is ...:
        path.mkdir()
    elif isinstance(written, bytes):
        path.write_bytes(written)
    elif written is not None:
        torch.save(written, path)
    with pytest.raises(CheckpointError, match=sentence):
        load_model(path)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("kind", "config", "reason"),
    [
        ("rnn", {}, "'rnn'"),
        ("transformer", {"languages": None}, ".*: languages: expected keys and .*"),
        ("transformer", {"vocab_size": 12}, r".* size mismatch for embedding\.weight: .*"),
        ("transformer", {"decoder_layers": 3}, r".* Missing key\(s\) .*decoder\.layers\.2\..*"),
        ("transformer", {"decoder_layers": 1}, r".* Unexpected key\(s\) .*layers\.1\..*"),
    ],
)
def test_parts_that_do_not_go_together(content, path, kind, config, reason):
    save_checkpoint(path, content | {"kind": kind, "config": content["config"] | config})
    with pytest.raises(CheckpointError, match=rf"do not go together \({reason}\)$") as error:
        load_model(path)
    assert "\n" not in str(error.value)


def test_a_checkpoint_of_another_config_is_refused():
    """Another backend is none."""
    mine = TransformerConfig(vocab_size=9)
    content = {"kind": "transformer", "config": vars(mine) | {"backend": "cpu"}}
    check_config("a.pt", content, mine)
    other = TransformerConfig(vocab_size=9, languages={"de": 4, "fr": 5})
    with pytest.raises(CheckpointError, match=r"languages \{\} in the checkpoint and \{'de': 4"):
        check_config("a.pt", content, other)


def test_average_is_the_mean_and_keeps_dtypes(content, tmp_path):
    paths = [tmp_path / f"{i}.pt" for i in range(3)]
    # In float32 the sum of the first two would lose the last digit.
    for path, value in zip(paths, (16777216.0, 1.0, 1.0), strict=True):
        weights = {"w": torch.full((3,), value), "n": torch.tensor([1, 2])}
        save_checkpoint(path, content | {"model": weights})
    mean = average_checkpoints(paths)
    assert mean["w"].dtype == torch.float32
    assert mean["w"].tolist() == [16777218 / 3] * 3
    assert torch.equal(mean["n"], torch.tensor([1, 2]))
    save_checkpoint(paths[1], content | {"model": {"w": torch.zeros(4), "n": torch.zeros(2)}})
    with pytest.raises(CheckpointError, match=r"1\.pt: the model differs in shape from .*0\.pt"):
        average_checkpoints(paths)
