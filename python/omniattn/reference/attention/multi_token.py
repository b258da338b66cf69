"""Multi-token attention: logits convolved over queries and keys, weights mixed over heads."""

from __future__ import annotations

import torch
from torch import Tensor

from omniattn.reference.attention.attention import default_scale
from omniattn.reference.precision import widen


def multi_token_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    head_weight: Tensor | None = None,
    *,
    causal: bool = True,
    scale: float | None = None,
    lead: int = 0,
) -> Tensor:
    """q (B,Tq,H,D), k (B,Tk,Hkv,D), v (B,Tk,Hkv,Dv) -> O (B,Tq-lead,H,Dv).

    weight (H,cq,ck) multiplies the logits of the last cq queries and of ck keys around each key,
    those of hidden keys as 0; head_weight (N,C,C), if given, maps the weights of C heads at a time.
    """
    rows, width = weight.shape[1:]
    group = q.shape[2] // max(k.shape[2], 1)
    scale = default_scale(q.shape[3]) if scale is None else scale
    qs, ks, vs = (widen(t).transpose(1, 2) for t in (q, k, v))
    s = scale * qs @ ks.repeat_interleave(group, 1).transpose(-1, -2)
    tq, tk = s.shape[-2:]
    own, key = (torch.arange(n, device=q.device) for n in (tq, tk))
    hidden = (key > own[:, None] + tk - tq) & causal
    padded = torch.nn.functional.pad(
        s.masked_fill(hidden, 0), (width // 2, width // 2, rows - 1, 0)
    )
    taps = widen(weight)[..., None, None].unbind(1)
    c = sum(
        (
            tap[:, i] * padded[..., a : a + tq, i : i + tk]
            for a, tap in enumerate(taps)
            for i in range(width)
        ),
        start=torch.zeros_like(s),
    )
    c = c.masked_fill(hidden, -torch.inf)[:, :, lead:]
    empty = hidden[lead:].all(-1, keepdim=True)
    p = c.masked_fill(empty, 0).softmax(-1).masked_fill(hidden[lead:], 0)
    if head_weight is not None:
        p = p.unflatten(1, head_weight.shape[:2])
        p = torch.einsum("bncij,nco->bnoij", p, widen(head_weight)).flatten(1, 2)
    return (p @ vs.repeat_interleave(group, 1)).transpose(1, 2).to(q.dtype)
