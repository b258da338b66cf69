"""Mixture of experts: from routed tokens to their outputs."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from omniattn.checks.arguments import (
    autocast_dtype,
    implementation,
    require_bool,
    require_choice,
    require_device,
    require_float,
    require_like,
    require_number,
    require_shape,
    require_tensor,
    takes_own_kernels,
)
from omniattn.checks.tracing import may_train
from omniattn.compositions.layers.moe import moe_of_weighed_inputs
from omniattn.ops import moe as ops
from omniattn.ops.dispatch.precision import split_bf16_of
from omniattn.ops.moe import ACTIVATIONS as ACTIVATIONS
from omniattn.reference.precision import compute_dtype

__all__ = ["moe_experts"]


def moe_experts(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "swiglu",
    interleaved: bool = False,
    alpha: float = 1.702,
    limit: float = 7.0,
    weigh_inputs: bool = False,
    recompute: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Computes the weighted sum of each token's experts, without dropping any.

    ``y[n] = sum_s weights[n, s] (W_down[e] h + b_down[e])`` with ``e = index[n, s]``,
    ``h = act(gate) * up`` or ``act(pre)``, ``pre = W_up[e] x[n] + b_up[e]``; to weigh the inputs
    instead, ``pre = W_up[e] (weights[n, s] x[n]) + b_up[e]`` and every factor of the sum is 1

    Args:
        x: (..., d), float64, float32, bfloat16 or float16, any strides. Under autocast x and the
            experts are cast to its dtype.
        index: (..., k), int64 or int32: experts of each token, -1 for a slot that adds nothing. k
            may be anything up to and beyond E; an expert chosen twice counts twice.
        weights: (..., k), floating point: routing weights, used in fp32 (fp64 for fp64).
        up: (E, 2F, d) of x's dtype, in each expert the rows of the gate before the rows of up; (E,
            F, d) for an activation without a gate. For weights that are stored as (E, d, 2F) pass
            `.mT`: views with unit stride along either dimension are not copied, and gradients come
            in the same layout.
        down: (E, d, F) of x's dtype, or `.mT` of (E, F, d).
        up_bias: (E, 2F) or (E, F), or None.
        down_bias: (E, d), or None.
        activation: swiglu, geglu, geglu_tanh, reglu, bilinear, clamped_swiglu; silu, gelu,
            gelu_tanh, relu have no gate.
        interleaved: True if the rows of gate and up alternate in `up` and `up_bias` (gpt-oss).
        alpha, limit: of clamped_swiglu, ``gate sigmoid(alpha gate) (up + 1)`` with ``gate <=
            limit`` and ``|up| <= limit``.
        weigh_inputs: True if the weights multiply the inputs (Llama 4) instead of the outputs.
            Makes k copies of x; half inputs round each copy and each slot's output.
        recompute: recompute the pre-activations in the backward instead of saving them: (N k, 2F)
            less memory for a third more work in the backward.
        backend: None for the native kernel of x's device, "cpu" to insist on it, "reference" for
            the eager definition.

    Returns:
        (..., d) of x's dtype.

    Raises:
        TypeError: a dtype is unsupported or differs from x's, a flag that is not bool.
        ValueError: a shape, device or value is invalid.
        RuntimeError: an index outside of [-1, E).
        NotImplementedError: no native kernel for the device.

    Note:
        Sums are in fp32 (fp64 for fp64), over a token's slots in order, and rounded once; half
        inputs round the pre-activations saved for the backward. Results and gradients do not depend
        on the number of threads or on `recompute`. Gradients flow to x, weights, both projections
        and both biases; experts without tokens get zeros. Second and forward-mode derivatives go
        through the eager definition. With AMX, fp32 products of experts with more than four tokens
        use split bf16 if `torch.set_float32_matmul_precision("high")` or
        `omniattn.config.FP32_PIECES` allows it (docs/precision.md).

    Reference:
        Shazeer et al., Outrageously Large Neural Networks, 2017, arXiv:1701.06538.

    Example:
        >>> x, index = torch.ones(1, 2), torch.tensor([[1]])
        >>> up, down = torch.ones(3, 4, 2), torch.ones(3, 2, 2)
        >>> moe_experts(x, index, torch.tensor([[0.5]]), up, down)
        tensor([[3.5232, 3.5232]])
    """
    op = "moe_experts"
    dtype = autocast_dtype(x) if isinstance(x, Tensor) else None
    if dtype is not None:
        x, up, down = (_cast(t, dtype) for t in (x, up, down))
        up_bias, down_bias = (None if b is None else _cast(b, dtype) for b in (up_bias, down_bias))
    _check_experts(op, x, up, down, up_bias, down_bias, activation)
    _check_routing(op, x, index, weights)
    require_number(op, "alpha", alpha, above=0)
    require_number(op, "limit", limit, above=0)
    require_bool(op, "interleaved", interleaved)
    require_bool(op, "weigh_inputs", weigh_inputs)
    require_bool(op, "recompute", recompute)
    tensors = (x, weights, up, up_bias, down, down_bias)
    trains = may_train() and any(t is not None and t.requires_grad for t in tensors)
    tokens, slots = math.prod(x.shape[:-1]), index.shape[-1]
    arguments = (
        x.reshape(tokens, x.shape[-1]),
        index.long().reshape(tokens, slots),
        weights.to(compute_dtype(x)).reshape(tokens, slots),
        up,
        up_bias,
        down,
        down_bias,
        *ops.encode(activation, interleaved, alpha, limit),
        trains and not recompute,
        split_bf16_of(x),
        takes_own_kernels(backend, x),
    )
    run = implementation(op, backend, x, ops.moe)
    if weigh_inputs:
        run = moe_of_weighed_inputs if run is ops.moe else partial(run, weigh_inputs=True)
    y: Tensor = run(*arguments)
    return y.reshape(x.shape)


