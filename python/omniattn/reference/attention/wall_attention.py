"""Wall attention: decays of each channel between keys and queries."""

from __future__ import annotations

import torch
from torch import Tensor

from omniattn.reference.attention.attention import default_scale
from omniattn.reference.attention.forgetting import LEAST_LOG_GATE
from omniattn.reference.limits import clamp
from omniattn.reference.precision import widen


def wall_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    g_scalar: Tensor | None = None,
    *,
    sinks: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    return_keys: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """q, g (B,T,Hq,D), k (B,Tk,Hkv,D), v (B,Tk,Hkv,Dv) -> O (B,T,Hq,Dv).

    ``O = softmax(scale sum_n q_in k_jn exp(c_in - c_jn) + C_i - C_j) v``, c and C the running sums
    of g and g_scalar.
    """
    steps, total = q.shape[1], k.shape[1]
    group = 1 if q.shape[2] == k.shape[2] else q.shape[2] // k.shape[2]
    past = total - steps
    scale = default_scale(q.shape[3]) if scale is None else scale
    qs, ks, vs, gs = (widen(t).transpose(1, 2) for t in (q, k, v, g))
    ks, vs = ks.repeat_interleave(group, 1), vs.repeat_interleave(group, 1)
    key, own = (torch.arange(n, device=q.device) for n in (total, steps))
    seen = key <= own[:, None] + past
    if cu_seqlens is not None:
        ids = torch.searchsorted(cu_seqlens.long(), own, right=True)
        seen = seen & (ids == ids[:, None])
    c = torch.nn.functional.pad(clamp(gs, LEAST_LOG_GATE).cumsum(2), (0, 0, past, 0))
    decays = c[:, :, past:, None] - c[:, :, None]
    decays = decays.masked_fill(~seen[..., None], -torch.inf).exp()
    logits = scale * (qs[:, :, :, None] * ks[:, :, None] * decays).sum(-1)
    if g_scalar is not None:
        d = clamp(widen(g_scalar), LEAST_LOG_GATE).cumsum(1).transpose(1, 2)
        logits = logits + d[:, :, past:, None] - d[:, :, None]
    logits = logits.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        sink = widen(sinks).to(logits.dtype)[:, None, None].expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, sink], -1)
    weights = logits.softmax(-1)[..., :total]
    out = (weights @ vs).transpose(1, 2).to(q.dtype)
    if not return_keys:
        return out
    left = (c[:, :, -1:] - c).exp() if steps > 0 else torch.ones_like(c)
    return out, (ks * left).transpose(1, 2).to(k.dtype)
