"""Attention of BLOOM and MPT, whose models make a bias of distances by themselves."""

from __future__ import annotations

import functools
import inspect
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from omniattn.hf.attention.attention import attention_forward
from omniattn.hf.common.probe import Finding, Left, probing

__all__ = ["bloom_forward", "find_alibi", "mpt_block_forward", "mpt_forward"]

#: Attribute of MPT's attention: True while its block wants attention weights.
_WANTED = "omniattn_wanted"


def bloom_forward(
    self: Any,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor,
    attention_mask: Tensor | None,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Maps hidden_states (B, T, E) to the same shape and adds the residual.

    alibi (B H, 1, Tk) is the bias of the keys, attention_mask additive (B, 1, T, Tk).
    """
    q, k, v = self._reshape(self.query_key_value(hidden_states))
    if layer_past is not None:
        k, v = layer_past.update(k, v, self.layer_idx)
    out, weights = attention_forward(
        self,
        q,
        k,
        v,
        _as_bool(attention_mask),
        dropout=self.attention_dropout.p if self.training else 0.0,
        scaling=self.inv_norm_factor,
        is_causal=False,
        position_bias=alibi.view(-1, self.num_heads, 1, alibi.shape[-1]),
        output_attentions=output_attentions,
    )
    y = nn.functional.dropout(self.dense(out.flatten(2)), self.hidden_dropout, self.training)
    return residual + y, weights


def mpt_forward(
    self: Any,
    hidden_states: Tensor,
    position_bias: Tensor | None,
    cache: Any = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Maps hidden_states (B, T, E) to the same shape.

    position_bias (H, 1 | T, Tk or more) is that of the last keys; attention_mask is True for pairs
    that may not attend.
    """
    cache = kwargs.pop("past_key_values", None) if cache is None else cache  # until 5.23
    mixed = self.Wqkv(hidden_states)
    if self.clip_qkv:
        mixed = mixed.clamp(-self.clip_qkv, self.clip_qkv)
    heads = (t.unflatten(-1, (self.n_heads, self.head_dim)) for t in mixed.chunk(3, 2))
    q, k, v = (t.transpose(1, 2) for t in heads)
    if cache is not None:
        k, v = cache.update(k, v, self.layer_idx)
    bias = None
    if position_bias is not None:
        rows = q.shape[2] + (0 if cache is None else cache.get_seq_length())
        first = max(0, position_bias.shape[1] - rows)
        bias = position_bias[None, :, first:, max(0, position_bias.shape[2] - k.shape[2]) :]
    out, weights = attention_forward(
        self,
        q,
        k,
        v,
        None if attention_mask is None else ~attention_mask,
        dropout=self.attn_dropout_p if self.training else 0.0,
        scaling=self.softmax_scale,
        is_causal=False,
        position_bias=bias,
        output_attentions=vars(self).get(_WANTED, False),
    )
    return self.out_proj(out.flatten(2)), weights


def mpt_block_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs the block's own forward and tells its attention if weights are wanted.

    The block's own forward does not, as the layer's own attention always returns them.
    """
    forward = self.omniattn_original.forward
    given = inspect.signature(forward).bind(self, *args, **kwargs).arguments
    vars(self.attn)[_WANTED] = bool(given.get("output_attentions"))
    try:
        return forward(self, *args, **kwargs)
    finally:
        del vars(self.attn)[_WANTED]


def _as_bool(mask: Tensor | None) -> Tensor | None:
    """Returns an additive mask of 0 and the lowest number as bool, which needs no bias (T, Tk)."""
    if mask is None or torch.compiler.is_compiling():
        return mask
    seen = mask == 0
    lowest = torch.finfo(mask.dtype).min
    return seen if bool((seen | (mask <= lowest)).all()) else mask


def find_alibi(module: nn.Module) -> Finding:
    """Returns our forward for layers that are equivalent to it."""
    kind: Any = type(module)
    layer: Any = module
    if kind.__name__ == "BloomAttention":
        if layer.pretraining_tp > 1 and layer.slow_but_exact:
            return Left("it multiplies in slices")
        return _bloom(kind)
    if kind.__name__ == "MptBlock" and callable(find_alibi(layer.attn)):
        return mpt_block_forward
    return _mpt(kind) if kind.__name__ == "MptAttention" else None


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Returns states (2, 6, 8), the visible pairs (2, 1, 6, 6) and a bias (4, 1, 6)."""
    x = torch.randn(2, 6, 8, dtype=torch.float32)
    seen = torch.ones(6, 6, dtype=torch.bool).tril().expand(2, 1, -1, -1).clone()
    seen[1, :, :, 0] = False
    seen[1, :, 0, 0] = True
    return x, seen, torch.randn(4, 1, 6, dtype=torch.float32)


def _as_large(ours: Tensor, theirs: Tensor) -> bool:
    return torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@functools.cache
def _bloom(kind: Any) -> Finding:
    taken = list(inspect.signature(kind.forward).parameters)
    ours = list(inspect.signature(bloom_forward).parameters)
    if taken != ours:
        return Left(f"its forward takes {', '.join(taken[1:])}")
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    more = {"pretraining_tp": 1, "slow_but_exact": False}
    with probing():
        layer = kind(SimpleNamespace(hidden_size=8, n_head=2, **options, **more), 0).float()
        x, seen, bias = _inputs()
        mask = torch.zeros_like(seen, dtype=x.dtype).masked_fill(~seen, torch.finfo(x.dtype).min)
        given = x, x.flip(0), bias, mask
        same = _as_large(bloom_forward(layer, *given)[0], kind.forward(layer, *given)[0])
    return bloom_forward if same else Left("it computes something else")


@functools.cache
def _mpt(kind: Any) -> Finding:
    for name in ("hidden_states", "position_bias", "attention_mask"):
        if name not in (taken := inspect.signature(kind.forward).parameters):
            return Left(f"its forward takes {', '.join(taken)}")
    options = SimpleNamespace(softmax_scale=0.3, attn_pdrop=0.0, clip_qkv=0.5)
    with probing():
        sizes = {"hidden_size": 8, "n_heads": 2, "max_seq_len": 9}
        layer = kind(SimpleNamespace(**sizes, attn_config=options), 0).float()
        x, seen, bias = _inputs()
        given = {"position_bias": bias[:2], "attention_mask": ~seen}
        same = _as_large(mpt_forward(layer, x, **given)[0], kind.forward(layer, x, **given)[0])
    return mpt_forward if same else Left("it computes something else")