def _cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t if t.dtype == torch.float64 else t.to(dtype)


def _check_experts(
    op: str,
    x: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
) -> None:
    require_float(op, "x", x)
    for name, t in (("up", up), ("down", down), ("up_bias", up_bias), ("down_bias", down_bias)):
        if t is not None or not name.endswith("bias"):
            require_like(op, name, t, x)  # type: ignore[arg-type]
    require_choice(op, "activation", activation, ops.ACTIVATIONS)
    gated = ops.ACTIVATIONS[activation][1]
    fits = x.dim() >= 1 and up.dim() == 3 and down.dim() == 3
    fits = fits and up.shape == (down.shape[0], (1 + gated) * down.shape[2], x.shape[-1])
    if not (fits and down.shape[1] == x.shape[-1]):
        raise ValueError(
            f"{op}: x must have shape (..., d), up (E, {'2F' if gated else 'F'}, d) for "
            f"{activation} and down (E, d, F), got x.shape={tuple(x.shape)}, "
            f"up.shape={tuple(up.shape)}, down.shape={tuple(down.shape)}"
        )
    for name, bias, weight in (("up_bias", up_bias, up), ("down_bias", down_bias, down)):
        if bias is not None:
            require_shape(op, name, bias, weight.shape[:2])


def _check_routing(op: str, x: Tensor, index: Tensor, weights: Tensor) -> None:
    """Checks the routing tensors; kernels check the range of the index."""
    require_tensor(op, "index", index)
    if index.dtype not in (torch.int64, torch.int32):
        raise TypeError(
            f"{op}: index must be an int64 or int32 tensor, got index.dtype={index.dtype}"
        )
    require_float(op, "weights", weights)
    for name, t in (("index", index), ("weights", weights)):
        require_device(op, name, t, x)
    if index.dim() != x.dim() or index.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"{op}: index must have shape (..., k) with the leading sizes of x, "
            f"got index.shape={tuple(index.shape)}, x.shape={tuple(x.shape)}"
        )
    require_shape(op, "weights", weights, index.shape)
