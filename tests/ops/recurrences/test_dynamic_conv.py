"""Convolutions by filters of each token against their definition and each other."""

import itertools
import re

import pytest
import torch

import omniattn.functional as F
from omniattn import reference
from omniattn.compositions.recurrences import dynamic_conv

F64 = torch.float64


def draw(*shape, dtype=F64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def by_loops(x, taps, state):
    """Computes sums over time, taps and channels one by one."""
    _, channels, before = state.shape
    y, width = torch.zeros_like(x), channels // taps.shape[2]
    rows = torch.cat([state.mT, x], 1)
    for t in range(x.shape[1]):
        for d in range(channels):
            y[:, t, d] = sum(
                taps[:, t, d // width, k] * rows[:, t + k, d] for k in range(before + 1)
            )
    return y, rows[:, x.shape[1] :].mT


@pytest.mark.parametrize(("heads", "taps", "steps"), [(2, 3, 7), (6, 4, 5), (1, 1, 4), (3, 5, 2)])
@pytest.mark.parametrize("function", [F.dynamic_conv1d, reference.dynamic_conv1d])
def test_the_definition(heads, taps, steps, function):
    x, filters, state = draw(2, steps, 6), draw(2, steps, heads, taps), draw(2, 6, taps - 1)
    options = {"initial_state": state, "return_final_state": True}
    got = function(x, filters, **options)
    want, last = by_loops(x, filters, state)
    torch.testing.assert_close(got, (want, last))
    y, _ = function(x, filters, activation="silu", residual=True, **options)
    torch.testing.assert_close(y, torch.nn.functional.silu(want) + x)


def test_equal_filters_are_a_causal_convolution():
    x, weight = draw(2, 9, 6), draw(6, 4)
    taps = weight.expand(2, 9, 6, 4)
    torch.testing.assert_close(F.dynamic_conv1d(x, taps), F.causal_conv1d(x, weight))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("silu", "residual"), [(False, True), (True, False)])
def test_the_composition(packed, silu, residual):
    """Devices without a kernel run it."""
    cu = torch.tensor([0, 2, 2, 9]) if packed else None
    given = draw(1, 9, 6), draw(1, 9, 3, 4), draw(3 if packed else 1, 6, 3)
    leaves = [t.requires_grad_() for t in given]
    rest = cu, silu, residual
    want = dynamic_conv._forward(*leaves, *rest)
    got = F.dynamic_conv1d(
        *leaves[:2],
        activation="silu" if silu else None,
        residual=residual,
        initial_state=leaves[2],
        cu_seqlens=cu,
        return_final_state=True,
    )
    weights = [draw(*t.shape, seed=n) for n, t in enumerate(want)]
    grads = torch.autograd.grad(got, leaves, weights)
    torch.testing.assert_close(
        (got, grads), (want, dynamic_conv._backward(*weights, *given, *rest))
    )
    assert [t.stride()[1:] for t in got] == [t.stride()[1:] for t in want]


@pytest.mark.parametrize("packed", [False, True])
def test_gradients(packed):
    cu = torch.tensor([0, 2, 2, 5]) if packed else None
    x, taps, state = draw(1, 5, 4), draw(1, 5, 2, 3), draw(3 if packed else 1, 4, 2)
    leaves = [t.requires_grad_() for t in (x, taps, state)]

    def call(x, taps, state):
        return F.dynamic_conv1d(
            *(x, taps),
            activation="silu",
            residual=True,
            initial_state=state,
            cu_seqlens=cu,
            return_final_state=True,
        )

    assert torch.autograd.gradcheck(call, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, leaves)


@pytest.mark.parametrize("function", [F.dynamic_conv1d, reference.dynamic_conv1d])
def test_packed_sequences_and_pieces(function):
    x, taps, state = draw(1, 11, 6), draw(1, 11, 3, 4), draw(4, 6, 3)
    cu, edges = torch.tensor([0, 2, 2, 9, 11]), [0, 2, 2, 9, 11]
    options = {"return_final_state": True}
    y, last = function(x, taps, initial_state=state, cu_seqlens=cu, **options)
    for n in range(4):
        part, before = slice(edges[n], edges[n + 1]), state[n : n + 1]
        rows, outs = [part.start, *range(part.start + 1, part.stop), part.stop], []
        for a, b in itertools.pairwise(rows):  # token by token
            out, before = function(x[:, a:b], taps[:, a:b], initial_state=before, **options)
            outs.append(out)
        torch.testing.assert_close(y[:, part], torch.cat(outs, 1))
        torch.testing.assert_close(last[n : n + 1], before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_rounded_once(dtype):
    x, taps = draw(2, 33, 12, dtype=dtype), draw(2, 33, 3, 4, dtype=dtype)
    y = F.dynamic_conv1d(x, taps)
    assert y.dtype == dtype
    exact = F.dynamic_conv1d(x.double(), taps.double())
    torch.testing.assert_close(y, exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_compiles_in_one_graph():
    x, taps = draw(2, 7, 6), draw(2, 7, 3, 4)
    run = torch.compile(F.dynamic_conv1d, fullgraph=True, backend="eager")
    torch.testing.assert_close(run(x, taps, residual=True), F.dynamic_conv1d(x, taps) + x)


def test_nothing():
    for x, taps in ((draw(2, 0, 4), draw(2, 0, 2, 3)), (draw(0, 3, 4), draw(0, 3, 2, 3))):
        y, last = F.dynamic_conv1d(x, taps, return_final_state=True)
        assert y.shape == x.shape
        assert last.shape == (len(x), 4, 2)
        assert not last.any()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": draw(2, 4)}, "x must have shape (B, T, D), got x.shape=(2, 4)"),
        ({"taps": draw(2, 5, 3, 2)}, "taps must have shape (B, T, H, K)"),
        ({"taps": draw(2, 5, 4, 0)}, "taps must have shape (B, T, H, K)"),
        ({"activation": "gelu"}, "activation must be \"silu\" or None, got activation='gelu'"),
        ({"initial_state": draw(2, 4, 3)}, "initial_state must have shape (2, 4, 1)"),
        ({"cu_seqlens": torch.tensor([0, 5])}, "B must be 1 with cu_seqlens, got x.shape="),
    ],
)
def test_errors(changed, message):
    with pytest.raises(ValueError, match=f"^dynamic_conv1d: .*{re.escape(message)}"):
        F.dynamic_conv1d(**{"x": draw(2, 5, 4), "taps": draw(2, 5, 4, 2)} | changed)
