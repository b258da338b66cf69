"""Softmax attention, O = softmax(f(scale q k^T) + bias) v, layout (B, T, H, D)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from omniattn.reference import masks, philox
from omniattn.reference.precision import widen
from omniattn.reference.scores import ScoreKind, table_bias
from omniattn.reference.vmap import require_not_mapped


class MaskRules(Protocol):
    """What `functional.masks` objects offer."""

    def rules(self) -> list[masks.Rule]: ...


class RelativeTerm(Protocol):
    """What the relative biases of `functional.scores` offer."""

    def rule(self) -> tuple[int, Tensor | None, tuple[float, ...]]: ...


class TableRule(NamedTuple):
    """A relative term in its encoded form; table (B | 1, rows, Hq)."""

    kind: int
    table: Tensor | None
    parameters: tuple[float, ...]

    def rule(self) -> tuple[int, Tensor | None, tuple[float, ...]]:
        return self.kind, self.table, self.parameters


Normaliser: TypeAlias = Literal["softmax", "sigmoid", "relu2"]


class Rules(NamedTuple):
    """Mask rules as a mask."""

    found: list[masks.Rule]

    def rules(self) -> list[masks.Rule]:
        return self.found


class Visibility(NamedTuple):
    """Which keys a query may attend to."""

    causal: bool
    window_size: tuple[int, int]
    mask: Tensor | MaskRules | None

    def rules(self) -> list[masks.Rule]:
        rules = [masks.window_rule(self.causal, self.window_size)]
        if isinstance(self.mask, Tensor):
            return [*rules, (masks.MaskKind.TENSOR, 0, 0, (self.mask,))]
        return rules if self.mask is None else [*rules, *self.mask.rules()]


class Logits(NamedTuple):
    """What makes logits of q and k."""

    scale: float | None
    head_scale: Tensor | None
    softcap: float
    bias: Tensor | None
    alibi_slopes: Tensor | None
    relative: RelativeTerm | None


class Weights(NamedTuple):
    """What makes weights of the logits."""

    normaliser: Normaliser
    sinks: Tensor | None
    dropout_p: float
    seed: Tensor | None


class AttentionOptions(NamedTuple):
    """The options that all forms of attention share."""

    visibility: Visibility
    logits: Logits
    weights: Weights

    def of_sequence(self, n: int, tq: int, tk: int) -> AttentionOptions:
        """Those of sequence n of a packed or cached batch, which has its own lengths."""
        rules = masks.of_sequence(self.visibility.rules(), n, tq, tk)
        logits = self.logits
        bias, slopes, relative = logits.bias, logits.alibi_slopes, logits.relative
        if bias is not None:
            bias = masks.cut(bias, n, tq, tk)
        if slopes is not None and slopes.dim() > 1 and len(slopes) > 1:
            slopes = slopes[n : n + 1]
        if relative is not None:
            kind, table, parameters = relative.rule()
            if table is not None and len(table) > 1:
                relative = TableRule(kind, table[n : n + 1], parameters)
        return AttentionOptions(
            Visibility(False, (-1, -1), Rules(rules)),
            logits._replace(bias=bias, alibi_slopes=slopes, relative=relative),
            self.weights,
        )


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
    normaliser: Normaliser = "softmax",
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """q (B,Tq,Hq,D), k (B,Tk,Hkv,D), v (B,Tk,Hkv,Dv) -> O (B,Tq,Hq,Dv) [, lse (B,Hq,Tq)].

    Query head h reads kv head h // (Hq / Hkv). `mask` (True = attend) and `bias` broadcast to
    (B,Hq,Tq,Tk). A row that sees no key gives O = 0, lse = -inf and zero gradients. Weights other
    than softmax are functions of one logit each; their lse is 0.
    """
    options = AttentionOptions(
        Visibility(causal, window_size, mask),
        Logits(scale, head_scale, softcap, bias, alibi_slopes, relative),
        Weights(normaliser, sinks, dropout_p, _seed(seed, dropout_p)),
    )
    out, lse = _attention(q, k, v, options)
    return (out, lse) if return_lse else out


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
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
    normaliser: Normaliser = "softmax",
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """q (Nq,Hq,D), k (Nk,Hkv,D), v (Nk,Hkv,Dv) -> O (Nq,Hq,Dv) [, lse (Hq,Nq)].

    Sequence n, a problem of its own, has the rows cu_seqlens_q[n] .. cu_seqlens_q[n + 1] of q and
    cu_seqlens_k[n] .. cu_seqlens_k[n + 1] of k and v. Masks and biases are those of a batch (N, Hq,
    max_seqlen_q, max_seqlen_k). Rows of no sequence give O = 0, lse = -inf.
    """
    require_not_mapped("attention_varlen", "cu_seqlens_q", cu_seqlens_q)
    require_not_mapped("attention_varlen", "cu_seqlens_k", cu_seqlens_k)
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    options = AttentionOptions(
        Visibility(causal, window_size, mask),
        Logits(scale, head_scale, softcap, bias, alibi_slopes, relative),
        Weights(normaliser, sinks, dropout_p, _seed(seed, dropout_p)),
    )
    outs, lses = [], []
    for n in range(len(ends_q) - 1):
        (q0, q1), (k0, k1) = ends_q[n : n + 2], ends_k[n : n + 2]
        mine = options.of_sequence(n, q1 - q0, k1 - k0)
        out, lse = _attention(q[None, q0:q1], k[None, k0:k1], v[None, k0:k1], mine, n)
        outs.append(out[0])
        lses.append(lse[0])
    before, behind = ends_q[0], q.shape[0] - ends_q[-1]
    pad = torch.nn.functional.pad
    out = torch.cat(outs) if outs else q.new_zeros(0, q.shape[1], v.shape[2])
    out = pad(out, (0, 0, 0, 0, before, behind))
    lse = torch.cat(lses, 1) if lses else widen(q.new_zeros(q.shape[1], 0))
    lse = pad(lse, (before, behind), value=-math.inf if normaliser == "softmax" else 0.0)
    return (out, lse) if return_lse else out


def attention_cached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache_seqlens: Tensor,
    *,
    block_table: Tensor | None = None,
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
    normaliser: Normaliser = "softmax",
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`attention` where sequence b has the first cache_seqlens[b] of the Tk keys, its Tk.

    With block_table (B,N) k and v are pages (pages,size,Hkv,.), and sequence b has those of row b.
    """
    require_not_mapped("attention_cached", "cache_seqlens", cache_seqlens)
    if block_table is not None:
        k, v = (t[block_table.clamp(min=0)].flatten(1, 2) for t in (k, v))
    options = AttentionOptions(
        Visibility(causal, window_size, mask),
        Logits(scale, head_scale, softcap, bias, alibi_slopes, relative),
        Weights(normaliser, sinks, dropout_p, _seed(seed, dropout_p)),
    )
    outs, lses = [], []
    for n, tk in enumerate(cache_seqlens.tolist()):
        one = slice(n, n + 1)
        mine = options.of_sequence(n, q.shape[1], tk)
        out, lse = _attention(q[one], k[one, :tk], v[one, :tk], mine, n)
        outs.append(out)
        lses.append(lse)
    out = torch.cat(outs) if outs else q.new_zeros(0, *q.shape[1:3], v.shape[3])
    lse = torch.cat(lses) if lses else widen(q.new_zeros(0, q.shape[2], q.shape[1]))
    return (out, lse) if return_lse else out


