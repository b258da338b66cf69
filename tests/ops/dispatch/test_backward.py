"""A backward is declared by names, and wrong names are errors where it is declared."""

from __future__ import annotations

import pytest
import torch

from omniattn.ops import norm as norms
from omniattn.ops.dispatch.backward import Plan
from omniattn.ops.dispatch.names import Schema


def test_a_gradient_of_no_output_is_refused():
    """Each call would pass None for it, and all gradients would be 0."""
    op = norms._backward_op.of(h="x")  # takes grad_h, which may be None
    with pytest.raises(TypeError, match=r"^norm: its backward takes grad_h, which is none of .*x,"):
        Plan(Schema("norm"), None, op, {}, True)
    with pytest.raises(TypeError, match=r"^norm: its backward takes grad_h"):
        Plan(Schema("norm"), lambda grad_y, x: {"x": grad_y * x}, None, {}, True, op)


def test_a_misspelled_value_is_refused():
    def backward(grad_out: torch.Tensor, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"x": grad_out * x}

    with pytest.raises(TypeError, match=r"^norm: its backward takes grad_out, .*, grad_y, "):
        Plan(Schema("norm"), backward, None, {}, True)


def test_an_argument_without_a_value_is_none():
    plan = Plan(Schema("norm"), None, norms._backward_op.of(h="x", grad_h=""), {}, True)
    name, places, _ = plan.native
    assert name == "norm_backward"
    assert [plan.readable[n] for n in places[:3]] == ["grad_y", "", "x"]
