"""Dynamic convolutions: causal filters of each token."""

from __future__ import annotations

import torch
from torch import Tensor

from omniattn.checks.arguments import (
    cast_like,
    require_bool,
    require_float,
    require_shape,
    shown,
)
from omniattn.checks.jagged import over_sequences
from omniattn.functional.recurrences._common import composed_sequence_count
from omniattn.reference.precision import widen

__all__ = ["dynamic_conv1d"]


@over_sequences("x", "taps")
def dynamic_conv1d(
    x: Tensor,
    taps: Tensor,
    *,
    activation: str | None = None,
    residual: bool = False,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_final_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Convolution over the last K time steps by filters of each token and head.

    ``y[t] = act(sum_k taps[t, h, k] x[t + k - (K - 1)])``, for the D / H channels of head h.

    Args:
        x: (B, T, D), float64, float32, bfloat16 or float16.
        taps: (B, T, H, K) of x's dtype, H a divisor of D (D for a filter of each channel), K >= 1;
            the last one is for the present input. Dynamic convolutions have a softmax over K.
        activation: "silu", or None.
        residual: True to add x.
        initial_state: (N, D, K - 1) of x's dtype, the inputs before x with the oldest first; None
            for zeros. N is B, or the number of sequences.
        cu_seqlens, return_final_state: as in `causal_conv1d`.

    Returns:
        y of x's shape and dtype; with return_final_state the pair (y, final_state), as in
        `causal_conv1d`.

    Raises:
        TypeError: a dtype is unsupported or differs from x's.
        ValueError: a shape, device or value is invalid.

    Note:
        A composition of torch's operations, one pass over x for each tap, summed in fp32 (fp64 for
        fp64). No tensor with D K numbers for each token is made, in the backward neither.

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
    return _tap_by_tap(
        *(x, taps),
        activation=activation,
        residual=residual,
        initial_state=initial_state,
        return_final_state=return_final_state,
        cu_seqlens=cu_seqlens,
    )


def _tap_by_tap(
    x: Tensor,
    taps: Tensor,
    *,
    activation: str | None,
    residual: bool,
    initial_state: Tensor | None,
    return_final_state: bool,
    cu_seqlens: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes the function, with one pass over x for each tap."""
    heads, count = taps.shape[2:]
    before = x.new_zeros(1) if initial_state is None else initial_state.mT
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    before = before.expand(sequences, count - 1, x.shape[2])
    inputs = _Inputs(widen(x), widen(before), cu_seqlens)
    sizes, wide = (heads, x.shape[2] // max(1, heads)), widen(taps)[..., None]
    y = wide[..., 0, :] * inputs.at(0).unflatten(-1, sizes)
    for k in range(1, count):
        y = y.addcmul(wide[..., k, :], inputs.at(k).unflatten(-1, sizes))
    y = y.flatten(2)
    if activation is not None:
        y = y * y.sigmoid()
    y = (y + x if residual else y).to(x.dtype)
    return (y, inputs.last().to(x.dtype)) if return_final_state else y


class _Inputs:
    """Rows that the taps read: x (B, T, D) and the K - 1 rows before each sequence, (N, K - 1, D).

    Packed sequences (B = 1) have the rows before all of them first.
    """

    def __init__(self, x: Tensor, before: Tensor, cu_seqlens: Tensor | None) -> None:
        self.steps, self.width = x.shape[1], before.shape[1]
        self.cu_seqlens = None if cu_seqlens is None else cu_seqlens.long()
        first = before if cu_seqlens is None else before.flatten(0, 1)[None]
        self.rows = torch.cat((first, x), 1)

    def at(self, tap: int) -> Tensor:
        """Returns the inputs (B, T, D) of a tap."""
        if self.cu_seqlens is None:
            return self.rows[:, tap : tap + self.steps]
        t = torch.arange(self.steps, device=self.rows.device)
        n = torch.searchsorted(self.cu_seqlens[1:], t, right=True)
        return self._packed(n, t - self.cu_seqlens[n] + tap - self.width)

    def last(self) -> Tensor:
        """Returns the last K - 1 inputs (N, D, K - 1) of each sequence."""
        if self.cu_seqlens is None:
            return self.rows[:, self.steps :].mT
        count = self.cu_seqlens.shape[0] - 1
        n = torch.arange(count, device=self.rows.device)[:, None]
        back = torch.arange(-self.width, 0, device=self.rows.device)
        rows = self._packed(
            n.expand(-1, self.width).flatten(), (self.cu_seqlens.diff()[:, None] + back).flatten()
        )
        return rows[0].unflatten(0, (count, self.width)).mT

    def _packed(self, n: Tensor, step: Tensor) -> Tensor:
        """Returns rows (1, M, D) of the steps of sequences n; those before its first are < 0."""
        assert self.cu_seqlens is not None
        first = self.width * (self.cu_seqlens.shape[0] - 1)
        places = torch.where(
            step < 0, self.width * (n + 1) + step, first + self.cu_seqlens[n] + step
        )
        return self.rows.index_select(1, places)
