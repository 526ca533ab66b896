"""Every test of a model runs on one thread: the models are too small for several."""

import pytest


@pytest.fixture(autouse=True)
def _one_thread(threads):
    with threads(1):
        yield
