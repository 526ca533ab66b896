"""Benchmarks: `python -m pytest bench`. Rows carry bytes, GB/s and the fraction of a copy."""

import pytest
import torch

from deepfast.measure.clock import copy_bandwidth


def pytest_configure(config):
    torch.set_num_threads(config.getoption("--threads"))


def pytest_addoption(parser):
    parser.addoption("--threads", type=int, default=2, help="threads of every benchmark")


@pytest.fixture(scope="session")
def copy_gb_per_second() -> float:
    """Bandwidth of a plain copy, measured in this run; bytes read plus bytes written."""
    return copy_bandwidth()


@pytest.fixture
def measure(benchmark, copy_gb_per_second):
    """Times ``run`` and adds its bandwidth to the row, unless ``nbytes`` that it moves are 0."""

    def timed(run, nbytes: int, rounds: int = 5):
        benchmark.pedantic(run, rounds=rounds, warmup_rounds=1)
        if not nbytes:
            return
        gb_per_second = nbytes / benchmark.stats.stats.median / 1e9
        benchmark.extra_info.update(
            bytes=nbytes,
            gb_per_second=round(gb_per_second, 2),
            fraction_of_copy=round(gb_per_second / copy_gb_per_second, 3),
            copy_gb_per_second=round(copy_gb_per_second, 2),
        )

    return timed
