"""Runs under torchrun on ranks of this machine: the losses of one process, and exact resumes.

Starting ranks takes seconds, so one start trains several recipes."""

import json
import math
import pickle
import shutil
import time
from pathlib import Path

import pytest
import torch

from deepfast.mt.training import (
    RecipeError,
    TrainingError,
    dump_recipe,
    load_checkpoint,
    ranks,
    train,
)
from deepfast.mt.training.environment import StopSignal
from deepfast.mt.training.ranks import Ranks, restarts

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch without distributed"
)

PROGRAM = Path(__file__).with_name("rank_runs.py")
TIMES = ("seconds", "source_tokens_per_second", "target_tokens_per_second", "memory_bytes")
PLAIN = {"model.dropout": 0.0, "train.max_steps": 20, "train.save_every": 5, "train.keep_last": 9}
KINDS = ("ddp", "fsdp")


def rows(folder):
    """The metrics of a run without what differs from run to run: times and memory."""
    lines = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


def numbers(value):
    """One value, or those of all layers; a layer that is frozen has none."""
    values = value if isinstance(value, list) else [value]
    return [math.nan if x is None else x for x in values]


def agree(folder, whole):
    """The losses of 20 steps, the gradient norms and validations are those of one process."""
    one, other = rows(whole), rows(folder)
    assert [(row["event"], row["step"]) for row in one] == [
        (row["event"], row["step"]) for row in other
    ]
    assert sum(row["event"] == "train" for row in one) == 20
    for expected, got in zip(one, other, strict=True):
        norms = {key for key in expected if key.startswith("grad_norm")}
        for key in norms | ({"loss", "nll", "accuracy"} & set(expected)):
            assert numbers(got[key]) == pytest.approx(
                numbers(expected[key]), rel=1e-5, nan_ok=True
            ), (key, expected)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture
def torchrun(python, make_recipe, folder):
    """torchrun(ranks, {name: changes}) trains the recipes, each into a folder of its name."""

    def run(size, recipes):
        paths = []
        for name, changes in recipes.items():
            output = {"output": str(folder / changes.get("output", name))}
            paths.append(folder / f"{name}.yaml")
            paths[-1].write_text(dump_recipe(make_recipe(changes | output)))
        return python(
            "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size),
            str(PROGRAM), *map(str, paths), OMP_NUM_THREADS="1", timeout=150,
        )  # fmt: skip

    return run


@pytest.fixture(scope="module")
def done():
    """What has been run already."""
    return set()


@pytest.fixture
def one_process(make_recipe, folder):
    path = folder / "one"
    if not path.exists():
        train(make_recipe(PLAIN | {"output": str(path)}), quiet=True)
    return path


@pytest.fixture
def two_ranks(torchrun, folder, done):
    """Runs on two ranks that stop after 10 steps and go on to the end, and whole ones."""
    if "two" not in done:
        done.add("two")
        recipes = {}
        for kind in KINDS:
            # The second validation, right before the save at step 10, is worse than the first.
            worse = {"optim.restart_step": 6, "optim.restart_lr": 3.0}
            dropout = {"parallel.kind": kind, "optim.accumulate": 3, "train.save_every": 6} | worse
            # An average would take a tenth of the time, and nothing reads it.
            begun = {"train.max_steps": 10, "train.average_last": 0}
            recipes[f"{kind}-half"] = PLAIN | begun | {"parallel.kind": kind}
            recipes[f"{kind}-whole"] = dropout
            recipes[f"{kind}-first"] = dropout | begun | {"output": f"{kind}-again"}
            recipes[f"{kind}-again"] = dropout | {"resume": True}
        torchrun(2, recipes)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_resume_to_the_bit(two_ranks, kind):
    whole, again = two_ranks / f"{kind}-whole", two_ranks / f"{kind}-again"
    assert rows(again) == rows(whole)
    best = [row["best"] for row in rows(whole) if row["event"] == "valid"]
    assert best[:2] == [True, False]
    one, two = (load_checkpoint(path / "step-00000012") for path in (whole, again))
    for name, tensor in one["model"].items():
        assert torch.equal(tensor, two["model"][name]), name
    for number, state in one["training"]["optimizer"]["state"].items():
        for field, value in state.items():
            assert torch.equal(value, two["training"]["optimizer"]["state"][number][field]), field


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_then_one_have_the_losses_of_one_process(
    one_process, two_ranks, make_recipe, folder, kind
):
    path = folder / f"{kind}-one"
    shutil.copytree(two_ranks / f"{kind}-half", path)
    train(make_recipe(PLAIN | {"output": str(path), "resume": True}), quiet=True)
    agree(path, one_process)
    assert (path / "step-00000020.pt").is_file()


@pytest.mark.exhaustive
def test_two_ranks_then_four_then_one(one_process, two_ranks, torchrun, make_recipe):
    """Also from a file of one process, which older runs have left."""
    folder, recipes = two_ranks, {}
    shutil.copytree(one_process, folder / "file")
    for step in (10, 15, 20):
        (folder / "file" / f"step-{step:08d}.pt").unlink()
    for kind in KINDS:
        shutil.copytree(folder / f"{kind}-half", folder / f"{kind}-four")
        recipes[f"{kind}-four"] = PLAIN | {
            "parallel.kind": kind, "train.max_steps": 15, "resume": True
        }  # fmt: skip
    recipes["file"] = PLAIN | {"parallel.kind": "fsdp", "resume": True}
    torchrun(4, recipes)
    agree(folder / "file", one_process)
    for kind in KINDS:
        path = folder / f"{kind}-four"
        train(make_recipe(PLAIN | {"output": str(path), "resume": True}), quiet=True)
        agree(path, one_process)


