"""Per-head norms, and RMSNorm with a gate."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from omniattn.checks.arguments import (
    cast_like,
    implementation,
    require_bool,
    require_choice,
    require_int,
    require_shape,
    require_tensor,
)
from omniattn.checks.jagged import token_wise
from omniattn.functional.layers.norm import casts_first, check_row, vector_of_row
from omniattn.ops.activation import ACTIVATIONS
from omniattn.ops.gated_norm import GATE_PLACES, gated_norm

GATES = ("silu", "sigmoid")

__all__ = ["group_norm", "rms_norm_gated"]


@token_wise()
def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    center: bool = True,
    backend: str | None = None,
) -> Tensor:
    """Normalisation per head: of `num_groups` equal parts of the last dimension.

    ``y = (x - mean) / sqrt(var + eps) * weight + bias`` with mean and biased variance of the part;
    without `center` ``y = x / sqrt(mean(x^2) + eps) * weight + bias``.

    Args:
        x: (..., N), float64, float32, bfloat16 or float16, any strides, or nested; channels last,
            where torch.nn.functional.group_norm has them second.
        num_groups: number of parts, a divisor of N.
        weight, bias: (N,) of x's dtype, or None.
        eps: inside the root.
        center: subtract the mean (RWKV, sLSTM) or not (RetNet).
        backend: see :func:`rms_norm`.

    Returns:
        y of x's shape and dtype.

    Raises:
        TypeError, ValueError, NotImplementedError: see :func:`rms_norm`.

    Note:
        Precision and determinism as for :func:`rms_norm`. Second and forward-mode derivatives go
        through the eager definition.

    Reference:
        Wu and He, Group Normalization, 2018, arXiv:1803.08494; per head: Sun et al., Retentive
        Network, 2023, arXiv:2307.08621.

    Example:
        >>> group_norm(torch.tensor([1.0, 3.0, 10.0, 30.0]), 2, eps=0.0)
        tensor([-1.,  1., -1.,  1.])
    """
    require_bool("group_norm", "center", center)
    return _gated_norm(
        "group_norm", backend, x, None, weight, bias, num_groups, "none", "silu", center, eps, False
    )


@token_wise("gate")
def rms_norm_gated(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    norm_before_gate: bool = True,
    activation: str = "silu",
    num_groups: int = 1,
    casting: str = "fp32",
    backend: str | None = None,
) -> Tensor:
    """Root mean square normalisation with a gate, in one pass.

    ``y = RMSNorm(x) * weight * act(gate)``, or ``y = RMSNorm(x * act(gate)) * weight``.

    Args:
        x: (..., N), float64, float32, bfloat16 or float16, any strides; or nested.
        gate: of x's shape and dtype; under autocast it is cast to x's dtype.
        weight: (N,) of x's dtype, or None.
        eps: added to the mean square.
        norm_before_gate: True if the gate multiplies the norm's result (Gated DeltaNet, Kimi),
            False for its input (Mamba-2).
        activation: "silu", or "sigmoid" (Kimi Delta Attention).
        num_groups: number of separately normalised parts of the last dimension (Mamba-2's groups).
        casting: see :func:`rms_norm`; "fp32" for Kimi, "llama" for Mamba-2 and Qwen3-Next, whose
            gate multiplies a norm that was rounded like Llama's.
        backend: see :func:`rms_norm`.

    Returns:
        y of x's shape and dtype.

    Raises:
        TypeError, ValueError, NotImplementedError: see :func:`rms_norm`.

    Note:
        Half inputs are computed in fp32 and rounded as `casting` specifies. The backward recomputes
        the gate: only the inputs and one number per group are saved. Derivatives as for
        :func:`group_norm`.

    Reference:
        Dao and Gu, Transformers are SSMs, 2024, arXiv:2405.21060; Yang, Kautz and Hatamizadeh,
        Gated Delta Networks, 2024, arXiv:2412.06464.

    Example:
        >>> rms_norm_gated(torch.tensor([3.0, 4.0]), torch.zeros(2), activation="sigmoid", eps=0.0)
        tensor([0.4243, 0.5657])
    """
    op = "rms_norm_gated"
    require_tensor(op, "x", x)
    require_tensor(op, "gate", gate)
    require_bool(op, "norm_before_gate", norm_before_gate)
    require_choice(op, "activation", activation, GATES)
    cast_first, place = casts_first(op, casting), "after" if norm_before_gate else "before"
    return _gated_norm(
        op, backend, x, gate, weight, None, num_groups, place, activation, False, eps, cast_first
    )


def _gated_norm(
    op: str,
    backend: str | None,
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    num_groups: int,
    place: str,
    activation: str,
    center: bool,
    eps: float,
    *options: Any,
) -> Any:
    cols = check_row(op, x, eps)
    require_int(op, "num_groups", num_groups, 1)
    if cols % num_groups or num_groups > max(cols, 1):
        raise ValueError(
            f"{op}: num_groups must divide the last dimension of x, "
            f"got num_groups={num_groups}, x.shape={tuple(x.shape)}"
        )
    if gate is not None:
        gate = cast_like(op, "gate", gate, x)
        require_shape(op, "gate", gate, x.shape)
    if weight is not None:
        weight = vector_of_row(op, "weight", weight, x, cols)
    if bias is not None:
        bias = vector_of_row(op, "bias", bias, x, cols)
    codes = GATE_PLACES[place], ACTIVATIONS[activation]
    run = implementation(op, backend, x, gated_norm)
    return run(x, gate, weight, bias, num_groups, *codes, center, eps, *options)
