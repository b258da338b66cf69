"""pytest plugin: runs the OpSpecs of every test on the device OMNIATTN_TEST_DEVICE."""

import os

import pytest

from omniattn.testing import on_device


@pytest.fixture(autouse=True)
def device():
    with on_device(os.environ["OMNIATTN_TEST_DEVICE"]):
        yield
