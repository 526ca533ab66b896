"""What a run saves to resume from, and what it does where that is damaged, copied or cut short."""

import shutil

import pytest
import torch

from deepfast.mt.models import DepthGrowing
from deepfast.mt.training import CheckpointError, load_checkpoint, train
from deepfast.mt.training.trainer import Trainer, Validation
from tests.mt.training.runs import assert_same_runs, at_step, interrupt

LSTM = {"kind": "fast_forward_lstm", "dim": 12, "embedding_dim": 8, "encoder_layers": 2,
        "decoder_layers": 2, "dropout": 0.2}  # fmt: skip
GROW = {"grow.model.top_encoder_layers": 1, "grow.model.top_decoder_layers": 1,
        "grow.model.top_encoder_connection": "dlcl", "grow.model.bottom_dropout": True,
        "grow.model.embedding_norm": True, "grow.optim.accumulate": 2, "grow.train.max_steps": 4,
        "train.max_steps": 4, "train.save_every": 2, "train.validate_every": 2}  # fmt: skip
STOPPED = {
    "in an epoch, the metrics of a line cut in two, after Adam's restart": (9, {
        "model.encoder_connection": "attnres", "optim.accumulate": 3, "optim.restart_step": 5,
        "optim.restart_lr": 1e-4, "optim.restart_accumulate": 1, "train.precision": "bfloat16",
        "train.log_every": 3, "train.max_steps": 10}),
    "in the next epoch, latent depth": (7, {
        "model.norm": "post", "optim.weight_decay": 0.1, "model.dlcl.weight_type": "vector",
        "data.max_tokens": 400, "train.deterministic": True, "model.encoder_layers": 1,
        "model.decoder_layers": 3, "model.decoder_connection": "latent",
        "model.latent": {"hard": True, "soft_steps": 3, "prior": "mean", "kl_weight": 0.1},
        "train.save_every": 3, "train.max_steps": 8}),
    "LSTM, two vocabularies": (6, {
        "model": LSTM, "optim.l2": 0.01, "optim.schedule": "constant", "data.vocab_size": 50,
        "data.target_vocab_size": 60, "train.max_steps": 8}),
}  # fmt: skip
"""Name -> the step in which the run is killed, and its recipe."""
ON_A_GPU = (7, {"train.device": "cuda", "train.deterministic": True, "train.precision": "bfloat16"})
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", [*STOPPED, pytest.param("on a GPU", marks=GPU)])
def test_a_run_resumes_to_the_bit(run, whole_run, killed_at, name):
    step, changes = (STOPPED | {"on a GPU": ON_A_GPU})[name]
    killed_at(step, changes)
    # Another generator state in the new process must not matter.
    torch.manual_seed(12345)
    resumed = run(changes | {"resume": True}).output
    assert_same_runs(whole_run(changes).output, resumed)


def test_two_runs_of_a_recipe_resume_to_the_bit(run, whole_run, killed_at, monkeypatch, tmp_path):
    """Interrupted in the first one; killed in the second one before it has saved, and after."""
    with monkeypatch.context() as patch:
        at_step(patch, 3, interrupt)
        first = run(GROW)
    # The step in which the signal came is finished. It is neither kept nor averaged later.
    assert (first.stopped, first.step, first.average) == ("SIGTERM", 3, None)
    assert first.output == tmp_path / "run" / "stage1"
    assert not (tmp_path / "run" / "stage2").exists()
    assert first.checkpoint.name == "step-00000003"
    assert not list((tmp_path / "run").rglob("result.json"))
    changes = GROW | {"resume": True}
    for step in (2, 4):
        torch.manual_seed(step)
        killed_at(step, changes, model=DepthGrowing)
    resumed, whole = run(changes).output, whole_run(GROW).output
    for stage in ("stage1", "stage2"):
        assert_same_runs(whole.with_name(stage), resumed.with_name(stage))


def test_the_newest_step_is_damaged_or_gone_and_a_finished_run_saves_no_step_again(run, finished):
    folder = finished()
    # A copy with a name of the user's own stays.
    shutil.copytree(folder / "step-00000004", folder / "step-00000004-good")
    before = {path: path.stat().st_ino for path in folder.glob("step-*")}
    # What a killed run left half written.
    (folder / ".step-00000016.part").mkdir()
    (folder / ".best.pt.7.part").touch()
    run({"resume": True})
    assert before == {path: path.stat().st_ino for path in folder.glob("step-*")}
    assert not list(folder.glob(".*.part"))
    last = folder / "step-00000008"
    file = last / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=rf"^{last}: .* damaged"):
        run({"resume": True})
    shutil.rmtree(last)
    assert run({"resume": True}).step == 8
    assert (folder / "step-00000004-good").is_dir()


@pytest.mark.parametrize("why", ["no best.pt in this folder", "the dev text"])
def test_a_best_that_is_not_that_of_the_run_is_forgotten(
    make_recipe, run, monkeypatch, capsys, corpus, tmp_path, why
):
    curve = {2: 1.0, 3: 2.5, 4: 3.0, 5: 4.0}
    monkeypatch.setattr(Trainer, "validate", lambda self: Validation(curve[self.step], 0.5))
    # Patience ends the first run, and begins anew with the best.
    changes = {"train.patience": 1, "train.validate_every": 2, "train.max_steps": 5}
    folder = run(changes | {"train.max_steps": 3}).output
    changes["resume"] = True
    if why == "the dev text":
        for side, suffix in (("source", "en"), ("target", "de")):
            lines = (corpus / f"dev.{suffix}").read_text("utf-8").splitlines(keepends=True)
            (tmp_path / suffix).write_text("".join(lines[:7]), "utf-8")
            changes[f"data.dev_{side}"] = str(tmp_path / suffix)
    else:
        (folder / "best.pt").unlink()
    result = train(make_recipe(changes))
    assert f"{why}; the next validation is the best so far\n" in capsys.readouterr().out
    assert (result.best_nll, load_checkpoint(result.best)["step"]) == (3.0, 4)
