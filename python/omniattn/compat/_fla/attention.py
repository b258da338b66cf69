"""Softmax attention of fla.ops: plain, forgetting, PaTH, Parallax, wall, NSA and MoBA."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from omniattn import functional
from omniattn.checks.arguments import require_int, require_shape, shown
from omniattn.compat._errors import errors_of, require_form
from omniattn.compat._fla.calls import require_inputs
from omniattn.functional import masks

__all__ = [
    "parallel_attn",
    "parallel_forgetting_attn",
    "parallel_moba",
    "parallel_nsa",
    "parallel_parallax",
    "parallel_path_attn",
    "parallel_wall_attn",
]

#: Boundaries of packed sequences, or a pair: of queries and of keys.
Boundaries: TypeAlias = Tensor | tuple[Tensor, Tensor] | None


def parallel_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    window_size: int | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    *,
    sink_bias: Tensor | None = None,
) -> Tensor:
    """Computes causal :func:`functional.attention`, or :func:`functional.forgetting_attention`.

    Args:
        q, k, v: (B, T, Hq, K), (B, T, H, K) and (B, T, H, V).
        g: (B, T, Hq), logarithms of forget gates, or None.
        scale: default K^-0.5.
        window_size: number of keys that a query sees, its own included; None for all.
        cu_seqlens: (N + 1,) int, boundaries of packed sequences, with B = 1.
        chunk_indices: has no effect.
        sink_bias: (Hq,), logits of keys without values, or None; only without g.
    """
    return _attend("parallel_attn", q, k, v, g, scale, window_size, cu_seqlens, sink_bias)


def parallel_forgetting_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    window_size: int | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Computes :func:`functional.forgetting_attention`, see `parallel_attn`."""
    op = "parallel_forgetting_attn"
    require_inputs(op, scale, g=g)
    return _attend(op, q, k, v, g, scale, window_size, cu_seqlens, None)


def _attend(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float | None,
    window_size: int | None,
    cu_seqlens: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    require_inputs(op, scale, q=q, k=k, v=v)
    options: dict[str, Any] = {"scale": scale, "window_size": (-1, -1)}
    if window_size is not None:
        require_int(op, "window_size", window_size, 1)
        options["window_size"] = (window_size - 1, 0)
    if g is not None and sinks is not None:
        raise NotImplementedError(
            f"{op}: sink_bias must be None where g is given, got sink_bias={shown(sinks)}"
        )
    with errors_of(op, log_f="g", sinks="sink_bias"):
        if g is None:
            options |= {"causal": True, "sinks": sinks}
            if cu_seqlens is None:
                return functional.attention(q, k, v, **options)
            q, k, v = _packed(op, cu_seqlens, q, k, v)
            return functional.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, **options)[None]
        if cu_seqlens is None:
            return functional.forgetting_attention(q, k, v, g, **options)
        nested = (
            torch.nested.nested_tensor_from_jagged(t, cu_seqlens.long())
            for t in _packed(op, cu_seqlens, q, k, v, g)
        )
        return functional.forgetting_attention(*nested, **options).values()[None]


def _packed(op: str, cu_seqlens: Tensor, q: Tensor, *more: Tensor) -> list[Tensor]:
    """Returns the rows of packed tensors (1, T, ...)."""
    require_inputs(op, None, cu_seqlens=cu_seqlens)
    if q.ndim != 4 or len(q) != 1:
        raise ValueError(
            f"{op}: q must have shape (1, T, H, K) with cu_seqlens, got q.shape={tuple(q.shape)}"
        )
    return [t[0] for t in (q, *more)]


def parallel_path_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    use_cache: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Computes :func:`functional.path_attention` with gates ``scale g``, as fla does.

    With `use_cache` also returns the keys for later tokens (B, T, H, K), without `cu_seqlens`.
    """
    op = "parallel_path_attn"
    require_inputs(op, scale, q=q, k=k, v=v, w=w, beta=beta)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with errors_of(op, return_keys="use_cache"):
        found = functional.path_attention(
            *(q, k, v, w, beta, None if g is None else g * scale),
            scale=scale,
            cu_seqlens=cu_seqlens,
            return_keys=use_cache,
        )
    return found if isinstance(found, tuple) else (found, None)


def parallel_parallax(
    q: Tensor,
    r: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    window_size: int | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Computes causal :func:`functional.parallax_attention`.

    `window_size` is the number of keys that a query sees, its own included; None for all.
    """
    op = "parallel_parallax"
    require_inputs(op, scale, q=q, r=r, k=k, v=v)
    left = -1
    if window_size is not None:
        require_int(op, "window_size", window_size, 1)
        left = window_size - 1
    with errors_of(op):
        return functional.parallax_attention(
            q, r, k, v, window_size=(left, 0), scale=scale, cu_seqlens=cu_seqlens
        )


