"""Error budgets: a kernel's error may be about as large as that of eager torch on the CPU.

The error is the largest difference from the fp64 reference on equal inputs. The budget is twice
(three times for gradients) the error of the reference in the dtype of the inputs, which rounds only
once; a spec can replace it by an eager form that rounds every step. The rounding of a sum of n
terms is added, eps sqrt(n) times the largest value, with n the longest dimension of the case and at
least 16, and eps that of the accumulator. All gradients share one largest value, because some are
differences of terms of that size. A spec can have another factor for its gradients, with a reason.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from omniattn.testing.environment import current_device
from omniattn.testing.memory import Layout
from omniattn.testing.spec import Case, Function, OpSpec, Pass, output_gradients

__all__ = ["Measured", "assert_same", "assert_within_budget", "distance", "measure_error"]


OUTPUT_FACTOR = 2.0


class Measured(NamedTuple):
    """Tensor of a call that comes closest to its budget, or exceeds it most."""

    error: float
    budget: float
    tensor: str


class References(NamedTuple):
    """Results of the eager form and, in fp64, of the reference; they depend on no kernel.

    `incoming` are the gradients that enter the backward.
    """

    outputs: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None
    gradients: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None
    incoming: tuple[Tensor, ...]


def references(
    spec: OpSpec, case: Case, dtype: torch.dtype, pass_: Pass = "forward+backward"
) -> References:
    """Computes the results that a call of the case is compared with, on the CPU."""
    call = spec.call(case, dtype, device=torch.device("cpu"))
    eager, exact = spec.eager or spec.reference, call.to(torch.float64)
    outputs = gradients = None
    incoming: tuple[Tensor, ...] = ()
    if pass_ != "backward":
        outputs = call.run(eager), exact.run(spec.reference)
    if pass_ != "forward" and call.differentiable:
        incoming = output_gradients(call.run(spec.reference))
        wide = tuple(g.double() for g in incoming)
        gradients = call.gradients(eager, incoming), exact.gradients(spec.reference, wide)
    return References(outputs, gradients, incoming)


def measure_error(
    spec: OpSpec,
    case: Case,
    dtype: torch.dtype,
    pass_: Pass = "forward",
    *,
    layout: Layout = "contiguous",
    function: Function | None = None,
) -> Measured:
    """Measures error and budget of the outputs or gradients of the op, or of `function`.

    "forward+backward" measures both. Raises AssertionError if shapes or dtypes differ.
    """
    return _measure(spec, case, dtype, references(spec, case, dtype, pass_), layout, function)


def _measure(
    spec: OpSpec,
    case: Case,
    dtype: torch.dtype,
    wanted: References,
    layout: Layout = "contiguous",
    function: Function | None = None,
) -> Measured:
    """Measures the passes that `wanted` has results of."""
    function = function or spec.function
    call = spec.call(case, dtype, layout)
    results: list[Measured] = []
    if wanted.outputs is not None:
        factors = {f"output {i}": OUTPUT_FACTOR for i in range(len(wanted.outputs[1]))}
        results += _compare(spec, case, dtype, factors, call.run(function), *wanted.outputs)
    if wanted.gradients is not None:
        factors = {f"gradient of {name}": spec.factor_of(name) for name in call.differentiable}
        incoming = tuple(g.to(current_device()) for g in wanted.incoming)
        found = call.gradients(function, incoming)
        results += _compare(spec, case, dtype, factors, found, *wanted.gradients)
    return max(results, key=lambda m: m.error / m.budget if m.budget else m.error)


def _compare(
    spec: OpSpec,
    case: Case,
    dtype: torch.dtype,
    factors: dict[str, float],
    actual: tuple[Tensor, ...],
    eager: tuple[Tensor, ...],
    exact: tuple[Tensor, ...],
) -> list[Measured]:
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    rounding = eps * max(16, *case.sizes.values()) ** 0.5
    largest = [_largest(t) for t in exact]
    if OUTPUT_FACTOR not in factors.values():
        largest = [max(largest)] * len(largest)
    elif dtype == torch.float64:  # the reference rounds, too
        largest = [max(each, spec.terms) for each in largest]
    for name, a, e in zip(factors, actual, eager, strict=True):
        assert a.shape == e.shape and a.dtype == e.dtype, (
            f"{spec.name}: {name} must have shape {tuple(e.shape)} and dtype {e.dtype}, "
            f"got {tuple(a.shape)}, {a.dtype}"
        )
    return [
        Measured(distance(a, x), factor * (distance(e, x) + rounding * size), name)
        for (name, factor), a, e, x, size in zip(
            factors.items(), actual, eager, exact, largest, strict=True
        )
    ]


def distance(actual: Tensor, exact: Tensor) -> float:
    """Returns the largest absolute difference: 0 for equal infinities, infinite for NaN."""
    actual, exact = actual.detach().cpu().double(), exact.detach().double()
    difference = (actual - exact).abs().masked_fill(actual == exact, 0)
    return difference.nan_to_num(nan=float("inf")).max().item() if difference.numel() else 0.0


def _largest(t: Tensor) -> float:
    finite = t.detach().double().abs().nan_to_num(posinf=0.0)
    return finite.max().item() if finite.numel() else 0.0


def assert_within_budget(
    spec: OpSpec,
    case: Case,
    dtype: torch.dtype,
    pass_: Pass = "forward+backward",
    *,
    layout: Layout = "contiguous",
    function: Function | None = None,
) -> None:
    wanted = references(spec, case, dtype, pass_)
    assert_as_exact(spec, case, dtype, wanted, layout=layout, function=function)


def assert_as_exact(
    spec: OpSpec,
    case: Case,
    dtype: torch.dtype,
    wanted: References,
    *,
    layout: Layout = "contiguous",
    function: Function | None = None,
) -> None:
    """Requires errors within budget of `references(...)`, which several calls can share."""
    m = _measure(spec, case, dtype, wanted, layout, function)
    assert m.error <= m.budget, (
        f"{spec.name}[{case.name}] {dtype}: {m.tensor} must be within {m.budget:.3g} of fp64, "
        f"got {m.error:.3g}"
    )


def assert_same(what: str, actual: Tensor, expected: Tensor) -> None:
    """Requires bitwise equality, with NaN equal to NaN."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, (
        f"{what} must be {tuple(expected.shape)} {expected.dtype}, "
        f"got {tuple(actual.shape)} {actual.dtype}"
    )
    if torch.equal(actual, expected):
        return
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    assert bool(same.all()), (
        f"{what} must be bitwise the same, got {int((~same).sum())} of {same.numel()} different, "
        f"up to {(actual.double() - expected.double()).abs().max().item():.3g}"
    )
