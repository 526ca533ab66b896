import pytest


@pytest.fixture(autouse=True)
def _one_thread(threads):
    with threads(1):
        yield
