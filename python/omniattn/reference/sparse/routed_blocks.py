"""Attention to key blocks that a learned router selects for query blocks."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from omniattn.encoding.options import FormOptions, ScoreOptions, pack, spelled_out
from omniattn.reference.attention.attention import attend, attention_weights
from omniattn.reference.layers.topk import top_k
from omniattn.reference.precision import widen
from omniattn.reference.sparse.selected_attention import selected_keys
from omniattn.reference.sparse.selected_blocks import positions


@spelled_out(FormOptions)
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
    router_grad: str = "none",
    **options: Unpack[FormOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """q (B,Tq,Hq,D), k (B,Tk,Hkv,D), v (B,Tk,Hkv,Dv), router_q (B,lists,Hr,Dr), router_k
    (B,blocks,Hs,Dr) -> O (B,Tq,Hq,Dv) [, loss (B,Hr,lists)].

    Causal. A list is a block of `query_block` queries. It selects its own key block and the
    topk - 1 earlier ones with the largest r = router_q . router_k / sqrt(Dr). router_grad "gate"
    adds ln sigmoid(r) to the logits of earlier blocks; "distill" returns loss = KL(block shares of
    full attention || softmax r).
    """
    record = pack("routed_block_attention", options, FormOptions)
    heads = q.shape[2]
    ends = list_positions(q.shape[1], k.shape[1], query_block, q.device)
    r = router_scores(router_q, router_k)
    scores, past = with_own(r.detach(), ends, block_size)
    _, index = top_k(scores, min(topk, r.shape[-1]), mask=past)
    mask = selected_keys(index, block_size, query_block, (q.shape[1], k.shape[1]))
    mask = mask.repeat_interleave(heads // r.shape[1], 1)
    bias = None
    if router_grad == "gate":
        block = torch.arange(r.shape[-1], device=q.device)
        gate = torch.nn.functional.logsigmoid(r)
        gate = gate.masked_fill(block >= (ends // block_size)[:, None], 0)
        query = torch.arange(q.shape[1], device=q.device) // query_block
        key = torch.arange(k.shape[1], device=q.device) // block_size
        bias = gate[:, :, query][..., key].repeat_interleave(heads // r.shape[1], 1)
    record = record._replace(causal=True)
    out, _ = attend(q, k, v, record._replace(mask=mask, bias=bias))
    if router_grad != "distill":
        return out
    with torch.no_grad():
        wide = widen(q), widen(k)
        _, lse = attend(*wide, wide[1], record._replace(dropout_p=0.0))
        logits: ScoreOptions = {"scale": record.scale, "softcap": record.softcap}
        weights = attention_weights(*wide, lse, causal=True, **logits)
        shares = block_shares(weights, r.shape[1], query_block, block_size)
    return out, share_divergence(shares, r, past)


def list_positions(tq: int, tk: int, query_block: int, device: torch.device) -> Tensor:
    """Returns the key position of each list's first query."""
    return positions(tq, tk, device)[::query_block]


def router_scores(router_q: Tensor, router_k: Tensor) -> Tensor:
    """Computes r (B,Hr,lists,blocks) from router_q (B,lists,Hr,Dr), router_k (B,blocks,Hs,Dr)."""
    heads, kv_heads, size = router_q.shape[2], router_k.shape[2], router_q.shape[3]
    keys = widen(router_k).repeat_interleave(heads // max(kv_heads, 1), 2)
    return torch.einsum("bihd,bjhd->bhij", widen(router_q), keys) * size**-0.5


def with_own(r: Tensor, ends: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Returns r with inf for the own block, which contains position `ends`, and the mask of
    candidate blocks."""
    block, own = torch.arange(r.shape[-1], device=r.device), ends[:, None] // block_size
    return r.masked_fill(block == own, torch.inf), (block <= own).expand(r.shape)


def block_shares(weights: Tensor, heads: int, query_block: int, block_size: int) -> Tensor:
    """Returns each block's share (B,heads,lists,blocks) of the weights (B,Hq,Tq,Tk), summed over a
    list's queries and a router head's query heads."""
    tq, tk = weights.shape[-2:]
    pad = torch.nn.functional.pad
    weights = pad(weights, (0, -tk % block_size, 0, -tq % query_block))
    blocks, lists = -(-tk // block_size), -(-tq // query_block)
    sums = weights.unflatten(-1, (blocks, block_size)).sum(-1)
    sums = sums.unflatten(2, (lists, query_block)).sum(3).unflatten(1, (heads, -1)).sum(2)
    whole = sums.sum(-1, keepdim=True)
    return sums / torch.where(whole == 0, 1, whole)


def share_divergence(shares: Tensor, r: Tensor, past: Tensor) -> Tensor:
    """Computes KL(shares || softmax r) (B,Hr,lists) over candidate blocks; 0 without candidates."""
    none = ~past.any(-1, keepdim=True)
    logs = r.masked_fill(~past & ~none, -torch.inf).log_softmax(-1).masked_fill(~past, 0)
    return (torch.xlogy(shares, shares) - shares * logs).sum(-1)
