"""Options of Attention: their checks, and the masks, factors and terms that they give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from omniattn import functional
from omniattn.checks.arguments import require_number, shown, widen
from omniattn.functional.attention.forgetting import forget_terms, packed_forget_terms
from omniattn.functional.masks import BoolMask, Chunked, Mask
from omniattn.functional.scores.score_mod import MaskMod
from omniattn.modules.base.jagged import Sequences
from omniattn.modules.base.linear import Linear
from omniattn.modules.caches.cache import Cache


def check_options(c: Any) -> None:
    """Raises if options of a config of Attention are invalid or exclude each other."""
    require_number("Attention", "softcap", c.softcap, 0)
    if c.cross and c.causal:
        raise ValueError("Attention: cross must have causal=False, got causal=True")
    for name, value, known in (
        ("gate", c.gate, (None, "elementwise", "headwise")),
        ("gate_activation", c.gate_activation, ("sigmoid", "silu")),
        ("qk_norm", c.qk_norm, (None, "rms", "rms_full", "rms_fixed", "layer", "l2")),
        ("normalizer", c.normalizer, ("softmax", "sigmoid", "stick_breaking", "softpick")),
    ):
        if value not in known:
            raise ValueError(f"Attention: {name} must be one of {known}, got {name}={shown(value)}")
    if c.qk_norm == "l2" and (c.head_scale or c.scale is not None):
        raise ValueError(
            'Attention: qk_norm="l2" has its own scale, '
            f"got scale={c.scale}, head_scale={c.head_scale}"
        )
    if c.qk_norm_offset and c.qk_norm not in ("rms", "rms_full"):
        raise ValueError(
            'Attention: qk_norm_offset needs qk_norm "rms" or "rms_full", '
            f"got qk_norm={shown(c.qk_norm)}, qk_norm_offset={c.qk_norm_offset}"
        )
    if c.cross and c.alibi is not None:
        raise ValueError(f"Attention: alibi must be None with cross=True, got alibi={c.alibi}")
    if c.alibi is None and c.alibi_scale != 1.0:
        raise ValueError(f"Attention: alibi_scale needs alibi, got alibi_scale={c.alibi_scale}")
    if c.normalizer != "sigmoid" and c.norm_n is not None:
        raise ValueError(f"Attention: norm_n needs sigmoid, got norm_n={c.norm_n}")
    for name in ("sinks", "query_sinks"):
        if c.normalizer != "softmax" and getattr(c, name):
            raise ValueError(
                f"Attention: {name} need softmax, got normalizer={shown(c.normalizer)}"
            )
    if c.sinks and c.query_sinks:
        raise ValueError("Attention: query_sinks replace sinks, got sinks=True, query_sinks=True")
    if not c.attend_current and not c.causal:
        raise ValueError("Attention: attend_current=False needs causal=True, got causal=False")
    if c.chunk_size is not None and (not c.causal or c.window_size != (-1, -1)):
        raise ValueError(
            "Attention: chunk_size needs causal=True and no window, got "
            f"chunk_size={c.chunk_size}, causal={c.causal}, window_size={c.window_size}"
        )
    if c.log_scale and (not c.causal or c.head_scale or c.qk_norm == "l2"):
        raise ValueError(
            "Attention: log_scale needs causal=True and no other factor per head, got "
            f"causal={c.causal}, head_scale={c.head_scale}, qk_norm={shown(c.qk_norm)}"
        )
    has_sinks = c.sinks or c.query_sinks
    if c.forget_gate and (not c.causal or has_sinks or c.alibi or c.normalizer != "softmax"):
        raise ValueError(
            "Attention: forget_gate needs causal=True and softmax without sinks and ALiBi, got "
            f"causal={c.causal}, sinks={c.sinks}, query_sinks={c.query_sinks}, alibi={c.alibi}, "
            f"normalizer={shown(c.normalizer)}"
        )
    if c.query_growth and (c.cross or c.query_period is None):
        raise ValueError(
            "Attention: query_growth needs self-attention and a query_period, got "
            f"query_growth={c.query_growth}, query_period={c.query_period}, cross={c.cross}"
        )


def in_chunks(c: Any, mask: Tensor | Mask | MaskMod | None) -> Any:
    """Returns the mask that also hides the keys that the config hides beyond causality.

    These are the keys of other chunks, if there is a chunk size, and a query's own key.
    """
    if c.chunk_size is not None:
        size = c.chunk_size
        mask = _narrowed(mask, Chunked(size), lambda b, h, q, k: q // size == k // size)
    if not c.attend_current:
        mask = _narrowed(mask, Chunked(1, back=(1, None)), lambda b, h, q, k: k < q)
    return mask


def _narrowed(mask: Tensor | Mask | MaskMod | None, rule: Mask, sees: MaskMod) -> Any:
    """Combines a mask with a rule, also given as a function."""
    if mask is None:
        return rule
    if isinstance(mask, Tensor):
        return BoolMask(mask) & rule
    if isinstance(mask, Mask):
        return mask & rule
    seen: MaskMod = mask
    return lambda b, h, q, k: seen(b, h, q, k) & sees(b, h, q, k)


def grown(c: Any, q: Tensor, sequences: Sequences, past: int) -> Tensor:
    """Multiplies queries (B, T, H, D) by factors of their positions.

    They are 1 + growth ln(1 + floor((position + 1) / period)), or with `log_scale` the logarithm of
    the number of keys that the query sees.
    """
    if c.query_growth == 0 and not c.log_scale:
        return q
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    count = (sequences.positions(q) + past + 1).to(wide)
    factors = torch.ones_like(count)
    if c.query_growth:
        factors = 1 + c.query_growth * torch.log1p((count / c.query_period).floor())
    if c.log_scale:
        near = c.window_size[0] + 1
        factors = factors * (count.clamp(max=near) if near > 0 else count).log()
    return (q * factors[:, None, None]).to(q.dtype)


def convolved(convolve: Callable[[Tensor], Tensor], *heads: Tensor) -> tuple[Tensor, ...]:
    """Returns queries, keys and values (B, T, H, D) after a function of all their channels."""
    rows = [t.flatten(-2) for t in heads]
    parts = convolve(torch.cat(rows, -1)).split([t.shape[-1] for t in rows], -1)
    return tuple(part.unflatten(-1, t.shape[-2:]) for part, t in zip(parts, heads, strict=True))


def slopes_of(c: Any, given: Tensor | None, x: Tensor) -> Tensor:
    """Returns ALiBi's slopes of the heads, which are no buffer, so that no dtype rounds them."""
    if given is not None:
        raise ValueError(f"Attention: alibi_slopes must be None, as the config has alibi={c.alibi}")
    slopes = functional.alibi_slopes(c.num_heads, max_exponent=c.alibi, device=x.device)
    return slopes if c.alibi_scale == 1.0 else slopes * c.alibi_scale


