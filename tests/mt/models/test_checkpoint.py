"""Checkpoint files: writing and reading them, averages, and one sentence for every unfit file."""

import contextlib
import random
import sys
from dataclasses import asdict

import pytest
import torch

from deepfast.mt.models import Transformer, TransformerConfig
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
from deepfast.mt.search import load_translator

CONFIG = {
    "vocab_size": 11, "dim": 16, "num_heads": 2, "ffn_dim": 24, "encoder_layers": 3,
    "decoder_layers": 2, "dlcl": {"weight_type": "vector", "learnable": False}, "backend": "cpu",
}  # fmt: skip
SOURCE, TARGET = torch.tensor([[5, 6, 3]]), torch.tensor([[2, 7]])


@pytest.fixture
def model():
    return Transformer(TransformerConfig(**CONFIG)).eval()


@pytest.fixture
def content(model):
    return {"step": 7, "kind": "transformer", "config": CONFIG, "model": model.state_dict(),
            "vocabulary": bytes(range(256)), "recipe": {"data": {}}}  # fmt: skip


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.pt"


def test_round_trip(model, content, path, monkeypatch):
    # A file needs no torch.distributed.checkpoint, which takes a second to import.
    for name in ("deepfast.mt.models.checkpoint_folder", "torch.distributed.checkpoint"):
        monkeypatch.setitem(sys.modules, name, None)
    save_checkpoint(path, content)
    assert load_checkpoint(path).keys() == content.keys() | {"format", "version"}
    loaded, vocabulary = load_model(path)
    # The weights are copies, so the file may be deleted.
    path.write_bytes(b"")
    assert vocabulary == content["vocabulary"]
    assert not loaded.training
    assert loaded.config == TransformerConfig(**CONFIG | {"backend": None})
    with torch.no_grad():
        assert torch.equal(loaded(SOURCE, TARGET), model(SOURCE, TARGET))
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name for name, p in loaded.named_parameters() if p.requires_grad} == trainable
    assert loaded.encoder.connection.dlcl.weight.requires_grad is False


def test_bfloat16_weights(content, path):
    content["model"] = {name: w.bfloat16() for name, w in content["model"].items()}
    save_checkpoint(path, content)
    model, _ = load_model(path)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_a_translator_reads_each_of_its_checkpoints_once(content, tmp_path, monkeypatch):
    vocabulary = pytest.importorskip("deepfast.mt.data").Vocabulary
    content["vocabulary"] = vocabulary.train(["a b c d e"] * 9, 9, whole_words=True).to_bytes()
    read, original = [], torch.load

    def counted(path, **options):
        read.append(path)
        return original(path, **options)

    monkeypatch.setattr(torch, "load", counted)
    paths = [tmp_path / "a.pt", tmp_path / "b.pt"]
    for path in paths:
        save_checkpoint(path, content)
    load_translator(paths, "cpu")
    assert read == paths


DAMAGED = r"^\S+model\.pt: expected a deepfast checkpoint, got a file of another kind, or one that "


@pytest.mark.parametrize("fraction", [0.001, 0.3, 0.9, 0.999])
def test_cut_short(content, path, fraction):
    save_checkpoint(path, content)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * fraction)])
    with pytest.raises(CheckpointError, match=DAMAGED):
        load_model(path)


def test_a_damaged_byte_is_an_error_or_changes_nothing(content, path):
    """Of the tensors each is an error; in the archive some are padding or times."""
    save_checkpoint(path, content)
    data = path.read_bytes()
    weights = content["model"]["encoder.layers.0.feed_forward.up.weight"].numpy().tobytes()
    draw = random.Random(1)
    inside = data.index(weights) + draw.randrange(len(weights))
    contents = data.rindex(b"PK\x01\x02")
    # A first byte of a name that UTF-8 does not have, and the flag that it is UTF-8.
    places = [inside, contents + 46, contents + 9, *draw.sample(range(len(data)), 40)]
    for place in (*places, *range(contents, len(data), 7)):
        path.write_bytes(data[:place] + bytes([data[place] ^ draw.randrange(1, 256)])
                         + data[place + 1 :])  # fmt: skip
        with contextlib.suppress(CheckpointError):
            found = load_checkpoint(path)
            assert place != inside
            assert all(torch.equal(w, content["model"][n]) for n, w in found["model"].items())
            assert found["vocabulary"] == content["vocabulary"]


