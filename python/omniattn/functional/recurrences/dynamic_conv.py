"""Dynamic convolutions: causal filters of each token."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor
from typing_extensions import Unpack

from omniattn.checks.arguments import (
    cast_like,
    implementation,
    require_bool,
    require_float,
    require_shape,
    shown,
)
from omniattn.checks.jagged import over_sequences
from omniattn.compositions.recurrences.dynamic_conv import dynamic_conv1d as composed
from omniattn.encoding.sequences import StateOptions, sequences_of, spelled_out
from omniattn.functional.recurrences._common import composed_sequence_count

__all__ = ["dynamic_conv1d"]


@overload
def dynamic_conv1d(
    x: Tensor,
    taps: Tensor,
    *,
    activation: str | None = None,
    residual: bool = False,
    return_final_state: Literal[False] = False,
    backend: str | None = None,
    **options: Unpack[StateOptions],
) -> Tensor: ...
@overload
def dynamic_conv1d(
    x: Tensor,
    taps: Tensor,
    *,
    activation: str | None = None,
    residual: bool = False,
    return_final_state: Literal[True],
    backend: str | None = None,
    **options: Unpack[StateOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def dynamic_conv1d(
    x: Tensor,
    taps: Tensor,
    *,
    activation: str | None = None,
    residual: bool = False,
    return_final_state: bool,
    backend: str | None = None,
    **options: Unpack[StateOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
@over_sequences("x", "taps")
@spelled_out(StateOptions, last=("return_final_state", "backend"))
def dynamic_conv1d(
    x: Tensor,
    taps: Tensor,
    *,
    activation: str | None = None,
    residual: bool = False,
    return_final_state: bool = False,
    backend: str | None = None,
    **options: Unpack[StateOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """Convolution over the last K time steps by filters of each token and head.

    ``y[t] = act(sum_k taps[t, h, k] x[t + k - (K - 1)])``, for the D / H channels of head h.

    Args:
        x: (B, T, D), float64, float32, bfloat16 or float16.
        taps: (B, T, H, K) of x's dtype, H a divisor of D (D for a filter of each channel), K >= 1;
            the last one is for the present input. Dynamic convolutions have a softmax over K.
        activation: "silu", or None.
        residual: True to add x to the result, after the activation.
        initial_state: (N, D, K - 1) of x's dtype, the inputs before x with the oldest first; None
            for zeros. N is B, or the number of sequences.
        cu_seqlens, return_final_state, backend: as in `causal_conv1d`.

    Returns:
        y of x's shape and dtype; with return_final_state the pair (y, final_state), as in
        `causal_conv1d`.

    Raises:
        TypeError: a dtype is unsupported or differs from x's.
        ValueError: a shape, device or value is invalid.

    Note:
        Sums are in fp32 (fp64 for fp64) and rounded once. Neither pass makes a tensor with D K
        numbers for each token, and only the inputs are saved for the backward. Gradients do not
        depend on the number of threads. CUDA tensors take a composition of torch's operations.
        Second and forward-mode derivatives go through the eager definition.

    Reference:
        Wu et al., Pay Less Attention with Lightweight and Dynamic Convolutions, 2019,
        arXiv:1901.10430.

    Example:
        >>> x = torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1)
        >>> taps = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]).view(1, 3, 1, 2)
        >>> dynamic_conv1d(x, taps).flatten()
        tensor([1., 1., 5.])
    """
    op = "dynamic_conv1d"
    initial_state, cu_seqlens, _ = sequences_of(op, options)
    require_float(op, "x", x)
    if x.ndim != 3:
        raise ValueError(f"{op}: x must have shape (B, T, D), got x.shape={tuple(x.shape)}")
    taps = cast_like(op, "taps", taps, x)
    fits = taps.ndim == 4 and taps.shape[:2] == x.shape[:2] and taps.shape[3] >= 1
    if not fits or x.shape[2] % max(1, taps.shape[2]) or (taps.shape[2] == 0 and x.shape[2]):
        raise ValueError(
            f"{op}: taps must have shape (B, T, H, K) with B and T of x, H a divisor of its D and "
            f"K >= 1, got taps.shape={tuple(taps.shape)}, x.shape={tuple(x.shape)}"
        )
    if activation not in ("silu", None):
        raise ValueError(
            f'{op}: activation must be "silu" or None, got activation={shown(activation)}'
        )
    require_bool(op, "residual", residual)
    require_bool(op, "return_final_state", return_final_state)
    count = composed_sequence_count(op, x, cu_seqlens, "x")
    if initial_state is not None:
        initial_state = cast_like(op, "initial_state", initial_state, x)
        require_shape(op, "initial_state", initial_state, (count, x.shape[2], taps.shape[3] - 1))
    run = implementation(op, backend, x, composed)
    y, final_state = run(x, taps, initial_state, cu_seqlens, activation == "silu", residual)
    return (y, final_state) if return_final_state else y
