"""A pytest plugin of `make gpu`: outcomes are written as they come, and no item takes for ever.

With pytest-xdist a crash or a hang costs only the item that it happened in: xdist reports it and
starts another worker. An item that passes its limit ends its process, as does one after which the
device answers with an error: every later launch would fail too.
"""

import faulthandler
import os
import sys

import pytest
import torch

from bench.gpu.clock import Bench
from bench.gpu.machine import emulate_cuda, end_with_parent
from bench.gpu.results import Run

STAGE = "DEEPFAST_GPU_STAGE"
"""The environment variable that names the stage to which items belong."""


@pytest.fixture(scope="session")
def run() -> Run:
    return Run.current()


@pytest.fixture
def bench(run, request) -> Bench:
    """Where a section of benchmarks writes its rows."""
    torch.manual_seed(0)
    if run.dry:
        emulate_cuda()
    return Bench(run, request.node.callspec.params["section"])


def pytest_configure(config):
    config.addinivalue_line("markers", "room: needs much memory, so it runs alone")
    if not Run.current().dry:
        end_with_parent()
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Writer(Run.current(), os.environ[STAGE]))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if "room" in item.fixturenames:
            item.add_marker("room")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    faulthandler.dump_traceback_later(Run.current().limit, exit=True, file=sys.__stderr__)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_runtest_logfinish(nodeid, location):
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(1)


class Writer:
    """Writes outcomes; in the process that starts the workers, to which they report."""

    def __init__(self, run: Run, stage: str):
        self.run, self.stage = run, stage

    def pytest_runtest_logreport(self, report):
        # A test that runs is reported in its call; one that is skipped, or fails in its setup or
        # with its worker, is not.
        if report.when == "call" or not report.passed:
            text = "" if report.passed else report.longreprtext[-6000:]
            self.run.write(
                "item", stage=self.stage, item=report.nodeid, outcome=report.outcome,
                seconds=round(getattr(report, "duration", 0.0), 2), text=text,
            )  # fmt: skip
            if report.failed:
                print(f"FAILED {report.nodeid}\n{text[-1500:]}", flush=True)

    def pytest_collectreport(self, report):
        """A file that cannot be imported."""
        if report.failed:
            self.run.write("item", stage=self.stage, item=report.nodeid, outcome="failed",
                           seconds=0.0, text=report.longreprtext[-6000:])  # fmt: skip
