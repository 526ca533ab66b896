"""Checkpoints: one sentence for every unfit file, and averages."""

import pytest
import torch

from deepfast.mt.models import DepthGrowingConfig, TransformerConfig
from deepfast.mt.training import CheckpointError, average_checkpoints, load_checkpoint
from deepfast.mt.training import checkpoint as module
from deepfast.mt.training.checkpoint import check_config, save_checkpoint


def content(value=1.0, width=3):
    state = {"w": torch.full((width,), value), "n": torch.tensor([1, 2])}
    return {"step": 3, "config": {}, "model": state, "vocabulary": b"v\xff", "recipe": {}}


def test_a_checkpoint_from_before_every_choice_made_in_a_dict():
    added = {"dlcl", "latent", "languages", "fusion"}
    grown = DepthGrowingConfig(vocab_size=9)
    saved = {k: v for k, v in vars(grown).items() if k not in added | {"top_dlcl"}}
    check_config("a.pt", {"kind": "depth_growing", "config": saved}, grown)
    config = TransformerConfig(vocab_size=9)
    saved = {k: v for k, v in vars(config).items() if k not in added}
    check_config("a.pt", {"config": saved}, config)
    other = TransformerConfig(vocab_size=9, languages={"de": 4, "fr": 5})
    with pytest.raises(CheckpointError, match=r"languages \{\} in the checkpoint and \{'de': 4"):
        check_config("a.pt", {"config": saved}, other)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": "3"}, "step as int, got str"),
        ({"recipe": None}, "recipe as dict, got NoneType"),
        ({"vocabulary": 3}, "vocabulary as bytes .*int"),
    ],
)
def test_other_content_is_one_sentence(tmp_path, changes, message):
    """tests/mt/models/test_checkpoint.py has damaged files and those of other kinds."""
    path = tmp_path / "a.pt"
    save_checkpoint(path, content() | changes)
    with pytest.raises(CheckpointError, match=rf"^{path}: .*{message}"):
        load_checkpoint(path)
    torch.save({"format": module.FORMAT, "version": module.VERSION, "step": 1}, path)
    with pytest.raises(CheckpointError, match=f"^{path}: the checkpoint lacks config, model, voca"):
        load_checkpoint(path)


def test_average_is_the_mean_and_keeps_dtypes(tmp_path):
    paths = [tmp_path / f"{i}.pt" for i in range(3)]
    # In float32 the sum of the first two would lose the last digit.
    for path, value in zip(paths, (16777216.0, 1.0, 1.0), strict=True):
        save_checkpoint(path, content(value))
    mean = average_checkpoints(paths)
    assert mean["w"].dtype == torch.float32
    assert mean["w"][0].item() == pytest.approx(16777218 / 3, rel=1e-7)
    assert torch.equal(mean["n"], torch.tensor([1, 2]))


def test_average_of_other_shapes_or_of_nothing(tmp_path):
    save_checkpoint(tmp_path / "a.pt", content())
    save_checkpoint(tmp_path / "b.pt", content(width=4))
    with pytest.raises(CheckpointError, match=r"b\.pt: the model differs in shape from .*a\.pt"):
        average_checkpoints([tmp_path / "a.pt", tmp_path / "b.pt"])
    with pytest.raises(CheckpointError, match="at least one checkpoint, got none"):
        average_checkpoints([])
