"""Longformer's attention: a window, and global tokens with separate projections."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from omniattn import reference
from omniattn.checks.arguments import require_bool, require_int, shown, use_reference
from omniattn.encoding.masks import BLOCK
from omniattn.encoding.options import FormOptions, pack, spelled_out
from omniattn.functional.attention._common import LONGEST
from omniattn.functional.attention.attention import attention
from omniattn.functional.attention.lse import merge_attention
from omniattn.functional.masks import All, Blocks, BoolMask, Causal, Dilated, KeyPadding, Mask
from omniattn.functional.sparse._common import (
    require_real,
    score_options,
    second_set,
    self_attention_inputs,
    token_sets,
    tokens_at,
    with_tokens,
)
from omniattn.functional.sparse.selected_attention import selected_attention
from omniattn.reference.empty import nothing_of

__all__ = ["longformer_attention"]


@spelled_out(FormOptions, last=("backend",))
def longformer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_global: Tensor | None = None,
    k_global: Tensor | None = None,
    v_global: Tensor | None = None,
    *,
    window: int,
    global_index: Tensor | None = None,
    key_padding: Tensor | None = None,
    dilation: int | tuple[int, ...] = 1,
    causal: bool = False,
    backend: str | None = None,
    **options: Unpack[FormOptions],
) -> Tensor:
    """Attention to a window around each token and to global tokens, which attend to all tokens.

    ``O_i = sum_j softmax_j(scale q_i . k_j) v_j`` over ``|i - j| <= window / 2`` and the global j,
    each key once; a global token i has ``q_global_i . k_global_j`` and v_global_j over all j in its
    place.

    Args:
        q: (B, T, Hq, D), float64, float32, bfloat16 or float16.
        k: (B, T, Hkv, D), Hkv a divisor of Hq; also of the global keys that local tokens see.
        v: (B, T, Hkv, Dv).
        q_global, k_global, v_global: second projections, as q, k and v, which are their defaults.
        window: even, window / 2 tokens on each side.
        global_index: (B, G) of integers, the global tokens of each sequence, -1 for none.
        key_padding: (B, T) of bool, True = real; the rows of other tokens are 0.
        dilation: distance of the keys of a window, one number or one for each query head.
        causal: only keys up to the query, of global tokens as well.
        scale: None is 1 / sqrt(D).
        softcap, dropout_p, seed: see :func:`attention`; a weight is dropped by the positions of its
            query and key, as there with a mask.
        backend: see :func:`attention`.

    Returns:
        O (B, T, Hq, Dv) of q's dtype.

    Raises:
        TypeError, ValueError, NotImplementedError: see :func:`attention`; global tokens outside of
            the sequence or named twice; projections of other shapes.

    Note:
        O(T window + T G) time and memory: the windows, the global keys and the global queries are
        three calls of :func:`attention` on disjoint pairs, merged by their lse. With dropout the
        global keys are selected, not copied, and a block of 64 rows is computed for a global query,
        as the copies would have other positions. Deterministic; gradients to all six tensors.

    Reference:
        Beltagy et al., Longformer: The Long-Document Transformer, 2020, arXiv:2004.05150.

    Example:
        >>> q = torch.ones(1, 6, 2, 4)
        >>> first = torch.tensor([[0]])
        >>> longformer_attention(q, q, q, window=2, global_index=first).shape
        torch.Size([1, 6, 2, 4])
    """
    op = "longformer_attention"
    record = pack(op, options, FormOptions)
    q, k, v = self_attention_inputs(op, q, k, v)
    require_int(op, "window", window, 0)
    if window % 2:
        raise ValueError(f"{op}: window must be even, got window={window}")
    require_bool(op, "causal", causal)
    dilations = _dilations(op, dilation, q.shape[2], window)
    names = ("q_global", "k_global", "v_global")
    second = second_set(op, (q, k, v), (q_global, k_global, v_global), names)
    if key_padding is not None:
        require_real(op, key_padding, q)
    if global_index is not None:
        global_index = token_sets(op, "global_index", global_index, q)
    how = score_options(op, q, k, record)
    if use_reference(op, backend, q):
        return reference.longformer_attention(
            *(q, k, v, *second),
            window=window,
            global_index=global_index,
            key_padding=key_padding,
            dilation=dilation,
            causal=causal,
            **how,
        )
    how["backend"] = backend
    reach = window // 2
    out, lse = _windows(q, k, v, dilations, reach, key_padding, causal, how)
    if global_index is not None and q.shape[1] == 0:
        out = out + nothing_of(*second)
    elif global_index is not None:
        outside = _outside(global_index, q.shape[1], dilations, reach, causal)
        if key_padding is not None:
            outside = outside & _at(key_padding, global_index)[:, None, None]
        far, far_lse = _global_keys(q, k, v, global_index, outside, how)
        out, _ = merge_attention((out, far), (lse, far_lse))
        out = _with_global_queries(out, second, global_index, key_padding, causal, how)
    return out if key_padding is None else out.masked_fill(~key_padding[..., None, None], 0)


def _dilations(
    op: str, dilation: int | tuple[int, ...], heads: int, window: int
) -> tuple[int, ...]:
    dilations = dilation if isinstance(dilation, (tuple, list)) else (dilation,) * heads
    if len(dilations) != heads:
        raise ValueError(
            f"{op}: dilation must be one int or one for each of {heads} heads, "
            f"got dilation={shown(dilation)}"
        )
    for n in dilations:
        require_int(op, "dilation", n, 1, LONGEST)
        if window // 2 * n > LONGEST:
            raise ValueError(
                f"{op}: window / 2 * dilation must be at most {LONGEST}, "
                f"got window={window}, dilation={shown(dilation)}"
            )
    return tuple(dilations)


def _at(real: Tensor, index: Tensor) -> Tensor:
    """Returns bool, True if there is a real token at index (B, G)."""
    return real.gather(1, index.clamp(min=0)) & (index >= 0)


def _outside(
    index: Tensor, length: int, dilations: tuple[int, ...], reach: int, causal: bool
) -> Tensor:
    """Returns bool (B, H | 1, T, G), True for visible global keys outside a query's window."""
    kinds = dilations if len(set(dilations)) > 1 else dilations[:1] or (1,)
    step = torch.tensor(kinds, device=index.device)[:, None, None]
    before = torch.arange(length, device=index.device)[:, None] - index[:, None, None]
    outside = (before % step != 0) | (before.abs() > step * reach)
    return outside & (before >= 0) if causal else outside