def parallel_wall_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    g_scalar: Tensor | None = None,
    sink_bias: Tensor | None = None,
    scale: float | None = None,
    window_size: int | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Computes :func:`functional.wall_attention`; `window_size` must be None."""
    op = "parallel_wall_attn"
    if window_size is not None:
        raise NotImplementedError(
            f"{op}: window_size is not supported, got window_size={shown(window_size)}"
        )
    with errors_of(op, sinks="sink_bias"):
        return functional.wall_attention(
            q, k, v, g, g_scalar, sinks=sink_bias, scale=scale, cu_seqlens=cu_seqlens
        )


def parallel_nsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g_cmp: Tensor | None = None,
    g_slc: Tensor | None = None,
    g_swa: Tensor | None = None,
    block_indices: Tensor | None = None,
    block_counts: Tensor | int = 16,
    block_size: int = 64,
    window_size: int = 0,
    scale: float | None = None,
    cu_seqlens: Boundaries = None,
) -> Tensor:
    """Computes :func:`functional.nsa_attention` with the means of blocks as compressed keys.

    Args:
        q, k, v: (B, Tq, Hq, K), (B, Tk, H, K) and (B, Tk, H, V), any Hq / H; queries are the last.
        g_cmp, g_slc, g_swa: (B, Tq, Hq), gates of compressed keys, selected blocks and the window;
            None for no compressed keys, and for gates of 1.
        block_indices: (B, Tq, H, S), the selected blocks, -1 for none; None to choose them, which
            needs g_cmp.
        block_counts: number of blocks that are chosen, an int.
        block_size: keys of a block.
        window_size: keys of the window; 0 for no window.
        scale: default K^-0.5.
        cu_seqlens: (N + 1,) int, boundaries of packed sequences with B = 1, or a pair of those of
            queries and keys.
    """
    op = "parallel_nsa"
    require_inputs(op, scale, q=q, k=k, v=v)
    require_form(op, "q", q, "B, Tq, Hq, K")
    for name, size, least in (("block_size", block_size, 1), ("window_size", window_size, 0)):
        require_int(op, name, size, least)
    if block_indices is None:
        if g_cmp is None:
            raise ValueError(f"{op}: block_indices must be given without g_cmp, got None")
        if isinstance(block_counts, Tensor):
            raise NotImplementedError(
                f"{op}: block_counts must be an int, got block_counts={shown(block_counts)}"
            )
        require_int(op, "block_counts", block_counts, 1)
    one = q.new_ones(1).expand(q.shape[:3])
    gates = [one if g is None else g for g in (g_cmp, g_slc, g_swa)]
    for name, g in zip(("g_cmp", "g_slc", "g_swa"), gates, strict=True):
        require_inputs(op, None, **{name: g})
        require_shape(op, name, g, tuple(q.shape[:3]))

    def attend(queries: slice, keys: slice) -> Tensor:
        part = q[:, queries], k[:, keys], v[:, keys]
        own = [g[:, queries, :, None] for g in gates]
        whole = part[1].shape[1] // block_size * block_size
        means = [t[:, :whole].unflatten(1, (-1, block_size)).mean(2) for t in part[1:]]
        if block_indices is None:
            if not window_size:
                own[2] = own[2] * 0
            sizes: dict[str, Any] = {
                "compress_size": block_size,
                "compress_stride": block_size,
                "block_size": block_size,
                "topk": block_counts,
                "window": max(1, window_size),
            }
            weights = torch.cat(own, -1).to(q.dtype)
            return functional.nsa_attention(
                *part, means[0], means[1], weights, scale=scale, **sizes
            )
        how: dict[str, Any] = {"causal": True, "scale": scale}
        index = block_indices[:, queries].transpose(1, 2)
        o = own[1] * functional.selected_attention(*part, index, block_size=block_size, **how)
        if window_size:
            o = o + own[2] * functional.attention(*part, window_size=(window_size - 1, 0), **how)
        if g_cmp is not None:
            seen = masks.PooledKeys(block_size, block_size, part[1].shape[1] - part[0].shape[1])
            o = o + own[0] * functional.attention(part[0], *means, mask=seen, scale=scale)
        return o.to(q.dtype)

    with errors_of(op, topk="block_counts", indices="block_indices", window="window_size"):
        return _by_sequences(op, attend, q, k, cu_seqlens)


def parallel_moba(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    chunk_size: int,
    topk: int,
) -> Tensor:
    """Computes :func:`functional.moba_attention` of packed sequences, with B = 1.

    `max_seqlen` has no effect. With topk = 1, all earlier keys are seen, as in fla.
    """
    op = "parallel_moba"
    require_inputs(op, None, q=q, k=k, v=v)
    require_form(op, "q", q, "1, T, H, K")
    require_int(op, "chunk_size", chunk_size, 1)
    require_int(op, "topk", topk, 1)
    if topk == 1:
        return _attend(op, q, k, v, None, None, None, cu_seqlens, None)

    def attend(queries: slice, keys: slice) -> Tensor:
        part = q[:, queries], k[:, keys], v[:, keys]
        return functional.moba_attention(*part, block_size=chunk_size, topk=topk)

    with errors_of(op, block_size="chunk_size"):
        return _by_sequences(op, attend, q, k, cu_seqlens)


def _by_sequences(op: str, attend: Any, q: Tensor, k: Tensor, cu_seqlens: Boundaries) -> Tensor:
    """Calls ``attend(queries, keys)`` for each packed sequence."""
    if cu_seqlens is None:
        found: Tensor = attend(slice(None), slice(None))
        return found
    pair = cu_seqlens if isinstance(cu_seqlens, tuple) else (cu_seqlens, cu_seqlens)
    for each, t in zip(pair, (q, k), strict=True):
        _packed(op, each, t)
    parts = [attend(queries, keys) for queries, keys in zip(*map(_slices, pair), strict=True)]
    return torch.cat(parts, 1)


def _slices(boundaries: Tensor) -> Iterator[slice]:
    edges = boundaries.tolist()
    return map(slice, edges, edges[1:])
