"""Attention to blocks of keys selected by block scores: MoBA, NSA."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from typing_extensions import Unpack

from omniattn import reference
from omniattn.checks.arguments import (
    cast_like,
    full_precision,
    is_traced,
    require_device,
    require_float,
    require_int,
    require_shape,
    use_reference,
)
from omniattn.encoding.options import FormOptions, pack, spelled_out
from omniattn.functional.attention._common import autocast, check_shapes
from omniattn.functional.attention.attention import attention
from omniattn.functional.attention.lse import attention_weights
from omniattn.functional.layers.topk import top_k
from omniattn.functional.masks.rules import LONGEST_STRIDE, PooledKeys
from omniattn.functional.sparse._common import score_options
from omniattn.functional.sparse.selected_attention import selected_attention
from omniattn.reference.precision import widen
from omniattn.reference.sparse.selected_blocks import block_means as block_means
from omniattn.reference.sparse.selected_blocks import moba_scores, nsa_scores, positions

__all__ = ["moba_attention", "nsa_attention"]

#: Number of block scores, or weights, in memory at a time.
SCORES = 1 << 22


@spelled_out(FormOptions, last=("backend",))
def moba_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_size: int,
    topk: int,
    block_keys: Tensor | None = None,
    backend: str | None = None,
    **options: Unpack[FormOptions],
) -> Tensor:
    """Mixture of block attention (MoBA): each query and head attends to `topk` blocks of keys.

    They are the query's own block and the topk - 1 earlier blocks b with the largest
    ``q_i . mean(k_j, j in b)``, the first of equal ones; causal, with one softmax over all keys.

    Args:
        q: (B, Tq, Hq, D), as in :func:`attention`; q and k after the rotary embedding. The last
            query is at the position of the last key.
        k: (B, Tk, Hkv, D).
        v: (B, Tk, Hkv, Dv).
        block_size: keys of a block.
        topk: number of blocks per query, including its own.
        block_keys: (B, Tk // block_size, Hkv, D) float32 (float64 for float64), mean keys of whole
            blocks, for example from a cache; None computes them.
        scale: factor on q k^T of the attention; None is 1 / sqrt(D). The scores have none.
        softcap, dropout_p, seed: of the attention, see :func:`attention`.
        backend: see :func:`attention`.

    Returns:
        O (B, Tq, Hq, Dv) of q's dtype.

    Raises:
        TypeError, ValueError, NotImplementedError: see :func:`attention`.

    Note:
        Scores are in fp32 (fp64 for fp64), a few queries at a time. Gradients flow to q, k and v
        through the attention alone: the choice has none.

    Reference:
        Lu et al., MoBA: Mixture of Block Attention for Long-Context LLMs, 2025, arXiv:2502.13189.

    Example:
        >>> q = k = v = torch.ones(1, 8, 2, 4)
        >>> moba_attention(q, k, v, block_size=2, topk=2).shape
        torch.Size([1, 8, 2, 4])
    """
    op = "moba_attention"
    record = pack(op, options, FormOptions)
    q, k, v = autocast(op, q, k, v)
    check_shapes(op, q, k, v)
    _check(op, block_size=block_size, topk=topk)
    if block_keys is not None:
        require_float(op, "block_keys", block_keys)
        if torch.float64 in (block_keys.dtype, q.dtype) and block_keys.dtype != q.dtype:
            raise TypeError(
                f"{op}: block_keys must be float32, or float64 with q in float64, got "
                f"block_keys.dtype={block_keys.dtype}, q.dtype={q.dtype}"
            )
        require_device(op, "block_keys", block_keys, q, "q")
        shape = (k.shape[0], k.shape[1] // block_size, *k.shape[2:])
        require_shape(op, "block_keys", block_keys, shape)
        block_keys = widen(block_keys.detach())
    how = score_options(op, q, k, record)
    if use_reference(op, backend, q):
        how |= {"block_size": block_size, "topk": topk, "block_keys": block_keys}
        return reference.moba_attention(q, k, v, **how)
    tk = k.shape[1]
    means = block_means(k, block_size) if block_keys is None else block_keys

    def scores(q: Tensor, ends: Tensor, queries: slice) -> tuple[Tensor, Tensor]:
        return moba_scores(q, means, ends, tk, block_size)

    ends = positions(q.shape[1], tk, q.device)
    index = chosen(q, ends, q.shape[2] * -(-tk // block_size), topk, scores, backend)
    out: Tensor = selected_attention(
        q, k, v, index, block_size=block_size, causal=True, backend=backend, **how
    )
    return out


@spelled_out(FormOptions, last=("backend",))
def nsa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_compressed: Tensor,
    v_compressed: Tensor,
    gates: Tensor,
    *,
    k_window: Tensor | None = None,
    v_window: Tensor | None = None,
    compress_size: int = 32,
    compress_stride: int = 16,
    block_size: int = 64,
    topk: int = 16,
    window: int = 512,
    backend: str | None = None,
    **options: Unpack[FormOptions],
) -> Tensor:
    """Native sparse attention (NSA): gated attention to compressed keys, blocks and a window.

    ``O = g_0 O_compressed + g_1 O_selected + g_2 O_window``, all causal. Compressed key n stands
    for `compress_size` keys from n compress_stride on, and is seen when all of them are. The
    weights of the compressed keys, given to the blocks as often as their strides overlap and summed
    over the query heads of a group, choose the blocks of the group: `topk` with the largest sums,
    among which are always the first block, the own and the one before it (the first of these where
    topk is below 3).

    Args:
        q: (B, Tq, Hq, D), as in :func:`attention`; the last query is at the position of the last
            key.
        k: (B, Tk, Hkv, D), the keys of selected blocks.
        v: (B, Tk, Hkv, Dv).
        k_compressed: (B, N, Hkv, D), for any N; means of the keys or the outputs of a network, see
            :class:`omniattn.modules.NSA`.
        v_compressed: (B, N, Hkv, Dv).
        gates: (B, Tq, Hq, 3) of compressed keys, selected blocks and window, of q's dtype.
        k_window, v_window: the same shapes as k and v; None for k and v.
        compress_size, compress_stride: l and d of the compressed keys; l is a multiple of d.
        block_size: keys of a selected block, a multiple of compress_stride.
        topk: blocks of a query.
        window: keys of the window, the query's own included.
        scale: factor on q k^T; None is 1 / sqrt(D).
        softcap, dropout_p, seed: of all branches, see :func:`attention`; compressed keys are
            dropped by their numbers. The choice is made without dropout.
        backend: see :func:`attention`.

    Returns:
        O (B, Tq, Hq, Dv) of q's dtype.

    Raises:
        TypeError, ValueError, NotImplementedError: see :func:`attention`.

    Note:
        The scores of blocks are made from the lse of the first branch, for some queries at a time:
        no (Tq, N) tensor is made. Gradients flow to all tensors; the choice has none.

    Reference:
        Yuan et al., Native Sparse Attention, 2025, arXiv:2502.11089.

    Example:
        >>> q, k = torch.ones(1, 64, 4, 8), torch.ones(1, 64, 1, 8)
        >>> pooled = k.unflatten(1, (4, 16)).mean(2)
        >>> gates = torch.full((1, 64, 4, 3), 0.5)
        >>> out = nsa_attention(q, k, k, pooled, pooled, gates, compress_size=16, topk=2)
        >>> out[0, -1, 0, 0]
        tensor(1.5000)
    """
    op = "nsa_attention"
    record = pack(op, options, FormOptions)
    q, k, v = autocast(op, q, k, v)
    check_shapes(op, q, k, v)
    _check(op, compress_size=compress_size, block_size=block_size, topk=topk, window=window)
    require_int(op, "compress_stride", compress_stride, 1, LONGEST_STRIDE)
    how = score_options(op, q, k, record)
    for name, size in (("compress_size", compress_size), ("block_size", block_size)):
        if size % compress_stride:
            raise ValueError(
                f"{op}: {name} must be a multiple of compress_stride, got {name}={size}, "
                f"compress_stride={compress_stride}"
            )
    k_window = k if k_window is None else cast_like(op, "k_window", k_window, q, "q")
    v_window = v if v_window is None else cast_like(op, "v_window", v_window, q, "q")
    k_compressed = cast_like(op, "k_compressed", k_compressed, q, "q")
    v_compressed = cast_like(op, "v_compressed", v_compressed, q, "q")
    gates = cast_like(op, "gates", gates, q, "q")
    require_shape(op, "k_window", k_window, tuple(k.shape))
    require_shape(op, "v_window", v_window, tuple(v.shape))
    count = k_compressed.shape[1] if k_compressed.dim() == 4 else 0
    require_shape(op, "k_compressed", k_compressed, (k.shape[0], count, *k.shape[2:]))
    require_shape(op, "v_compressed", v_compressed, (v.shape[0], count, *v.shape[2:]))
    require_shape(op, "gates", gates, (*q.shape[:3], 3))
    if use_reference(op, backend, q):
        return reference.nsa_attention(
            *(q, k, v, k_compressed, v_compressed, gates),
            k_window=k_window,
            v_window=v_window,
            compress_size=compress_size,
            compress_stride=compress_stride,
            block_size=block_size,
            topk=topk,
            window=window,
            **how,
        )
    (tq, tk), sizes = (q.shape[1], k.shape[1]), (compress_size, compress_stride)
    ends = positions(tq, tk, q.device)
    how["backend"] = backend
    seen: PooledKeys | None = None
    if tq == 1 and not is_traced():  # a step sees a range of keys; others are not read
        last = min(count, max(0, (tk - compress_size) // compress_stride + 1))
        k_compressed, v_compressed = k_compressed[:, :last], v_compressed[:, :last]
        if record.dropout_p == 0:
            k_window, v_window = k_window[:, -window:], v_window[:, -window:]
    else:
        seen = PooledKeys(*sizes, first=tk - tq)
    compressed, lse = attention(q, k_compressed, v_compressed, mask=seen, return_lse=True, **how)
    # In full precision, as in the definition: rounded weights are often equal.
    kept_k, kept_lse = widen(k_compressed.detach()), lse.detach()

    def scores(part: Tensor, ends: Tensor, queries: slice) -> tuple[Tensor, Tensor]:
        p = attention_weights(
            *(widen(part), kept_k, kept_lse[:, :, queries]),
            group_sums=True,
            mask=None if seen is None else PooledKeys(*sizes, first=seen.first + queries.start),
            scale=record.scale,
            softcap=record.softcap,
            backend=backend,
        )
        return nsa_scores(p, ends, tk, *sizes, block_size)

    index = chosen(q, ends, k.shape[2] * max(count, 1), topk, scores, backend)
    selected = selected_attention(q, k, v, index, block_size=block_size, causal=True, **how)
    near = attention(q, k_window, v_window, causal=True, window_size=(window - 1, 0), **how)
    first, second, third = widen(gates)[..., None].unbind(-2)
    return (first * compressed + second * selected + third * near).to(q.dtype)


def _check(op: str, **sizes: int) -> None:
    for name, size in sizes.items():
        require_int(op, name, size, 1, 2**31 - 1)


@torch.no_grad()
def chosen(
    q: Tensor,
    ends: Tensor,
    elements: int,
    topk: int,
    scores: Callable[[Tensor, Tensor, slice], tuple[Tensor, Tensor]],
    backend: str | None,
) -> Tensor:
    """Returns lists of the topk blocks with the largest scores(queries, positions, slice).

    q is (B, lists, heads, .) at the positions `ends` (lists,). `elements` is the number of elements
    in memory that the scores of a query need.
    """
    batch, tq = q.shape[:2]
    found = []
    with full_precision(q):
        for queries in parts_of(tq, batch * elements):
            values, past = scores(q.detach()[:, queries], ends[queries], queries)
            count = values.shape[-1]
            if isinstance(count, torch.SymInt):  # comparing it with topk would add a guard
                values, past = (torch.nn.functional.pad(t, (0, topk)) for t in (values, past))
                count = topk
            count = min(topk, count)
            found.append(top_k(values, count, mask=past, backend=backend)[1].int())
    return torch.cat(found, 2)


def parts_of(count: int, elements: int) -> Iterator[slice]:
    """Yields slices of `count` items, at least one, of about SCORES elements each.

    Each item needs `elements`. With symbolic sizes a single slice has all items.
    """
    if isinstance(count, torch.SymInt) or isinstance(elements, torch.SymInt):
        yield slice(0, count)
        return
    step = max(1, SCORES // max(1, elements))
    for first in range(0, max(count, 1), step):
        yield slice(first, first + step)
