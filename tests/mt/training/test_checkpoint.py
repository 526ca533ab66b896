"""The folder of a step: whole after a kill at any point, refused where it is damaged."""

import itertools
import os
import pickle
import random
import sys

import pytest
import torch

from deepfast.mt.models.checkpoint import CheckpointError, load_checkpoint, load_model, read_run
from deepfast.mt.models.checkpoint_folder import check_files
from deepfast.mt.training import saving
from deepfast.mt.training.ranks import Ranks
from deepfast.mt.training.run_folder import prune, recover, step_checkpoints
from deepfast.mt.training.saving import Saving
from tests.mt.models.test_checkpoint import Evil
from tests.mt.training.runs import Killed, die, tensors

CONTENT = {"step": 4, "kind": "transformer", "config": {}, "vocabulary": b"v", "recipe": {},
           "training": {}}  # fmt: skip
LATENT = {"model.decoder_connection": "latent", "model.decoder_layers": 3}


def write(folder, value, step=4):
    path = folder / f"step-{step:08d}"
    weights = {"model.w": torch.full((500,), value), "optimizer.w.step": torch.tensor(3.0)}
    saving._write_folder(path, CONTENT | {"step": step}, weights, Ranks())
    return path


def value_of(path):
    check_files(path, read_run(path)["files"])
    (value,) = load_checkpoint(path)["model"]["w"].unique().tolist()
    return value


def killed_after(count, work):
    """Does the work in a child that is killed at its file operation of this number; returns
    whether it was."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    left = itertools.count(count, -1)

    def hook(event, arguments):
        changes = event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir")
        if (changes or (event == "open" and arguments[2] & os.O_WRONLY)) and next(left) == 0:
            os._exit(9)

    try:
        sys.addaudithook(hook)
        work()
    finally:
        os._exit(0)


def test_a_kill_at_any_operation_leaves_whole_steps(tmp_path):
    """While the next step is written and an older one removed."""

    def work():
        assert value_of(write(folder, 2.0, 8)) == 2.0
        prune(folder, 1, 4)

    for count in itertools.count():
        folder = tmp_path / str(count)
        folder.mkdir()
        write(folder, 1.0)
        killed = killed_after(count, work)
        recover(folder)
        found = step_checkpoints(folder)
        assert sorted(folder.iterdir()) == found
        values = [value_of(path) for path in found]
        assert values in ([1.0], [1.0, 2.0], [2.0])
        if not killed:
            break
    assert values == [2.0]
    assert count > 8


def test_a_folder_has_no_pickle_and_a_damaged_file_is_an_error(tmp_path, capsys):
    path = write(tmp_path, 1.0)
    run, file = path / "run.pt", path / "__0_0.distcp"
    assert sorted(path.iterdir()) == [file, run]
    (path / ".metadata").write_bytes(pickle.dumps(Evil()))
    assert value_of(path) == 1.0
    data, content = file.read_bytes(), torch.load(run, weights_only=True)
    flips = [bytearray(data) for _ in range(20)]
    for flipped, place in zip(flips, random.Random(1).sample(range(len(data)), 20), strict=True):
        flipped[place] ^= 1
    damaged = r"00004: .* damaged in its file __0_0\.distcp$"
    for spoil, told in (
        *((lambda flipped=flipped: file.write_bytes(flipped), damaged) for flipped in flips),
        (lambda: file.write_bytes(data[:-1]), damaged),
        (file.unlink, damaged),
        (lambda: torch.save(content | {"format": Evil()}, run), r"run\.pt: expected a deepfast ch"),
        (run.unlink, "got a folder that is no step of a run"),
    ):
        spoil()
        with pytest.raises(CheckpointError, match=told):
            load_checkpoint(path)
    assert capsys.readouterr().out == ""


def test_a_rank_that_lost_the_first_one_leaves_it_its_folder(tmp_path, monkeypatch):
    """Where torchrun was killed, the first rank may still rename it."""
    path = tmp_path / "step-00000003"
    share = path.with_name(f".{path.name}.part")
    share.mkdir()
    monkeypatch.setattr(Ranks, "by_first", die)
    with pytest.raises(Killed):
        saving._write_folder(path, CONTENT, {}, Ranks(1, 2))
    assert share.exists()


@pytest.mark.parametrize("steps", [0, 2])
def test_a_step_is_saved_and_restored_as_it_is(make_trainer, tmp_path, steps):
    """Also before the first update, where Adam has no state, and with parameters that had no
    gradient, which have none."""
    trainer, other = make_trainer(LATENT), make_trainer(LATENT | {"optim.lr": 1.0})
    for _ in range(steps):
        trainer.train_step()
    model, state = trainer.model, trainer.optimizer.state
    assert len(state) == (len(trainer.parameters) if steps else 0)
    state.pop(next(iter(state), None), None)
    before = {name: p.clone() for name, p in model.named_parameters()}
    path = Saving(tmp_path, trainer, trainer.recipe.train).step()
    saved = tensors(path)
    kinds = {name.partition(".")[0] for name in saved}
    assert kinds == ({"model", "optimizer"} if steps else {"model"})
    again = Saving(tmp_path, other, other.recipe.train)
    again.restore(read_run(path), path)
    restored = again._tensors()
    assert restored.keys() == saved.keys()
    assert all(torch.equal(restored[name], tensor) for name, tensor in saved.items())
    # Rates are the recipe's.
    assert {group["lr"] for group in other.optimizer.param_groups} == {1.0}
    for found in (model, load_model(path)[0]):
        assert all(torch.equal(p, before[name]) for name, p in found.named_parameters())
    for one in (trainer, other):
        one.train_step()
        assert len(one.optimizer.state) == len(one.parameters)
