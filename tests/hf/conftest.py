"""The models of these tests are registered once, and tiny."""

import pytest
import torch
import torch.distributed as dist

import omniattn.hf


@pytest.fixture(autouse=True)
def _registered(one_thread) -> None:
    torch.manual_seed(0)
    omniattn.hf.register()


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
