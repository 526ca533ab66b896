"""The training step: accumulation, precision, determinism, and finding the origin of NaN."""

import math
import os
import weakref

import pytest
import torch

from deepfast.mt.training import NotFiniteError
from deepfast.mt.training.environment import settings
from deepfast.mt.training.trainer import perplexity

LSTM = {"kind": "fast_forward_lstm", "dim": 16, "embedding_dim": 8, "encoder_layers": 1,
        "decoder_layers": 1, "lr_scale": 1.0}  # fmt: skip


def norm_of(modules):
    return math.sqrt(sum(p.grad.square().sum().item() for m in modules for p in m.parameters()))


def literal_accuracy(trainer, batches):
    """The share of target tokens, eos included, whose label is the argmax of all logits."""
    trainer.model.eval()
    right = count = 0
    for batch in batches:
        logits = trainer.model(batch.source_BS, batch.target_in_BT)
        labels = batch.target_out_BT[batch.target_in_BT != trainer.corpus.vocabulary.pad_id]
        right, count = right + (logits.argmax(-1) == labels).sum().item(), count + len(labels)
    return right / count


def test_a_step_is_that_of_one_batch_and_says_the_gradient_norm_of_every_layer(make_trainer):
    """The norms are those before clipping."""
    changes = {"model.dropout": 0.0, "optim.accumulate": 3}
    trainer = make_trainer(changes | {"optim.clip_norm": 0.01, "train.accuracy": True})
    twin, plain = make_trainer(changes), make_trainer(changes | {"optim.clip_norm": 0.01})
    batches = [next(twin._micro_batches) for _ in range(3)]
    accuracy = literal_accuracy(make_trainer(changes), batches)
    sums = [twin.batch_loss(batch, 0.1)[0] for batch in batches]
    tokens = [batch.target_tokens for batch in batches]
    assert len(set(tokens)) > 1
    (sum(sums) / sum(tokens)).backward()
    model, whole = twin.model, norm_of([twin.model])
    assert not trainer.gradient_norms.row()
    trainer.train_step()
    for (name, p), q in zip(trainer.model.named_parameters(), model.parameters(), strict=True):
        if p.grad is not None:
            wanted = q.grad * 0.01 / whole
            torch.testing.assert_close(p.grad, wanted, rtol=1e-3, atol=1e-7, msg=name)
    row = trainer.take_metrics()
    assert row["loss"] == pytest.approx((sum(sums) / sum(tokens)).item(), rel=1e-6)
    assert row["accuracy"] == pytest.approx(accuracy, rel=1e-12)
    assert (row["lr"], row["grad_norm"]) == pytest.approx((5e-4, whole), rel=1e-5)
    assert row["memory_bytes"] > 2**20
    for side, layers in (("encoder", model.encoder.layers), ("decoder", model.decoder.layers)):
        expected = [norm_of([layer]) for layer in layers]
        assert row[f"grad_norm_{side}"] == pytest.approx(expected, rel=1e-5)
    assert row["grad_norm_embedding"] == pytest.approx(norm_of([model.embedding]), rel=1e-5)
    named = [*row["grad_norm_encoder"], *row["grad_norm_decoder"], row["grad_norm_embedding"]]
    rest = whole**2 - sum(norm**2 for norm in named)
    assert row["grad_norm_other"] == pytest.approx(math.sqrt(rest), rel=1e-3)
    # Training counts the right tokens only on request, which changes nothing else.
    plain.train_step()
    assert "accuracy" not in plain.take_metrics()
    for p, q in zip(trainer.parameters, plain.parameters, strict=True):
        assert torch.equal(p, q)
    # A frozen layer has no norm.
    trainer.model.encoder.layers[1].requires_grad_(False)
    trainer.train_step()
    assert [norm is None for norm in trainer.take_metrics()["grad_norm_encoder"]] == [0, 1, 0]


