"""Selective attention: tokens hide each other from all later queries."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from typing_extensions import Unpack

from omniattn.encoding.options import SelectiveOptions, pack, spelled_out
from omniattn.reference.attention.attention import attend, attention_logits
from omniattn.reference.precision import widen


@spelled_out(SelectiveOptions)
def selective_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    penalty: Tensor | None = None,
    budget: int | None = None,
    return_penalty: bool = False,
    **options: Unpack[SelectiveOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """q (B,Tq,Hq,D), k (B,Tk,Hkv,D), v (B,Tk,Hkv,Dv) -> O (B,Tq,Hq,Dv) [, F (B,Tk) afterwards].

    ``F_i = penalty + sum_{r < i} S_r`` is subtracted from the logits of all heads. S is the
    positive part of head 0's logits, but 0 for key 0 and for a query's own key. With `budget` a
    query sees that many keys with the smallest F; ties go to later keys.
    """
    record = pack("selective_attention", options, SelectiveOptions)._replace(causal=True)
    tq, tk = q.shape[1], k.shape[1]
    first = None if record.head_scale is None else record.head_scale[:1]
    logits = attention_logits(q[:, :, :1], k[:, :, :1], record._replace(head_scale=first))
    place = torch.arange(tk, device=q.device)
    own = place == torch.arange(tk - tq, tk, device=q.device)[:, None]
    s = logits[:, 0].relu().masked_fill(own | (place == 0), 0)
    start = s.new_zeros(q.shape[0], tk) if penalty is None else widen(penalty).to(s.dtype)
    sums = torch.cat([start[:, None], s], 1).cumsum(1)
    f = sums[:, :-1]
    bias = -f
    if budget is not None:
        hidden = logits[:, 0] == -math.inf
        order = f.detach().masked_fill(hidden, math.inf).flip(-1).sort(dim=-1, stable=True).indices
        kept = torch.zeros_like(hidden).scatter(-1, tk - 1 - order[..., :budget], 1)
        bias = bias.masked_fill(~kept, -math.inf)
    out, _ = attend(q, k, v, record._replace(bias=bias[:, None]))
    return (out, sums[:, -1]) if return_penalty else out
