"""The kernels on a GPU, at realistic sizes.

`make gpu` runs these. Without a GPU some run on the CPU, at toy sizes, with Triton's interpreter
and the emulator of tests/cuda: that tests the tests.
"""

import contextlib
import importlib.util
import os

import pytest
import torch

from deepfast import backend

INTERPRETED = importlib.util.find_spec("triton") is not None


_seen: set[str] = set()


def pytest_itemcollected(item):
    """On a CPU, which has nothing to wait for, the first case of each other test runs, and of those
    only one every day."""
    if torch.cuda.is_available():
        return
    test = item.nodeid.partition("[")[0]
    if test in _seen or "unsynchronised" in item.fixturenames:
        item.add_marker(pytest.mark.only_if(lambda: False))
    elif not test.endswith("test_ops.py::test_op"):
        item.add_marker("exhaustive")
    _seen.add(test)


@pytest.fixture(autouse=True)
def device():
    if torch.cuda.is_available():
        # The processor computes the float64 references; other groups of tests need it too.
        torch.set_num_threads(max(2, (os.cpu_count() or 2) // 4))
        yield "cuda"
        # Large tests must free their memory for other processes.
        torch.cuda.empty_cache()
    elif INTERPRETED:
        yield "cpu"
    else:
        pytest.skip("needs a CUDA device, or Triton's interpreter")


@pytest.fixture(params=["triton", "cuda"])
def by(request, device):
    """Each backend that has kernels of its own for a GPU; a dry run emulates them."""
    if request.param == "cuda" and device == "cpu":
        request.getfixturevalue("emulated")
    reason = backend.why_unable("boundary", request.param, device, torch.float32)
    if reason is not None:
        pytest.skip(reason)
    return request.param


@pytest.fixture
def room(device):
    """``room(gib)`` skips a test that the GPU has too little memory for."""

    def check(gib):
        if device == "cuda":
            free = torch.cuda.mem_get_info()[0] / 2**30
            if free < gib:
                pytest.skip(f"needs {gib} GiB of GPU memory, {free:.0f} GiB are free")

    return check


@pytest.fixture
def capture(device):
    """``replay, results = capture(run)``: a CUDA graph of ``run`` and the tensors it writes.

    A dry run calls ``run`` again in place of a replay.
    """

    def captured(run):
        if device == "cpu":
            results = [r.clone() for r in run()]

            def replay():
                for old, new in zip(results, run(), strict=True):
                    old.copy_(new)

            return replay, results
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = run()

        def replay():
            graph.replay()
            torch.cuda.synchronize()

        return replay, results

    return captured


@pytest.fixture
def unsynchronised():
    """``with unsynchronised(): ...`` fails if the host waits for the device."""

    @contextlib.contextmanager
    def check():
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return check
