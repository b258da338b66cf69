"""Attention of packed sequences, and attention to caches."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor
from typing_extensions import Unpack

from omniattn.checks.arguments import makes_graph, require_int, require_shape
from omniattn.checks.packed import require_all_tokens
from omniattn.encoding.masks import MaskKind, Rule
from omniattn.encoding.options import AttentionOptions, pack, spelled_out
from omniattn.functional.attention._common import (
    autocast,
    check_shapes,
    require_int32_or_int64,
)
from omniattn.functional.attention._options import attempt, run
from omniattn.ops.dispatch.plain import is_plain
from omniattn.reference.vmap import is_mapped

__all__ = ["attention_cached", "attention_varlen"]


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    return_lse: Literal[False] = False,
    backend: str | None = None,
    **options: Unpack[AttentionOptions],
) -> Tensor: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    return_lse: Literal[True],
    backend: str | None = None,
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    return_lse: bool,
    backend: str | None = None,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
@spelled_out(AttentionOptions)
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    return_lse: bool = False,
    backend: str | None = None,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`attention` of packed sequences of any lengths: no padding is stored or computed.

    Each sequence n is a separate problem: rows ``cu_seqlens_q[n] .. cu_seqlens_q[n + 1]`` of q
        against rows ``cu_seqlens_k[n] .. cu_seqlens_k[n + 1]`` of k and v, with its own Tq and Tk.

    Args:
        q: (total_q, Hq, D), as in :func:`attention`.
        k: (total_k, Hkv, D).
        v: (total_k, Hkv, Dv).
        cu_seqlens_q: (N + 1,) int32 or int64, growing from 0 to total_q.
        cu_seqlens_k: (N + 1,) for the keys; the same tensor for self-attention.
        max_seqlen_q: upper bound of the query lengths; None reads it from cu_seqlens_q (and
            synchronises a GPU), or is total_q in a compiled or exported program.
        max_seqlen_k: upper bound of the key lengths.
        causal, window_size, mask, bias, scale, softcap, alibi_slopes, relative: see
            :func:`attention`. Tensors per batch entry or position have the shape of a batch
            (N, Hq, max_seqlen_q, max_seqlen_k).
        relative_keys, relative_queries: see :func:`attention`.
        sinks: (Hq,), or (Hq, total_q), see :func:`attention`.
        head_scale, normalizer, score_mod, dropout_p, seed, return_lse, backend: see
            :func:`attention`.

    Returns:
        O (total_q, Hq, Dv), and with return_lse lse (Hq, total_q).

    Raises:
        TypeError, ValueError, NotImplementedError: see :func:`attention`; ValueError if cu_seqlens
            decrease or omit rows, or RuntimeError if only the kernel can read their values.

    Example:
        >>> q, v = torch.zeros(3, 1, 4), torch.tensor([1.0, 3.0, 7.0]).view(3, 1, 1)
        >>> cu = torch.tensor([0, 2, 3])
        >>> attention_varlen(q, q, v, cu, cu).flatten()
        tensor([2., 2., 7.])
    """
    op = "attention_varlen"
    q, k, v = autocast(op, q, k, v)
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dim() != 3:
            raise ValueError(
                f"{op}: {name} must have 3 dimensions (total, H, D), "
                f"got {name}.shape={tuple(t.shape)}"
            )
    q, k, v = q[None], k[None], v[None]
    check_shapes(op, q, k, v)
    for name, cu in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        require_int32_or_int64(op, name, cu, q)
        if cu.dim() != 1 or cu.shape[0] < 1 or cu.shape != cu_seqlens_q.shape:
            raise ValueError(
                f"{op}: cu_seqlens must both have shape (N + 1,), "
                f"got {name}.shape={tuple(cu.shape)}"
            )
    require_all_tokens(op, cu_seqlens_q, q.shape[1], name="cu_seqlens_q", of="queries")
    require_all_tokens(op, cu_seqlens_k, k.shape[1], name="cu_seqlens_k", of="keys")
    longest_q, longest_k = max_seqlen_q, max_seqlen_k
    if longest_q is None:
        longest_q = _longest(op, "q", cu_seqlens_q, q.shape[1], options)
    if longest_k is None:
        longest_k = _longest(op, "k", cu_seqlens_k, k.shape[1], options)
    require_int(op, "max_seqlen_q", longest_q, 0)
    require_int(op, "max_seqlen_k", longest_k, 0)
    layout: Rule = (MaskKind.PACKED, longest_q, longest_k, (cu_seqlens_q, cu_seqlens_k))
    full = (cu_seqlens_q.shape[0] - 1, q.shape[2], longest_q, longest_k)
    out, lse = run(op, q, k, v, full, pack(op, options), return_lse, backend, layout)
    return (out[0], lse[0]) if return_lse else out[0]


@overload
def attention_cached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache_seqlens: Tensor,
    *,
    block_table: Tensor | None = None,
    return_lse: Literal[False] = False,
    backend: str | None = None,
    **options: Unpack[AttentionOptions],
) -> Tensor: ...
@overload
def attention_cached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache_seqlens: Tensor,
    *,
    block_table: Tensor | None = None,
    return_lse: Literal[True],
    backend: str | None = None,
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_cached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache_seqlens: Tensor,
    *,
    block_table: Tensor | None = None,
    return_lse: bool,
    backend: str | None = None,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
