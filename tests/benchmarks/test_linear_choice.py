"""The range of products for which this package's kernel is chosen, from measured times."""

import pytest
import torch
from linear_choice import Measured, crossings, measure, rows_of_ours, smallest_of_ours

from omniattn.ops.dispatch.gemm_choice import UNBOUNDED


def measured(gains):
    """Products of 1, 10, 100 ... multiply-adds, with these gains."""
    return [Measured((10**i, 1, 1), [1.0, gain], [2.0, 2 * gain]) for i, gain in enumerate(gains)]


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ((2, 2, 2), (0, UNBOUNDED)),
        ((0.5, 0.9, 0.8), (1, 0)),
        ((2, 1.5, 0.5), (0, 10)),
        ((0.5, 1.5, 2), (10, UNBOUNDED)),
        ((0.5, 1.5, 0.9, 1.5, 0.5), (10, 1000)),  # a small loss between two gains
        ((0.5, 1.5, 0.2, 1.7, 0.5), (1000, 1000)),  # a large one
    ],
)
def test_the_range_gains_most_in_total(gains, expected):
    assert crossings(measured(gains)) == expected


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ({1: 0.9, 2: 1.5, 4: 1.2, 8: 0.9, 16: 1.1}, (2, 4)),
        ({1: 1.1, 2: 1.5}, (1, 2)),
        ({4: 1.1}, (4, 4)),
        ({1: 0.9, 2: 1}, (1, 0)),
    ],
)
def test_rows_without_gradients_are_the_longest_run_of_gains(gains, expected):
    assert rows_of_ours(gains) == expected


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ((0.4, 0.8, 1.1, 2), 100),
        ((2, 1.5, 1.1), 0),
        ((0.5, 0.9), UNBOUNDED),
        ((0.4, 1.2, 0.9, 2), 10),  # a small loss between two gains
    ],
)
def test_small_weights_without_gradients_are_torchs(gains, expected):
    assert smallest_of_ours([(10**i, gain) for i, gain in enumerate(gains)]) == expected


def test_a_product_is_measured_in_both_passes():
    found = measure(torch.float32, (3, 4, 5), 0.001)
    assert found.madds == 60
    assert len(found.forward) == len(found.backward) == 2
    assert min(*found.forward, *found.backward) > 0
    assert str(found).split()[:3] == ["3", "4", "5"]
