"""Forced decoding against the forward pass, and against the log-probabilities of a search."""

import pytest
import torch

from deepfast.mt.search import DecodingOptions, beam_search, score_hypotheses

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


def test_forced_is_forward(any_model):
    model = any_model.double().eval()
    got = score_hypotheses(model, SOURCE, GIVEN)
    assert [len(scores) for scores in got] == [3, 0, 1]
    for source, given, scores in zip(SOURCE, GIVEN, got, strict=True):
        expected = [by_forward(model, source, tokens) for tokens in given]
        assert scores == pytest.approx(expected, rel=1e-9)


def test_agrees_with_the_log_probabilities_of_a_search(any_model):
    """Reordered hypotheses of a batch, each against a forward pass of its sentence alone."""
    model = any_model.train()
    found = beam_search(model, SOURCE, DecodingOptions(beam=4, nbest=4, max_length=7))
    assert [len(best) for best in found] == [4, 4, 4]
    scores = score_hypotheses(model, SOURCE, [[h.tokens for h in best] for best in found])
    assert all(module.training for module in (model, model.encoder, model.decoder))
    model.eval()
    for source, best, mine in zip(SOURCE, found, scores, strict=True):
        assert mine == pytest.approx([h.log_prob for h in best], abs=1e-4)
        expected = [by_forward(model, source, h.tokens) for h in best]
        assert mine == pytest.approx(expected, abs=1e-4)


def test_nothing_to_score(any_model):
    assert score_hypotheses(any_model, SOURCE, [[], [], []]) == [[], [], []]
    assert score_hypotheses(any_model, SOURCE[:0], []) == []
    with pytest.raises(ValueError, match="expected translations of 3 sentences, got 2"):
        score_hypotheses(any_model, SOURCE, [[], []])
