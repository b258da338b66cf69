"""Sums of chunks of recurrences that are split over ranks, in one process."""

import math

import pytest
import torch

from omniattn.distributed.states import _decay_to_end


def by_definition(g):
    later = g.flip(1).cumsum(1).flip(1)
    return torch.cat((later[:, 1:], torch.zeros_like(later[:, :1])), 1).exp()


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 129, 200])
def test_decays_to_the_end_of_a_chunk(length):
    torch.manual_seed(0)
    g = -torch.rand(2, length, 3, 2, dtype=torch.float64)
    if length > 2:
        g[0, length // 2] = -math.inf  # forgets all before
    g.requires_grad_()
    found, expected = _decay_to_end(g), by_definition(g)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    pull = torch.randn_like(found)
    finite = g.detach().isfinite()
    (grad,) = torch.autograd.grad(found, g, pull)
    (wanted,) = torch.autograd.grad(expected, g, pull)
    torch.testing.assert_close(grad[finite], wanted[finite], rtol=1e-11, atol=1e-13)
    assert not grad[~finite].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_decays_have_no_subnormal_numbers(dtype):
    g = torch.full((1, 2000, 1), -1.0, dtype=dtype)
    found, least = _decay_to_end(g), torch.finfo(dtype).tiny / torch.finfo(dtype).eps
    assert found[0, -1] == 1 and found[found > 0].min() > least
    exact = by_definition(g.double())
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=3 * least)
    assert found.isfinite().all()


def test_nan_gates_stay():
    g = torch.zeros(1, 100, 1)
    g[0, 50] = math.nan
    assert _decay_to_end(g)[0, :50].isnan().all()
