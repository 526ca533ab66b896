"""A pytest plugin: one of several processes that share the tests, with a journal of each outcome.

``DEEPFAST_SHARE`` is "i/n alone": the process is the i-th of n, and ``alone`` is 1 for the tests
that need much memory, which run in one process after all others.
"""

import os
from collections import Counter

from bench.gpu.journal import Journal, leave_broken_device

MEMORY = "room"
"""The fixture of a test that needs much memory."""

journal = Journal()


def share(groups: list[list], index: int, count: int) -> list:
    """The items of the i-th of ``count`` processes. Cases of one test stay together, because they
    share compiled kernels; the longest groups are dealt first, each to the shortest share."""
    shares: list[list] = [[] for _ in range(count)]
    for group in sorted(groups, key=len, reverse=True):
        min(shares, key=len).extend(group)
    return shares[index]


def pytest_collection_modifyitems(config, items) -> None:
    part, alone = os.environ["DEEPFAST_SHARE"].split()
    index, count = map(int, part.split("/"))
    groups: dict[str, list] = {}
    files = Counter(item.nodeid.partition("::")[0] for item in items)
    for file, number in files.items():
        journal.write(file=file, collected=number)
    for item in items:
        if (MEMORY in item.fixturenames) == bool(int(alone)):
            groups.setdefault(item.nodeid.partition("[")[0], []).append(item)
    mine = share(list(groups.values()), index, count)
    kept = [item for item in mine if item.nodeid not in journal.done]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


def pytest_runtest_logstart(nodeid, location) -> None:
    journal.write(begin=nodeid)


def pytest_runtest_logreport(report) -> None:
    # A test that runs is reported in its call; one that is skipped, or fails in its setup, is not.
    if report.when == "call" or not report.passed:
        text = "" if report.passed else report.longreprtext[-6000:]
        outcome = "ok" if report.passed else report.outcome
        seconds = round(report.duration, 2)
        journal.write(end=report.nodeid, outcome=outcome, seconds=seconds, text=text)
        if report.failed:
            leave_broken_device()


def pytest_collectreport(report) -> None:
    """A file that cannot be imported."""
    if report.failed:
        journal.write(
            end=report.nodeid, outcome="failed", seconds=0.0, text=report.longreprtext[-6000:]
        )


def pytest_sessionfinish(session, exitstatus) -> None:
    journal.write(finished=True)