def _windows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dilations: tuple[int, ...],
    reach: int,
    real: Tensor | None,
    causal: bool,
    how: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Computes O and lse of the windows, for all heads of one dilation together."""

    def attend(q: Tensor, k: Tensor, v: Tensor, dilation: int) -> tuple[Tensor, Tensor]:
        mask: Mask = Dilated(dilation, reach, causal)
        if real is not None:
            mask = mask & KeyPadding(real)
        return attention(q, k, v, mask=mask, return_lse=True, **how)

    kinds = sorted(set(dilations))
    if len(kinds) <= 1:
        return attend(q, k, v, kinds[0] if kinds else 1)
    group = q.shape[2] // k.shape[2]
    order: list[int] = []
    outs, lses = [], []
    for kind in kinds:
        heads = [h for h, n in enumerate(dilations) if n == kind]
        shared = [h // group for h in heads]
        if how["dropout_p"] > 0:  # dropout depends on the head's index
            out, lse = (
                t[:, :, heads] if t.dim() == 4 else t[:, heads] for t in attend(q, k, v, kind)
            )
        else:
            out, lse = attend(q[:, :, heads], k[:, :, shared], v[:, :, shared], kind)
        outs.append(out)
        lses.append(lse)
        order += heads
    back = sorted(range(len(order)), key=order.__getitem__)
    return torch.cat(outs, 2)[:, :, back], torch.cat(lses, 1)[:, back]


def _global_keys(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, outside: Tensor, how: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Computes O and lse of all queries for global keys outside their windows."""
    seen = outside & (index >= 0)[:, None, None]
    if how["dropout_p"] > 0:  # dropout depends on the positions of keys, which stay in place
        lists = torch.where(seen, index[:, None, None], -1)
        return selected_attention(q, k, v, lists, block_size=1, return_lse=True, **how)
    place = index.clamp(min=0)
    keys, values = tokens_at(k, place), tokens_at(v, place)
    return attention(q, keys, values, mask=BoolMask(seen), return_lse=True, **how)


def _with_global_queries(
    out: Tensor,
    tensors: tuple[Tensor, Tensor, Tensor],
    index: Tensor,
    real: Tensor | None,
    causal: bool,
    how: dict[str, Any],
) -> Tensor:
    """Returns `out` with the rows of global tokens replaced; these see all keys."""
    if how["dropout_p"] > 0:
        return _with_global_rows(out, tensors, index, real, causal, how)
    q, k, v = tensors
    place = index.clamp(min=0)
    mask = None if real is None else real[:, None, None]
    if causal:
        before = torch.arange(q.shape[1], device=q.device) <= place[:, None, :, None]
        mask = before if mask is None else mask & before
    rows = attention(tokens_at(q, place), k, v, mask=mask, **how)
    return with_tokens(out, index, rows)


def _with_global_rows(
    out: Tensor,
    tensors: tuple[Tensor, Tensor, Tensor],
    index: Tensor,
    real: Tensor | None,
    causal: bool,
    how: dict[str, Any],
) -> Tensor:
    """Like `_with_global_queries`, without gathering the global queries, since dropout depends on
    their positions. Blocks without a global query are skipped."""
    batch, length = index.shape[0], out.shape[1]
    target = torch.where(index >= 0, index, length)
    marked = torch.zeros(batch, length + 1, dtype=torch.bool, device=out.device)
    marked = marked.scatter(1, target, 1)[:, :length]
    rows = torch.nn.functional.pad(marked, (0, -length % BLOCK)).unflatten(1, (-1, BLOCK)).any(-1)
    blocks = rows[:, None, :, None].expand(-1, -1, -1, rows.shape[1])
    rules: list[Mask] = [Blocks.from_block_mask(blocks), BoolMask(marked[:, None, :, None])]
    rules += [] if real is None else [KeyPadding(real)]
    rules += [Causal()] if causal else []
    far = attention(*tensors, mask=All(tuple(rules)), **how)
    return torch.where(marked[..., None, None], far, out)
