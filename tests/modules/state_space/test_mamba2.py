"""Mamba2: transformers' mixer, states, precision, initial values, errors."""

import math

import pytest
import torch
from transformers.models.mamba2.modeling_mamba2 import Mamba2Config, Mamba2Mixer

from omniattn.modules import Mamba2

SIZES = {"d_state": 12, "headdim": 8, "ngroups": 2}


def pair(**options):
    """The two layers with the same random weights."""
    torch.manual_seed(0)
    ours = Mamba2(dim=16, **SIZES, **options)
    config = Mamba2Config(
        hidden_size=16, num_heads=4, head_dim=8, state_size=12, n_groups=2, num_hidden_layers=1,
        chunk_size=16, use_bias=options.get("bias", False),
    )  # fmt: skip
    theirs = Mamba2Mixer(config, layer_idx=0)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_(std=0.5)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


@pytest.mark.parametrize("bias", [False, True])
def test_transformers(bias):
    ours, theirs = pair(bias=bias)
    x = torch.randn(2, 37, 16, requires_grad=True)
    found, expected = ours(x), theirs(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    grad = torch.randn_like(found)
    named = dict(theirs.named_parameters())
    leaves = [x, *ours.parameters()], [x, *(named[name] for name, _ in ours.named_parameters())]
    for own, other in zip(
        torch.autograd.grad(found, leaves[0], grad),
        torch.autograd.grad(expected, leaves[1], grad),
        strict=True,
    ):
        torch.testing.assert_close(
            own, other, rtol=1e-3, atol=1e-5 * other.abs().max().item() + 1e-6
        )


@torch.no_grad()
def test_steps_keep_the_state_in_place():
    """The kernels read the state as it lies, so that a step copies it once only."""
    layer = Mamba2(dim=16, **SIZES)
    state, x = layer.new_state(2, 9), torch.randn(2, 9, 16)
    assert state["s"].shape == (2, 4, 8, 12) and state["s"].mT.is_contiguous()
    where = state["s"].data_ptr()
    steps = [layer(x[:, t : t + 1], state=state) for t in range(9)]
    torch.testing.assert_close(torch.cat(steps, 1), layer(x))
    assert state.length == 9 and state["s"].data_ptr() == where
    # of any length: 2 (4 8 12 + (32 + 2 2 12) 3) numbers
    assert state.nbytes == 4 * 2 * (4 * 8 * 12 + 80 * 3)


@torch.no_grad()
def test_steps_without_limits():
    """mamba-ssm also writes them as infinities."""
    (free, _), (unlimited, _) = pair(), pair(dt_limit=(-math.inf, math.inf))
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(unlimited(x), free(x), rtol=0, atol=0)
    state = unlimited.new_state(2, 5)
    steps = [unlimited(x[:, t : t + 1], state=state) for t in range(5)]
    torch.testing.assert_close(torch.cat(steps, 1), free(x))


def test_bf16_keeps_rates_and_states_in_fp32():
    layer = Mamba2(dim=16, **SIZES, dtype=torch.bfloat16)
    wide = {name for name, p in layer.named_parameters() if p.dtype == torch.float32}
    assert wide == {"A_log", "D", "dt_bias"}
    assert layer.new_state(1, 1)["s"].dtype == torch.float32
    assert layer(torch.randn(1, 5, 16, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_initial_values():
    torch.manual_seed(0)
    layer = Mamba2(dim=512, headdim=8)
    rates, steps = layer.A_log.exp(), torch.nn.functional.softplus(layer.dt_bias)
    assert 1 <= rates.min() < 3 and 14 < rates.max() <= 16
    assert 1e-3 <= steps.min() < 3e-3 and 0.05 < steps.max() <= 0.1 + 1e-6
    assert layer.D.eq(1).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mamba2(8, headdim=5), "a multiple of headdim, got expand=2, dim=8, headdim=5"),
        (lambda: Mamba2(8, headdim=8, ngroups=3), "ngroups must divide .*, got ngroups=3"),
        (lambda: Mamba2(8, headdim=8, d_state=0), "d_state must be at least 1, got d_state=0"),
        (
            lambda: Mamba2(8, headdim=8)(torch.ones(1, 2, 8), mask=torch.ones(1)),
            "mask must be None",
        ),
        (lambda: Mamba2(8, headdim=8, dt_limit=(1.0, 0.1)), r"dt_limit must be .*\(1.0, 0.1\)"),
        (lambda: Mamba2(8, headdim=8, dt_limit=(-1.0, 0.1)), r"dt_limit must be .*=-1.0"),
        (lambda: Mamba2(8, headdim=8, dt_limit=(0.0, float("nan"))), r"dt_limit must be .*=nan"),
        (lambda: Mamba2(8, headdim=8)(torch.ones(2, 8)), r"x must have shape \(B, T, 8\)"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=f"^Mamba2: .*{message}"):
        make()
