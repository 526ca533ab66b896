"""Batches: the budget, each example once, the same order every time, exact resuming."""

import itertools
import json
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepfast.files import DataError
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


def padded_cost(batch):
    widest = max(batch.source_BS.shape[1], batch.target_in_BT.shape[1])
    return len(batch) * widest


def assert_equal(batch, expected):
    for name, value in vars(expected).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(getattr(batch, name), value), name
        else:
            assert getattr(batch, name) == value, name


def test_contents_of_a_batch():
    batch = make_batch([([5, 6, 7], [8]), ([9], [10, 11])], [1, 0])
    assert batch.source_BS.tolist() == [[9, 3, 0, 0], [5, 6, 7, 3]]
    assert batch.target_in_BT.tolist() == [[2, 10, 11], [2, 8, 0]]
    assert batch.target_out_BT.tolist() == [[10, 11, 3], [8, 3, 0]]
    assert [lengths.tolist() for lengths in batch.lengths()] == [[2, 4], [3, 2]]
    assert (batch.source_tokens, batch.target_tokens, batch.indices) == (6, 5, (1, 0))
    assert len(batch) == 2
    moved = batch.to("meta")
    for tensor in (moved.source_BS, moved.target_in_BT, moved.target_out_BT):
        assert tensor.is_meta
        assert tensor.dtype == torch.int64


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=8, max_size=60),
    max_tokens=st.integers(13, 80),
    seed=st.integers(-1, 3),
)
def test_every_example_once_within_the_budget(lengths, max_tokens, seed):
    pairs = [([5] * source, [6] * target) for source, target in lengths]
    batches = TokenBatches(pairs, max_tokens=max_tokens, seed=seed)
    for _ in range(2):
        epoch = list(batches)
        assert len(epoch) == len(batches)
        assert all(padded_cost(batch) <= max_tokens for batch in epoch)
        assert sorted(itertools.chain(*indices(epoch))) == list(range(len(pairs)))


def test_some_sentences_of_a_batch_are_those_of_a_batch_of_them():
    rows = [7, 2, 11]
    assert_equal(take(make_batch(PAIRS, range(12)), rows), make_batch(PAIRS, rows))


def test_order_is_a_function_of_seed_and_epoch():
    one, two = (TokenBatches(PAIRS, max_tokens=100, seed=7) for _ in range(2))
    epochs = [indices(one) for _ in range(3)]
    assert epochs == [indices(two) for _ in range(3)]
    assert epochs[2] == order(TokenBatches(PAIRS, max_tokens=100, seed=7), 2)
    assert epochs[0] != epochs[1]
    assert epochs[0] != indices(TokenBatches(PAIRS, max_tokens=100, seed=8))
    # Not only the order of batches changes, but also their members.
    assert set(map(frozenset, epochs[0])) != set(map(frozenset, epochs[1]))


def test_order_is_the_same_in_every_release():
    batches = TokenBatches([([5] * (1 + i % 3), [6]) for i in range(8)], max_tokens=9, seed=1)
    # A checkpoint of an older release must continue with the same batches.
    assert order(batches, 0) == [(4, 7, 1), (2, 5), (6, 0, 3)]


@pytest.mark.parametrize("taken", [0, 1, 7])
def test_resume_within_an_epoch(taken):
    original = TokenBatches(PAIRS, max_tokens=100, seed=3)
    list(original)
    list(itertools.islice(original, taken))
    # Through JSON, to show that the state holds only plain values.
    state = json.loads(json.dumps(original.state_dict()))
    resumed = TokenBatches(PAIRS, max_tokens=100, seed=99)
    resumed.load_state_dict(state)
    rest = list(resumed)
    assert len(rest) == len(original) - taken
    for mine, due in zip(rest, original, strict=True):
        assert_equal(mine, due)
    assert indices(resumed) == indices(original)


def test_resume_while_the_last_batch_is_in_use():
    batches = TokenBatches(PAIRS, max_tokens=100, seed=3)
    for _ in batches:
        assert batches.epoch == 0
        state = batches.state_dict()
    resumed = TokenBatches(PAIRS, max_tokens=100, seed=3)
    resumed.load_state_dict(state)
    assert indices(resumed) == indices(batches) == order(batches, 1)
    assert batches.epoch == 1


def test_leaving_a_loop_continues_with_the_next_batch():
    batches = TokenBatches(PAIRS, max_tokens=100)
    whole = order(batches, 0)
    seen = indices(itertools.islice(batches, 3)) + indices(batches)
    assert seen == whole
    assert next(iter(batches)).indices == order(batches, 1)[0]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"max_tokens": 120}, "with max_tokens 100, got 120"),
        ({"pairs": make_pairs(200, seed=5)}, "other sentence pairs"),
        ({"pairs": PAIRS[:-1]}, "other sentence pairs"),
        ({"max_length": 15}, "with max_length 256, got 15"),
    ],
)
def test_a_state_of_other_batches_is_refused(change, sentence):
    state = TokenBatches(PAIRS, max_tokens=100).state_dict()
    batches = TokenBatches(**{"pairs": PAIRS, "max_tokens": 100} | change)
    with pytest.raises(DataError, match=sentence):
        batches.load_state_dict(state)
    assert batches.position == 0


@pytest.mark.parametrize(("max_tokens", "max_length"), [(50, 10), (10, 50)])
def test_too_long_is_dropped_and_counted(max_tokens, max_length):
    pairs = [([5] * 3, [6] * 3), ([5] * 10, [6]), ([5], [6] * 9), ([5] * 9, [6])]
    batches = TokenBatches(pairs, max_tokens=max_tokens, max_length=max_length)
    assert sorted(itertools.chain(*indices(batches))) == [0, 2, 3]
    assert batches.dropped == "1 pairs dropped: 0 empty, 1 too long"


@pytest.mark.parametrize(
    ("pairs", "arguments", "sentence"),
    [
        ([], {}, "at least one pair of at most 100 tokens, got 0"),
        ([([5] * 9, [5])], {"max_length": 5}, "at least one pair of at most 5 tokens, got 1 long"),
        (PAIRS, {"max_tokens": 0}, "max_tokens must be an integer of at least 1, got 0"),
    ],
)
def test_arguments(pairs, arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        TokenBatches(pairs, **{"max_tokens": 100} | arguments)


def test_evaluation_covers_all():
    pairs = [*PAIRS, ([5] * 300, [6]), ([], [])]
    batches = evaluation_batches(pairs, max_tokens=100)
    assert sorted(itertools.chain(*indices(batches))) == list(range(len(pairs)))
    assert all(padded_cost(b) <= 100 or len(b) == 1 for b in batches)
    assert evaluation_batches([], max_tokens=100) == []


def test_a_batch_is_of_one_group():
    groups = [random.Random(i).randrange(3) for i in range(len(PAIRS))]
    batches = TokenBatches(PAIRS, max_tokens=90, groups=groups)
    evaluation = evaluation_batches(PAIRS, max_tokens=15, groups=groups)
    # The second epoch has the same cuts.
    for epoch, most in ((list(batches), 90), (list(batches), 90), (evaluation, 15)):
        for batch in epoch:
            assert len({groups[i] for i in batch.indices}) == 1
            assert padded_cost(batch) <= most or len(batch) == 1
        assert sorted(itertools.chain(*indices(epoch))) == list(range(len(PAIRS)))
