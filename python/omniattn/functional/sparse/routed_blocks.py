"""Attention to key blocks that a learned router selects for blocks of queries."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from omniattn import reference
from omniattn.checks.arguments import (
    cast_like,
    full_precision,
    is_one_of,
    require_choice,
    require_int,
    use_reference,
)
from omniattn.encoding.options import FormOptions, pack, spelled_out
from omniattn.functional.attention._common import autocast, check_shapes
from omniattn.functional.attention.attention import attention
from omniattn.functional.attention.lse import attention_weights, merge_attention
from omniattn.functional.sparse._common import score_options
from omniattn.functional.sparse.selected_attention import selected_attention
from omniattn.functional.sparse.selected_blocks import chosen, parts_of
from omniattn.reference.empty import nothing_of
from omniattn.reference.precision import widen
from omniattn.reference.sparse.routed_blocks import (
    block_shares,
    list_positions,
    router_scores,
    share_divergence,
    with_own,
)

__all__ = ["routed_block_attention"]

RouterGrad = Literal["none", "gate", "distill"]


@overload
def routed_block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    router_q: Tensor,
    router_k: Tensor,
    *,
    block_size: int,
    topk: int,
    query_block: int = 1,
    router_grad: Literal["none", "gate"] = "none",
    backend: str | None = None,
    **options: Unpack[FormOptions],
) -> Tensor: ...
@overload
def routed_block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    router_q: Tensor,
    router_k: Tensor,
    *,
    block_size: int,
    topk: int,
    query_block: int = 1,
    router_grad: Literal["distill"],
    backend: str | None = None,
    **options: Unpack[FormOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def routed_block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    router_q: Tensor,
    router_k: Tensor,
    *,
    block_size: int,
    topk: int,
    query_block: int = 1,
    router_grad: RouterGrad,
    backend: str | None = None,
    **options: Unpack[FormOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
@spelled_out(FormOptions, last=("backend",))
def routed_block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    router_q: Tensor,
    router_k: Tensor,
    *,
    block_size: int,
    topk: int,
    query_block: int = 1,
    router_grad: RouterGrad = "none",
    backend: str | None = None,
    **options: Unpack[FormOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention of each query block to `topk` key blocks with the best learned scores.

    Queries I attend to their own block of keys and to the topk - 1 blocks J before it with the
    largest ``r_IJ = router_q_I . router_k_J / sqrt(Dr)``, the first of equal ones, in one softmax.
    The router is trained by:

    - "none": nothing;
    - "gate": ``ln sigmoid(r_IJ)`` is added to the logits of all keys of a chosen block before the
      own, so that the loss has a gradient to r of the blocks that were chosen. The own block has
      no gate: it is attended to whatever its r is, as in MoBA, which forces it because the mean of
      its keys tells a query of keys after it, and a gate would tell that, too. (The code of both
      papers below uses r to choose blocks, and adds it to no logits.)
    - "distill": ``loss_I = KL(p_I || softmax_J r_IJ)`` over the blocks up to the own, with p_IJ the
      share of block J in the weights of full attention of the queries I, without gradient.

    Args:
        q: (B, Tq, Hq, D), as in :func:`attention`; the last query is at the position of the last
            key.
        k: (B, Tk, Hkv, D).
        v: (B, Tk, Hkv, Dv).
        router_q: (B, ceil(Tq / query_block), Hr, Dr) of q's dtype, Hr = 1, Hkv or Hq: query heads
            of a group choose together, for instance the projected mean of their queries.
        router_k: (B, ceil(Tk / block_size), Hs, Dr), Hs a divisor of Hr, for instance the projected
            mean of the keys of a block.
        block_size: keys of a block.
        topk: blocks of a query, its own included.
        query_block: queries that choose together, a divisor of block_size and of Tk - Tq. A mean of
            several queries tells the earlier ones of the later, so that only 1 is causal in all.
        router_grad: "none", "gate" or "distill".
        scale, softcap: see :func:`attention`; r and the gate have neither.
        dropout_p, seed: see :func:`attention`.
        backend: see :func:`attention`.

    Returns:
        O (B, Tq, Hq, Dv) of q's dtype, and with "distill" loss (B, Hr, lists) in float32 (float64
        for float64), 0 for queries before the first key.

    Raises:
        TypeError, ValueError, NotImplementedError: see :func:`attention`.

    Note:
        The choice has no gradient. "gate" is one call of :func:`selected_attention` for each of the
        topk places, merged by lse. "distill" costs a full attention; its weights are made for some
        queries at a time, so that no (Tq, Tk) tensor is kept. Deterministic.

    Reference:
        Gates and distillation: Gao et al., SeerAttention: Learning Intrinsic Sparse Attention in
        Your LLMs, 2024, arXiv:2410.13276; the own block: Lu et al., MoBA, 2025, arXiv:2502.13189.

    Example:
        >>> q = k = v = torch.ones(1, 8, 2, 4)
        >>> router_q, router_k = torch.ones(1, 4, 1, 3), torch.ones(1, 4, 1, 3)
        >>> sizes = {"block_size": 2, "query_block": 2, "topk": 2}
        >>> routed_block_attention(q, k, v, router_q, router_k, **sizes).shape
        torch.Size([1, 8, 2, 4])
    """
    op = "routed_block_attention"
    record = pack(op, options, FormOptions)
    q, k, v = autocast(op, q, k, v)
    check_shapes(op, q, k, v)
    for name, size in (("block_size", block_size), ("topk", topk), ("query_block", query_block)):
        require_int(op, name, size, 1, 2**31 - 1)
    require_choice(op, "router_grad", router_grad, ("none", "gate", "distill"))
    router_q = cast_like(op, "router_q", router_q, q, "q")
    router_k = cast_like(op, "router_k", router_k, q, "q")
    _check_router(op, q, k, router_q, router_k, block_size, query_block)
    how = score_options(op, q, k, record)
    sizes: dict[str, Any] = {"block_size": block_size, "query_block": query_block}
    if use_reference(op, backend, q):
        how |= sizes | {"topk": topk, "router_grad": router_grad}
        return reference.routed_block_attention(q, k, v, router_q, router_k, **how)
    tq, tk = q.shape[1], k.shape[1]
    ends = list_positions(tq, tk, query_block, q.device)

    def scores(part: Tensor, ends: Tensor, lists: slice) -> tuple[Tensor, Tensor]:
        return with_own(router_scores(part, router_k.detach()), ends, block_size)

    index = chosen(router_q, ends, router_q.shape[2] * router_k.shape[1], topk, scores, backend)
    how |= sizes | {"causal": True, "backend": backend}
    if router_grad == "gate":
        own = (ends // block_size)[:, None]
        return _gated(q, k, v, router_q, router_k, index, own, how)
    out = selected_attention(q, k, v, index, **how)
    assert isinstance(out, Tensor)
    if router_grad == "none":
        return out
    logits = {"scale": record.scale, "softcap": record.softcap}
    full = logits | {"causal": True, "backend": backend}
    with full_precision(q):
        loss = _distillation(q, k, router_q, router_k, ends, block_size, query_block, full)
    return out, loss


def _check_router(
    op: str,
    q: Tensor,
    k: Tensor,
    router_q: Tensor,
    router_k: Tensor,
    block_size: int,
    query_block: int,
) -> None:
    (batch, tq, heads), (tk, kv_heads) = q.shape[:3], k.shape[1:3]
    if block_size % query_block or (tk - tq) % query_block:
        raise ValueError(
            f"{op}: query_block must divide block_size and Tk - Tq, got query_block={query_block}, "
            f"block_size={block_size}, Tk - Tq={tk - tq}"
        )
    lists, blocks = -(-tq // query_block), -(-tk // block_size)
    shape = tuple(router_q.shape)
    if (
        len(shape) != 4
        or shape[:2] != (batch, lists)
        or not is_one_of(shape[2], 1, kv_heads, heads)
    ):
        raise ValueError(
            f"{op}: router_q must have shape (B, ceil(Tq / query_block), 1 | Hkv | Hq, Dr) with "
            f"B={batch}, Tq={tq}, Hkv={kv_heads}, Hq={heads}, got router_q.shape={shape}"
        )
    if shape[3] == 0:
        raise ValueError(f"{op}: router_q must have Dr > 0, got router_q.shape={shape}")
    shape = tuple(router_k.shape)
    fits = len(shape) == 4 and shape[:2] == (batch, blocks) and shape[3] == router_q.shape[3]
    if not fits or shape[2] == 0 or router_q.shape[2] % shape[2]:
        raise ValueError(
            f"{op}: router_k must have shape (B, ceil(Tk / block_size), Hs, Dr) with B={batch}, "
            f"Tk={tk}, Hs a divisor of Hr={router_q.shape[2]} and Dr={router_q.shape[3]}, "
            f"got router_k.shape={shape}"
        )


def _gated(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    router_q: Tensor,
    router_k: Tensor,
    index: Tensor,
    own: Tensor,
    options: dict[str, Any],
) -> Tensor:
    """Computes O with ln sigmoid(r) added to the logits of each earlier selected block."""
    heads, query_block = q.shape[2], options["query_block"]
    keys = widen(router_k).transpose(1, 2)
    keys = keys.repeat_interleave(router_q.shape[2] // router_k.shape[2], 1)
    queries = widen(router_q).transpose(1, 2) * router_q.shape[3] ** -0.5
    parts: list[tuple[Tensor, Tensor]] = []
    for place in index.split(1, 3) if k.shape[1] else ():
        out, lse = selected_attention(q, k, v, place, return_lse=True, **options)
        at = place.long().clamp(min=0).expand(-1, -1, -1, keys.shape[3])
        gate = torch.nn.functional.logsigmoid((queries * keys.gather(2, at)).sum(-1))
        gate = gate.masked_fill(place[..., 0] >= own[:, 0], 0)
        gate = gate.repeat_interleave(query_block, 2)[..., : q.shape[1]]
        parts.append((out, lse + gate.repeat_interleave(heads // gate.shape[1], 1)))
    if not parts:  # no keys
        return selected_attention(q, k, v, index, **options) + nothing_of(router_q, router_k)
    return merge_attention(*zip(*parts, strict=True))[0]


def _distillation(
    q: Tensor,
    k: Tensor,
    router_q: Tensor,
    router_k: Tensor,
    ends: Tensor,
    block_size: int,
    query_block: int,
    options: dict[str, Any],
) -> Tensor:
    """Computes KL(shares of blocks in full attention || softmax r), some lists at a time."""
    (batch, tq, heads), tk = q.shape[:3], k.shape[1]
    wide_q, wide_k = widen(q.detach()), widen(k.detach())
    with torch.no_grad():  # one column of values: only the lse is needed
        _, lse = attention(wide_q, wide_k, wide_k[..., :1], return_lse=True, **options)
    found = []
    for lists in parts_of(ends.shape[0], batch * heads * tk * query_block):
        queries = slice(lists.start * query_block, min(lists.stop * query_block, tq))
        last = max(0, queries.stop + tk - tq)  # number of keys visible to the part
        blocks = -(-last // block_size)
        with torch.no_grad():
            weights = attention_weights(
                wide_q[:, queries], wide_k[:, :last], lse[:, :, queries], **options
            )
            shares = block_shares(weights, router_q.shape[2], query_block, block_size)
        r = router_scores(router_q[:, lists], router_k[:, :blocks])
        _, past = with_own(r.detach(), ends[lists], block_size)
        found.append(share_divergence(shares, r, past))
    return torch.cat(found, 2)