MODELS = {
    "latent": {"model.decoder_connection": "latent", "model.decoder_layers": 3,
               "model.latent": {"hard": True, "kl_weight": 0.1, "lr_scale": 10.0},
               "optim.accumulate": 2},
    "attention residuals": {"model.encoder_connection": "attnres", "memory": "history"},
    "mudd, post-norm": {"model.encoder_connection": "mudd", "model.decoder_connection": "dlcl"},
    "fusion": {"model.encoder_fusion": "attention", "memory": "states", "optim.accumulate": 4},
    "transparent": {"model.cross_attention": "transparent", "model.mixture_dropout": 0.0},
    "lstm": {"model": {"kind": "fast_forward_lstm", "dim": 16, "dropout": 0.0}},
    "growing": {"grow": {"train": {"max_steps": 20}}},
    "Adam anew, all micro-batches at once": {
        "optim.restart_step": 9, "optim.restart_lr": 1e-3, "optim.accumulate": 2,
        "train.validate_bleu": True, "memory": "1GiB"},
}  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_every_model_has_the_losses_of_one_process(torchrun, make_recipe, folder, kind):
    recipes = {f"{kind} {name}": PLAIN | changes | {"parallel.kind": kind}
               for name, changes in MODELS.items()}  # fmt: skip
    torchrun(2, recipes)
    for name, changes in recipes.items():
        one = folder / f"one {name}"
        train(make_recipe(changes | {"output": str(one)}), quiet=True)
        for stage in ("stage1", "stage2") if "growing" in name else ("",):
            agree(folder / name / stage, one / stage)


@pytest.mark.exhaustive
def test_a_shipped_recipe_runs_as_it_is(python, tmp_path):
    steps = ("train.max_steps=4", "train.validate_every=2", f"output={tmp_path}")
    said = python(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "-m", "deepfast",
        "train", "phrases-small", *steps, OMP_NUM_THREADS="1", timeout=150,
    ).stdout  # fmt: skip
    assert said.count("stopped by max_steps") == 1
    assert "deepfast translate" in said
    done = python("-m", "deepfast", "export", str(tmp_path / "step-00000004"), "--output",
                  str(tmp_path / "model.safetensors"))  # fmt: skip
    assert "transformer of step 4" in done.stdout


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel.kind": "zero"}, "parallel.kind: expected one of auto, ddp, fsdp, got 'zero'"),
        ({"parallel.timeout": 0.0}, "timeout: expected seconds above 0 and below 1e6, got 0.0"),
        ({"parallel.kin": "ddp"}, "unknown key parallel.kin, the nearest known key is paral"),
    ],
)
def test_a_section_that_is_none_is_refused(make_recipe, changes, message):
    with pytest.raises(RecipeError, match=message):
        make_recipe(changes)


@pytest.fixture
def waiting(monkeypatch):
    """waiting(lives, works): what the second rank gets where the first one works for some seconds,
    and gives signs of life for some."""

    def run(lives, works):
        store, now = torch.distributed.HashStore(), 0.0
        second = Ranks(1, 2, store, timeout=45.0)
        second.signal = StopSignal()

        def sleep(seconds):
            nonlocal now
            if int(now) < int(now + seconds) <= lives:
                store.add(ranks.ALIVE, 1)
            now += seconds
            if now > works:
                store.set("first/0", pickle.dumps("the result"))

        monkeypatch.setattr(ranks.time, "sleep", sleep)
        return second.by_first(lambda: None)

    return run


def test_a_first_rank_that_lives_may_work_long(waiting):
    assert waiting(lives=4000, works=4000) == "the result"


@pytest.mark.parametrize("lives", [0, 100])
def test_a_first_rank_without_a_sign_of_life_is_no_longer_waited_for(waiting, lives):
    with pytest.raises(torch.distributed.DistNetworkError, match="no sign of life"):
        waiting(lives, lives + 50)
    assert waiting(lives, lives + 40) == "the result"


def test_the_first_rank_gives_signs_of_life_also_after_a_roll_call():
    store = torch.distributed.HashStore()
    first = Ranks(0, 2, store)
    first.answer_roll_calls()
    try:
        deadline = time.monotonic() + 60
        store.set("roll call", "")
        while not store.check(["here/0"]):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        before = store.add(ranks.ALIVE, 0)
        while store.add(ranks.ALIVE, 0) < before + 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        first.leave()


@pytest.mark.parametrize("count", ["", "-1", "1.0", "two"])
def test_a_count_of_restarts_that_is_none(monkeypatch, count):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
    # Without torchrun it says nothing, and no run resumes because of it.
    assert restarts() == 0
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(TrainingError, match=f"COUNT: expected a whole number .*, got '{count}'"):
        restarts()
