"""Removal of padding: `flash_attn.bert_padding`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as nnf

from omniattn.checks.arguments import require_int, require_rows, require_shape, require_tensor
from omniattn.compat._errors import require_index


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Returns the rows `indices` (n,) of the input (rows, ...), as (n, ...)."""
    op = "index_first_axis"
    require_tensor(op, "input", input)
    _require_indices(op, indices, input, "input", len(input) if input.ndim else 0)
    return input[indices.long()]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Returns zeros (first_axis_dim, ...) whose rows `indices` (n,) are the values (n, ...)."""
    op = "index_put_first_axis"
    require_tensor(op, "values", values)
    require_int(op, "first_axis_dim", first_axis_dim, 0)
    _require_indices(op, indices, values, "values", first_axis_dim)
    if values.ndim < 1 or len(values) != len(indices):
        raise ValueError(
            f"{op}: values must have a row for each index, got values.shape={tuple(values.shape)}, "
            f"indices.shape={tuple(indices.shape)}"
        )
    zeros = values.new_zeros(first_axis_dim, *values.shape[1:])
    return zeros.index_copy(0, indices.long(), values)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the rows `indices` and the input, through both of which gradients flow."""
    return index_first_axis(input, indices), input.view_as(input)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Returns the tokens of padded sequences as packed rows.

    Args:
        hidden_states: (B, T, ...).
        attention_mask: (B, T) bool or int, 1 for a token and 0 for padding.
        unused_mask: (B, T) bool or int, 1 for a place that is packed but not used.

    Returns:
        rows (total, ...); indices (total,) of the rows in the flattened batch; cu_seqlens (B + 1,)
        int32; the longest length as an int; the number of tokens of each sequence (B,) int32,
        without unused places.
    """
    op = "unpad_input"
    require_tensor(op, "hidden_states", hidden_states)
    _require_mask(op, "attention_mask", attention_mask, hidden_states)
    kept = attention_mask
    if unused_mask is not None:
        _require_mask(op, "unused_mask", unused_mask, hidden_states)
        kept = attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    used = attention_mask.sum(-1, dtype=torch.int32)
    return (*_packed(hidden_states, kept, lengths), used)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Returns the tokens of rows that hold several sequences as packed rows.

    Args:
        hidden_states: (B, T, ...).
        attention_mask_in_length: (B, T) int: the lengths of the sequences in a row, then zeros.

    Returns:
        rows, indices, cu_seqlens and the longest length, see :func:`unpad_input`.
    """
    op = "unpad_input_for_concatenated_sequences"
    require_tensor(op, "hidden_states", hidden_states)
    _require_mask(op, "attention_mask_in_length", attention_mask_in_length, hidden_states)
    totals = attention_mask_in_length.sum(-1)
    places = torch.arange(attention_mask_in_length.shape[1], device=totals.device)
    lengths = attention_mask_in_length.flatten()
    return _packed(hidden_states, places < totals[:, None], lengths[lengths != 0])


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Returns packed rows as padded sequences: the inverse of :func:`unpad_input`.

    Args:
        hidden_states: (total, ...).
        indices: (total,), places in the flattened batch.
        batch: number of sequences.
        seqlen: length of the padded sequences.

    Returns:
        (batch, seqlen, ...), zero in the padding.
    """
    op = "pad_input"
    require_int(op, "batch", batch, 0)
    require_int(op, "seqlen", seqlen, 0)
    require_tensor(op, "hidden_states", hidden_states)
    _require_indices(op, indices, hidden_states, "hidden_states", batch * seqlen)
    if hidden_states.ndim < 1 or len(hidden_states) != len(indices):
        raise ValueError(
            f"{op}: hidden_states must have a row for each index, got hidden_states.shape="
            f"{tuple(hidden_states.shape)}, indices.shape={tuple(indices.shape)}"
        )
    rows = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return rows.view(batch, seqlen, *hidden_states.shape[1:])


def _packed(
    hidden_states: Tensor, kept: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    indices = kept.flatten().nonzero()[:, 0]
    cu_seqlens = nnf.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if len(lengths) else 0
    return hidden_states.flatten(0, 1)[indices], indices, cu_seqlens, longest


def _require_mask(op: str, name: str, mask: Tensor, x: Tensor) -> None:
    require_tensor(op, name, mask)
    if x.ndim < 2:
        raise ValueError(
            f"{op}: hidden_states must have shape (B, T, ...), got "
            f"hidden_states.shape={tuple(x.shape)}"
        )
    require_shape(op, name, mask, tuple(x.shape[:2]))


def _require_indices(op: str, indices: Tensor, x: Tensor, x_name: str, rows: int) -> None:
    require_tensor(op, "indices", indices)
    require_index(op, "indices", indices, (indices.numel(),), x, x_name)
    require_rows(op, "indices", indices, rows)
