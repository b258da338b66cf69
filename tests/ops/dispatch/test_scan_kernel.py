"""The kernel for tangents of the selective scan: values of the definition, without its chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from derivatives import DERIVATIVES, F64, OF_KERNELS, refuse_pieces
from torch import Tensor

from omniattn import functional as F
from omniattn.ops.derivatives import scans
from omniattn.testing.environment import threads

pytestmark = pytest.mark.skipif(
    not scans._PRESENT, reason="the emulated kernels of CUDA have none for tangents"
)


@pytest.fixture(autouse=True)
def _without_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scans, "ELEMENTS", 0)
    refuse_pieces(monkeypatch)


Inputs = tuple[Tensor, ...]


def _inputs(sizes: tuple[int, ...], states: int, seed: int, dtype: torch.dtype = F64) -> Inputs:
    """Returns u, delta, A, B, C and the initial states of `states` sequences."""
    batch, length, channels, groups, n = sizes
    shapes = (
        *((batch, length, channels),) * 2,
        (channels, n),
        *((batch, length, groups, n),) * 2,
        (states, channels, n),
    )
    make = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(s, generator=make, dtype=F64).to(dtype) for s in shapes)


def _loss(backend: str | None, **options: Any) -> Callable[..., Tensor]:
    def loss(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, start: Tensor) -> Tensor:
        y, final = F.selective_scan(
            *(u, delta.sigmoid(), -A.abs(), B, C),
            initial_state=start,
            backend=backend,
            **options,
        )
        return y.double().sin().sum() + final.double().square().sum()

    return loss


@pytest.mark.parametrize("derive", OF_KERNELS)
@pytest.mark.parametrize(
    ("sizes", "ends"),
    [
        # Around chunks of 32 tokens, blocks of 4 states, vectors and blocks of 128 channels.
        ((2, 33, 5, 1, 1), None),
        ((1, 64, 12, 2, 7), None),
        ((2, 70, 130, 1, 4), None),
        ((1, 70, 9, 3, 6), [0, 0, 32, 33, 33, 70]),
    ],
)
def test_sizes(sizes: tuple[int, ...], ends: list[int] | None, derive: str) -> None:
    count = sizes[0] if ends is None else len(ends) - 1
    x, t = (_inputs(sizes, count, seed) for seed in (0, 1))
    options = {} if ends is None else {"cu_seqlens": torch.tensor(ends)}
    found, wanted = (DERIVATIVES[derive](_loss(b, **options), x, t) for b in (None, "reference"))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-11)


def test_options() -> None:
    """D, z, delta_bias and softplus surround the kernel."""
    sizes = (2, 40, 6, 1, 5)
    x, t = (_inputs(sizes, 2, seed) for seed in (0, 1))
    D, bias, z = (torch.randn(s, dtype=F64) for s in ((6,), (6,), (2, 40, 6)))
    options = {"D": D, "z": z, "delta_bias": bias, "delta_softplus": True}
    for derive in OF_KERNELS:
        found, wanted = (
            DERIVATIVES[derive](_loss(b, **options), x, t) for b in (None, "reference")
        )
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-11)


def test_bits_do_not_depend_on_threads() -> None:
    x, t = (_inputs((2, 100, 300, 1, 16), 2, seed, torch.float32) for seed in (0, 1))
    leaves = [a.requires_grad_() for a in (x[0], x[1].sigmoid(), -x[2].abs(), *x[3:])]
    results = []
    for count in (1, 3):
        with threads(count):
            outputs = F.selective_scan(*leaves[:5], initial_state=leaves[5])
            first = torch.autograd.grad(outputs, leaves, (t[0], t[5]), create_graph=True)
            results.append(torch.autograd.grad(first, leaves, t))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error(dtype: torch.dtype) -> None:
    """The error is at most twice that of the eager form in the same dtype."""
    u, delta, *rest = _inputs((1, 100, 20, 1, 8), 1, 0, torch.float32)
    x = (u.to(dtype), delta.to(dtype), rest[0], *(r.to(dtype) for r in rest[1:3]), rest[3])
    t = tuple((a.float() * 0.5).to(a.dtype) for a in x)
    exact = [tuple(a.double() for a in each) for each in (x, t)]
    derive = DERIVATIVES["vjp of grad"]
    best = derive(_loss("reference"), *exact)
    ours, eager = (derive(_loss(backend), x, t) for backend in (None, "reference"))
    for a, b, e in zip(ours, eager, best, strict=True):
        floor = torch.finfo(a.dtype).eps * e.abs().max()
        assert (a - e).abs().max() <= 2 * (b - e).abs().max() + floor


def test_bad_arguments() -> None:
    *inputs, start = _inputs((1, 4, 3, 1, 2), 1, 0)

    def call(inputs: list[Tensor], *grads: Tensor | None, moved: Tensor = inputs[0]) -> Any:
        given = (*inputs, start, None, moved, *inputs[1:], None)
        return torch.ops.omniattn.selective_scan_tangents(*given, *grads)

    with pytest.raises(RuntimeError, match="tangent_u must have shape"):
        call(inputs, None, None, None, None, moved=inputs[0][:, :2])
    with pytest.raises(RuntimeError, match="grad_y must be given"):
        call(inputs, None, start, None, None)
    with pytest.raises(RuntimeError, match="B and C must have 4 dimensions"):
        call([*inputs[:3], inputs[2], inputs[4]], None, None, None, None)
    with pytest.raises(RuntimeError, match="u must be in the compute type"):
        half = [t.bfloat16() if i != 2 else t.float() for i, t in enumerate(inputs)]
        torch.ops.omniattn.selective_scan_tangents(
            *half, None, None, *half, None, None, None, None, None
        )
