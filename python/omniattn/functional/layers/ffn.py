"""Feed-forward layers as one op."""

from __future__ import annotations

import torch
from torch import Tensor

from omniattn.checks.arguments import (
    autocast_dtype,
    implementation,
    require_bool,
    require_choice,
    require_float,
    require_like,
    require_number,
    require_seed,
    require_shape,
    require_strided,
)
from omniattn.checks.jagged import token_wise
from omniattn.ops import ffn as ops
from omniattn.ops.activation import ACTIVATIONS as ACTIVATIONS
from omniattn.ops.activation import CLAMPED, encode
from omniattn.ops.dispatch.gemm_choice import native_is_faster
from omniattn.ops.dispatch.precision import split_bf16_of

__all__ = ["glu_mlp", "mlp"]


@token_wise()
def glu_mlp(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    *,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float = 7.0,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    recompute: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Gated feed-forward layer.

    ``y = dropout(act(x W_gate^T + b_gate) * (x W_up^T + b_up)) W_down^T + b_down``

    Args:
        x: (..., d), float64, float32, bfloat16 or float16; or a jagged nested tensor (B, j, d), and
            then so is y. Under autocast all tensors are cast to its dtype.
        gate_weight, up_weight: (F, d) of x's dtype.
        down_weight: (n, F) of x's dtype.
        gate_bias, up_bias, down_bias: (F,), (F,), (n,), or None.
        activation: "silu" (SwiGLU), "gelu" or "gelu_tanh" (GeGLU), "relu" (ReGLU), "sigmoid" (GLU),
            "identity" (bilinear), "quick_gelu" or "relu_squared"; or "clamped_swiglu" (gpt-oss), a
            function of both projections, see :func:`clamped_swiglu`.
        alpha, limit: of "clamped_swiglu".
        dropout_p: probability to drop an element of the hidden layer, in [0, 1).
        seed: int64 (2,), [seed, offset] of the draws of :func:`omniattn.functional.dropout`, which
            the backward repeats. None draws one from torch's generator.
        recompute: save only the inputs and recompute the projections in the backward: a third more
            arithmetic, no memory of size F.
        backend: None for the matrix products measured to be faster on this CPU family, this
            package's or torch's; "cpu" for this package's; "reference" for the eager definition.

    Returns:
        y (..., n) of x's dtype.

    Raises:
        TypeError: a dtype is unsupported or differs from x's.
        ValueError: a shape, device or value is invalid; an unknown activation.
        NotImplementedError: no native kernel for the device.

    Note:
        Saves the two projections, but neither the activation nor the hidden layer: half the memory
        of the eager form. With half-precision inputs the projections, the hidden layer and y are
        rounded, as in three linear layers. Second and forward-mode derivatives go through the eager
        definition.

    Reference:
        Shazeer, GLU Variants Improve Transformer, 2020, arXiv:2002.05202.

    Example:
        >>> one = torch.ones(1, 1)
        >>> glu_mlp(one, one, 2 * one, 3 * one, activation="relu")
        tensor([[6.]])
    """
    op = "glu_mlp"
    tensors = _autocast(x, gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias)
    require_choice(op, "activation", activation, (*ACTIVATIONS, CLAMPED))
    for name, value in (("alpha", alpha), ("limit", limit)):
        require_number(op, name, value, above=0)
    _check(op, dropout_p, *tensors, names=("gate_weight", "gate_bias"))
    x, gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias = tensors
    require_bool(op, "recompute", recompute)
    seed = require_seed(op, seed, x) if dropout_p > 0 else None
    codes = encode(activation, alpha, limit)
    return _run(op, tensors, codes, dropout_p, seed, recompute, backend)


@token_wise()
def mlp(
    x: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    *,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "gelu",
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    recompute: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Feed-forward layer.

    ``y = dropout(act(x W_up^T + b_up)) W_down^T + b_down``

    Args:
        x: (..., d), see :func:`glu_mlp`.
        up_weight: (F, d) of x's dtype.
        down_weight: (n, F) of x's dtype.
        up_bias, down_bias: (F,), (n,), or None.
        activation: "gelu" (BERT), "gelu_tanh" (GPT-2), "relu", "silu", "quick_gelu" (CLIP),
            "relu_squared" (Primer) or another one of :func:`glu_mlp`.
        dropout_p, seed, recompute, backend: see :func:`glu_mlp`.

    Returns:
        y (..., n) of x's dtype.

    Raises:
        TypeError, ValueError, NotImplementedError: see :func:`glu_mlp`.

    Note:
        Keeps the projection but not the activated hidden layer. The activation itself runs on
        torch's kernels. Otherwise as :func:`glu_mlp`.

    Reference:
        Vaswani et al., Attention Is All You Need, 2017, arXiv:1706.03762.

    Example:
        >>> one = torch.ones(1, 1)
        >>> mlp(-one, one, one, activation="relu")
        tensor([[0.]])
    """
    op = "mlp"
    tensors = _autocast(x, up_weight, None, down_weight, up_bias, None, down_bias)
    require_choice(op, "activation", activation, ACTIVATIONS)
    _check(op, dropout_p, *tensors, names=("up_weight", "up_bias"))
    x, up_weight, _, down_weight, up_bias, _, down_bias = tensors
    require_bool(op, "recompute", recompute)
    seed = require_seed(op, seed, x) if dropout_p > 0 else None
    return _run(op, tensors, (ACTIVATIONS[activation], ()), dropout_p, seed, recompute, backend)


def _autocast(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    """Casts as torch's linear layers do under autocast, which leaves fp64 unchanged."""
    x = tensors[0]
    dtype = autocast_dtype(x) if isinstance(x, Tensor) else None
    if dtype is None:
        return tensors  # type: ignore[return-value]
    return tuple(
        t.to(dtype) if isinstance(t, Tensor) and t.dtype != torch.float64 else t  # type: ignore[misc]
        for t in tensors
    )


def _check(
    op: str,
    dropout_p: float,
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor | None,
    down_weight: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    *,
    names: tuple[str, str],
) -> None:
    """Checks the tensors; `names` are the caller's names of the first weight and bias."""
    require_float(op, "x", x)
    require_number(op, "dropout_p", dropout_p, 0, below=1)
    require_like(op, names[0], gate_weight, x)
    require_like(op, "down_weight", down_weight, x)
    if x.dim() == 0 or gate_weight.dim() != 2 or gate_weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"{op}: x must have shape (..., d) and {names[0]} (F, d), "
            f"got x.shape={tuple(x.shape)}, {names[0]}.shape={tuple(gate_weight.shape)}"
        )
    hidden = gate_weight.shape[0]
    if down_weight.dim() != 2 or down_weight.shape[1] != hidden:
        raise ValueError(
            f"{op}: down_weight must have shape (n, {hidden}), "
            f"got down_weight.shape={tuple(down_weight.shape)}"
        )
    require_strided(op, "x", x)
    require_strided(op, names[0], gate_weight)
    require_strided(op, "down_weight", down_weight)
    for name, t, shape in (
        ("up_weight", up_weight, tuple(gate_weight.shape)),
        (names[1], gate_bias, (hidden,)),
        ("up_bias", up_bias, (hidden,)),
        ("down_bias", down_bias, tuple(down_weight.shape[:1])),
    ):
        if t is not None:
            require_like(op, name, t, x)
            require_strided(op, name, t)
            require_shape(op, name, t, shape)


def _run(
    op: str,
    tensors: tuple[Tensor, ...],
    codes: tuple[int, tuple[float, ...]],
    dropout_p: float,
    seed: Tensor | None,
    recompute: bool,
    backend: str | None,
) -> Tensor:
    x = tensors[0]
    run = implementation(op, backend, x, ops.glu_mlp)
    split_bf16 = split_bf16_of(x)
    native = native_is_faster(x, tensors[1], split_bf16) if backend is None else backend == "cpu"
    y: Tensor = run(*tensors, seed, dropout_p, *codes, recompute, native, split_bf16)
    return y
