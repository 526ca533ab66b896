"""Which cases of a parametrized test run every day.

A test over five parameters has a few hundred cases, and nearly every fault needs only two certain
values together. So a daily run takes a few cases of each test, in which every pair of values of two
parameters occurs. A test over one or two parameters keeps all its cases. If it is marked
``each_value``, only each value has to occur. ``--all-cases`` runs every case, and also the tests
marked ``exhaustive``; ``--left-out`` runs those that a daily run leaves out.
"""

from collections import Counter
from itertools import combinations


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


def cover(cases, together=2):
    """Indices of the chosen cases: every combination of values of ``together`` parameters occurs.

    The choice is greedy. ``cases`` are the `values` of one test's items.
    """
    if len(cases[0]) <= together:
        return list(range(len(cases)))
    meetings = [set(combinations(case, together)) for case in cases]
    missing, taken, used = set().union(*meetings), [], Counter()

    def gain(k):
        """New combinations first, then values that were used least."""
        return len(meetings[k] & missing), -sum(used[value] for value in cases[k])

    while missing:
        best = max(range(len(cases)), key=gain)
        taken.append(best)
        missing -= meetings[best]
        used.update(cases[best])
    return taken


def daily(items):
    """The items of a daily run, in their order."""
    tests = {}
    for number, item in enumerate(items):
        if item.get_closest_marker("exhaustive") is None:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(number)
    kept = []
    for numbers in tests.values():
        together = 1 if items[numbers[0]].get_closest_marker("each_value") else 2
        kept += [numbers[k] for k in cover([values(items[n]) for n in numbers], together)]
    return [items[number] for number in sorted(kept)]
