"""Fixtures that several folders use, and the share of threads of each process of a run."""

import os
from collections.abc import Iterator

import pytest
import torch

from omniattn.testing import threads

# Of `pytest -n`: workers that each took all cores would wait for one another.
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0)):
    share = max(1, torch.get_num_threads() // workers)
    torch.set_num_threads(share)
    os.environ["OMP_NUM_THREADS"] = str(share)  # of what the tests start


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny models only lose by a second thread, on a busy machine a factor of ten."""
    with threads(1):
        yield
