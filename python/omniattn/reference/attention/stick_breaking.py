"""Stick-breaking attention: each key takes a share of what the keys after it left."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from omniattn.encoding.options import StickBreakingOptions, break_stick, pack, spelled_out
from omniattn.reference.attention.attention import attention_logits, dropped, seeded
from omniattn.reference.precision import widen


@spelled_out(StickBreakingOptions)
def stick_breaking_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attend_current: bool = False,
    return_remainder: bool = False,
    **options: Unpack[StickBreakingOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """q (B,Tq,Hq,D), k (B,Tk,Hkv,D), v (B,Tk,Hkv,Dv) -> O (B,Tq,Hq,Dv) [, remainder (B,Hq,Tq)].

    ``w_ij = sigmoid(z_ij) prod_{j < l < i} (1 - sigmoid(z_il))``, z = scale q k^T, over the keys
    before query i, and the query's own with `attend_current`.
    """
    record = seeded(pack("stick_breaking_attention", options, StickBreakingOptions))
    s = attention_logits(q, k, record._replace(causal=True))
    if not attend_current:
        own = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device)
        s = s.masked_fill(own.triu(s.shape[-1] - s.shape[-2]), -torch.inf)
    p, left = break_stick(s)
    vw = widen(v).transpose(1, 2)
    vw = vw.repeat_interleave(q.shape[2] // max(k.shape[2], 1), 1)
    out = (dropped(p, record) @ vw).transpose(1, 2).to(q.dtype)
    return (out, left.exp()) if return_remainder else out