@spelled_out(AttentionOptions)
def attention_cached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache_seqlens: Tensor,
    *,
    block_table: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`attention` to caches with a different number of keys per sequence.

    Each sequence b is a separate problem with ``Tk = cache_seqlens[b]``: its last query is aligned
    with its last key, and later entries of the cache are never read.

    Args:
        q: (B, Tq, Hq, D), as in :func:`attention`.
        k: (B, capacity, Hkv, D), or with a block table (pages, page size, Hkv, D).
        v: (B, capacity, Hkv, Dv), or (pages, page size, Hkv, Dv).
        cache_seqlens: (B,) int32 or int64, the number of keys of each sequence, including the keys
            of its queries.
        block_table: (B, N) int32 or int64: key t of sequence b is row ``t % page size`` of page
            ``block_table[b, t // page size]``, and the capacity is ``N * page size``. Sequences may
            share pages; entries after a sequence's last page are not read.
        causal, window_size, mask, bias, scale, softcap, alibi_slopes, relative: see
            :func:`attention`, with Tk the capacity in the shapes of mask and bias.
        relative_keys, relative_queries: see :func:`attention`.
        sinks, head_scale, normalizer, score_mod, dropout_p, seed, return_lse, backend: see
            :func:`attention`.

    Returns:
        O (B, Tq, Hq, Dv), and with return_lse lse (B, Hq, Tq).

    Raises:
        TypeError, ValueError, NotImplementedError: see :func:`attention`; RuntimeError if
            cache_seqlens exceed the capacity or the block table names a page that does not exist.

    Note:
        With few queries (decoding) pages are read in place, and results are bitwise equal to those
        of contiguous keys; with many, and in the backward, pages are gathered first.

    Example:
        >>> q, k = torch.zeros(2, 1, 1, 4), torch.zeros(2, 3, 1, 4)
        >>> v = torch.tensor([1.0, 3.0, 8.0]).view(1, 3, 1, 1).expand(2, 3, 1, 1)
        >>> attention_cached(q, k, v, torch.tensor([2, 3]), causal=True).flatten()
        tensor([2., 4.])
    """
    op = "attention_cached"
    if backend is None and block_table is None and is_plain(q, k, v, cache_seqlens):
        rule: Rule = (MaskKind.CACHED, 0, 0, (cache_seqlens,))
        found = attempt(op, q, k, v, options, return_lse, rule)
        if found is not None:
            return found if return_lse else found[0]
    packed = pack(op, options)
    q, k, v = autocast(op, q, k, v)
    full = check_shapes(op, q, k, v, paged=block_table is not None)
    layout, full = cache_layout(op, q, k, full, cache_seqlens, block_table)
    out, lse = run(op, q, k, v, full, packed, return_lse, backend, layout)
    return (out, lse) if return_lse else out


def cache_layout(
    op: str,
    q: Tensor,
    k: Tensor,
    full: tuple[int, int, int, int],
    cache_seqlens: Tensor,
    block_table: Tensor | None,
) -> tuple[Rule, tuple[int, int, int, int]]:
    """Checks the lengths and pages of a cache; returns their rule, and (B, Hq, Tq, capacity).

    `full` is (B, Hq, Tq, Tk) with Tk the capacity of k's rows, with a block table that of a page.
    """
    batch, heads, tq, tk = full
    require_int32_or_int64(op, "cache_seqlens", cache_seqlens, q)
    require_shape(op, "cache_seqlens", cache_seqlens, (batch,))
    if block_table is None:
        return (MaskKind.CACHED, 0, 0, (cache_seqlens,)), full
    require_int32_or_int64(op, "block_table", block_table, q)
    if block_table.dim() != 2 or block_table.shape[0] != batch or tk == 0:
        raise ValueError(
            f"{op}: block_table must have shape (B, N) and pages tokens, "
            f"got block_table.shape={tuple(block_table.shape)}, k.shape={tuple(k.shape)}"
        )
    layout: Rule = (MaskKind.PAGED, 0, 0, (block_table, cache_seqlens))
    return layout, (batch, heads, tq, tk * block_table.shape[1])


def _longest(op: str, of: str, cu_seqlens: Tensor, total: int, options: AttentionOptions) -> int:
    """Returns the longest sequence, or its upper bound in a graph, which cannot read it."""
    if is_mapped(cu_seqlens):
        raise ValueError(
            f"{op}: max_seqlen_{of} must be given where vmap maps over cu_seqlens_{of}, "
            f"got max_seqlen_{of}=None"
        )
    if not makes_graph():
        return int(cu_seqlens.diff().max()) if len(cu_seqlens) > 1 else 0
    for name in ("bias", "mask"):
        if isinstance(options.get(name), Tensor):
            raise ValueError(
                f"{op}: max_seqlen_{of} must be given with the tensor {name} in a compiled or "
                f"exported program, got max_seqlen_{of}=None"
            )
    return total
