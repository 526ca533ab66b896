"""Benchmarks: `python -m pytest bench/ops.py`. `deepfast bench` compares ops with a copy."""

import torch


def pytest_configure(config):
    torch.set_num_threads(config.getoption("--threads"))


def pytest_addoption(parser):
    parser.addoption("--threads", type=int, default=2, help="threads of every benchmark")
