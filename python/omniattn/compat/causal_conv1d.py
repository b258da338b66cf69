"""causal-conv1d 1.6: convolutions with the channels before the steps."""

from __future__ import annotations

import torch
from torch import Tensor

from omniattn import functional
from omniattn.functional._checks import (
    is_traced,
    require_distinct,
    require_float,
    require_integers,
    require_rows,
)

__all__ = ["causal_conv1d_fn", "causal_conv1d_update"]


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`functional.causal_conv1d` of x (B, D, T), in the wider dtype of x and the weights.

    Args:
        x: (B, D, T); steps next to each other in memory are copied.
        weight: (D, K).
        bias: (D,).
        seq_idx: (B, T) int, the same number for the steps of one sequence, which lie next to each
            other; steps with a negative one give zeros. Then without states.
        initial_states: (B, D, K - 1).
        return_final_states: whether to return (y, final states) in place of y.
        final_states_out: (B, D, K - 1), to which they are written.
        activation: None, "silu" or "swish".

    Returns:
        y (B, D, T) of x's dtype, or with the final states (B, D, K - 1).
    """
    op = "causal_conv1d_fn"
    require_float(op, "x", x)
    require_float(op, "weight", weight)
    require_real(op, bias=bias, initial_states=initial_states)
    dtype = x.dtype
    x, weight, bias = _promoted(x, weight, bias)
    activation = _activation(op, activation)
    if x.ndim != 3:
        raise ValueError(f"{op}: x must have shape (B, D, T), got x.shape={tuple(x.shape)}")
    if seq_idx is not None:
        require_integers(op, "seq_idx", seq_idx)
        if initial_states is not None or return_final_states:
            raise ValueError(
                f"{op}: initial_states must be None and return_final_states False with seq_idx, "
                f"got return_final_states={return_final_states}"
            )
        if tuple(seq_idx.shape) != (x.shape[0], x.shape[2]):
            raise ValueError(
                f"{op}: seq_idx must have shape (B, T), got seq_idx.shape={tuple(seq_idx.shape)}, "
                f"x.shape={tuple(x.shape)}"
            )
        rows = x.mT.flatten(0, 1)[None]
        y = functional.causal_conv1d(
            rows, weight, bias, activation=activation, cu_seqlens=boundaries(seq_idx)
        )
        y = y.view(x.shape[0], x.shape[2], x.shape[1]).mT.to(dtype)
        return torch.where(seq_idx[:, None] < 0, 0, y)
    y, final = functional.causal_conv1d(
        x.mT,
        weight,
        bias,
        activation=activation,
        initial_state=None if initial_states is None else initial_states.to(x.dtype),
        return_final_state=True,
    )
    y, final = y.mT.to(dtype), final.to(dtype)
    if not return_final_states:
        return y
    return y, final if final_states_out is None else final_states_out.copy_(final)


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """The steps x that follow those in `conv_state`, which is updated in place: for inference.

    Args:
        x: (B, D), or (B, D, T).
        conv_state: (B, D, L) with L >= K - 1, the last steps, the newest at the end; or the ring
            that `cache_seqlens` describes; or (N, D, L), of which `conv_state_indices` are read and
            written.
        weight: (D, K).
        bias: (D,).
        activation: None, "silu" or "swish".
        cache_seqlens: (B,) int: x belongs to column cache_seqlens % L of a ring.
        conv_state_indices: (B,) int, each at most once; of a negative one y is 0, and no state
            changes.

    Returns:
        y of x's shape and dtype.
    """
    op = "causal_conv1d_update"
    for name, t in (("x", x), ("conv_state", conv_state), ("weight", weight)):
        require_float(op, name, t)
    require_real(op, bias=bias)
    activation = _activation(op, activation)
    if x.ndim not in (2, 3):
        raise ValueError(f"{op}: x must have shape (B, D) or (B, D, T), got x={tuple(x.shape)}")
    steps = x if x.ndim == 3 else x[..., None]
    before = weight.shape[-1] - 1
    length = conv_state.shape[-1]
    if conv_state.ndim != 3 or length < before:
        raise ValueError(
            f"{op}: conv_state must have shape (B, D, L) with L >= K - 1, "
            f"got conv_state.shape={tuple(conv_state.shape)}, weight.shape={tuple(weight.shape)}"
        )
    if cache_seqlens is not None:
        require_integers(op, "cache_seqlens", cache_seqlens)
    if conv_state_indices is not None:
        require_integers(op, "conv_state_indices", conv_state_indices)
        padding = conv_state_indices < 0
        if not is_traced() and bool(padding.any()):
            y = torch.zeros_like(x)
            y[~padding] = causal_conv1d_update(
                *(x[~padding], conv_state, weight, bias, activation),
                None if cache_seqlens is None else cache_seqlens[~padding],
                conv_state_indices[~padding],
            )
            return y
        require_rows(op, "conv_state_indices", conv_state_indices, len(conv_state))
        require_distinct(op, "conv_state_indices", conv_state_indices)
    own = conv_state if conv_state_indices is None else conv_state[conv_state_indices.long()]
    if tuple(own.shape[:2]) != tuple(steps.shape[:2]):
        raise ValueError(
            f"{op}: conv_state must have the B and D of x, got conv_state.shape="
            f"{tuple(own.shape)}, x.shape={tuple(x.shape)}"
        )
    new = steps.to(own.dtype)
    if cache_seqlens is None:
        past, after = own[..., length - before :], torch.cat((own, new), -1)[..., -length:]
    else:

        def columns(first: int, last: int) -> Tensor:
            offsets = torch.arange(first, last, device=x.device)
            places = (cache_seqlens.long()[:, None] + offsets) % length
            return places[:, None].expand(-1, steps.shape[1], -1)

        past = own.gather(2, columns(-before, 0))
        after = own.scatter(2, columns(0, steps.shape[2]), new)
    wide, weight, bias = _promoted(steps, weight, bias)
    y = functional.causal_conv1d(
        wide.mT, weight, bias, activation=activation, initial_state=past.to(wide.dtype)
    ).mT.to(x.dtype)
    with torch.no_grad():
        if conv_state_indices is None:
            conv_state.copy_(after)
        else:
            conv_state[conv_state_indices.long()] = after
    return y if x.ndim == 3 else y[..., 0]


def require_real(op: str, **tensors: Tensor | None) -> None:
    """Of those that are given."""
    for name, t in tensors.items():
        if t is not None:
            require_float(op, name, t)


def _promoted(
    x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """In one dtype: causal-conv1d takes weights of another one than x."""
    dtype = torch.promote_types(x.dtype, weight.dtype)
    if bias is not None:
        dtype = torch.promote_types(dtype, bias.dtype)
        bias = bias.to(dtype)
    return x.to(dtype), weight.to(dtype), bias


def _activation(op: str, activation: str | None) -> str | None:
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"{op}: activation must be None, silu or swish, got {activation=}")
    return None if activation is None else "silu"


def boundaries(seq_idx: Tensor) -> Tensor:
    """(N + 1,): where rows or numbers of sequences change."""
    first = torch.ones_like(seq_idx, dtype=torch.bool)
    first[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    starts = first.flatten().nonzero()[:, 0]
    return torch.cat((starts, starts.new_tensor([seq_idx.numel()])))