def sigmoid_bias(c: Any, q: Tensor, k: Tensor, keys: Sequences, cache: Cache | None) -> Tensor:
    """Computes -ln n of shape (N | 1, 1, 1, 1), in the scores' precision."""
    if c.norm_n is None and cache is not None and not c.cross:
        raise ValueError("Attention: decoding with sigmoid needs a norm_n, got norm_n=None")
    sizes = keys.sizes(k) if c.norm_n is None else q.new_tensor(c.norm_n, dtype=torch.int64)
    n = sizes.clamp(min=1).to(torch.promote_types(q.dtype, torch.float32))
    return -n.log().view(-1, 1, 1, 1)


def plus(term: Tensor, bias: Tensor | None) -> Tensor:
    """Adds a term of the scores to the caller's bias, if there is one."""
    return term if bias is None else term + bias


def require_no_position_terms(relative: object, alibi_slopes: Tensor | None) -> None:
    """Raises if a call of a layer with forget gates has further terms of positions."""
    if relative is not None or alibi_slopes is not None:
        raise ValueError(
            "Attention: relative and alibi_slopes must be None with forget_gate=True, got "
            f"relative={shown(relative)}, alibi_slopes={shown(alibi_slopes)}"
        )


def forget_options(gates: Linear, x: Tensor, sequences: Sequences, cache: Any) -> dict[str, Any]:
    """Returns the options of functional.attention for the forget gates sigmoid(gates(x)).

    `cache` is None or has `forget`, as `caches.new.with_gates` makes it.
    """
    log_f = torch.nn.functional.logsigmoid(widen(gates(x)))
    if sequences.nested is not None:
        return packed_forget_terms(log_f[0], sequences.nested)
    return forget_terms(log_f if cache is None else cache.forget(log_f))
