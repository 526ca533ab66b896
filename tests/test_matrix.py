"""The choice of cases: which combinations of values occur."""

from itertools import combinations, product

import pytest

from tests.matrix import cover, runs

SIZES = (3, 2, 4, 2)
CASES = [tuple(enumerate(case)) for case in product(*map(range, SIZES)) if sum(case) % 5]


@pytest.mark.parametrize("together", [1, 2, 3])
def test_every_combination_that_a_case_has_occurs(together):
    daily = cover(CASES, together)
    more = cover(CASES, together + 1, daily)
    assert len({*daily, *more}) == len(daily) + len(more) <= len(CASES)
    for taken, count in ((daily, together), (daily + more, together + 1)):
        found = {meeting for k in taken for meeting in combinations(CASES[k], count)}
        assert found == {meeting for case in CASES for meeting in combinations(case, count)}
    assert len(daily) < len(CASES) * together / 4 + 3


def test_few_parameters_keep_all_cases():
    pairs = [case[:2] for case in CASES]
    assert cover(pairs, 2) == [*range(len(pairs))]
    assert cover(pairs, 3, [0, 1]) == [*range(2, len(pairs))]


@pytest.mark.only_if(lambda size, kind: size < 3 or kind == "b")
@pytest.mark.parametrize("kind", "ab")
@pytest.mark.parametrize("size", SIZES)
def test_a_case_that_cannot_run_is_no_case(request, size, kind):
    assert (size, kind) in [(2, "a"), (2, "b"), (3, "b"), (4, "b")]
    request.node.add_marker(pytest.mark.only_if(lambda: False))
    assert not runs(request.node)
