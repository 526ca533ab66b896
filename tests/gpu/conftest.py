"""The kernels on a GPU, at realistic sizes: `make gpu STAGE=tests`.

Without a GPU they run on the CPU, at toy sizes, with Triton's interpreter and the emulator of
tests/cuda: that tests the tests.
"""

import faulthandler
import os

import pytest
import torch

from deepfast import backend
from deepfast.clock import captured

REAL = torch.cuda.is_available()
SECONDS = 180
"""The limit of a test on a GPU: a kernel may hang."""


def pytest_runtest_logfinish():
    """After a fault of the device every call fails, so the process ends; xdist starts another."""
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(1)


@pytest.fixture(autouse=True)
def device():
    if not REAL:
        pytest.importorskip("triton")
        yield "cpu"
        return
    # The processor computes the float64 references; other groups of tests need it too.
    torch.set_num_threads(max(2, (os.cpu_count() or 2) // 4))
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    yield "cuda"
    faulthandler.cancel_dump_traceback_later()
    # Large tests must free their memory for other processes.
    torch.cuda.empty_cache()


@pytest.fixture(params=["triton", "cuda"] if REAL else ["cuda"])
def by(request, device):
    """Each backend that has kernels of its own for a GPU. On a CPU the emulator is fast enough."""
    if request.param == "cuda" and not REAL:
        request.getfixturevalue("emulated")
    reason = backend.why_unable("boundary", request.param, device, torch.float32)
    if reason is not None:
        pytest.skip(f"needs {request.param}: {reason}")
    return request.param


@pytest.fixture
def capture():
    """``replay, results = capture(run)``: a CUDA graph of ``run`` and the tensors it writes. On a
    CPU a replay calls ``run`` again."""

    def captured_run(run):
        stream = torch.cuda.Stream() if REAL else None
        if REAL:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            results = [r.clone() for r in run()]

            def again():
                for old, new in zip(results, run(), strict=True):
                    old.copy_(new)

            again()
            return captured(again, stream) if REAL else again, results

    return captured_run
