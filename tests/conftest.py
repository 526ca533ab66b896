"""Shared fixtures: fixed seeds and a fixed number of threads."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def pytest_configure(config):
    torch.set_num_threads(2)
