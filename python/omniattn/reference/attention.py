"""Softmax attention, O = softmax(f(scale q k^T) + bias) v, layout (B, T, H, D)."""

from __future__ import annotations

import math
from typing import Literal, Protocol

import torch
from torch import Tensor

from omniattn.reference import masks, philox
from omniattn.reference.precision import widen
from omniattn.reference.scores import ScoreKind, table_bias


class MaskRules(Protocol):
    """What `functional.masks` objects offer."""

    def rules(self) -> list[masks.Rule]: ...


class RelativeTerm(Protocol):
    """What the relative biases of `functional.scores` offer."""

    def rule(self) -> tuple[int, Tensor | None, tuple[float, ...]]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    mask: Tensor | MaskRules | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    relative: RelativeTerm | None = None,
    sinks: Tensor | None = None,
    head_scale: Tensor | None = None,
    normaliser: Literal["softmax", "sigmoid", "relu2"] = "softmax",
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """q (B,Tq,Hq,D), k (B,Tk,Hkv,D), v (B,Tk,Hkv,Dv) -> O (B,Tq,Hq,Dv) [, lse (B,Hq,Tq)].

    Query head h reads kv head h // (Hq / Hkv). `mask` (True = attend) and `bias` broadcast to
    (B,Hq,Tq,Tk). A row that sees no key gives O = 0, lse = -inf and zero gradients. Weights other
    than softmax are functions of one logit each; their lse is 0.
    """
    (batch, tq, heads, dim), (tk, kv_heads) = q.shape, k.shape[1:3]
    qw, kw, vw = (widen(t).transpose(1, 2) for t in (q, k, v))
    if kv_heads != heads:
        kw, vw = (t.repeat_interleave(heads // kv_heads, 1) for t in (kw, vw))

    s = (default_scale(dim) if scale is None else scale) * (qw @ kw.transpose(-1, -2))
    if head_scale is not None:
        s = s * widen(head_scale).to(s.dtype)[:, None, None]
    if softcap > 0:
        s = softcap * torch.tanh(s / softcap)
    if bias is not None:
        s = s + widen(bias).to(s.dtype)
    if alibi_slopes is not None:
        slopes = widen(alibi_slopes).to(s.dtype).reshape(-1, 1, heads)
        s = s + table_bias(ScoreKind.ALIBI, slopes, 0, 0, tq, tk)
    if relative is not None:
        kind, table, (a, b) = relative.rule()
        assert table is not None
        s = s + table_bias(kind, widen(table).to(s.dtype), int(a), int(b), tq, tk)
    rules = [masks.window_rule(causal, window_size)]
    if isinstance(mask, Tensor):
        rules.append((masks.MaskKind.TENSOR, 0, 0, (mask,)))
    elif mask is not None:
        rules += mask.rules()
    s = s.masked_fill(~masks.visible(rules, tq, tk, q.device, heads=heads), -math.inf)

    if normaliser == "softmax":
        p, lse = _softmax(s, None if sinks is None else widen(sinks).to(s.dtype))
    else:
        p = torch.sigmoid(s) if normaliser == "sigmoid" else torch.relu(s).square()
        lse = s.new_zeros(batch, heads, tq)
    if dropout_p > 0:
        seed = philox.new_seed() if seed is None else seed
        keep = philox.attention_keep(batch, heads, tq, tk, dropout_p, seed.to(q.device))
        p = p * keep * (1 / (1 - dropout_p) if dropout_p < 1 else 0)
    out = (p @ vw).transpose(1, 2).to(q.dtype)
    return (out, lse) if return_lse else out


def _softmax(s: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Probabilities and lse (B,Hq,Tq); a sink is one more logit per head, without a column of P."""
    if sinks is not None:
        s = torch.cat((s, sinks[:, None, None].expand(*s.shape[:-1], 1)), -1)
    # Finite stand-ins for the statistics of a row without a key keep its gradients zero, not NaN.
    top = s.detach().amax(-1, keepdim=True) if s.shape[-1] > 0 else s.new_zeros(*s.shape[:-1], 1)
    top = top.masked_fill(top == -math.inf, 0)
    p = torch.exp(s - top)
    total = p.sum(-1, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1)
    lse = (top + total.log()).masked_fill(empty, -math.inf).squeeze(-1)
    p = p / total
    return (p if sinks is None else p[..., :-1]), lse


def default_scale(dim: int) -> float:
    """1 / sqrt(D), and 1 for D = 0, where the logits are 0 anyway."""
    return 1 / math.sqrt(dim) if dim > 0 else 1.0


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's signature and layout (B,H,T,D); `is_causal` aligns top-left, as in torch."""
    tq, tk = query.shape[-2], key.shape[-2]
    mask = bias = None
    if is_causal:
        rule = (masks.MaskKind.WINDOW_TOP_LEFT, -1, 0, ())
        mask = masks.visible([rule], tq, tk, query.device)
    elif attn_mask is not None and attn_mask.dtype == torch.bool:
        mask = attn_mask
    else:
        bias = attn_mask
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    out = attention(q, k, v, mask=mask, bias=bias, scale=scale, dropout_p=dropout_p)
    assert isinstance(out, Tensor)
    return out.transpose(1, 2)