def test_bfloat16_autocast_trains_float32_parameters(make_trainer):
    trainer = make_trainer({"train.precision": "bfloat16", "model.dropout": 0.0})
    seen = []
    up = trainer.model.encoder.layers[0].feed_forward.up
    up.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    trainer.train_step()
    assert set(seen) == {torch.bfloat16}
    assert {p.dtype for p in trainer.parameters} == {torch.float32}


def test_settings_are_put_back(make_recipe, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = torch.get_num_threads()
    recipe = make_recipe({"train.threads": 1, "train.deterministic": True})
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with settings(recipe.train):
            assert torch.get_num_threads() == 1
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.get_num_threads() == before
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("embedding.weight", "embedding (Embedding)"),
        ("decoder.layers.0.cross_attention.query.weight",
         "decoder.layers.0.cross_attention.query (Linear)"),
        ("encoder.connection.dlcl.weight", "encoder.connection.dlcl (DLCL)"),
    ],
)  # fmt: skip
def test_a_nan_loss_names_step_and_module(make_trainer, name, module):
    trainer = make_trainer({"optim.accumulate": 2})
    trainer.train_step()
    with torch.no_grad():
        trainer.model.get_parameter(name).fill_(math.nan)
    weights = {n: p.clone() for n, p in trainer.model.named_parameters()}
    with pytest.raises(NotFiniteError) as caught:
        trainer.train_step()
    assert str(caught.value).startswith("step 2: the loss is nan; the first value that is not fin")
    assert str(caught.value).endswith(f"the output of {module}")
    for n, p in trainer.model.named_parameters():
        assert torch.equal(p, weights[n]) or n == name
    assert trainer.step == 1


def test_a_finite_loss_with_a_bad_gradient_names_the_parameter(make_trainer):
    trainer = make_trainer()
    bias = trainer.model.encoder.layers[2].feed_forward.up.bias
    bias.register_hook(lambda grad: grad * math.nan)
    told = "step 1: the gradient is not finite; the first value that is not finite is the gradient "
    with pytest.raises(NotFiniteError, match=f"^{told}of encoder.layers.2.feed_forward.up.bias$"):
        trainer.train_step()


def test_the_rerun_draws_what_the_step_drew_and_keeps_one_graph(make_trainer):
    trainer = make_trainer({"model.dropout": 0.5, "optim.accumulate": 3})
    drawn, outputs, alive = [], [], []

    def poison(module, inputs, output):
        alive.append(sum(output() is not None for output in outputs))
        drawn.append(torch.rand(()).item())
        output = output * (math.inf if len(drawn) % 3 == 0 else 1.0)
        outputs.append(weakref.ref(output))
        return output

    trainer.model.decoder.layers[0].feed_forward.up.register_forward_hook(poison)
    with pytest.raises(NotFiniteError, match=r"decoder\.layers\.0\.feed_forward\.up \(Linear\)"):
        trainer.train_step()
    assert drawn[:3] == drawn[3:]
    assert alive == [0] * 6


@pytest.mark.parametrize("changes", [{}, {"model": dict(LSTM)}], ids=["transformer", "lstm"])
def test_a_validation_counts_the_right_tokens(make_trainer, changes):
    """It is without dropout, draws nothing, and its loss has no label smoothing."""
    trainer = make_trainer(changes | {"optim.label_smoothing": 0.3})
    for _ in range(25):
        trainer.train_step()
    row, state = trainer.take_metrics(), torch.get_rng_state()
    assert row["nll"] < row["loss"]
    assert row["ppl"] == pytest.approx(math.exp(row["nll"]))
    found = trainer.validate()
    assert trainer.validate() == found
    assert torch.equal(state, torch.get_rng_state())
    with torch.no_grad():
        expected = literal_accuracy(trainer, trainer.corpus.dev_batches)
    assert 0 < expected < 1
    assert found.accuracy == pytest.approx(expected, rel=1e-12)
    assert found.row == {"nll": found.nll, "ppl": math.exp(found.nll), "accuracy": found.accuracy}
    assert perplexity(1e4) == math.inf
