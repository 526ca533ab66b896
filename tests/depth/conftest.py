import pytest


@pytest.fixture(autouse=True)
def _poisoned(poison):
    """Fresh memory is NaN."""
