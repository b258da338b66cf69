"""Log-linear attention, token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from omniattn.reference.recurrences.delta_variants import over_tokens, written

__all__ = ["log_linear_attention"]


def log_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    level_scales: Tensor,
    *,
    initial_state: Tensor | None = None,
    position: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Keeps state b of a sequence at position t for the block of 2^b tokens that bit b of t names.

    A token reads itself with scale 0 and state b with scale b + 1. Then it joins the states below
    the lowest bit of t that is 0, and the result becomes the state of that bit.
    """
    group = v.shape[2] // max(1, q.shape[2])
    q, k = q.repeat_interleave(group, 2), k.repeat_interleave(group, 2)
    levels = level_scales.shape[3]
    bits = torch.arange(levels, device=v.device)
    at = positions(v, position, cu_seqlens)
    if initial_state is not None and position is not None:
        held = (position[:, None] >> bits) & 1
        initial_state = initial_state.masked_fill((held == 0)[:, None, :, None, None], 0)

    def step(
        s: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, scales: Tensor, at: Tensor
    ) -> tuple[Tensor, Tensor]:
        s = s * g.exp()[..., None, None, None]
        own = scales[..., :1] * (q * k).sum(-1, keepdim=True) * v
        read = (s[:, :, :-1] * q[:, :, None, :, None]).sum(-2)
        o = own + (scales[..., 1:, None] * read).sum(-2)
        is_set = (at.long()[:, None] >> bits) & 1
        joined = is_set.cumprod(-1)
        chosen = (is_set.cumsum(-1) == bits) & (is_set == 0)
        joined, chosen = (t[:, None, :, None, None].to(s.dtype) for t in (joined, chosen))
        fresh = written((s * joined).sum(2), k, v)
        return o, s * (1 - joined) + chosen * fresh[:, :, None]

    shape = (v.shape[2], levels, q.shape[3], v.shape[3])
    options = {"initial_state": initial_state, "cu_seqlens": cu_seqlens}
    rows = (q, k, v, g, level_scales, at)
    return over_tokens("log_linear_attention", options, step, rows, v, shape)  # type: ignore[arg-type]


def positions(x: Tensor, position: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """Returns the place of each token (B, T) in its sequence, which starts at `position` or 0."""
    tokens = torch.arange(x.shape[1], device=x.device)
    if cu_seqlens is None:
        start = tokens.new_zeros(x.shape[0]) if position is None else position
        return start[:, None] + tokens
    if cu_seqlens.shape[0] == 1:
        return tokens[None]
    owner = (cu_seqlens[1:, None] <= tokens).sum(0)
    first = cu_seqlens[:-1] if position is None else cu_seqlens[:-1] - position
    return (tokens - first[owner])[None]
