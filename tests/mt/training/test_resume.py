"""What a run saves to resume from, and what it does where that is damaged, copied or cut short."""

import re
import shutil
from pathlib import Path

import pytest

from deepfast.mt.data import text
from deepfast.mt.training import CheckpointError, NotFiniteError, load_checkpoint, train
from deepfast.mt.training.trainer import Trainer, Validation

FIRST, SECOND, THIRD = (f"step-{step:08d}.pt" for step in (4, 8, 12))


class Killed(BaseException):
    """The error that ends a test's run; nothing may catch it."""


def die(*args):
    raise Killed


@pytest.fixture
def killed_at(make_recipe, monkeypatch):
    """killed_at(step, prepare) kills a run in the given step, or when what `prepare` patches is
    called after it began."""

    def run(step, prepare=die):
        original = Trainer.train_step

        def train_step(self):
            if self.step + 1 == step:
                prepare(patch)
            original(self)

        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "train_step", train_step)
            with pytest.raises(Killed):
                train(make_recipe(), quiet=True)

    return run


def damage(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_where_the_newest_are_damaged_the_newest_intact_one_is_named(make_recipe, count):
    """And it can be continued as the sentence says, also from the best."""
    folder = train(make_recipe(), quiet=True).output
    newest_first = [folder / name for name in (THIRD, SECOND, FIRST, "best.pt")]
    damaged, rest = newest_first[:count], newest_first[count:]
    for path in damaged:
        damage(path)
    with pytest.raises(CheckpointError, match=rf"^{damaged[0]}: .* damaged") as error:
        train(make_recipe({"resume": True}), quiet=True)
    if not rest:
        assert str(error.value).endswith("; no other one is intact")
        return
    names = ", ".join(path.name for path in damaged)
    assert str(error.value).endswith(
        f"; the newest intact one is {rest[0]}: move {names} out of the folder and continue with "
        f"resume={rest[0]}"
    )
    for path in damaged:
        path.rename(folder.parent / path.name)
    assert train(make_recipe({"resume": str(rest[0])}), quiet=True).step == 12
    assert load_checkpoint(damaged[0])["step"] == 12


@pytest.mark.parametrize(
    ("name", "later"), [("step-good.pt", SECOND), ("step-00000099.pt", "step-00000099.pt")]
)
def test_a_copy_is_resumed_by_its_step_not_by_its_name(make_recipe, name, later):
    folder = train(make_recipe({"train.max_steps": 8}), quiet=True).output
    copy = folder / name
    shutil.copy(folder / FIRST, copy)
    with pytest.raises(CheckpointError, match=f"later checkpoints than {copy}, got {later}"):
        train(make_recipe({"resume": str(copy)}), quiet=True)
    copy.unlink()
    good = shutil.copy(folder / SECOND, folder / "step-good.pt")
    assert train(make_recipe({"resume": str(good)}), quiet=True).step == 12


def test_a_file_does_not_continue_in_the_folder_of_another_run(make_recipe, killed_at, tmp_path):
    other = train(make_recipe({"output": str(tmp_path / "other")}), quiet=True)
    killed_at(3)
    metrics = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=r"run: expected a new folder.*\(metrics\.jsonl\)"):
        train(make_recipe({"resume": str(other.checkpoint)}), quiet=True)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == metrics


def test_in_a_new_folder_the_best_is_the_best_of_that_folder(make_recipe, tmp_path, monkeypatch):
    curve = {5: 2.0, 8: 2.5, 10: 3.0, 12: 4.0}
    monkeypatch.setattr(Trainer, "validate", lambda self: Validation(curve[self.step], 0.5))
    first = train(make_recipe({"train.max_steps": 8, "train.validate_every": 5}), quiet=True)
    changes = {"resume": str(first.checkpoint), "output": str(tmp_path / "other")}
    result = train(make_recipe(changes | {"train.test_bleu": True}), quiet=True)
    assert (result.best, result.best_nll) == (tmp_path / "other" / "best.pt", 3.0)
    assert load_checkpoint(result.best)["step"] == 10


@pytest.mark.parametrize(("step", "name"), [(8, SECOND), (10, "best.pt")])
def test_what_a_killed_run_left_half_written_is_removed(
    make_recipe, killed_at, tmp_path, step, name
):
    def prepare(patch):
        # As after SIGKILL of another process: the file does not get its name, nothing removes it.
        patch.setattr(text.os, "getpid", lambda: 7)
        patch.setattr(text.os, "replace", die)
        patch.setattr(text.Path, "unlink", lambda *args, **options: None)

    killed_at(step, prepare)
    (part,) = (tmp_path / "run").glob("*.part")
    assert part.name == f".{name}.7.part"
    train(make_recipe({"resume": True}), quiet=True)
    assert not part.exists()


@pytest.mark.parametrize("step", [8, 12])
def test_a_step_that_leaves_weights_that_are_not_finite_is_not_saved(make_recipe, step):
    """Also where it is the last one, so that no later loss tells."""
    recipe = make_recipe({"optim.restart_step": step - 1, "optim.restart_lr": 1e39})
    with pytest.raises(NotFiniteError) as caught:
        train(recipe, quiet=True)
    last = f"step-{step - 4:08d}.pt"
    assert re.fullmatch(
        rf"step {step}: the parameter embedding\.weight is not finite after the update; last "
        rf"checkpoint: .*/{last}",
        str(caught.value),
    )
    names = sorted(path.name for path in Path(recipe.output).glob("*.pt"))
    assert names[-1] == last
    assert "average.pt" not in names
