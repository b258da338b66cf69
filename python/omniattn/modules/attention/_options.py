"""Options of Attention: their checks, chunks, and queries that grow with their position."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from omniattn.checks.arguments import require_number, shown
from omniattn.functional.masks import BoolMask, Chunked, Mask
from omniattn.functional.scores.score_mod import MaskMod
from omniattn.modules.base.jagged import Sequences


def check_options(c: Any) -> None:
    """Raises if options of a config of Attention are invalid or exclude each other."""
    require_number("Attention", "softcap", c.softcap, 0)
    if c.cross and c.causal:
        raise ValueError("Attention: cross must have causal=False, got causal=True")
    for name, value, known in (
        ("gate", c.gate, (None, "elementwise", "headwise")),
        ("gate_activation", c.gate_activation, ("sigmoid", "silu")),
        ("qk_norm", c.qk_norm, (None, "rms", "rms_full", "rms_fixed", "layer", "l2")),
        ("normalizer", c.normalizer, ("softmax", "sigmoid")),
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
    if c.normalizer == "softmax" and c.norm_n is not None:
        raise ValueError(f"Attention: norm_n needs sigmoid, got norm_n={c.norm_n}")
    if c.normalizer == "sigmoid" and c.sinks:
        raise ValueError("Attention: sinks need softmax, got normalizer='sigmoid'")
    if c.chunk_size is not None and (not c.causal or c.window_size != (-1, -1)):
        raise ValueError(
            "Attention: chunk_size needs causal=True and no window, got "
            f"chunk_size={c.chunk_size}, causal={c.causal}, window_size={c.window_size}"
        )
    if c.query_growth and (c.cross or c.query_period is None):
        raise ValueError(
            "Attention: query_growth needs self-attention and a query_period, got "
            f"query_growth={c.query_growth}, query_period={c.query_period}, cross={c.cross}"
        )


def in_chunks(size: int | None, mask: Tensor | Mask | MaskMod | None) -> Any:
    """Returns the mask that also hides the keys of other chunks, if there is a chunk size."""
    if size is None:
        return mask
    chunks = Chunked(size)
    if mask is None:
        return chunks
    if isinstance(mask, Tensor):
        return BoolMask(mask) & chunks
    if isinstance(mask, Mask):
        return mask & chunks
    seen: MaskMod = mask
    return lambda b, h, q, k: seen(b, h, q, k) & (q // size == k // size)


def grown(c: Any, q: Tensor, sequences: Sequences, past: int) -> Tensor:
    """Multiplies queries (B, T, H, D) by 1 + growth ln(1 + floor((position + 1) / period))."""
    if c.query_growth == 0:
        return q
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    positions = (sequences.positions(q) + past + 1).to(wide)
    factors = 1 + c.query_growth * torch.log1p((positions / c.query_period).floor())
    return (q * factors[:, None, None]).to(q.dtype)
