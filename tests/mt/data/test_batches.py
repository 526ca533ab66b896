"""Batches: the budget, each example once, the same order every time, exact resuming."""

import itertools
import json
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepfast.mt.data import TokenBatches, evaluation_batches, make_batch, take


def make_pairs(count, seed=0, longest=20):
    """Pairs of random ids from 4 on, 1 to `longest` a side."""
    draw = random.Random(seed)
    side = lambda: [draw.randrange(4, 99) for _ in range(draw.randint(1, longest))]  # noqa: E731
    return [(side(), side()) for _ in range(count)]


PAIRS = make_pairs(200)


def indices(batches):
    return [batch.indices for batch in batches]


def order(batches, epoch):
    return [tuple(batches.indices(epoch, position).tolist()) for position in range(len(batches))]


def assert_whole(batches, count, most, groups=None):
    """Each example is there once, within the budget unless alone, and of one group."""
    for batch in batches:
        widest = max(batch.source_BS.shape[1], batch.target_in_BT.shape[1])
        assert len(batch) * widest <= most or len(batch) == 1
        assert groups is None or len({groups[i] for i in batch.indices}) == 1
    assert sorted(itertools.chain(*indices(batches))) == list(range(count))


def test_contents_of_a_batch():
    batch = make_batch([([5, 6, 7], [8]), ([9], [10, 11])], [1, 0])
    assert batch.source_BS.tolist() == [[9, 3, 0, 0], [5, 6, 7, 3]]
    assert batch.target_in_BT.tolist() == [[2, 10, 11], [2, 8, 0]]
    assert batch.target_out_BT.tolist() == [[10, 11, 3], [8, 3, 0]]
    assert [lengths.tolist() for lengths in batch.lengths()] == [[2, 4], [3, 2]]
    assert (batch.source_tokens, batch.target_tokens, batch.indices) == (6, 5, (1, 0))
    moved = batch.to("meta")
    for tensor in (moved.source_BS, moved.target_in_BT, moved.target_out_BT):
        assert tensor.is_meta
        assert tensor.dtype == torch.int64
    # Some sentences of a batch are those of a batch of them.
    rows = [7, 2, 11]
    found, expected = take(make_batch(PAIRS, range(12)), rows), make_batch(PAIRS, rows)
    torch.testing.assert_close(vars(found), vars(expected), rtol=0, atol=0)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=8, max_size=60),
    max_tokens=st.integers(13, 80),
    seed=st.integers(0, 3),
    kinds=st.integers(1, 3),
)
def test_every_example_once_within_the_budget(lengths, max_tokens, seed, kinds):
    pairs = [([5] * source, [6] * target) for source, target in lengths]
    groups = [random.Random(i).randrange(kinds) for i in range(len(pairs))]
    batches = TokenBatches(pairs, max_tokens=max_tokens, seed=seed, groups=groups)
    # The second epoch has the same cuts.
    for _ in range(2):
        epoch = list(batches)
        assert len(epoch) == len(batches)
        assert_whole(epoch, len(pairs), max_tokens, groups)
    pairs += [([5] * 300, [6]), ([], [])]
    groups += [0, 0]
    evaluation = evaluation_batches(pairs, max_tokens=max_tokens, groups=groups)
    assert_whole(evaluation, len(pairs), max_tokens, groups)
    assert evaluation_batches([], max_tokens=100) == []


def test_order_is_a_function_of_seed_and_epoch():
    batches = TokenBatches(PAIRS, max_tokens=100, seed=7)
    epochs = [indices(batches) for _ in range(3)]
    assert epochs == [order(batches, epoch) for epoch in range(3)]
    assert epochs[0] != order(TokenBatches(PAIRS, max_tokens=100, seed=8), 0)
    # Not only the order of batches changes, but also their members.
    assert set(map(frozenset, epochs[0])) != set(map(frozenset, epochs[1]))
    # A checkpoint of an older release must continue with the same batches.
    fixed = TokenBatches([([5] * (1 + i % 3), [6]) for i in range(8)], max_tokens=9, seed=1)
    assert order(fixed, 0) == [(4, 7, 1), (2, 5), (6, 0, 3)]


@pytest.mark.parametrize("taken", [0, 1, 7, None])
def test_resume_exactly(taken):
    """Within an epoch, and while its last batch is in use."""
    original = TokenBatches(PAIRS, max_tokens=100, seed=3)
    epoch = order(original, 0)
    taken = len(epoch) if taken is None else taken
    list(itertools.islice(original, taken))
    # Through JSON, to show that the state holds only plain values.
    state = json.loads(json.dumps(original.state_dict()))
    resumed = TokenBatches(PAIRS, max_tokens=100, seed=99)
    resumed.load_state_dict(state)
    assert resumed.epoch == 0
    assert indices(resumed) == indices(original) == (epoch[taken:] or order(original, 1))
    assert indices(resumed) == indices(original)
    for change, sentence in (
        ({"max_tokens": 120}, "with max_tokens 100, got 120"),
        ({"pairs": make_pairs(200, seed=5)}, "other sentence pairs"),
        ({"max_length": 15}, "with max_length 256, got 15"),
    ):
        with pytest.raises(ValueError, match=sentence):
            TokenBatches(**{"pairs": PAIRS, "max_tokens": 100} | change).load_state_dict(state)


@pytest.mark.parametrize(("max_tokens", "max_length"), [(50, 10), (10, 50)])
def test_too_long_is_dropped_and_counted(max_tokens, max_length):
    pairs = [([5] * 3, [6] * 3), ([5] * 10, [6]), ([5], [6] * 9), ([5] * 9, [6])]
    batches = TokenBatches(pairs, max_tokens=max_tokens, max_length=max_length)
    assert sorted(itertools.chain(*indices(batches))) == [0, 2, 3]
    assert batches.dropped == "1 pairs dropped: 0 empty, 1 too long"
