"""Which cases of a parametrized test run when.

A test over five parameters has a few hundred cases, and nearly every fault needs only two or three
certain values together. So a daily run takes a few cases of each test, in which every pair of
values of two parameters occurs. A test over one or two parameters keeps all its cases. If it is
marked ``each_value``, only each value has to occur.

``--left-out`` goes one step further, without what a daily run has: every three values of three
parameters occur, of a test marked ``each_value`` every pair; and it runs the tests marked
``exhaustive``. ``--all-cases`` runs every case.

A case that cannot run is no case, and ``only_if`` says which can. Its condition takes parameters
of the test, or of its fixtures, by name::

    @pytest.mark.only_if(lambda kind, bias: bias or kind != "layer")
"""

import heapq
import inspect
from itertools import combinations


def runs(item):
    """Whether the conditions of ``only_if`` hold for the item's parameters."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return all(
        condition(*(params[name] for name in inspect.signature(condition).parameters))
        for mark in item.iter_markers("only_if")
        for condition in mark.args
    )


def values(item):
    """The item's value of each parameter; names of one ``parametrize`` are one parameter."""
    callspec = getattr(item, "callspec", None)
    alone = dict(callspec.params) if callspec else {}
    found = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        names = names.replace(" ", "").split(",") if isinstance(names, str) else names
        found.append((tuple(names), tuple(id(alone.pop(name)) for name in names)))
    return found + [((name,), (id(value),)) for name, value in alone.items()]


def cover(cases, together, taken=()):
    """Indices of further cases: with ``taken`` every combination of values of ``together``
    parameters occurs.

    The next case has the most new combinations. ``cases`` are the `values` of one test's items.
    """
    if len(cases[0]) <= together:
        return [k for k in range(len(cases)) if k not in taken]
    meetings = [set(combinations(case, together)) for case in cases]
    missing = set().union(*meetings).difference(*(meetings[k] for k in taken))
    found, queue = [], [(-len(meeting), k) for k, meeting in enumerate(meetings)]
    heapq.heapify(queue)
    while missing:
        _, k = heapq.heappop(queue)
        new = len(meetings[k] & missing)
        # Counts only fall, so a case that is still ahead of the next one's old count is the best.
        if new and (not queue or -new <= queue[0][0]):
            found.append(k)
            missing -= meetings[k]
        elif new:
            heapq.heappush(queue, (-new, k))
    return found


def chosen(items, left_out):
    """The items of a daily run, or those that `make test-all` adds to it, in their order."""
    kept, tests = [], {}
    for number, item in enumerate(items):
        if item.get_closest_marker("exhaustive") is None:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(number)
        elif left_out:
            kept.append(number)
    for numbers in tests.values():
        together = 1 if items[numbers[0]].get_closest_marker("each_value") else 2
        cases = [values(items[n]) for n in numbers]
        daily = cover(cases, together)
        more = cover(cases, together + 1, daily) if left_out else daily
        kept += [numbers[k] for k in more]
    return [items[number] for number in sorted(kept)]
