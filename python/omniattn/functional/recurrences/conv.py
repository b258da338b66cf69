"""Short causal convolutions before recurrences."""

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
from omniattn.encoding.sequences import StateOptions, sequences_of, spelled_out
from omniattn.functional.recurrences._common import sequence_count
from omniattn.ops import conv as ops

__all__ = ["causal_conv1d"]


@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    return_final_state: Literal[False] = False,
    backend: str | None = None,
    **options: Unpack[StateOptions],
) -> Tensor: ...
@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    return_final_state: Literal[True],
    backend: str | None = None,
    **options: Unpack[StateOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    return_final_state: bool,
    backend: str | None = None,
    **options: Unpack[StateOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
@over_sequences("x")
@spelled_out(StateOptions, last=("return_final_state", "backend"))
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    return_final_state: bool = False,
    backend: str | None = None,
    **options: Unpack[StateOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """Convolution of each channel with its own filter over the last K time steps.

    ``y[t] = act(bias + sum_k weight[:, k] * x[t + k - (K - 1)])``, with the last column of the
    weight for the present input, as in torch.nn.Conv1d and causal-conv1d.

    Args:
        x: (B, T, D), float64, float32, bfloat16 or float16. Any strides; copied only if the stride
            of the channels is not 1. Channels are last; causal-conv1d has time last.
        weight: (D, K) of x's dtype, any K >= 1; models have 4, which is the fastest. Under autocast
            weight, bias and initial_state are cast to x's dtype.
        bias: (D,) of x's dtype, or None.
        activation: "silu", or None.
        initial_state: (N, D, K - 1) of x's dtype, the inputs before x with the oldest first;
            None for zeros. N is B, or the number of sequences.
        cu_seqlens: (N + 1,) int32 or int64: B is 1, and rows cu_seqlens[n] .. cu_seqlens[n + 1] are
            sequence n, with a state of its own; they grow from 0 to T. A jagged nested x (B, j, D)
            brings its own boundaries, and y has them, too.
        return_final_state: if True, also returns the state after x.
        backend: None for the native kernel of x's device, "cpu" or "cuda" to insist on it,
            "reference" for the eager definition.

    Returns:
        y of x's shape and dtype; with return_final_state the pair (y, final_state), the latter like
        initial_state: the last K - 1 inputs, including inputs before x.

    Raises:
        TypeError: a dtype is unsupported or differs from x's.
        ValueError: a shape, device or value is invalid.
        NotImplementedError: no native kernel for the device.

    Note:
        Sums in fp32 (fp64 for fp64), rounded once. Gradients flow to x, weight, bias and
        initial_state, from y and from the final state; they do not depend on the number of threads.
        Only the inputs are saved for the backward. Second and forward-mode derivatives go through
        the eager definition.

    Reference:
        Gu and Dao, Mamba, 2023, arXiv:2312.00752; Yang, Kautz and Hatamizadeh, Gated Delta
        Networks, 2024, arXiv:2412.06464.

    Example:
        >>> x = torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1)
        >>> causal_conv1d(x, torch.tensor([[10.0, 1.0]])).flatten()
        tensor([ 1., 12., 23.])
    """
    op = "causal_conv1d"
    initial_state, cu_seqlens, _ = sequences_of(op, options)
    require_float(op, "x", x)
    if x.ndim != 3:
        raise ValueError(f"{op}: x must have shape (B, T, D), got x.shape={tuple(x.shape)}")
    count, channels = sequence_count(op, x, cu_seqlens, "x"), x.shape[2]
    weight = cast_like(op, "weight", weight, x)
    if weight.ndim != 2 or weight.shape[0] != channels or weight.shape[1] < 1:
        raise ValueError(
            f"{op}: weight must have shape (D, K) with the D of x and K >= 1, "
            f"got weight.shape={tuple(weight.shape)}, x.shape={tuple(x.shape)}"
        )
    if bias is not None:
        bias = cast_like(op, "bias", bias, x)
        require_shape(op, "bias", bias, (channels,))
    if activation not in ("silu", None):
        raise ValueError(
            f'{op}: activation must be "silu" or None, got activation={shown(activation)}'
        )
    if initial_state is not None:
        initial_state = cast_like(op, "initial_state", initial_state, x)
        require_shape(op, "initial_state", initial_state, (count, channels, weight.shape[1] - 1))
    require_bool(op, "return_final_state", return_final_state)
    run = implementation(op, backend, x, ops.causal_conv1d)
    y, final_state = run(x, weight, bias, initial_state, cu_seqlens, activation == "silu")
    return (y, final_state) if return_final_state else y
