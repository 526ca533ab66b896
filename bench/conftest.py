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
