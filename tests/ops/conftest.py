"""Every op test runs on poisoned memory."""

import pytest


@pytest.fixture(autouse=True)
def _poisoned(poison):
    """Fresh memory is NaN."""
