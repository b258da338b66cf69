"""Tangents of linear_scan, and the selective scan over a chunk of tokens by linear_scan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as nnf

from omniattn.ops.derivatives.tokens import previous_tokens
from omniattn.ops.dispatch.pieces import ELEMENTS, Composed, Piece, Pieces, Tensors
from omniattn.reference.precision import compute_dtype

__all__ = ["linear_scan_pieces", "selective_chunk", "selective_tokens"]

#: linear_scan, a function of x, g, the initial states and cu_seqlens.
Scan = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], tuple[Tensor, Tensor]]


def linear_scan_pieces(
    scan: Scan, x: Tensor, g: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None
) -> Pieces:
    """Returns linear_scan with its tangents.

    They are h'_t = e^(g_t) h'_{t-1} + x'_t + g'_t e^(g_t) h_{t-1}.
    """

    def tangents(at: Tensors, along: Tensors) -> tuple[Tensor, Tensor]:
        values: Any = at  # x and g are there
        x, g, start, ends = values
        moved_x, moved_g, moved_start, _ = along
        added = torch.zeros_like(x) if moved_x is None else moved_x
        if moved_g is not None:
            before = previous_tokens(scan(x, g, start, ends)[0], ends, start)
            added = added + moved_g * g.exp() * before
        return scan(added, g, moved_start, ends)

    count = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = torch.Size((count, x.shape[2]))
    piece = Piece(scan, ((),) * 4, ((),) * 2)
    outputs = ((x.shape, x.dtype), (state, compute_dtype(x)))
    return Composed((piece,), outputs, tangents=tangents)


def selective_tokens(values: dict[str, Any]) -> int:
    """Returns the number of tokens of a chunk, which holds a state for each."""
    states = values["u"].shape[2] * values["B"].shape[-1]
    return max(2, min(64, ELEMENTS // max(1, states)))


def selective_chunk(
    scan: Scan,
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    initial_state: Tensor | None,
    *,
    delta_softplus: bool,
) -> tuple[Tensor, Tensor]:
    """Computes reference.selective_scan with real states, whose elements are channels of `scan`."""
    dtype = compute_dtype(u)
    wide_u, dt, A = u.to(dtype), delta.to(dtype), A.to(dtype)
    if delta_bias is not None:
        dt = dt + delta_bias.to(dtype)
    if delta_softplus:
        dt = nnf.softplus(dt)

    def of_channels(x: Tensor) -> Tensor:
        """Repeats groups (B, T, G, N) to all channels; (D, N) has them."""
        x = x.to(dtype)
        if x.dim() < 4:
            return x if x.dim() == 2 else x[:, :, None]
        return x.repeat_interleave(A.shape[0] // max(1, x.shape[2]), 2)

    written = (dt * wide_u)[..., None] * of_channels(B)
    start = None if initial_state is None else initial_state.to(dtype).flatten(1)
    h, final = scan(written.flatten(2), (dt[..., None] * A).flatten(2), start, None)
    y = (h.unflatten(2, A.shape) * of_channels(C)).sum(-1)
    if D is not None:
        y = y + D.to(dtype) * wide_u
    if z is not None:
        y = y * nnf.silu(z.to(dtype))
    return y.to(u.dtype), final.unflatten(1, A.shape)
