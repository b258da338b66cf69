"""Convolutions by filters of each token: the op, and a composition for devices without a kernel.

The composition passes over x once for each tap: no tensor has D K numbers for each token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from omniattn.compositions._python_ops import implement, recomputed
from omniattn.ops.dispatch.autograd import DifferentiableOp
from omniattn.ops.dispatch.backward import BackwardOp
from omniattn.ops.dispatch.vmap import Fold
from omniattn.reference.precision import widen
from omniattn.reference.recurrences.conv import dynamic_conv1d as definition

__all__ = ["dynamic_conv1d"]


def _forward(
    x: Tensor,
    taps: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
    residual: bool,
) -> tuple[Tensor, Tensor]:
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
    if silu:
        y = y * y.sigmoid()
    return (y + x if residual else y).to(x.dtype), _channels_last(inputs.last().to(x.dtype))


def _channels_last(state: Tensor) -> Tensor:
    """Returns a state whose channels are adjacent in memory, as the kernels do."""
    return state.mT.contiguous().mT


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


def _final_state(x: Tensor, taps: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Returns an empty final state, whose channels are adjacent in memory."""
    count = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return x.new_empty((count, taps.shape[3] - 1, x.shape[2])).mT


def _like_state(taps: Tensor, state: Tensor | None) -> Tensor:
    if state is None:
        return taps.new_empty(0)
    return state.new_empty(state.mT.shape).mT


_SHAPES = {"x": "B T D", "taps": "B T H K", "initial_state": "N D P", "cu_seqlens": "N+1"}
_GRADIENTS = {"grad_y": "B T D", "grad_final_state": "N D P"}
_differentiate = recomputed(_forward, 2, 3)


def _backward(*values: Any) -> tuple[Tensor, ...]:
    dx, dtaps, dstate = _differentiate(*values)
    return dx, dtaps, _channels_last(dstate) if dstate.dim() == 3 else dstate


implement("dynamic_conv1d", _forward, _SHAPES, differentiable=True)
implement("dynamic_conv1d_backward", _backward, _GRADIENTS | _SHAPES)
#: (x, taps, initial_state, cu_seqlens, silu, residual) -> (y, final_state)
dynamic_conv1d = DifferentiableOp(
    "dynamic_conv1d",
    fakes={"final_state": _final_state},
    backward_op=BackwardOp(
        "dynamic_conv1d_backward",
        fakes={"dinitial_state": lambda taps, initial_state: _like_state(taps, initial_state)},
    ),
    formula=lambda x, taps, initial_state, cu_seqlens, silu, residual: definition(
        *(x, taps),
        activation="silu" if silu else None,
        residual=residual,
        initial_state=initial_state,
        return_final_state=True,
        cu_seqlens=cu_seqlens,
    ),
    fold=Fold(("x", "taps", "initial_state"), when=lambda cu_seqlens: cu_seqlens is None),
)
