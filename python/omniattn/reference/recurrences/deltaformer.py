"""DeltaFormer, token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from omniattn.reference.empty import nothing_of
from omniattn.reference.precision import compute_dtype

__all__ = ["deltaformer_attention"]


def deltaformer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    *,
    past: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """u_t = v_t - beta_t softmax(q_t K_<t) U_<t, o_t = softmax(q_t K_<=t) U_<=t; returns o, u."""
    dtype = compute_dtype(v)
    scale = max(1, q.shape[-1]) ** -0.5 if scale is None else scale
    beta = torch.ones_like(v[..., 0]) if beta is None else beta
    first = [] if past is None else list(past.to(dtype).unbind(1))
    q, k, wide, beta = (t.to(dtype) for t in (q, k, v, beta))
    steps = torch.arange(q.shape[1], device=q.device)
    starts = torch.zeros_like(steps)
    if cu_seqlens is not None and cu_seqlens.shape[0] > 1:
        owner = (cu_seqlens[1:, None] <= steps).sum(0)
        starts = cu_seqlens[owner]
    u, outputs = first, []
    for t in range(q.shape[1]):
        seen = len(u)
        logits = scale * (q[:, t, None] * k[:, : seen + 1]).sum(-1)
        if cu_seqlens is not None:
            places = torch.arange(seen + 1, device=q.device)
            logits = logits.masked_fill((places < starts[t])[:, None], -torch.inf)
        values, weights = u, _softmax(logits[:, :seen])
        before = torch.zeros_like(wide[:, t])
        for j in range(seen):
            before = before + weights[:, j, :, None] * values[j]
        own = wide[:, t] - beta[:, t, :, None] * before
        share = _softmax(logits)[:, -1, :, None]
        outputs.append((1 - share) * before + share * own)
        u = [*u, own]
    nothing = nothing_of(wide if past is None else past.to(dtype))
    if not outputs:
        nothing = nothing + nothing_of(q, k, wide, beta)
        return (wide + nothing).to(v.dtype), wide + nothing
    o, own = torch.stack(outputs, 1), torch.stack(u[len(first) :], 1)
    return (o + nothing).to(v.dtype), own + nothing


def _softmax(logits: Tensor) -> Tensor:
    """Softmax over keys (B, keys, H), 0 without a key."""
    if logits.shape[1] == 0:
        return logits
    empty = (logits == -torch.inf).all(1, keepdim=True)
    return logits.masked_fill(empty, 0).softmax(1).masked_fill(empty, 0)
