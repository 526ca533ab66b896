"""The training step: accumulation, precision, determinism, and finding the origin of NaN."""

import math
import os
import weakref

import pytest
import torch

from deepfast.mt.training import NotFiniteError
from deepfast.mt.training.environment import settings
from deepfast.mt.training.trainer import perplexity


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
    encoder, decoder = ([norm_of([x]) for x in y.layers] for y in (model.encoder, model.decoder))
    named = [*encoder, *decoder, norm_of([model.embedding])]
    expected = {"encoder": encoder, "decoder": decoder, "embedding": named[-1]}
    for name, norms in expected.items():
        assert row[f"grad_norm_{name}"] == pytest.approx(norms, rel=1e-5)
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
    assert [norm is None for norm in trainer.take_metrics()["grad_norm_encoder"]] == [0, 1]


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
    torch.use_deterministic_algorithms(True, warn_only=True)
    with settings(make_recipe({"train.threads": 2, "train.deterministic": True}).train):
        assert torch.get_num_threads() == 2
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert torch.get_num_threads() == before
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def nan(*given):
    """As a hook of a module or of a gradient."""
    return given[-1] * math.nan


FIRST = "; the first value that is not finite is the"
NOT_FINITE = {
    f"loss is nan{FIRST} output of decoder.layers.0.cross_attention.query (Linear)": lambda model: (
        model.decoder.layers[0].cross_attention.query.register_forward_hook(nan)),
    f"loss is nan{FIRST} output of encoder.connection.dlcl (DLCL)": lambda model: (
        model.encoder.connection.dlcl.weight.data.fill_(math.nan)),
    f"gradient is not finite{FIRST} gradient of the output of encoder.layers.1.feed_forward.up "
    "(Linear)": lambda model: model.encoder.layers[1].feed_forward.down.register_full_backward_hook(
        lambda module, inputs, outputs: (nan(*inputs),)),
    f"gradient is not finite{FIRST} gradient of encoder.layers.1.feed_forward.up.bias":
        lambda model: model.encoder.layers[1].feed_forward.up.bias.register_hook(nan),
}  # fmt: skip


@pytest.mark.parametrize("told", NOT_FINITE)
def test_what_is_not_finite_is_named_and_changes_no_parameter(make_trainer, told):
    trainer = make_trainer({"optim.accumulate": 2})
    trainer.train_step()
    NOT_FINITE[told](trainer.model)
    before = [p.clone() for p in trainer.parameters]
    with pytest.raises(NotFiniteError) as caught:
        trainer.train_step()
    assert str(caught.value) == f"step 2: the {told}"
    for p, old in zip(trainer.parameters, before, strict=True):
        torch.testing.assert_close(p, old, rtol=0, atol=0, equal_nan=True)
    assert trainer.step == 1


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


def test_a_validation_counts_the_right_tokens(make_trainer):
    """It is without dropout, draws nothing, and its loss has no label smoothing."""
    trainer = make_trainer({"optim.label_smoothing": 0.3})
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
