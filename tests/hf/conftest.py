"""The models of these tests are registered once, and tiny."""

import pytest
import torch

import omniattn.hf


@pytest.fixture(autouse=True)
def _registered(one_thread) -> None:
    torch.manual_seed(0)
    omniattn.hf.register()
