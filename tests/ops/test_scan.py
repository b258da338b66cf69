"""Scans: direct sums, states, packed sequences, ends of the number range, errors, other code."""

import itertools

import pytest
import torch
from torch.nn import functional as nnf

from omniattn import functional as F
from omniattn import testing

BACKENDS = [None, "reference"]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def wkv_inputs(steps: int = 70, channels: int = 11, batch: int = 2):
    w, u = draw(channels).exp(), draw(channels, seed=1)
    return w, u, draw(batch, steps, channels, seed=2), draw(batch, steps, channels, seed=3)


def wkv_direct(w, u, k, v) -> torch.Tensor:
    """The mean with weights e^(k_i - (t - 1 - i) w), and e^(u + k_t) of the present token."""
    t = torch.arange(k.shape[1])
    age = (t[:, None] - t - 1)[:, :, None]
    score = torch.where(age < 0, u + k[:, None], k[:, None] - age * w)
    score = score.masked_fill((age < -1), -torch.inf)
    return (score.softmax(2) * v[:, None]).sum(2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rwkv4_is_a_mean(backend):
    inputs = wkv_inputs()
    torch.testing.assert_close(F.rwkv4(*inputs, backend=backend)[0], wkv_direct(*inputs))


@pytest.mark.parametrize("isa", testing.isas())
@pytest.mark.parametrize("size", [0.0, 1e4, -1e4])
def test_rwkv4_of_large_keys(isa, size):
    """Sums that differ from each other by more than exp can hold, and decays below the spacing of
    the keys, which a maximum that is decremented at each step would lose."""
    w, u, k, v = (t.float() for t in wkv_inputs(200))
    k = torch.cat((k[:, :40] + size, k[:, 40:80] * 1e4, k[:, 80:] + size), 1)
    w = w * 1e-3
    inputs = [t.requires_grad_() for t in (w, u, k, v)]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    with testing.isa(isa):
        y, state = F.rwkv4(*inputs)
        grads = torch.autograd.grad(y.square().sum(), inputs)
    expected = wkv_direct(*wide)
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-5)
    assert state.isfinite().all()
    exact = torch.autograd.grad(expected.square().sum(), wide)
    for ours, theirs in zip(grads, exact, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-3, atol=1e-3 * theirs.abs().max())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("splits", [(0, 1, 2, 70), (0, 33, 64, 70), (0, 0, 70)])
def test_a_state_of_rwkv4_continues(backend, splits):
    w, u, k, v = wkv_inputs()
    y, final = F.rwkv4(w, u, k, v, backend=backend)
    state, parts = None, []
    for a, b in itertools.pairwise(splits):
        part, state = F.rwkv4(w, u, k[:, a:b], v[:, a:b], initial_state=state, backend=backend)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), y)
    torch.testing.assert_close(state, final)


@pytest.mark.parametrize("edges", [(0, 20, 20, 65, 70), (3, 20, 20, 65, 68)])
def test_packed_sequences_of_rwkv4_are_apart(edges):
    w, u, k, v = wkv_inputs(batch=1)
    leaves = [t.requires_grad_() for t in (w, u, k, v, draw(4, 3, 11, seed=5).abs())]
    *_, start = leaves
    cu = torch.tensor(edges)
    y, final = F.rwkv4(w, u, k, v, initial_state=start, cu_seqlens=cu)
    parts = [
        F.rwkv4(w, u, k[:, a:b], v[:, a:b], initial_state=start[n : n + 1])
        for n, (a, b) in enumerate(itertools.pairwise(edges))
    ]
    alone = nnf.pad(torch.cat([part for part, _ in parts], 1), (0, 0, edges[0], 70 - edges[-1]))
    ends = torch.cat([state for _, state in parts])
    torch.testing.assert_close(y, alone)
    torch.testing.assert_close(final, ends)
    found = torch.autograd.grad(y.square().sum() + final.square().sum(), leaves)
    expected = torch.autograd.grad(alone.square().sum() + ends.square().sum(), leaves)
    torch.testing.assert_close(found, expected)


def test_rwkv4_does_not_depend_on_threads():
    inputs = [t.float().requires_grad_() for t in wkv_inputs(100, 300)]
    results = []
    for threads in (1, 3):
        with testing.threads(threads):
            y, state = F.rwkv4(*inputs)
            loss = y.square().sum() + state.square().sum()
            results.append((y, state, *torch.autograd.grad(loss, inputs)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_rwkv4_of_transformers():
    module = pytest.importorskip("transformers.models.rwkv.modeling_rwkv")
    w, u, k, v = (t.float() for t in wkv_inputs())
    theirs, state = module.rwkv_linear_attention_cpu(w.log(), u, k, v, return_state=True)
    y, final = F.rwkv4(w, u, k, v)
    torch.testing.assert_close(y, theirs)
    torch.testing.assert_close(final.unbind(1), tuple(state))


W, K = torch.ones(4), torch.ones(1, 3, 4)
WKV = {"w": W, "u": W, "k": K, "v": K}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"k": torch.ones(3, 4)},
            ValueError,
            r"k must have shape \(B, T, C\), got k.shape=\(3, 4\)",
        ),
        ({"k": K.long()}, TypeError, "k must be float64"),
        ({"v": K.double()}, TypeError, "v must have the dtype of k"),
        ({"v": torch.ones(1, 2, 4)}, ValueError, r"v must have shape \(1, 3, 4\)"),
        ({"w": torch.ones(3)}, ValueError, r"w must have shape \(4,\), got w.shape=\(3,\)"),
        ({"u": torch.ones(4).long()}, TypeError, "u must be floating-point"),
        ({"initial_state": torch.ones(1, 2, 4)}, ValueError, r"must have shape \(1, 3, 4\)"),
        ({"cu_seqlens": torch.tensor([0, 5])}, RuntimeError, r"must lie in \[0, 3\], got 5"),
        ({"cu_seqlens": torch.tensor([2, 1])}, RuntimeError, "must grow by 0 to 3, got 2 then 1"),
        ({"cu_seqlens": torch.tensor([0.0])}, TypeError, "cu_seqlens must be integers"),
    ],
)
def test_bad_input_of_rwkv4(arguments, error, message):
    with pytest.raises(error, match=f"rwkv4: .*{message}"):
        F.rwkv4(**(WKV | arguments))
