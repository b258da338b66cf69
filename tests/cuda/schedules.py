"""pytest plugin for the emulated library: runs every test under each given schedule."""

import os

import pytest
import torch

SCHEDULES = {"ascending": 0, "descending": 1, "shuffled": 2}


def pytest_sessionstart():
    if limit := os.environ.get("OMNIATTN_TEST_SHARED_MEMORY"):
        torch.ops.omniattn.emulator_set_shared_memory(int(limit))


@pytest.fixture(autouse=True, params=os.environ["OMNIATTN_TEST_SCHEDULES"].split())
def schedule(request):
    torch.ops.omniattn.emulator_set_schedule(SCHEDULES[request.param], 1)
