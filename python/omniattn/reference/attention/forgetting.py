"""Forgetting attention: softmax attention whose logits decay by gates between key and query."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from omniattn.encoding.options import ForgettingOptions, pack, spelled_out
from omniattn.reference.attention.attention import attend
from omniattn.reference.limits import clamp
from omniattn.reference.precision import widen

#: Smallest log gate: exp(-1000) is 0 in every dtype, and sums of such gates stay finite.
LEAST_LOG_GATE = -1000.0


@spelled_out(ForgettingOptions)
def forgetting_attention(
    q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, **options: Unpack[ForgettingOptions]
) -> Tensor:
    """q (B,Tq,Hq,D), k (B,Tk,Hkv,D), v (B,Tk,Hkv,Dv), log_f (B,Tk,Hq) -> O (B,Tq,Hq,Dv).

    ``O = softmax(scale q k^T + c_i - c_j) v`` over the keys j up to query i, c the running sum of
    log_f along the tokens.
    """
    record = pack("forgetting_attention", options, ForgettingOptions)
    tq, tk = q.shape[1], k.shape[1]
    c = clamp(widen(log_f), LEAST_LOG_GATE).cumsum(1).transpose(1, 2)
    bias = -c[:, :, None]
    if tk > 0:
        own = torch.arange(tk - tq, tk, device=q.device).clamp(min=0)
        bias = bias + c[:, :, own, None]
    return attend(q, k, v, record._replace(causal=True, bias=bias))[0]
