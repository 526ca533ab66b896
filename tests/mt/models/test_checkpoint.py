"""Loading a model from a checkpoint, and refusing unfit files."""

import pytest
import torch

from deepfast.mt.models import Transformer, TransformerConfig
from deepfast.mt.models.checkpoint import load_model

CONFIG = {
    "vocab_size": 11, "dim": 16, "num_heads": 2, "ffn_dim": 24, "encoder_layers": 3,
    "decoder_layers": 2, "dlcl": {"weight_type": "vector", "learnable": False}, "backend": "cpu",
}  # fmt: skip
VOCABULARY = bytes(range(256))
SOURCE, TARGET = torch.tensor([[5, 6, 3]]), torch.tensor([[2, 7]])


@pytest.fixture
def model():
    return Transformer(TransformerConfig(**CONFIG)).eval()


@pytest.fixture
def content(model):
    return {
        "format": "deepfast-checkpoint",
        "version": 2,
        "config": CONFIG,
        "model": model.state_dict(),
        "vocabulary": VOCABULARY,
        "training": {"step": 7},
    }


@pytest.fixture
def save(tmp_path):
    def save(content):
        torch.save(content, tmp_path / "model.pt")
        return tmp_path / "model.pt"

    return save


@pytest.mark.parametrize(
    "vocabulary", [VOCABULARY, torch.tensor(list(VOCABULARY), dtype=torch.uint8)]
)
def test_round_trip(model, content, save, vocabulary):
    path = save(content | {"vocabulary": vocabulary})
    loaded, got = load_model(path)
    # The weights are copies, so the file may be deleted.
    path.write_bytes(b"")
    assert got == VOCABULARY
    assert not loaded.training
    assert loaded.config == TransformerConfig(**CONFIG | {"backend": None})
    with torch.no_grad():
        assert torch.equal(loaded(SOURCE, TARGET), model(SOURCE, TARGET))
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name for name, p in loaded.named_parameters() if p.requires_grad} == trainable
    assert loaded.encoder.connection.dlcl.weight.requires_grad is False


def test_bfloat16_weights(content, save):
    content["model"] = {name: w.bfloat16() for name, w in content["model"].items()}
    model, _ = load_model(save(content))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("fraction", [0.001, 0.3, 0.9, 0.999])
def test_cut_short(content, save, fraction):
    path = save(content)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * fraction)])
    with pytest.raises(ValueError, match=r"the checkpoint is cut short or damaged$"):
        load_model(path)


def test_damaged(content, save):
    path = save(content)
    damaged = bytearray(path.read_bytes())
    weights = content["model"]["encoder.layers.0.feed_forward.up.weight"].numpy().tobytes()
    damaged[bytes(damaged).index(weights) + 10] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"the checkpoint is damaged in its part \S+data/\d+$"):
        load_model(path)


def test_damaged_table_of_contents(content, save):
    path = save(content)
    data = bytearray(path.read_bytes())
    entry = data.rindex(b"PK\x01\x02")
    # The flag that a name is UTF-8, and a first byte of it that UTF-8 does not have.
    for place, byte in ((entry + 9, 0x08), (entry + 46, 0xFF)):
        data[place] = byte
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"\.pt: the checkpoint is cut short or damaged$"):
        load_model(path)


class Thing:
    """An object that `weights_only` refuses."""


OTHER_FILE, OTHER_CONTENT = (
    "expected a deepfast checkpoint, got a file of an",
    "got other torch.sav",
)


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        (None, r"model\.pt: there is no such file"),
        (..., r"expected a checkpoint, got a folder without run\.pt"),
        *((data, OTHER_FILE) for data in (b"", b"P", b"text\n", b"\x80\x02]q\x00.", bytes(1000))),
        ({"format": Thing}, OTHER_FILE),
        *((data, OTHER_CONTENT) for data in ([1, 2], {"a": 3}, {"format": "other"}, torch.ones(3))),
    ],
    ids=str,
)
def test_what_is_no_checkpoint(tmp_path, save, written, sentence):
    path = tmp_path / "model.pt"
    if written is ...:
        path.mkdir()
    elif isinstance(written, bytes):
        path.write_bytes(written)
    elif written is not None:
        save(written)
    with pytest.raises(ValueError, match=sentence):
        load_model(path)


LACKS = ...


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"version": 3}, "expected a checkpoint of version 2, got version 3"),
        ({"config": LACKS, "vocabulary": LACKS}, "the checkpoint lacks config, vocabulary"),
        *(({"model": {"embedding.weight": weight}}, "embedding.weight must be a tensor of floati")
          for weight in (3, torch.zeros(11, 16, dtype=torch.int64))),
        ({"version": None}, "expected a checkpoint of version 2, got version None"),
        ({"kind": ["transformer"]}, r"that this deepfast knows \(.*\), got \['transformer'\]"),
        ({"config": CONFIG | {"languages": None}}, "languages must be a dict, got None"),
        ({"config": CONFIG | {"dlcl": [1]}}, "config cannot be used .*: dlcl must be a dict, got"),
        ({"kind": "depth_growing", "config": CONFIG | {"top_dlcl": None}}, "top_dlcl must be a d"),
        ({"config": [1]}, "expected the checkpoint's config as dict, got list"),
        ({"config": CONFIG | {"depth": 3}}, "does not know: depth"),
        ({"config": CONFIG | {"dim": 15}}, r"be used \(TransformerConfig: dim must be an even"),
        ({"config": {"dim": 16}}, "config cannot be used .*vocab_size"),
        ({"config": CONFIG | {"dlcl": {"x": 1}}}, "config cannot be used .*got x"),
        ({"config": CONFIG | {"vocab_size": 12}}, r"embedding.weight must be \(12, 16\), got \(11"),
        ({"config": CONFIG | {"decoder_layers": 3}}, "lacks weights of the model that its config"),
        ({"config": CONFIG | {"decoder_layers": 1}}, "has weights that do not belong to the model"),
        ({"model": [1]}, "expected the checkpoint's model as dict, got list"),
        ({"vocabulary": "text"}, "as bytes or as a uint8 tensor, got str"),
        ({"vocabulary": torch.zeros(3)}, "as bytes or as a uint8 tensor, got torch.float32"),
    ],
    ids=str,
)  # fmt: skip
def test_parts_that_do_not_go_together(content, save, changes, sentence):
    if isinstance(changes.get("model"), dict):
        changes = {"model": content["model"] | changes["model"]}
    content = {k: v for k, v in (content | changes).items() if v is not LACKS}
    with pytest.raises(ValueError, match=sentence) as error:
        load_model(save(content))
    assert "\n" not in str(error.value)
