"""Ranks in one process: what they tell each other, their gradients, and who is named."""

import pickle
import shutil

import pytest
import torch

from deepfast.mt.training import RecipeError, TrainingError, load_checkpoint, ranks, train
from deepfast.mt.training.environment import StopSignal
from deepfast.mt.training.errors import OtherRankError
from deepfast.mt.training.parallel import kind_for
from deepfast.mt.training.ranks import Ranks
from tests.mt.training.runs import assert_losses_agree

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch without distributed"
)


@pytest.mark.parametrize(("lives", "works"), [(4000, 4000), (0, 40), (0, 50), (9, 49), (9, 59)])
def test_a_first_rank_is_waited_for_as_long_as_it_lives(monkeypatch, lives, works):
    """It works for some seconds, and gives signs of life for some."""
    store, now = torch.distributed.HashStore(), 0.0
    second = Ranks(1, 2, store, timeout=45.0)
    second.signal = StopSignal()

    def sleep(seconds):
        nonlocal now
        if int(now) < int(now + seconds) <= lives:
            store.add("beats/0", 1)
        now += seconds
        if now > works:
            store.set("first/0", pickle.dumps("the result"))

    monkeypatch.setattr(ranks.time, "sleep", sleep)
    if works - lives > 45:
        with pytest.raises(torch.distributed.DistNetworkError, match="no sign of life"):
            second.by_first(lambda: None)
    else:
        assert second.by_first(lambda: None) == "the result"
        # Nothing of it is left in the store.
        assert not store.check(["first/0"])


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
    first, second = (Ranks(rank, 3, store) for rank in range(2))
    # A rank that has left is not silent.
    store.set("left/2", "")
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
        return [list(values), list(self.other or values)]


def test_the_smallest_rank_decides_between_ddp_and_fsdp(make_recipe):
    model, recipe, small = torch.nn.Linear(9, 9), make_recipe(), Pair(0, 2)
    for least, kind in ((2**40, "ddp"), (2**10, "fsdp")):
        small.other = (least,)
        assert kind_for(recipe, model, torch.device("cpu"), small) == kind


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_the_mean_of_the_ranks_gradients_is_that_of_one_process(make_trainer, accumulate):
    changes = {"model.dropout": 0.0, "optim.accumulate": accumulate, "train.accuracy": True}
    trainers = [make_trainer(changes, own) for own in (Pair(0, 2), Pair(1, 2), None)]
    sums = []
    for trainer in trainers:
        batches = [next(trainer._micro_batches) for _ in range(accumulate)]
        tokens = sum(batch.target_tokens for batch in batches)
        sums.append(trainer._backward(trainer._shares(batches), tokens))
    torch.testing.assert_close(sums[0] + sums[1], sums[2])
    for a, b, whole in zip(*(trainer.parameters for trainer in trainers), strict=True):
        if whole.grad is not None:
            torch.testing.assert_close((a.grad + b.grad) / 2, whole.grad, rtol=1e-4, atol=1e-6)


def test_a_rank_trains_as_a_process_alone_which_resumes_its_run(make_recipe, monkeypatch, tmp_path):
    changes = {"optim.accumulate": 2, "train.max_steps": 4, "train.save_every": 2,
               "train.validate_every": 3, "train.test_bleu": True,
               "model.decoder_connection": "latent"}  # fmt: skip

    def run(name, **more):
        recipe = make_recipe(changes | more | {"output": str(tmp_path / name)})
        return train(recipe, quiet=True).output

    one = run("one")
    for kind in ("ddp", "fsdp"):
        own = {"parallel.kind": kind}
        with monkeypatch.context() as patch:
            for name, value in (("TORCHELASTIC_RUN_ID", "x"), ("RANK", 0), ("WORLD_SIZE", 1),
                                ("MASTER_ADDR", "localhost"), ("MASTER_PORT", 0)):  # fmt: skip
                patch.setenv(name, str(value))
            other = run(kind, **own)
        assert_losses_agree(one, other)
        shutil.rmtree(other / "step-00000004")
        assert_losses_agree(one, run(kind, **own, resume=True))
        assert "training" not in load_checkpoint(other / "best.pt")
