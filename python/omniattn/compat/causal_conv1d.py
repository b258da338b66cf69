"""causal-conv1d 1.6: convolutions of (B, D, T)."""

from __future__ import annotations

import torch
from torch import Tensor

from omniattn import functional
from omniattn.checks.arguments import (
    is_traced,
    require_device,
    require_distinct,
    require_int,
    require_like,
    require_rows,
    require_shape,
)
from omniattn.compat._errors import (
    errors_of,
    require_flags,
    require_form,
    require_index,
    require_optional,
    require_real,
    require_writable,
)
from omniattn.functional.recurrences._common import require_boundaries

__all__ = ["causal_conv1d_fn", "causal_conv1d_update", "causal_conv1d_varlen_states"]


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
    """Computes :func:`functional.causal_conv1d` in the wider dtype of x and the weights.

    Args:
        x: (B, D, T); copied if T is contiguous in memory.
        weight: (D, K).
        bias: (D,).
        seq_idx: (B, T) int, sequence index of each step; the steps of a sequence are contiguous.
            The output is 0 where it is negative. Cannot be combined with states.
        initial_states: (B, D, K - 1).
        return_final_states: if True, returns (y, final states) instead of y.
        final_states_out: (B, D, K - 1) of x's dtype, buffer for the returned states.
        activation: None, "silu" or "swish".

    Returns:
        y (B, D, T) of x's dtype, or with the final states (B, D, K - 1).
    """
    op = "causal_conv1d_fn"
    require_real(op, x=x)
    require_form(op, "x", x, "B, D, T")
    require_flags(op, return_final_states=return_final_states)
    batch, channels, steps = x.shape
    if seq_idx is not None:
        require_index(op, "seq_idx", seq_idx, (batch, steps), x)
        if initial_states is not None or return_final_states:
            raise ValueError(
                f"{op}: initial_states must be None and return_final_states False with seq_idx, "
                f"got return_final_states={return_final_states}"
            )
        return convolved(op, x.mT, weight, bias, seq_idx, activation, {}).mT
    wide, weight, bias = _promoted(op, x, weight, bias, {})
    require_optional(op, initial_states=initial_states, final_states_out=final_states_out)
    if final_states_out is not None:
        require_like(op, "final_states_out", final_states_out, x)
        require_shape(op, "final_states_out", final_states_out, (batch, channels, _past(weight)))
        require_writable(op, "final_states_out", final_states_out)
    with errors_of(op, initial_state="initial_states"):
        y, final = functional.causal_conv1d(
            wide.mT,
            weight,
            bias,
            activation=_activation(op, activation),
            initial_state=None if initial_states is None else initial_states.to(wide.dtype),
            return_final_state=True,
        )
    y, final = y.mT.to(x.dtype), final.to(x.dtype)
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
    """Convolves the steps x and updates `conv_state` in place, for inference.

    Args:
        x: (B, D), or (B, D, T).
        conv_state: (B, D, L) with L >= K - 1, the last steps, the newest at the end; or with
            `cache_seqlens` a ring buffer; or with `conv_state_indices` a pool (N, D, L).
        weight: (D, K).
        bias: (D,).
        activation: None, "silu" or "swish".
        cache_seqlens: (B,) int; x belongs to column cache_seqlens % L of the ring buffer.
        conv_state_indices: (B,) int, distinct rows of the pool; if negative, y is 0 and no state
            changes.

    Returns:
        y of x's shape and dtype.
    """
    op = "causal_conv1d_update"
    require_real(op, x=x)
    if x.ndim not in (2, 3):
        raise ValueError(
            f"{op}: x must have shape (B, D) or (B, D, T), got x.shape={tuple(x.shape)}"
        )
    steps = x if x.ndim == 3 else x[..., None]
    activation = _activation(op, activation)
    wide, weight, bias = _promoted(op, steps, weight, bias, {})
    require_real(op, conv_state=conv_state)
    require_device(op, "conv_state", conv_state, x)
    require_writable(op, "conv_state", conv_state)
    before, (batch, channels, count) = _past(weight), steps.shape
    if conv_state.ndim != 3 or conv_state.shape[-1] < before:
        raise ValueError(
            f"{op}: conv_state must have shape (B, D, L) with L >= K - 1, "
            f"got conv_state.shape={tuple(conv_state.shape)}, weight.shape={tuple(weight.shape)}"
        )
    if cache_seqlens is not None:
        require_index(op, "cache_seqlens", cache_seqlens, (batch,), x)
    if conv_state_indices is not None:
        require_index(op, "conv_state_indices", conv_state_indices, (batch,), x)
        padding = conv_state_indices < 0
        if not is_traced() and not padding.is_meta and bool(padding.any()):
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
    if tuple(own.shape[:2]) != (batch, channels):
        raise ValueError(
            f"{op}: conv_state must have the B and D of x, got conv_state.shape="
            f"{tuple(own.shape)}, x.shape={tuple(x.shape)}"
        )
    length, new = own.shape[-1], steps.to(own.dtype)
    if cache_seqlens is None:
        past, after = own[..., length - before :], torch.cat((own, new), -1)[..., -length:]
    else:

        def columns(first: int, last: int) -> Tensor:
            offsets = torch.arange(first, last, device=x.device)
            places = (cache_seqlens.long()[:, None] + offsets) % length
            return places[:, None].expand(-1, channels, -1)

        past = own.gather(2, columns(-before, 0))
        after = own.scatter(2, columns(0, count), new)
    with torch.no_grad(), errors_of(op, initial_state="conv_state"):
        y = functional.causal_conv1d(
            wide.mT, weight, bias, activation=activation, initial_state=past.to(wide.dtype)
        ).mT.to(x.dtype)
        if conv_state_indices is None:
            conv_state.copy_(after)
        else:
            conv_state[conv_state_indices.long()] = after
    return y if x.ndim == 3 else y[..., 0]


