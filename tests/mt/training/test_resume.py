"""What a run saves to resume from, and what it does where that is damaged, copied or cut short."""

import shutil

import pytest
import torch

from deepfast.mt.models import DepthGrowing
from deepfast.mt.training import CheckpointError, load_checkpoint, train
from deepfast.mt.training.trainer import Trainer, Validation
from tests.mt.training.runs import assert_same_runs, at_step, interrupt, rows

LSTM = {"kind": "fast_forward_lstm", "dim": 12, "embedding_dim": 8, "encoder_layers": 2,
        "decoder_layers": 2, "dropout": 0.2}  # fmt: skip
GROW = {"grow.model.top_decoder_layers": 1, "grow.model.top_encoder_connection": "dlcl",
        "grow.optim.accumulate": 3, "grow.train.precision": "bfloat16",
        "grow.model.bottom_dropout": True, "grow.model.embedding_norm": True,
        "grow.train.max_steps": 5, "train.max_steps": 6, "train.save_every": 2,
        "train.validate_every": 3}  # fmt: skip
STOPPED = {
    "in an epoch, the metrics of a line cut in two": (9, {
        "optim.accumulate": 3, "train.precision": "bfloat16", "train.log_every": 3,
        "train.save_every": 5}),
    "in the next epoch, latent depth": (11, {
        "model.norm": "post", "optim.weight_decay": 0.1, "model.dlcl.weight_type": "vector",
        "data.max_tokens": 400, "train.deterministic": True, "model.decoder_layers": 4,
        "model.decoder_connection": "latent",
        "model.latent": {"hard": True, "soft_steps": 3, "prior": "mean", "kl_weight": 0.1}}),
    "LSTM, two vocabularies": (6, {
        "model": LSTM, "optim.l2": 0.01, "optim.schedule": "constant", "data.vocab_size": 50,
        "data.target_vocab_size": 60, "train.max_steps": 8}),
    "attention residuals, fewer micro-batches after the restart": (5, {
        "model.encoder_connection": "attnres", "model.decoder_connection": "block_attnres",
        "model.decoder_layers": 2, "optim.accumulate": 3, "optim.restart_step": 2,
        "optim.restart_lr": 1e-4, "optim.restart_accumulate": 1, "data.max_tokens": 60,
        "train.save_every": 1, "train.max_steps": 6}),
    "before the second run saved": (2, GROW),
    "in the second run": (5, GROW),
    "interrupted": (6, {}),
    "interrupted in the first of two runs": (2, GROW),
}  # fmt: skip
"""Name -> the step in which the run is killed or interrupted, and its recipe."""
ON_A_GPU = (7, {"train.device": "cuda", "train.deterministic": True, "train.precision": "bfloat16"})
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CASES = [
    pytest.param(name, marks=pytest.mark.slow if "restart" in name or "second" in name else ())
    for name in STOPPED
]


@pytest.mark.parametrize("name", [*CASES, pytest.param("on a GPU", marks=GPU)])
def test_a_run_resumes_to_the_bit(run, whole_run, killed_at, monkeypatch, tmp_path, name):
    step, changes = (STOPPED | {"on a GPU": ON_A_GPU})[name]
    whole = whole_run(changes).output
    if "interrupted" not in name:
        killed_at(step, changes, model=DepthGrowing if changes == GROW else torch.nn.Module)
    else:
        with monkeypatch.context() as patch:
            at_step(patch, step, interrupt)
            first = run(changes)
        # The step in which the signal came is finished. It is neither kept nor averaged later.
        assert (first.stopped, first.step, first.average) == ("SIGTERM", step, None)
        assert first.output == tmp_path / "run" / ("stage1" if changes == GROW else "")
        assert not (tmp_path / "run" / "stage2").exists()
        assert first.checkpoint.name == f"step-{step:08d}"
        assert not (first.output / "result.json").exists()
    # Another generator state in the new process must not matter.
    torch.manual_seed(12345)
    resumed = run(changes | {"resume": True}).output
    assert_same_runs(whole, resumed)
    if changes == GROW:
        assert_same_runs(whole.with_name("stage1"), resumed.with_name("stage1"))


def test_the_newest_step_is_damaged_or_gone_and_a_finished_run_saves_no_step_again(run, finished):
    folder = finished()
    # A copy with a name of the user's own stays.
    (folder / "step-00000004").rename(folder / "step-00000004-good")
    before = {path: path.stat().st_ino for path in folder.glob("step-*")}
    # What a killed run left half written.
    (folder / ".step-00000016.part").mkdir()
    (folder / ".best.pt.7.part").touch()
    run({"resume": True})
    assert before == {path: path.stat().st_ino for path in folder.glob("step-*")}
    assert not list(folder.glob(".*.part"))
    last = folder / "step-00000012"
    file = last / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=rf"^{last}: .* damaged"):
        run({"resume": True})
    shutil.rmtree(last)
    assert run({"resume": True}).step == 12


@pytest.mark.parametrize("why", ["no best.pt in this folder", "the dev text"])
def test_a_best_that_is_not_that_of_the_run_is_forgotten(
    make_recipe, run, monkeypatch, capsys, corpus, tmp_path, why
):
    curve = {5: 1.0, 8: 2.5, 10: 3.0, 12: 4.0}
    monkeypatch.setattr(Trainer, "validate", lambda self: Validation(curve[self.step], 0.5))
    # Patience ends the first run, and begins anew with the best.
    folder = run({"train.max_steps": 8, "train.patience": 1}).output
    changes = {"resume": True, "train.patience": 1}
    if why == "the dev text":
        for side, suffix in (("source", "en"), ("target", "de")):
            lines = (corpus / f"dev.{suffix}").read_text("utf-8").splitlines(keepends=True)
            (tmp_path / suffix).write_text("".join(lines[:7]), "utf-8")
            changes[f"data.dev_{side}"] = str(tmp_path / suffix)
    else:
        (folder / "best.pt").unlink()
    result = train(make_recipe(changes))
    assert f"{why}; the next validation is the best so far\n" in capsys.readouterr().out
    assert (result.best_nll, load_checkpoint(result.best)["step"]) == (3.0, 10)


def test_a_run_that_ends_where_it_was_resumed_keeps_what_it_found_there(
    run, monkeypatch, whole_run
):
    """It validates, and a longer run knows of that."""
    with monkeypatch.context() as patch:
        at_step(patch, 6, interrupt)
        run()
    ended = run({"train.max_steps": 6, "resume": True})
    assert (ended.step, load_checkpoint(ended.best)["step"]) == (6, 6)
    longer = run({"resume": True})
    losses = [row["loss"] for row in rows(longer.output, "train")]
    assert losses == [row["loss"] for row in rows(whole_run({}).output, "train")]
    assert longer.best_nll == min(row["nll"] for row in rows(longer.output, "valid"))
