"""Options that are checked and encoded once never become stale, nor hide an error."""

from __future__ import annotations

import pytest
import torch

from omniattn.checks.remembered import remembered
from omniattn.functional import attention, masks

random = torch.Generator().manual_seed(0)
Q, K, V = (torch.randn(1, 5, 2, 8, generator=random) for _ in range(3))


def reference(**options):
    return attention(Q, K, V, backend="reference", **options)


def assert_right(**options):
    torch.testing.assert_close(attention(Q, K, V, **options), reference(**options))


def test_results_are_kept_by_value_and_class():
    calls = []

    @remembered
    def double(x, y):
        calls.append((x, y))
        return x, y

    for value in (1, 1, True, 1.0, 1.0, "1", None, None):
        assert type(double(value, 2)[0]) is type(value)
    assert calls == [(1, 2), (True, 2), (1.0, 2), ("1", 2), (None, 2)]


def test_tensors_lists_and_errors_are_not_kept():
    calls = []

    @remembered
    def check(x):
        calls.append(x)
        if x is None:
            raise ValueError("x must be given")
        return calls.count(x) if isinstance(x, (int, list)) else None

    t, found = torch.tensor(1.0), [1]
    for value in (t, t, found, found):
        check(value)
    for _ in range(2):
        with pytest.raises(ValueError, match="given"):
            check(None)
    assert len(calls) == 6


def test_results_do_not_fill_memory():
    calls = []
    counted = remembered(lambda x: calls.append(x))
    for x in range(5000):
        counted(x)
    counted(0)
    assert len(calls) == 5001


@pytest.mark.parametrize(
    "good, bad",
    [
        ({"causal": True}, {"causal": 1}),
        ({"window_size": (1, 0)}, {"window_size": (True, 0)}),
        ({"window_size": (1, 0)}, {"window_size": (1.0, 0)}),
        ({"window_size": (1, 0)}, {"window_size": [1, 0.0]}),
        ({"window_size": (1, 0)}, {"window_size": (1, 0, 0)}),
        ({"scale": 1.0}, {"scale": True}),
        ({"softcap": 0.0}, {"softcap": False}),
        ({"dropout_p": 0.0}, {"dropout_p": False}),
        ({"normalizer": "softmax"}, {"normalizer": None}),
    ],
)
def test_a_wrong_class_of_an_equal_value_raises_after_a_right_call(good, bad):
    attention(Q, K, V, **good)
    for _ in range(2):
        with pytest.raises((TypeError, ValueError), match=next(iter(bad))):
            attention(Q, K, V, **bad)
    assert_right(**good)


def test_changed_lists_and_tensors_are_read_again():
    window, scale = [1, 0], torch.tensor(0.5)
    allowed, real = torch.ones(5, 5, dtype=torch.bool).tril(), torch.ones(1, 5, dtype=torch.bool)
    bias = torch.randn(5, 5, generator=random)
    options = {"window_size": window, "scale": scale, "mask": allowed, "bias": bias}
    padding = masks.KeyPadding(real)
    before = attention(Q, K, V, **options), attention(Q, K, V, mask=padding)
    window[0] = 3
    scale.fill_(2.0)
    allowed[3, 0] = False
    bias[4].fill_(-3.0)
    real[0, 4] = False
    after = attention(Q, K, V, **options), attention(Q, K, V, mask=padding)
    assert not any(map(torch.equal, before, after))
    torch.testing.assert_close(after[0], reference(**options))
    torch.testing.assert_close(after[1], reference(mask=padding))


def test_sizes_dtypes_and_autocast_of_each_call_count():
    for q in (Q, Q[..., :4], Q.double(), Q.bfloat16(), Q):
        expected = attention(q, q, q, causal=True, backend="reference")
        found = attention(q, q, q, causal=True)
        assert found.dtype == q.dtype
        torch.testing.assert_close(found, expected)
    huge = 1e39  # beyond fp32
    assert attention(Q.double(), Q.double(), Q.double(), scale=huge).dtype == torch.float64
    with pytest.raises(ValueError, match="scale"):
        attention(Q, K, V, scale=huge)
    for enabled, dtype in ((False, Q.dtype), (True, torch.bfloat16), (False, Q.dtype)):
        with torch.autocast("cpu", enabled=enabled):
            assert attention(Q, K, V, causal=True).dtype == dtype


def test_backends_and_gradients_of_each_call_count():
    assert_right(softcap=2.0)
    with pytest.raises(ValueError, match="backend"):
        attention(Q, K, V, softcap=2.0, backend="cuda")
    q = Q.clone().requires_grad_()
    attention(q, K, V, softcap=2.0).sum().backward()
    expected = torch.autograd.grad(attention(q, K, V, softcap=2.0, backend="reference").sum(), q)
    torch.testing.assert_close(q.grad, expected[0])
    assert_right(softcap=2.0)
    assert_right(softcap=3.0)