def _seed(seed: Tensor | None, dropout_p: float) -> Tensor | None:
    """The seed of a call, None without dropout."""
    if dropout_p == 0:
        return None
    return philox.new_seed() if seed is None else seed


def _attention(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, first_batch: int = 0
) -> tuple[Tensor, Tensor]:
    """O and lse; `first_batch` is the number of q[0] in its call."""
    weights = options.weights
    heads, kv_heads, (batch, tq), tk = q.shape[2], k.shape[2], q.shape[:2], k.shape[1]
    vw = widen(v).transpose(1, 2)
    if kv_heads != heads:
        vw = vw.repeat_interleave(heads // kv_heads, 1)
    s = _logits(q, k, options.visibility.rules(), options.logits)
    if weights.normaliser == "softmax":
        p, lse = _softmax(s, None if weights.sinks is None else widen(weights.sinks).to(s.dtype))
    else:
        p = _elementwise(s, weights.normaliser)
        lse = s.new_zeros(batch, heads, tq)
    if weights.seed is not None:
        drop, seed = weights.dropout_p, weights.seed.to(q.device)
        keep = philox.attention_keep(batch, heads, tq, tk, drop, seed, first_batch=first_batch)
        p = p * keep * (1 / (1 - drop) if drop < 1 else 0)
    out = (p @ vw).transpose(1, 2).to(q.dtype)
    return out, lse


def _logits(q: Tensor, k: Tensor, rules: list[masks.Rule], logits: Logits) -> Tensor:
    """(B,Hq,Tq,Tk), -inf where not allowed."""
    (tq, heads, dim), (tk, kv_heads) = q.shape[1:], k.shape[1:3]
    qw, kw = (widen(t).transpose(1, 2) for t in (q, k))
    if kv_heads != heads:
        kw = kw.repeat_interleave(heads // kv_heads, 1)

    s = (default_scale(dim) if logits.scale is None else logits.scale) * (qw @ kw.transpose(-1, -2))
    if logits.head_scale is not None:
        s = s * widen(logits.head_scale).to(s.dtype)[:, None, None]
    if logits.softcap > 0:
        s = logits.softcap * torch.tanh(s / logits.softcap)
    if logits.bias is not None:
        s = s + widen(logits.bias).to(s.dtype)
    if logits.alibi_slopes is not None:
        slopes = widen(logits.alibi_slopes).to(s.dtype)
        slopes = slopes if slopes.dim() == 3 else torch.atleast_2d(slopes)[:, None]
        s = s + table_bias(ScoreKind.ALIBI, slopes, 0, 0, tq, tk)
    if logits.relative is not None:
        kind, table, (a, b) = logits.relative.rule()
        assert table is not None
        s = s + table_bias(kind, widen(table).to(s.dtype), int(a), int(b), tq, tk)
    return s.masked_fill(~masks.visible(rules, tq, tk, q.device, heads=heads), -math.inf)


def attention_weights(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
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
    normaliser: Normaliser = "softmax",
    column_sums: bool = False,
) -> Tensor:
    """P (B,Hq,Tq,Tk) of :func:`attention` with its lse, or its sums over queries (B,Hq,Tk).

    `sinks` are part of lse already and change nothing here.
    """
    logits = Logits(scale, head_scale, softcap, bias, alibi_slopes, relative)
    s = _logits(q, k, Visibility(causal, window_size, mask).rules(), logits)
    if normaliser == "softmax":
        nothing = lse == -math.inf
        p = torch.exp(s - lse.masked_fill(nothing, 0)[..., None])
        p = p.masked_fill(nothing[..., None], 0)
    else:
        p = _elementwise(s, normaliser)
    return p.sum(-2) if column_sums else p.to(q.dtype)


def select_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    energy: Literal["l2", "dot"] = "l2",
    theta: float = math.inf,
    tau: float = 1.0,
    ste: bool = True,
    scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    mask: Tensor | MaskRules | None = None,
) -> Tensor:
    """v of the key with the least energy, the first of equal ones: O (B,Tq,Hq,Dv).

    ``E = scale |q - k|^2 / 2``, or ``-scale q.k``; 0 where E exceeds theta or no key is allowed.
    The gradient of q and k is that of softmax(-E / tau) v, or nothing; v's is that of the choice.
    """
    (tq, heads, dim), (tk, kv_heads) = q.shape[1:], k.shape[1:3]
    qw, kw, vw = (widen(t).transpose(1, 2) for t in (q, k, v))
    if kv_heads != heads:
        kw, vw = (t.repeat_interleave(heads // kv_heads, 1) for t in (kw, vw))
    score = qw @ kw.transpose(-1, -2)
    if energy == "l2":
        score = score - (qw.square().sum(-1)[..., None] + kw.square().sum(-1)[..., None, :]) / 2
    score = score * (default_scale(dim) if scale is None else scale)
    rules = Visibility(causal, window_size, mask).rules()
    score = score.masked_fill(~masks.visible(rules, tq, tk, q.device, heads=heads), -math.inf)
    # NaN is never chosen, and without keys there is a column that nothing chooses.
    choices = score.detach().masked_fill(score.isnan(), -math.inf)
    top, index = torch.nn.functional.pad(choices, (0, 1), value=-math.inf).max(-1)
    chosen = (-top <= theta) & (top > -math.inf)
    weights = torch.nn.functional.one_hot(index, tk + 1)[..., :tk].to(vw.dtype)
    out = weights @ vw
    if ste:
        soft = _softmax(score / tau, None)[0] @ vw.detach()
        out = out + (soft - soft.detach())
    return out.masked_fill(~chosen[..., None], 0).transpose(1, 2).to(q.dtype)


def merge_attention(
    outs: Sequence[Tensor], lses: Sequence[Tensor], *, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over the union of disjoint sets of keys, from O (B,Tq,Hq,Dv) and lse of each."""
    lse = torch.stack([widen(x) for x in lses])
    if sinks is not None:
        shape = (1, *lse.shape[1:])
        lse = torch.cat((lse, widen(sinks).to(lse.dtype)[:, None].expand(shape)))
    top = lse.detach().amax(0)
    top = top.masked_fill(top == -math.inf, 0)
    weights = torch.exp(lse - top)
    total = weights.sum(0)
    empty = total == 0
    total = total.masked_fill(empty, 1)
    shares = (weights / total)[: len(outs)].transpose(-1, -2)[..., None]
    out = (shares * torch.stack([widen(x) for x in outs])).sum(0).to(outs[0].dtype)
    return out, (top + total.log()).masked_fill(empty, -math.inf)


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


def _elementwise(s: Tensor, normaliser: str) -> Tensor:
    """Weights that are functions of one logit each."""
    return torch.sigmoid(s) if normaliser == "sigmoid" else torch.relu(s).square()


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
    """torch's signature and layout (..., H, T, D); `is_causal` aligns top-left, as in torch."""
    if enable_gqa:
        heads = query.shape[-3]
        key, value = (t.repeat_interleave(heads // t.shape[-3], -3) for t in (key, value))
    lead = torch.broadcast_shapes(*(t.shape[:-2] for t in (query, key, value)))
    tq, tk = query.shape[-2], key.shape[-2]
    count = math.prod(lead)
    mask = bias = None
    if is_causal:
        rule = (masks.MaskKind.WINDOW_TOP_LEFT, -1, 0, ())
        mask = masks.visible([rule], tq, tk, query.device)
    if attn_mask is not None:
        given = attn_mask.expand(*lead, tq, tk).reshape(count, 1, tq, tk)
        if given.dtype == torch.bool:
            mask = given if mask is None else given & mask
        else:
            bias = given
    q, k, v = (
        t.expand(*lead, *t.shape[-2:]).reshape(count, 1, *t.shape[-2:]).transpose(1, 2)
        for t in (query, key, value)
    )
    out = attention(q, k, v, mask=mask, bias=bias, scale=scale, dropout_p=dropout_p)
    assert isinstance(out, Tensor)
    return out.transpose(1, 2).reshape(*lead, tq, value.shape[-1])
