"""Slopes at limits, which torch changed in version 2.14, are the same under every version."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

import omniattn.functional as F
from omniattn import testing
from omniattn.reference.limits import clamp

#: Functions of torch whose slope at a limit or a tie has changed once.
VARYING = {"clamp", "clamp_", "clip", "clip_", "fmax", "fmin"} | {
    f"clamp_{end}" for end in ("min", "max", "min_", "max_")
}
SPECS = testing.registry()


class NoVaryingSlopes(TorchFunctionMode):
    """Fails where a gradient would pass through one of these functions."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in VARYING and torch.is_grad_enabled():
            tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
            assert not any(t.requires_grad for t in tensors), f"use reference.limits for {func}"
        return func(*args, **kwargs)


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec.differentiable])
def test_no_gradient_depends_on_the_version_of_torch(name):
    spec = SPECS[name]
    cases = [spec.cases[0], *map(spec.case, spec.special)]
    for case in cases:
        call = spec.call(case, torch.float32).requiring_grad()
        with NoVaryingSlopes():
            for function in (spec.function, spec.reference):
                call.run(function)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_slope_is_one_at_the_limits_and_zero_beyond(dtype):
    x = torch.tensor([-3.0, -1.0, 0.0, 2.0, 4.0], dtype=dtype, requires_grad=True)
    for limits, slopes in (
        ((-1, 2.0), [0, 1, 1, 1, 0]),
        ((-1.0, None), [0, 1, 1, 1, 1]),
        ((None, 2), [1, 1, 1, 1, 0]),
        ((0, float("inf")), [0, 0, 1, 1, 1]),
    ):
        y = clamp(x, *limits)
        assert y.dtype == dtype and torch.equal(y, x.clamp(*limits))
        assert torch.autograd.grad(y.sum(), x)[0].tolist() == slopes
    assert clamp(torch.tensor(float("nan")), -1, 1).isnan()


@pytest.mark.parametrize("backend", [None, "reference"])
def test_a_clamped_gate_at_its_limit(backend):
    gate, up = (torch.tensor(x, requires_grad=True) for x in ([7.0, 7.0, 1.0], [1.0, -7.0, 7.0]))
    y = F.clamped_swiglu(gate, up, backend=backend)
    swish = gate * torch.sigmoid(1.702 * gate)
    wanted = torch.autograd.grad((swish * (up + 1)).sum(), (gate, up))
    torch.testing.assert_close(torch.autograd.grad(y.sum(), (gate, up)), wanted)


@pytest.mark.parametrize("backend", [None, "reference"])
def test_a_step_of_zero_has_the_slope_of_other_steps(backend):
    x, B, C = (torch.ones(1, 1, 1, 1) for _ in range(3))
    dt = torch.zeros(1, 1, 1, requires_grad=True)
    y, _ = F.ssd(x, dt, -torch.ones(1), B, C, backend=backend)
    assert torch.autograd.grad(y.sum(), dt)[0].item() == 1


@pytest.mark.parametrize("options", [{"epsilon_low": 0.0}, {"epsilon_high": 0.0}, {"delta": 1.0}])
def test_a_ratio_at_its_bound_has_the_slope_of_other_ratios(options):
    """A policy that is its own sampler has ratios of 1."""
    log_prob = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    for advantage in (-1.0, 1.0):
        given = (log_prob, torch.tensor([advantage]), torch.ones(1, 2))
        slopes = [
            torch.autograd.grad(F.grpo_loss(*given, **o).loss, log_prob)[0] for o in ({}, options)
        ]
        torch.testing.assert_close(*slopes)
