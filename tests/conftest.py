"""Fixtures that several folders use."""

from collections.abc import Iterator

import pytest

from omniattn.testing import threads


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny models only lose by a second thread, on a busy machine a factor of ten."""
    with threads(1):
        yield
