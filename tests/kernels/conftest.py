"""Kernels run on a GPU where there is one, else in the interpreter (see tests/conftest.py)."""

import pytest

pytest.importorskip("triton")
