import pytest


@pytest.fixture(autouse=True)
def _poisoned_on_one_thread(poison, threads):
    """Fresh memory is NaN. One thread, unless a test asks for more: most tensors here are tiny."""
    with threads(1):
        yield
