"""Word alignment: IBM model 1 against a literal transcription, and a corpus with a known answer."""

from collections import defaultdict

import pytest

from deepfast.mt.data import align
from deepfast.mt.data.align import TIE, Aligner
from tests.mt.words import reversed_pairs


def literal_model_1(pairs, rounds):
    """p(target | source) by EM, from equal probabilities."""
    p = defaultdict(lambda: 1.0)
    for _ in range(rounds):
        counts, totals = defaultdict(float), defaultdict(float)
        for source, target in pairs:
            for t in target:
                norm = sum(p[s, t] for s in source)
                for s in source:
                    counts[s, t] += p[s, t] / norm
                    totals[s] += p[s, t] / norm
        p = defaultdict(float, {(s, t): c / totals[s] for (s, t), c in counts.items()})
    return p


def literal_links(pairs, rounds):
    """Where each word is the likeliest for the other; of equal ones the nearest to the diagonal."""
    forward = literal_model_1(pairs, rounds)
    backward = literal_model_1([(target, source) for source, target in pairs], rounds)
    found = []
    for source, target in pairs:
        n, m, links = len(source), len(target), []
        near = lambda i, j, n=n, m=m: 1 - TIE * abs(i / n - j / m)  # noqa: E731
        for j, t in enumerate(target):
            i = max(range(n), key=lambda i: forward[source[i], t] * near(i, j))
            back = [backward[u, source[i]] * near(i, k) for k, u in enumerate(target)]
            if back[j] == max(back):
                links.append((i, j))
        found.append(links)
    return found


@pytest.mark.parametrize("at_once", [1, 50, 10_000])
def test_links_are_those_of_the_literal_form(monkeypatch, at_once):
    monkeypatch.setattr(align, "ENTRIES_AT_ONCE", at_once)
    monkeypatch.setattr(align, "AT_ONCE", at_once)
    pairs = [pair for pair in reversed_pairs(50) if len(set(pair[0])) == len(pair[0])]
    pairs.append((["a", "c", "b"], ["x", "y", "y"]))
    assert [*Aligner(pairs).links(pairs)] == literal_links(pairs, align.ROUNDS)


def test_words_that_were_not_in_the_text_have_no_link():
    aligner = Aligner([*reversed_pairs(150), (["only"], []), ([], ["nur"])])
    text = [(["new", "red", "tree"], ["Baum", "neu", "rot"]), (["new"], ["neu"]), ([], ["Baum"]),
            (["tree"], ["Baum"])]  # fmt: skip
    assert [*aligner.links(text)] == [[(2, 0), (1, 2)], [], [], [(0, 0)]]
    assert [*Aligner([]).links([(["a"], ["b"])])] == [[]]


def test_the_most_frequent_words():
    aligner = Aligner([([], ["b", "a", "c"]), ([], ["c", "a"]), ([], ["c", "d"])])
    found = [aligner.most_frequent(count) for count in (2, 3, 9)]
    assert found == [{"c", "a"}, {"c", "a", "b"}, {"a", "b", "c", "d"}]


def test_a_large_text_keeps_the_words_that_meet_often(monkeypatch):
    """Of a text with more than MOST pairs of words; the rare names keep their translation."""
    pairs = reversed_pairs(400)
    for n in range(0, 400, 2):
        pairs[n] = ([*pairs[n][0], f"name{n // 8}"], [f"Name{n // 8}", *pairs[n][1]])
    whole = Aligner(pairs)
    monkeypatch.setattr(align, "MOST", 100)
    monkeypatch.setattr(align, "SLOTS", 16)
    few = Aligner(pairs)
    assert len(few._keys) < 0.5 * len(whole._keys)
    assert [*few.links(pairs)] == [*whole.links(pairs)]