def causal_conv1d_varlen_states(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """Returns the last inputs of packed sequences, as states for the following steps.

    ``states[s, :, k] = x[cu_seqlens[s + 1] - state_len + k]``, or 0 before the sequence's start.

    Args:
        x: (total, D), floating-point.
        cu_seqlens: (S + 1,) int32 or int64: rows cu_seqlens[s] .. cu_seqlens[s + 1] are sequence s.
        state_len: number of inputs per state, at least 0; a convolution of K taps needs K - 1.

    Returns:
        (S, D, state_len) of x's dtype, with D contiguous in memory. Gradients flow to x, unlike in
        causal-conv1d.

    Raises:
        TypeError, ValueError: dtypes, shapes, devices or boundaries do not match.

    Example:
        >>> x = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
        >>> causal_conv1d_varlen_states(x, torch.tensor([0, 1, 4]), 2)[:, 0]
        tensor([[0., 1.],
                [3., 4.]])
    """
    op = "causal_conv1d_varlen_states"
    require_real(op, x=x)
    require_form(op, "x", x, "total, D")
    require_boundaries(op, cu_seqlens, x[None], "x")
    require_int(op, "state_len", state_len, 0)
    places = cu_seqlens[1:, None].long() + torch.arange(-state_len, 0, device=x.device)
    inside = places >= cu_seqlens[:-1, None]
    rows = torch.cat((x, x.new_zeros(1, x.shape[1])))  # the last row is for steps before a start
    return rows[torch.where(inside, places, len(x))].mT


def convolved(
    op: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seq_idx: Tensor | None,
    activation: str | None,
    names: dict[str, str],
) -> Tensor:
    """Convolves x (B, T, D), with sequences separated by a checked seq_idx (B, T).

    `names` maps x, weight and bias to the alias's names.
    """
    wide, weight, bias = _promoted(op, x.mT, weight, bias, names)
    rows, bounds = wide.mT, None
    if seq_idx is not None:
        rows, bounds = rows.flatten(0, 1)[None], boundaries(op, seq_idx)
    with errors_of(op, **names):
        y = functional.causal_conv1d(
            rows, weight, bias, activation=_activation(op, activation), cu_seqlens=bounds
        )
    y = y.view(x.shape).to(x.dtype)
    return y if seq_idx is None else torch.where(seq_idx[..., None] < 0, 0, y)


def _promoted(
    op: str, x: Tensor, weight: Tensor, bias: Tensor | None, names: dict[str, str]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Promotes x (B, D, T), weight and bias to one dtype; causal-conv1d allows different ones."""
    name = names.get("weight", "weight")
    require_real(op, **{name: weight})
    require_optional(op, **{names.get("bias", "bias"): bias})
    if weight.ndim != 2 or weight.shape[0] != x.shape[1] or weight.shape[1] < 1:
        raise ValueError(
            f"{op}: {name} must have shape ({x.shape[1]}, K) with K >= 1, got "
            f"{name}.shape={tuple(weight.shape)}"
        )
    dtype = torch.promote_types(x.dtype, weight.dtype)
    if bias is not None:
        dtype = torch.promote_types(dtype, bias.dtype)
        bias = bias.to(dtype)
    return x.to(dtype), weight.to(dtype), bias


def _past(weight: Tensor) -> int:
    """Returns the number of past inputs that a convolution needs."""
    return weight.shape[1] - 1


def _activation(op: str, activation: str | None) -> str | None:
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"{op}: activation must be None, silu or swish, got {activation=}")
    return None if activation is None else "silu"


def boundaries(op: str, seq_idx: Tensor) -> Tensor:
    """Returns the boundaries (N + 1,) where the row or the sequence index changes."""
    if seq_idx.is_meta:
        raise ValueError(f"{op}: seq_idx must have values, got seq_idx.device=meta")
    first = torch.ones_like(seq_idx, dtype=torch.bool)
    first[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    starts = first.flatten().nonzero()[:, 0]
    return torch.cat((starts, starts.new_tensor([seq_idx.numel()])))
