"""Forced decoding against the forward pass."""

import pytest
import torch

from deepfast.mt.search import score_hypotheses

SOURCE = torch.tensor([[5, 6, 7, 4, 3], [8, 4, 3, 0, 0], [0, 0, 0, 7, 3]])
GIVEN = [[(4, 5), (), (6, 7, 8, 4, 4, 4)], [], [(8,)]]


def by_forward(model, source, tokens):
    """log P of one translation of one sentence, by the model's forward pass."""
    row = torch.tensor([tokens])
    with torch.no_grad():
        target_in = torch.cat((torch.tensor([[2]]), row), 1).long()
        target_out = torch.cat((row, torch.tensor([[3]])), 1).long()
        logits = model(source[source != 0][None], target_in)
        return logits.log_softmax(1).gather(1, target_out.T).sum().item()


@pytest.mark.parametrize("mode", [False, True])
def test_forced_is_forward(any_model, mode):
    """Without dropout, and the model's mode is left as it was."""
    model = any_model.double().train(mode)
    got = score_hypotheses(model, SOURCE, GIVEN)
    assert all(module.training == mode for module in (model, model.encoder, model.decoder))
    model.eval()
    assert [len(scores) for scores in got] == [3, 0, 1]
    for source, given, scores in zip(SOURCE, GIVEN, got, strict=True):
        expected = [by_forward(model, source, tokens) for tokens in given]
        assert scores == pytest.approx(expected, rel=1e-9)