class Evil:
    def __reduce__(self):
        return print, ("ran",)

    def __repr__(self):
        return "Evil"


HEAD = {"format": FORMAT, "version": VERSION}
OTHER_CONTENT = "got other torch.save content"


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        (None, r"model\.pt: there is no such file"),
        (..., r"model\.pt: expected a checkpoint, such as .*/best\.pt, got a folder that is no"),
        *((data, DAMAGED) for data in (b"", b"P", b"text\n", b"\x80\x02]q\x00.", bytes(1000))),
        *((data, DAMAGED) for data in (Evil(), HEAD | {"config": Evil()})),
        *((data, OTHER_CONTENT) for data in ([1, 2], {"a": 3}, {"format": "other"}, torch.ones(3))),
        (HEAD | {"version": 2}, f"expected a checkpoint of version {VERSION}, got version 2"),
        (HEAD, r"expected a checkpoint with its tensors, got run\.pt of a step"),
    ],
    ids=str,
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
    ("changes", "reason"),
    [
        ({"kind": "rnn"}, "'rnn'"),
        (
            {"config": CONFIG | {"languages": None}},
            ".*: languages: expected keys and .*",
        ),
        ({"config": CONFIG | {"dim": 15}}, ".*: dim: expected an even .*, got 15"),
        ({"config": CONFIG | {"vocab_size": 12}}, r".* size mismatch for embedding\.weight: .*"),
        (
            {"config": CONFIG | {"decoder_layers": 3}},
            r".* Missing key\(s\) .*decoder\.layers\.2\..*",
        ),
        ({"config": CONFIG | {"decoder_layers": 1}}, r".* Unexpected key\(s\) .*layers\.1\..*"),
    ],
    ids=str,
)
def test_parts_that_do_not_go_together(content, path, changes, reason):
    save_checkpoint(path, content | changes)
    with pytest.raises(CheckpointError, match=rf"do not go together \({reason}\)$") as error:
        load_model(path)
    assert "\n" not in str(error.value)


def test_a_checkpoint_of_another_config_is_refused():
    mine = TransformerConfig(vocab_size=9)
    content = {"kind": "transformer", "config": asdict(mine) | {"backend": "cpu"}}
    check_config("a.pt", content, mine)
    other = TransformerConfig(vocab_size=9, languages={"de": 4, "fr": 5})
    with pytest.raises(CheckpointError, match=r"languages \{\} in the checkpoint and \{'de': 4"):
        check_config("a.pt", content, other)
    with pytest.raises(CheckpointError, match="of the kind transformer, got depth_growing"):
        check_config("a.pt", content | {"kind": "depth_growing"}, mine)


def test_average_is_the_mean_and_keeps_dtypes(content, tmp_path):
    paths = [tmp_path / f"{i}.pt" for i in range(3)]
    # In float32 the sum of the first two would lose the last digit.
    for path, value in zip(paths, (16777216.0, 1.0, 1.0), strict=True):
        weights = {"w": torch.full((3,), value), "n": torch.tensor([1, 2])}
        save_checkpoint(path, content | {"model": weights})
    mean = average_checkpoints(paths)
    assert mean["w"].dtype == torch.float32
    assert mean["w"][0].item() == pytest.approx(16777218 / 3, rel=1e-7)
    assert torch.equal(mean["n"], torch.tensor([1, 2]))
    save_checkpoint(paths[1], content | {"model": {"w": torch.zeros(4), "n": torch.zeros(2)}})
    with pytest.raises(CheckpointError, match=r"1\.pt: the model differs in shape from .*0\.pt"):
        average_checkpoints(paths)
