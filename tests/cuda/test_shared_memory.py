"""Launches on devices whose blocks have less shared memory: sm_86 and sm_89 99 KB, sm_80 163 KB."""

import pytest
import torch

from bench.gpu.launches import every_launch
from deepfast import availability, backend


@pytest.mark.parametrize(("kilobytes", "dim"), [(99, 512), (99, 509), (99, 4096), (163, 8192)])
def test_every_launch_fits(emulated, monkeypatch, kilobytes, dim):
    monkeypatch.setenv("EMULATOR_SHARED", str(kilobytes))
    # The first device shows what a block asks for and what it does with it.
    monkeypatch.setenv("EMULATOR_BLOCKS", "1")
    every_launch(emulated, "cpu", 1, dim)


def test_a_row_too_wide_is_told(monkeypatch):
    class Properties:
        shared_memory_per_block_optin = 99 << 10

    for name in ("_library_with_cuda", "_triton"):
        monkeypatch.setattr(availability, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    half = torch.bfloat16
    assert backend.why_unable("boundary", "cuda", "cuda", half, 4096) is None
    assert "at most 4096 channels" in backend.why_unable("boundary", "cuda", "cuda", half, 4097)
    Properties.shared_memory_per_block_optin = 163 << 10
    assert backend.why_unable("boundary", "cuda", "cuda", half, 8192) is None
