"""What every model of the toolkit does, for all kinds and options."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from deepfast.memory import POLICIES
from tests.mt.models import kinds
from tests.mt.models.kinds import LABELS, REAL, SOURCE, TARGET, learning, make

# The other options of an LSTM are compared with its specification.
NAMES = [*kinds.TRANSFORMERS, *kinds.GROWING, "Deep-Att", "Deep-ED", "Deep-Att, plain",
         "Deep-ED, plain"]  # fmt: skip
# So are the forward and the loss of a model that grows and of an LSTM, sentence by sentence.
EVERY = pytest.mark.parametrize("name", kinds.TRANSFORMERS)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_decoding_step_by_step_equals_forward(name):
    """Then with hypotheses that are repeated, dropped and exchanged."""
    model = make(name)
    rows = model(SOURCE, TARGET).split(REAL.sum(1).tolist())
    whole, state = pad_sequence(rows, batch_first=True), model.start(SOURCE)
    for position in range(TARGET.shape[1]):
        step, real = model.step(TARGET[:, position], state), REAL[:, position]
        torch.testing.assert_close(step[real], whole[real, position])
    state = model.start(SOURCE)
    model.step(torch.tensor([2, 2, 2]), state)
    # Sentence 1 twice, sentence 0 once, sentence 2 gone.
    state.reorder(torch.tensor([1, 1, 0]))
    model.step(torch.tensor([5, 6, 7]), state)
    state.reorder(torch.tensor([1, 0, 2]), encoded=False)
    state.reorder(torch.tensor([2, 0]))
    got = model.step(torch.tensor([9, 4]), state)
    expected = model(SOURCE[[0, 1]], torch.tensor([[2, 7, 9], [2, 6, 4]]))
    torch.testing.assert_close(got, expected.view(2, 3, -1)[:, -1])


@EVERY
@torch.no_grad()
def test_padding_changes_nothing(name):
    model = make(name)
    expected = model(SOURCE, TARGET)
    assert expected.shape[0] == REAL.sum()
    source, target = F.pad(SOURCE, (0, 3)), F.pad(TARGET, (0, 3))
    left = torch.stack([torch.cat((row[row == 0], row[row != 0])) for row in source])
    for operands in ((source, target), (left, TARGET)):
        torch.testing.assert_close(model(*operands), expected)
    alone = [model(s[s != 0][None], t[t != 0][None]) for s, t in zip(SOURCE, TARGET, strict=True)]
    torch.testing.assert_close(torch.cat(alone), expected)


@EVERY
def test_loss_and_gradients_are_torchs_on_the_logits(name):
    """Every parameter of a layer that runs has a gradient that is not zero."""
    model = make(name)
    loss, nll, correct = model.loss(SOURCE, TARGET, LABELS, 0.1, True)
    loss.backward()
    got = {key: p.grad for key, p in learning(model).items()}
    model.zero_grad()
    logits, labels = model(SOURCE, TARGET), LABELS[REAL]
    expected = F.cross_entropy(logits, labels, label_smoothing=0.1, reduction="sum")
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(nll, F.cross_entropy(logits, labels, reduction="sum").detach())
    assert correct == (logits.argmax(1) == labels).sum()
    for key, p in learning(model).items():
        torch.testing.assert_close(got[key], p.grad, msg=key)
        # In evaluation latent depth leaves layers out.
        assert name == "latent" or got[key].ne(0).any(), key


@pytest.mark.parametrize("name", kinds.SOME)
def test_autocast_learns_in_float32(name):
    model = make(name, torch.float32)
    exact, _ = kinds.gradients(model)
    with torch.autocast("cpu", torch.bfloat16):
        mixed, found = kinds.gradients(model)
        state = model.start(SOURCE)
        logits = [model.step(torch.full((3,), token), state) for token in (2, 4)]
    assert mixed == pytest.approx(exact, rel=0.05)
    assert {g.dtype for g in found.values() if g is not None} == {torch.float32}
    assert torch.stack(logits).isfinite().all()


@pytest.mark.parametrize("name", ["transparent, dlcl", "channel_attention fusion",
                                  "dlcl everywhere"])  # fmt: skip
def test_memory_policies_give_the_same_gradients(name):
    model = make(name, dropout=0.3).train()
    expected = kinds.gradients(model)
    for policy in POLICIES:
        model.encoder.set_recompute(policy)
        # A decoder of plain residual layers has no history to keep.
        plain = model.config.decoder_connection == "residual" and policy == "layer+input"
        model.decoder.set_recompute("layer" if plain else policy)
        loss, found = kinds.gradients(model)
        assert loss == expected[0], policy
        torch.testing.assert_close(found, expected[1], rtol=1e-9, atol=1e-12)
