"""Ranks in one process: what they tell each other, their gradients, and who is named."""

import math
import pickle
import shutil
from unittest.mock import Mock

import pytest
import torch

from deepfast.mt.training import (
    NotFiniteError,
    RecipeError,
    TrainingError,
    load_checkpoint,
    ranks,
    train,
)
from deepfast.mt.training.environment import StopSignal
from deepfast.mt.training.errors import OtherRankError
from deepfast.mt.training.parallel import kind_for
from deepfast.mt.training.ranks import Ranks
from tests.mt.training.runs import as_rank, assert_losses_agree, free_port, rows

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch without distributed"
)


@pytest.fixture
def waiting(monkeypatch):
    """waiting(lives, works): what the second rank gets where the first one works for some seconds,
    and gives signs of life for some; and how often it asked the store."""

    def run(lives, works):
        store, now = torch.distributed.HashStore(), 0.0
        counted = Mock(wraps=store)
        second = Ranks(1, 2, counted, timeout=45.0)
        second.signal = StopSignal()

        def sleep(seconds):
            nonlocal now
            if int(now) < int(now + seconds) <= lives:
                store.add("beats/0", 1)
            now += seconds
            if now > works:
                store.set("first/0", pickle.dumps("the result"))

        monkeypatch.setattr(ranks.time, "sleep", sleep)
        found = second.by_first(lambda: None)
        # Nothing of it is left in the store.
        assert not store.check(["first/0"])
        return found, len(counted.mock_calls)

    return run


def test_a_first_rank_is_waited_for_as_long_as_it_lives(waiting):
    found, asked = waiting(lives=4000, works=4000)
    assert found == "the result"
    assert asked < 7 * 4000
    for lives in (0, 100):
        with pytest.raises(torch.distributed.DistNetworkError, match="no sign of life"):
            waiting(lives, lives + 50)
        assert waiting(lives, lives + 40)[0] == "the result"


def test_a_rank_that_lives_or_has_left_is_not_silent(monkeypatch):
    monkeypatch.setattr(ranks, "BEAT_EVERY", 0.01)
    monkeypatch.setattr(ranks, "SILENT_AFTER", 0.5)
    store = torch.distributed.HashStore()
    asking, lives, killed = (Ranks(rank, 3, store) for rank in range(3))
    lives.start()
    try:
        assert asking._silent() == [2]
    finally:
        lives.leave()
    assert asking._silent() == [2]
    store.set("failure", "rank 2: says why itself")
    assert asking._silent() == []
    assert killed._beats(1) > 0


LOST = RuntimeError("[gloo] Connection closed by peer")
EXHAUSTED = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.\nMore lines.")


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (RecipeError("optim.lr: wrong"), "rank 1: optim.lr: wrong"),
        (KeyError("x"), "rank 1: KeyError: 'x'"),
        (EXHAUSTED, "rank 1: out of memory (CUDA out of memory. Tried to allo"),
        (LOST, "rank 0: no answer, killed or stopped from outside (the machine's"),
    ],
)
def test_a_rank_that_fails_is_named_by_the_first_that_notices(
    monkeypatch, tmp_path, error, sentence
):
    monkeypatch.setattr(ranks, "SILENT_AFTER", 0.1)
    store = torch.distributed.HashStore()
    first, second = (Ranks(rank, 2, store) for rank in range(2))
    second.saved = tmp_path
    blamed = second.blame(error)
    assert type(blamed) is TrainingError
    assert str(blamed).startswith(sentence)
    assert str(blamed).endswith(f"; last checkpoint: {tmp_path}")
    assert isinstance(first.blame(LOST), OtherRankError)
    with pytest.raises(OtherRankError, match=r"^rank [01]: "):
        second.by_first(lambda: None)


class Pair(Ranks):
    """One of two ranks in this process: the other one gives the same, or what `other` is."""

    other = None

    def rows(self, *values):
        found = [list(values), list(self.other or values)]
        return found if self.first else found[::-1]

    objects = rows


