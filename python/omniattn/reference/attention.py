"""softmax attention, O = softmax(cap(scale q k^T) + bias) v, layout (B, T, H, D)."""

import math

import torch

from omniattn.reference import philox
from omniattn.reference.precision import widen


def visible(
    tq: int, tk: int, causal: bool, window_size: tuple[int, int], device: torch.device
) -> torch.Tensor:
    """Boolean (Tq, Tk), True = attend. Row i sits at key position i + Tk - Tq (bottom-right)."""
    left, right = window_size
    if causal:
        right = 0
    distance = torch.arange(tk, device=device) - (
        torch.arange(tq, device=device)[:, None] + tk - tq
    )
    allowed = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        allowed &= distance >= -left
    if right >= 0:
        allowed &= distance <= right
    return allowed


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    seed: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """q (B,Tq,Hq,D), k (B,Tk,Hkv,D), v (B,Tk,Hkv,Dv) -> O (B,Tq,Hq,Dv) [, lse (B,Hq,Tq)].

    Query head h reads kv head h // (Hq / Hkv). `mask` (True = attend) and `bias` broadcast to
    (B,Hq,Tq,Tk). A row that sees no key gives O = 0, lse = -inf and zero gradients.
    """
    (batch, tq, heads, dim), (tk, kv_heads) = q.shape, k.shape[1:3]
    qw, kw, vw = (widen(t).transpose(1, 2) for t in (q, k, v))
    kw, vw = (t.repeat_interleave(heads // kv_heads, 1) for t in (kw, vw))

    s = (1 / math.sqrt(dim) if scale is None else scale) * (qw @ kw.transpose(-1, -2))
    if softcap > 0:
        s = softcap * torch.tanh(s / softcap)
    if bias is not None:
        s = s + widen(bias)
    if mask is not None:
        s = s.masked_fill(~mask, -math.inf)
    s = s.masked_fill(~visible(tq, tk, causal, window_size, q.device), -math.inf)

    # Finite stand-ins for the statistics of a row without a key keep its gradients zero, not NaN.
    top = s.amax(-1, keepdim=True).detach() if tk > 0 else s.new_zeros(batch, heads, tq, 1)
    top = top.masked_fill(top == -math.inf, 0)
    p = torch.exp(s - top)
    total = p.sum(-1, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1)
    p = p / total
    if dropout_p > 0:
        seed = philox.new_seed() if seed is None else seed
        keep = philox.attention_keep(batch, heads, tq, tk, dropout_p, seed.to(q.device))
        p = p * keep * (1 / (1 - dropout_p) if dropout_p < 1 else 0)
    out = (p @ vw).transpose(1, 2).to(q.dtype)
    if not return_lse:
        return out
    return out, (top + total.log()).masked_fill(empty, -math.inf).squeeze(-1)


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """torch's signature and layout (B,H,T,D); `is_causal` aligns top-left, as in torch."""
    tq, tk = query.shape[-2], key.shape[-2]
    mask = bias = None
    if is_causal:
        mask = torch.ones(tq, tk, dtype=torch.bool, device=query.device).tril()
    elif attn_mask is not None and attn_mask.dtype == torch.bool:
        mask = attn_mask
    else:
        bias = attn_mask
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    out = attention(q, k, v, mask=mask, bias=bias, scale=scale, dropout_p=dropout_p)
    assert isinstance(out, torch.Tensor)
    return out.transpose(1, 2)
