"""Attention of batches and packed sequences of which only some rows are in use, or in pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from omniattn import functional
from omniattn.checks.arguments import require_int, require_rows, require_tensor
from omniattn.compat._errors import errors_of, require_form, require_index, require_real


@dataclass
class Lengths:
    """Lengths of sequences, named as in flash-attn.

    Args:
        cu_seqlens_q, cu_seqlens_k: (N + 1,) int, the first rows of sequences in packed tensors.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths.
        seqused_q, seqused_k: (N,) int, numbers of rows in use of each sequence.
        page_table: (N, M) int, pages of the keys of each sequence.
    """

    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    page_table: Tensor | None = None

    @property
    def is_full(self) -> bool:
        """True if all rows are in use and none is in a page."""
        return self.seqused_q is None and self.seqused_k is None and self.page_table is None


def attend(
    op: str, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Returns O in the form of q, and lse (H, total) or (B, H, T).

    Rows of q that are not in use have O = 0 and lse = -inf.
    """
    require_real(op, q=q, k=k, v=v)
    require_form(op, "q", q, "B, T, H, D" if lengths.cu_seqlens_q is None else "total, H, D")
    form = "B, T, H, D" if lengths.cu_seqlens_k is None else "total, H, D"
    if lengths.page_table is not None:
        form = "pages, page size, H, D"
    for name, t in (("k", k), ("v", v)):
        require_form(op, name, t, form)
    for name, n in (("max_seqlen_q", lengths.max_seqlen_q), ("max_seqlen_k", lengths.max_seqlen_k)):
        if n is not None:
            require_int(op, name, n, 0)
    packed = lengths.cu_seqlens_q is not None, lengths.cu_seqlens_k is not None
    with errors_of(op, scale="softmax_scale", sinks="learnable_sink"):
        if lengths.is_full and not any(packed):
            return functional.attention(q, k, v, return_lse=True, **options)
        if lengths.is_full and all(packed):
            assert lengths.cu_seqlens_q is not None and lengths.cu_seqlens_k is not None
            bounds = lengths.max_seqlen_q, lengths.max_seqlen_k
            cu = lengths.cu_seqlens_q, lengths.cu_seqlens_k
            return functional.attention_varlen(q, k, v, *cu, *bounds, return_lse=True, **options)
    return _gathered(op, q, k, v, lengths, options)


def _gathered(
    op: str, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Packs the rows in use, attends, and puts the results into their places."""
    rows_q, cu_q = _rows(op, "q", q, lengths.cu_seqlens_q, lengths.seqused_q)
    if lengths.page_table is None:
        rows_k, cu_k = _rows(op, "k", k, lengths.cu_seqlens_k, lengths.seqused_k)
    else:
        rows_k, cu_k = _paged_rows(op, k, lengths)
    if len(cu_q) != len(cu_k):
        raise ValueError(
            f"{op}: q and k must have the same number of sequences, got {len(cu_q) - 1} and "
            f"{len(cu_k) - 1}"
        )
    flat_q, flat_k, flat_v = (t if t.ndim == 3 else t.flatten(0, 1) for t in (q, k, v))
    tensors = flat_q[rows_q], flat_k[rows_k], flat_v[rows_k]
    with errors_of(op, scale="softmax_scale", sinks="learnable_sink"):
        out, lse = functional.attention_varlen(*tensors, cu_q, cu_k, return_lse=True, **options)
    whole = out.new_zeros(len(flat_q), *out.shape[1:]).index_copy(0, rows_q, out)
    whole_lse = lse.new_full((len(lse), len(flat_q)), -torch.inf).index_copy(1, rows_q, lse)
    if q.ndim == 3:
        return whole, whole_lse
    shape = q.shape[:2]
    return whole.unflatten(0, shape), whole_lse.unflatten(1, shape).transpose(0, 1)


def _rows(
    op: str, name: str, x: Tensor, cu_seqlens: Tensor | None, used: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the rows in use of the packed x, and their cumulated lengths."""
    if cu_seqlens is None:
        room = torch.full((len(x),), x.shape[1], device=x.device)
        starts = torch.arange(len(x), device=x.device) * x.shape[1]
    else:
        require_index(op, f"cu_seqlens_{name}", cu_seqlens, tuple(cu_seqlens.shape), x, name)
        if cu_seqlens.ndim != 1 or len(cu_seqlens) < 1:
            raise ValueError(
                f"{op}: cu_seqlens_{name} must have shape (N + 1,), got {tuple(cu_seqlens.shape)}"
            )
        room, starts = cu_seqlens.long().diff(), cu_seqlens.long()[:-1]
        require_rows(op, f"cu_seqlens_{name}", cu_seqlens, len(x) + 1)
    count = room if used is None else _used(op, name, used, room, x)
    row, place = _places(count)
    return starts[row] + place, _cumulated(count)


def _paged_rows(op: str, k: Tensor, lengths: Lengths) -> tuple[Tensor, Tensor]:
    """Returns the rows of the keys in pages, and their cumulated lengths."""
    table, size = lengths.page_table, k.shape[1]
    assert table is not None
    require_tensor(op, "page_table", table)
    require_index(op, "page_table", table, tuple(table.shape), k, "k")
    if table.ndim != 2 or size < 1:
        raise ValueError(f"{op}: page_table must have shape (N, M), got {tuple(table.shape)}")
    if lengths.cu_seqlens_k is not None or lengths.seqused_k is None:
        raise ValueError(f"{op}: seqused_k must be given with page_table, and no cu_seqlens_k")
    room = torch.full((len(table),), table.shape[1] * size, device=k.device)
    count = _used(op, "k", lengths.seqused_k, room, k)
    row, place = _places(count)
    page = table[row, place // size].long()
    require_rows(op, "page_table", page, len(k))
    return page * size + place % size, _cumulated(count)


def _used(op: str, name: str, used: Tensor, room: Tensor, x: Tensor) -> Tensor:
    require_index(op, f"seqused_{name}", used, tuple(room.shape), x, name)
    if bool(((used < 0) | (used > room)).any()):
        raise ValueError(
            f"{op}: seqused_{name} must be at least 0 and at most the rows of each sequence, got "
            f"seqused_{name}={used.tolist()} of {room.tolist()}"
        )
    return used.long()


def _places(count: Tensor) -> tuple[Tensor, Tensor]:
    """Returns sequence and place of each of `count` tokens."""
    longest = int(count.max()) if len(count) else 0
    found = torch.arange(longest, device=count.device) < count[:, None]
    row, place = found.nonzero().unbind(1)
    return row, place


def _cumulated(count: Tensor) -> Tensor:
    return torch.nn.functional.pad(count.cumsum(0), (1, 0)).int()