def test_the_smallest_rank_decides_between_ddp_and_fsdp(make_recipe):
    model, recipe = torch.nn.Linear(9, 9), make_recipe()
    for least, kind in ((2**40, "ddp"), (2**10, "fsdp")):
        small = Pair(0, 2)
        small.other = (least,)
        assert kind_for(recipe, model, torch.device("cpu"), small) == kind


@pytest.fixture
def pair(make_trainer):
    """pair(changes): new trainers of two ranks and of one process alone."""

    def make(changes):
        plain = {"model.dropout": 0.0, "optim.clip_norm": None}
        return [make_trainer(plain | changes, own) for own in (Pair(0, 2), Pair(1, 2), None)]

    return make


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_the_mean_of_the_ranks_gradients_is_that_of_one_process(pair, accumulate):
    *two, one = pair({"optim.accumulate": accumulate, "train.accuracy": True})
    sums = []
    for trainer in (*two, one):
        batches = [next(trainer._micro_batches) for _ in range(accumulate)]
        tokens = sum(batch.target_tokens for batch in batches)
        sums.append(trainer._backward(trainer._shares(batches), tokens))
    torch.testing.assert_close(sums[0] + sums[1], sums[2])
    for a, b, whole in zip(*(t.parameters for t in (*two, one)), strict=True):
        if whole.grad is not None:
            torch.testing.assert_close((a.grad + b.grad) / 2, whole.grad, rtol=1e-4, atol=1e-6)


def test_the_rank_whose_loss_or_gradient_is_not_finite_says_where(pair):
    trainer, *_ = pair({})
    trainer.ranks.other = (math.nan,) * 4
    with pytest.raises(OtherRankError, match=r"^step 1: the loss is nan on another rank"):
        trainer.train_step()
    bad, *_ = pair({})
    bad.ranks.other = trainer.ranks.other
    hook = lambda module, inputs, output: output * math.nan  # noqa: E731
    bad.model.encoder.layers[1].attention.out.register_forward_hook(hook)
    told = r"^step 1: the loss is nan; .* is the output of encoder\.layers\.1\.attent"
    with pytest.raises(NotFiniteError, match=told):
        bad.train_step()
    trainer, *_ = pair({})
    down = trainer.model.encoder.layers[1].feed_forward.down
    down.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * math.nan,))
    where = r"the gradient of the output of encoder\.layers\.1\.feed_forward\.up \(Linear\)$"
    with pytest.raises(NotFiniteError, match=f"^step 1: the gradient is not finite; .* is {where}"):
        trainer.train_step()


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_rank_trains_and_resumes_as_a_process_alone(make_recipe, monkeypatch, tmp_path, kind):
    """Its checkpoints are folders, which a process alone resumes from."""
    changes = {"parallel.kind": kind, "optim.accumulate": 2, "train.test_bleu": kind == "ddp",
               "train.max_steps": 6, "train.save_every": 3, "model.encoder_connection": "dlcl",
               "model.decoder_connection": "latent"}  # fmt: skip

    def run(name, **more):
        recipe = make_recipe(changes | more | {"output": str(tmp_path / name)})
        return train(recipe, quiet=True).output

    def run_as_rank(name, **more):
        with monkeypatch.context() as patch:
            as_rank(patch, free_port(), 0, 1)
            return run(name, **more)

    one, whole = run("one"), run_as_rank("whole")
    assert_losses_agree(one, whole)
    half = {"train.max_steps": 3, "train.validate_every": 99, "train.average_last": 0,
            "train.test_bleu": False, "data.dev_source": None, "data.dev_target": None}  # fmt: skip
    saved = run_as_rank("again", **half) / "step-00000003"
    assert sorted(path.name for path in saved.iterdir()) == ["__0_0.distcp", "run.pt"]
    shutil.copytree(saved.parent, tmp_path / "alone")
    again = run_as_rank("again", resume=True)
    assert rows(again, "train") == rows(whole, "train")
    a, b = (load_checkpoint(path / "step-00000006")["model"] for path in (again, whole))
    assert all(torch.equal(a[name], b[name]) for name in b)
    alone = run("alone", resume=True)
    assert rows(alone, "train")[-1]["loss"] == pytest.approx(rows(one, "train")[-1]["loss"])
    assert "training" not in load_checkpoint(whole / "best.pt")
