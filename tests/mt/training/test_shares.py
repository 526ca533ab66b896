"""How ranks divide a step: every sentence once, the same number of parts, about the same tokens."""

import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from deepfast.mt.data import make_batch
from deepfast.mt.training.parallel import shares


def step(counts, seed=0):
    """One micro-batch for each count of sentences; no two sentences have the same index."""
    draw = random.Random(seed)
    pairs = [([5] * draw.randint(1, 30), [6] * draw.randint(1, 30)) for _ in range(sum(counts))]
    ends = list(itertools.accumulate(counts))
    return [make_batch(pairs, range(e - c, e)) for c, e in zip(counts, ends, strict=True)]


@settings(max_examples=40)
@given(
    counts=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    size=st.integers(1, 8),
    whole=st.booleans(),
)
def test_every_sentence_once_and_as_many_parts_on_each_rank(counts, size, whole):
    batches = step(counts)
    ranks = [shares(batches, rank, size, whole=whole) for rank in range(size)]
    assert len({len(mine) for mine in ranks}) == 1
    parts = list(itertools.chain(*ranks))
    seen = [i for batch, counts in parts if counts for i in batch.indices]
    assert sorted(seen) == list(range(sum(counts)))
    # A rank without a sentence still takes part.
    assert all(len(batch) == 1 for batch, counts in parts if not counts)


def test_ranks_take_whole_micro_batches_as_far_as_they_can():
    batches = step([9, 3, 7, 5])
    for size, parts in ((2, 2), (4, 1), (8, 1), (3, 4)):
        ranks = [shares(batches, rank, size) for rank in range(size)]
        assert {len(mine) for mine in ranks} == {parts}
        if size in (2, 4):
            taken = [batch.indices for mine in ranks for batch, _ in mine]
            assert sorted(taken) == sorted(batch.indices for batch in batches)
    assert len(shares(batches, 0, 2, whole=False)) == 4
    # Parts have about the same tokens.
    (batch,) = step([60])
    for size in (2, 3, 4):
        ranks = [shares([batch], rank, size) for rank in range(size)]
        tokens = [sum(p.source_tokens + p.target_tokens for p, _ in mine) for mine in ranks]
        assert max(tokens) - min(tokens) <= 5
