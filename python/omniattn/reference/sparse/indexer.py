"""Lightning indexer of DeepSeek sparse attention: selects the keys of each query; its loss."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from omniattn.reference.attention.attention import default_scale
from omniattn.reference.layers.topk import top_k
from omniattn.reference.precision import widen

Activation = Literal["relu"] | None


def dsa_indexer(
    q: Tensor,
    k: Tensor,
    w: Tensor | None,
    topk: int,
    *,
    causal: bool = True,
    key_stride: int = 1,
    past: int | None = None,
    activation: Activation = "relu",
    tie: Literal["first", "recent"] = "first",
    key_padding: Tensor | None = None,
    sorted_by_index: bool = False,
    return_scores: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """q (B,Tq,H,D), k (B,Tk,D), w (B,Tq,H) -> index (B,Tq,topk) int32 [, scores (B,Tq,topk)].

    Selects the visible keys with the largest ``sum_h w_h relu(q_h . k)``, in descending order. Ties
    go to the earlier key, or with tie "recent" to the later. Missing keys have index -1 and score
    -inf. Key s stands for key_stride tokens from s key_stride on, and is seen from the last of them
    on; `past` tokens come before q.
    """
    tk = k.shape[1]
    with torch.no_grad():
        scores = indexer_scores(q, k, w, activation)
        seen = visible_keys(q, k, causal, key_padding, key_stride, past).expand(scores.shape)
        if tie == "recent":
            scores, seen = scores.flip(-1), seen.flip(-1)
        count = min(topk, tk)
        values, index = top_k(scores, count, mask=seen)
        if tie == "recent":
            index = torch.where(index < 0, index, tk - 1 - index)
        if sorted_by_index:
            order = index.masked_fill(index < 0, tk).argsort(-1)
            values, index = values.gather(-1, order), index.gather(-1, order)
        more = (0, topk - count)
        index = torch.nn.functional.pad(index.int(), more, value=-1)
        values = torch.nn.functional.pad(values, more, value=-torch.inf)
    return (index, values) if return_scores else index


def indexer_scores(q: Tensor, k: Tensor, w: Tensor | None, activation: Activation) -> Tensor:
    """Computes the scores I (B,Tq,Tk) in fp32, or fp64 for fp64."""
    return sum_of_heads(torch.einsum("bthd,bsd->bths", widen(q), widen(k)), w, activation)


def sum_of_heads(products: Tensor, w: Tensor | None, activation: Activation) -> Tensor:
    """Computes I (B,Tq,n) from products (B,Tq,H,n) of a query and n keys."""
    if activation == "relu":
        products = products.relu()
    return products.sum(2) if w is None else (products * widen(w)[..., None]).sum(2)


def visible_keys(
    q: Tensor,
    k: Tensor,
    causal: bool,
    key_padding: Tensor | None,
    key_stride: int = 1,
    past: int | None = None,
) -> Tensor:
    """Returns the mask (B | 1, Tq, Tk), True where a query sees a key."""
    tq, tk = q.shape[1], k.shape[1]
    key = torch.arange(tk, device=q.device)
    seen = torch.ones(1, tq, tk, dtype=torch.bool, device=q.device)
    if causal:
        first = tk - tq if past is None else past
        ends = torch.arange(first + 1, first + tq + 1, device=q.device) // key_stride
        seen = seen & (key < ends[:, None])
    return seen if key_padding is None else seen & key_padding[:, None]


def dsa_indexer_loss(
    q_idx: Tensor,
    k_idx: Tensor,
    w: Tensor | None,
    q: Tensor,
    k: Tensor,
    lse: Tensor | None = None,
    indices: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = True,
    activation: Activation = "relu",
    key_padding: Tensor | None = None,
) -> Tensor:
    """KL(p || softmax I) of each query (B,Tq), over its visible keys, or those in indices (B,Tq,n).

    I are `dsa_indexer`'s scores of q_idx (B,Tq,HI,DI), k_idx (B,Tk,DI), w (B,Tq,HI). p is the sum
    over heads of softmax(scale q k^T), q (B,Tq,Hq,D), k (B,Tk,Hkv,D), divided by its own sum; `lse`
    (B,Hq,Tq) is this softmax's. q, k and lse get no gradient. A query without keys gives 0.
    """
    seen = visible_keys(q, k, causal, key_padding)
    if indices is not None:
        listed = seen.new_zeros(*indices.shape[:2], k.shape[1] + 1)
        places = indices.long().masked_fill(indices < 0, k.shape[1])
        seen = seen & listed.scatter(-1, places, 1)[..., :-1]
    target = attention_target(q, k, lse, seen, scale)
    scores = indexer_scores(q_idx, k_idx, w, activation)
    return divergence(target.to(scores.dtype), scores, seen)


def attention_target(
    q: Tensor, k: Tensor, lse: Tensor | None, seen: Tensor, scale: float | None
) -> Tensor:
    """Computes p (B,Tq,Tk), without gradient."""
    with torch.no_grad():
        heads, kv_heads = q.shape[2], k.shape[2]
        keys = widen(k).repeat_interleave(heads // max(kv_heads, 1), 2)
        factor = default_scale(q.shape[3]) if scale is None else scale
        logits = torch.einsum("bihd,bjhd->bhij", widen(q), keys) * factor
        logits = logits.masked_fill(~seen[:, None], -torch.inf)
        if lse is None:
            lse = logits.logsumexp(-1)
        # A head that sees no key has lse = -inf.
        lse = lse.to(logits.dtype).masked_fill(lse == -torch.inf, 0)
        return normalised((logits - lse[..., None]).exp().sum(1))


def normalised(weights: Tensor) -> Tensor:
    """Divides rows by their sums; rows of zeros stay zero."""
    whole = weights.sum(-1, keepdim=True)
    return weights / torch.where(whole == 0, 1, whole)


def divergence(target: Tensor, scores: Tensor, seen: Tensor) -> Tensor:
    """Computes sum p (ln p - ln softmax I) over the visible keys."""
    if scores.shape[-1] == 0:
        return scores.sum(-1)
    none = ~seen.any(-1, keepdim=True)
    hidden = ~seen & ~none  # rows without keys stay unmasked: finite softmax, target 0
    logs = scores.masked_fill(hidden, -torch.inf).log_softmax(-1).masked_fill(~seen, 0)
    return (torch.xlogy(target, target) - target * logs).sum(-1)
