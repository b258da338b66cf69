"""Tangents of linear_scan and of the selective scan, and its chunks of tokens by linear_scan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as nnf

from omniattn.ops.derivatives.tangent_kernels import KernelPieces
from omniattn.ops.derivatives.tokens import previous_tokens
from omniattn.ops.dispatch.backward import private_op
from omniattn.ops.dispatch.library import has_kernel, register_fake
from omniattn.ops.dispatch.names import like
from omniattn.ops.dispatch.pieces import ELEMENTS, Composed, Piece, Pieces, Tensors, evaluate
from omniattn.reference.precision import compute_dtype

__all__ = ["linear_scan_pieces", "selective_chunk", "selective_scan_pieces", "selective_tokens"]

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
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Computes the plain selective scan, whose states are channels of `scan`."""

    def of_channels(x: Tensor) -> Tensor:
        """Repeats groups (B, T, G, N) to all channels; (D, N) has them."""
        return x if x.dim() == 2 else x.repeat_interleave(A.shape[0] // max(1, x.shape[2]), 2)

    written = (dt * u)[..., None] * of_channels(B)
    start = None if initial_state is None else initial_state.flatten(1)
    h, final = scan(written.flatten(2), (dt[..., None] * A).flatten(2), start, None)
    return (h.unflatten(2, A.shape) * of_channels(C)).sum(-1), final.unflatten(1, A.shape)


_tangents = private_op("selective_scan_tangents")
_forward, _backward = private_op("selective_scan_raw"), private_op("selective_scan_backward")
#: Emulated kernels of CUDA, which tests run on the CPU, have none for tangents.
_PRESENT = has_kernel("selective_scan_tangents", "cpu")
#: Channels of a part of the gradients of B and C.
_BLOCK = 128


@register_fake("selective_scan_tangents")
def _fake_tangents(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    *others: Tensor | None,
) -> tuple[Tensor, ...]:
    *_, grad_y, _, _, _ = others
    count = u.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = A.new_empty(count, *A.shape)
    parts = -(-(u.shape[2] // max(1, B.shape[2])) // _BLOCK)
    weights = B.new_empty(parts, *B.shape)
    gradients = [like(u), like(u), like(state), weights, like(weights), like(state)]
    if grad_y is None:
        gradients = [t.new_empty(0) for t in gradients]
    return (like(u), state, *gradients)


@dataclass(frozen=True)
class _SelectiveKernel:
    """The kernel for tangents of the plain selective scan (`_is_plain`); see tangent_kernels.py."""

    moving: ClassVar[tuple[int, ...]] = (0, 1, 2, 3, 4, 8)  # u, delta, A, B, C, initial_state
    outputs: ClassVar[int] = 2
    results: ClassVar[int] = 0

    def tangents(
        self,
        arguments: Sequence[Any],
        results: Sequence[Tensor],
        moved: Mapping[int, Tensor],
        grads: Mapping[int, Tensor] | None = None,
        moved_grads: Mapping[int, Tensor] | None = None,
    ) -> Sequence[Tensor]:
        *inputs, _, _, _, start, ends = arguments[:10]
        along = (_or_zeros(moved.get(i), x) for i, x in enumerate(inputs))
        of_outputs: tuple[Tensor | None, ...] = (None, None, None, None)
        if grads is not None:
            further = moved_grads or {}
            given = (grads.get(0), grads.get(1), further.get(0), further.get(1))
            of_outputs = (_or_zeros(given[0], inputs[0]), *given[1:])
        found = _tangents(*inputs, start, ends, *along, moved.get(8), *of_outputs)
        if grads is None:
            return found[:2]
        y, final, du, ddelta, dA, dB, dC, dstart = found
        return y, final, du, ddelta, dA.sum(0), dB.sum(0), dC.sum(0), dstart

    def gradients(
        self, arguments: Sequence[Any], results: Sequence[Tensor], grads: Mapping[int, Tensor]
    ) -> Sequence[Tensor]:
        given = arguments[:10]
        states = _forward(*given, False, False)[2]
        flags = (False, False, True, True, True, False, False)
        found = _backward(*given, states, grads.get(0), grads.get(1), *flags)
        return (*found[:5], found[8])


def _or_zeros(t: Tensor | None, like_this: Tensor) -> Tensor:
    return torch.zeros_like(like_this) if t is None else t


def selective_scan_pieces(
    scan: Callable[..., tuple[Tensor, Tensor]],
    in_chunks: Callable[..., Pieces | None],
    *args: Any,
) -> Pieces | None:
    """Returns the selective scan in pieces.

    With real states it is a plain one between operations of torch. That one has a kernel for its
    tangents if B and C depend on the token; other scans, and further derivatives, evaluate the
    definition in chunks.

    Args:
        scan: the op.
        in_chunks: returns the pieces of a plain scan, or of paired states, from the arguments of
            the op, None if it is small.
        args: arguments of the op.
    """
    u, _, A, B, C, *_, paired = args
    if paired or A is None:
        return in_chunks(*args)
    if u.shape[0] == 0 or u.shape[1] <= selective_tokens({"u": u, "B": B}):
        return None
    if not _is_plain(*args):
        ends = args[9]
        count = u.shape[0] if ends is None else ends.shape[0] - 1
        around = partial(_around_plain, scan, delta_softplus=args[10])
        outputs = ((u.shape, u.dtype), (torch.Size((count, *A.shape)), A.dtype))
        return Pieces((Piece(around, ((),) * 10, ((),) * 2),), outputs)
    chunks = in_chunks(*args)
    if chunks is None or not _PRESENT or not u.is_cpu or 2 in (B.dim(), C.dim()):
        return chunks
    whole = Piece(lambda *t: evaluate(chunks, *t)[:2], ((),) * 10, ((),) * 2)
    return KernelPieces((whole,), chunks.outputs[:2], kernel=_SelectiveKernel())


def _is_plain(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    *others: Any,
) -> bool:
    """Returns whether all tensors are in the compute type, and y = C h with dt = delta."""
    _, _, delta_softplus, _ = others
    absent = D is None and z is None and delta_bias is None
    return absent and not delta_softplus and u.dtype == compute_dtype(u)


def _around_plain(
    scan: Callable[..., tuple[Tensor, Tensor]],
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    delta_softplus: bool,
) -> tuple[Tensor, Tensor]:
    """Computes the selective scan by a plain one between operations of torch."""
    dtype = compute_dtype(u)
    wide_u, dt, B, C = (t.to(dtype) for t in (u, delta, B, C))
    if delta_bias is not None:
        dt = dt + delta_bias
    if delta_softplus:
        dt = nnf.softplus(dt)
    plain = (None, None, None, initial_state, cu_seqlens, False, False)
    y, final = scan(wide_u, dt, A, B, C, *plain)
    if D is not None:
        y = y + D * wide_u
    if z is not None:
        y = y * nnf.silu(z.to(dtype))
    return y.to(u.dtype), final
