"""A pytest plugin that writes each test's outcome at once, so that a kill does not lose it.

``DEEPFAST_TEST_LOG`` names the file, one JSON object a line.
"""

import json
import os
from pathlib import Path


def pytest_runtest_logreport(report) -> None:
    # A test that runs is reported in its call; one that is skipped, or fails in its setup, is not.
    if report.when == "call" or not report.passed:
        line = {
            "test": report.nodeid,
            "outcome": report.outcome,
            "seconds": round(report.duration, 3),
            "text": "" if report.passed else report.longreprtext[-6000:],
        }
        with Path(os.environ["DEEPFAST_TEST_LOG"]).open("a") as file:
            file.write(json.dumps(line) + "\n")


def pytest_collectreport(report) -> None:
    """A file that cannot be imported."""
    if report.failed:
        line = {"test": report.nodeid, "outcome": "failed", "seconds": 0.0}
        with Path(os.environ["DEEPFAST_TEST_LOG"]).open("a") as file:
            file.write(json.dumps(line | {"text": report.longreprtext[-6000:]}) + "\n")
