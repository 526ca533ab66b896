"""Beam search: against a plain search, and its batches, ties, lengths and errors."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepfast.mt.ids import BOS, EOS, PAD, UNK
from deepfast.mt.search import DecodingOptions, Hypothesis, beam_search, score_hypotheses
from deepfast.mt.search.options import LENGTH_FORMS
from tests.mt.search.conftest import Table, grown, lively, recurrent

# The last one is padded on the left.
SOURCE = torch.tensor([[5, 6, 7, 3], [8, 4, 3, 0], [0, 0, 7, 3]])


def random_rule(seed):
    """Random logits, the same for the same prefix."""

    def rule(sentence, prefix):
        number = hash((seed, sentence, *prefix)) % (1 << 62)
        generator = torch.Generator().manual_seed(number)
        return 1.5 * torch.randn(9, generator=generator, dtype=torch.float64)

    return rule


def plain_search(log_probs, options):
    """The same search for one sentence, without a cache and without stopping early."""
    tokens = (EOS, 4, 5, 6, 7, 8) if options.no_unknown else (EOS, UNK, 4, 5, 6, 7, 8)
    live, finished = [((), 0.0)], []
    while live:
        allowed = (EOS,) if len(live[0][0]) == options.max_length else tokens
        candidates = [
            ((*prefix, token), total + float(row[token]))
            for prefix, total in live
            for row in [log_probs(prefix)]
            for token in allowed
        ]
        candidates = sorted(candidates, key=lambda c: -c[1])[: options.beam]
        live = [c for c in candidates if c[0][-1] != EOS]
        for path, total in candidates:
            if path[-1] == EOS:
                base = len(path) if options.length_form == "power" else (5 + len(path)) / 6
                score = total / base**options.length_penalty
                finished.append(Hypothesis(path[:-1], score, total))
    return sorted(finished, key=lambda h: -h.score)[: options.nbest]


def literal_score(model, source, tokens):
    """The log-probability of a translation of one sentence, without padding and cache."""
    rows = model(source[source != PAD][None], torch.tensor([[BOS, *tokens]])).log_softmax(-1)
    return sum(rows[i, token].item() for i, token in enumerate((*tokens, EOS)))


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    beam=st.one_of(st.integers(1, 6), st.just(40)),
    nbest=st.integers(1, 6),
    options=st.fixed_dictionaries({
        "length_penalty": st.sampled_from([0.0, 0.6, 2.0]),
        "length_form": st.sampled_from(LENGTH_FORMS),
        "max_length": st.integers(1, 8),
        "no_unknown": st.booleans(),
    }),
)  # fmt: skip
def test_equals_the_plain_search(seed, beam, nbest, options):
    """Neither pad nor bos is generated."""
    options = DecodingOptions(beam=beam, nbest=min(nbest, beam), **options)
    rule = random_rule(seed)
    for index, hypotheses in enumerate(beam_search(Table(rule), SOURCE, options)):
        log_probs = lambda prefix, i=index: rule(i, prefix).log_softmax(0)  # noqa: E731
        expected = plain_search(log_probs, options)
        assert [h.tokens for h in hypotheses] == [h.tokens for h in expected]
        for found, wanted in zip(hypotheses, expected, strict=True):
            numbers = pytest.approx((wanted.score, wanted.log_prob), abs=1e-9)
            assert (found.score, found.log_prob) == numbers


@pytest.mark.parametrize("make", [lively, grown, recurrent])
def test_the_score_of_a_translation_is_that_of_its_tokens_one_by_one(make, monkeypatch):
    """Of given ones and of those that the search finds; without dropout."""
    monkeypatch.setattr("deepfast.mt.search.beam.AT_ONCE", 4)
    model = make().double().train()
    given = [[(4, 5), (), (6, 7, 8, 4, 4, 4)], [], [(8,)]]
    got = score_hypotheses(model, SOURCE, given)
    assert model.training
    model.eval()
    for best in beam_search(model, SOURCE, DecodingOptions(nbest=4)):
        given.append([h.tokens for h in best])
        got.append([h.log_prob for h in best])
    for source, translations, scores in zip([*SOURCE, *SOURCE], given, got, strict=True):
        expected = [literal_score(model, source, tokens) for tokens in translations]
        assert scores == pytest.approx(expected, rel=1e-9)


def test_finished_sentences_leave_the_batch():
    def rule(sentence, prefix):
        logits = torch.full((9,), -20.0)
        logits[EOS if len(prefix) >= 3 * sentence else 4 + len(prefix) % 5] = 20.0
        return logits

    model = Table(rule)
    results = beam_search(model, SOURCE, DecodingOptions(beam=2, max_length=20))
    assert [len(best.tokens) for (best,) in results] == [0, 3, 6]
    # One row a sentence at first; two once the beam is full; none for a sentence that is done.
    assert model.rows == [3, 4, 4, 4, 2, 2, 2]
    # The default length limit.
    endless = Table(lambda s, p: torch.tensor([-9.0, -9, -9, -9, 1, 0, 0, 0, 0]))
    assert [len(best.tokens) for (best,) in beam_search(endless, SOURCE)] == [18, 16, 14]


def test_equal_candidates_by_hypothesis_then_by_id():
    flat = Table(lambda sentence, prefix: torch.zeros(40))
    options = DecodingOptions(beam=4, nbest=4, max_length=2, no_unknown=True)
    best = beam_search(flat, SOURCE[:1], options)[0]
    # At first eos (3) and the tokens 4, 5, 6; then 4 is continued by eos, 4, 5, 6; then eos.
    assert [h.tokens for h in best] == [(), (4,), (4, 4), (4, 5)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu():
    model = lively(seed=1)
    expected = beam_search(model, SOURCE)
    model.cuda()
    for precision, tolerance in ((torch.float32, 1e-3), (torch.bfloat16, 0.1)):
        with torch.autocast("cuda", precision, enabled=precision != torch.float32):
            got = beam_search(model, SOURCE.cuda())
        for (g,), (e,) in zip(got, expected, strict=True):
            assert g.score == pytest.approx(e.score, abs=tolerance, rel=tolerance)


def test_mode_and_gradients_are_left_as_they_were():
    """Also where there is nothing to search or to score."""
    model, nothing = lively(dropout=0.5).train(), torch.zeros(0, 4, dtype=torch.int64)
    assert beam_search(model, nothing) == score_hypotheses(model, nothing, []) == []
    assert score_hypotheses(model, SOURCE, [[]] * 3) == [[]] * 3
    assert beam_search(model, SOURCE) == beam_search(model, SOURCE)
    assert model.training
    model(SOURCE, torch.tensor([[2], [2], [2]])).sum().backward()
    assert model.embedding.weight.grad.isfinite().all()


@pytest.mark.parametrize(("bad", "place"), [(math.nan, 0), (math.inf, EOS), (math.inf, 8)])
def test_logits_without_a_next_token(bad, place):
    def third_step(sentence, prefix):
        logits = torch.zeros(9)
        logits[place] = bad if len(prefix) == 2 else 0.0
        return logits

    with pytest.raises(RuntimeError, match="expected finite logits from the model, got NaN"):
        beam_search(Table(third_step), SOURCE)
    nothing = Table(lambda *_: torch.tensor([0.0, 0, 0, -math.inf, -math.inf]))
    with pytest.raises(RuntimeError, match="position 1, got probability 0 for all"):
        beam_search(nothing, SOURCE, DecodingOptions(no_unknown=True))
