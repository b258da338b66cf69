"""Linear layers, MLPs and activations: `flash_attn.ops.fused_dense`, `.activations`, `.triton.mlp`.

`checkpoint_lvl` > 0 recomputes what is inside of an MLP in the backward; `save_pre_act` and
`heuristic` have no effect.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from omniattn import functional
from omniattn.checks.arguments import require_choice, require_int
from omniattn.compat._errors import errors_of

#: Names of activations here.
_ACTIVATIONS = {"gelu_approx": "gelu_tanh", "relu": "relu", "sqrelu": "relu_squared"}
Pair = Tensor | tuple[Tensor, Tensor]


def fused_dense_func(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    return_residual: bool = False,
    process_group: Any = None,
    sequence_parallel: bool = True,
) -> Pair:
    """Computes ``x weight^T + bias``, with `return_residual` also x.

    `process_group` must be None, and `sequence_parallel` has no effect.
    """
    _require_one_process("fused_dense_func", process_group)
    with errors_of("fused_dense_func"):
        y = functional.linear(x, weight, bias)
    return (y, x) if return_residual else y


class FusedDense(nn.Linear):
    """Layer of :func:`fused_dense_func`."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        return_residual: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.return_residual = return_residual

    def forward(self, x: Tensor, process_group: Any = None) -> Pair:  # type: ignore[override]
        return fused_dense_func(x, self.weight, self.bias, self.return_residual, process_group)


def fused_mlp_func(
    x: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    activation: str = "gelu_approx",
    save_pre_act: bool = True,
    return_residual: bool = False,
    checkpoint_lvl: int = 0,
    heuristic: int = 0,
    process_group: Any = None,
    sequence_parallel: bool = True,
) -> Pair:
    """Computes ``act(x weight1^T + bias1) weight2^T + bias2``, with `return_residual` also x.

    Args:
        x: (..., D).
        weight1, weight2: (F, D) and (E, F).
        bias1, bias2: (F,) and (E,), or None.
        activation: "gelu_approx", "relu" or "sqrelu", the square of ReLU.
        save_pre_act, heuristic, sequence_parallel: have no effect.
        return_residual: True to return x as well.
        checkpoint_lvl: 0, or 1 or 2 to recompute inner results in the backward.
        process_group: must be None.
    """
    op = "fused_mlp_func"
    _require_one_process(op, process_group)
    require_choice(op, "activation", activation, tuple(_ACTIVATIONS))
    require_int(op, "checkpoint_lvl", checkpoint_lvl, 0, 2)
    names = {"up": "weight1", "down": "weight2", "up_bias": "bias1", "down_bias": "bias2"}
    with errors_of(op, **names):
        y = functional.mlp(
            *(x, weight1, weight2),
            up_bias=bias1,
            down_bias=bias2,
            activation=_ACTIVATIONS[activation],
            recompute=checkpoint_lvl > 0,
        )
    return (y, x) if return_residual else y


class FusedMLP(nn.Module):
    """Layer of :func:`fused_mlp_func`, 4 times as wide inside by default."""

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        bias1: bool = True,
        bias2: bool = True,
        activation: str = "gelu_approx",
        return_residual: bool = False,
        checkpoint_lvl: int = 0,
        heuristic: int | str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require_choice("FusedMLP", "activation", activation, tuple(_ACTIVATIONS))
        require_int("FusedMLP", "checkpoint_lvl", checkpoint_lvl, 0, 2)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        inner, out = hidden_features or in_features * 4, out_features or in_features
        self.activation, self.return_residual = activation, return_residual
        self.checkpoint_lvl, self.heuristic = checkpoint_lvl, heuristic
        self.fc1 = nn.Linear(in_features, inner, bias=bias1, **factory)
        self.fc2 = nn.Linear(inner, out, bias=bias2, **factory)

    def forward(self, x: Tensor, process_group: Any = None) -> Pair:
        return fused_mlp_func(
            *(x, self.fc1.weight, self.fc2.weight, self.fc1.bias, self.fc2.bias, self.activation),
            return_residual=self.return_residual,
            checkpoint_lvl=self.checkpoint_lvl,
            process_group=process_group,
        )


def fused_dense_sqrelu_dense_function(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor,
    weight2: Tensor,
    bias2: Tensor,
    checkpoint_lvl: int = 0,
) -> Tensor:
    """Computes :func:`fused_mlp_func` with the square of ReLU."""
    y = fused_mlp_func(x, weight1, weight2, bias1, bias2, "sqrelu", checkpoint_lvl=checkpoint_lvl)
    assert isinstance(y, Tensor)
    return y


class FusedDenseSqreluDense(FusedMLP):
    """:class:`FusedMLP` with the square of ReLU and biases."""

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        bias1: bool = True,
        bias2: bool = True,
        checkpoint_lvl: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes = in_features, hidden_features, out_features, bias1, bias2
        super().__init__(
            *sizes, "sqrelu", checkpoint_lvl=checkpoint_lvl, device=device, dtype=dtype
        )


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    """Computes ``silu(x) y``."""
    with errors_of("swiglu", gate="x", up="y"):
        return functional.swiglu(x, y)


def _require_one_process(op: str, process_group: Any) -> None:
    if process_group is not None:
        raise NotImplementedError(f"{op}: process_group must be None, got {type(process_group)}")
