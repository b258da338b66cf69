"""Attention of Longformer and LED, whose global tokens have separate projections."""

from __future__ import annotations

import functools
import inspect
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from omniattn.functional import longformer_attention
from omniattn.hf.attention.attention import collects_weights
from omniattn.hf.common.probe import Finding, Left, probing

__all__ = ["find_longformer", "longformer_forward"]

_SETS = (("query", "key", "value"), ("query_global", "key_global", "value_global"))
_TAKEN = (
    *("hidden_states", "attention_mask", "is_index_masked", "is_index_global_attn"),
    *("is_global_attn", "output_attentions"),
)


def longformer_forward(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    is_index_masked: Tensor | None = None,
    is_index_global_attn: Tensor | None = None,
    is_global_attn: bool | None = None,
    output_attentions: bool = False,
) -> tuple[Tensor]:
    """Maps hidden_states (B, T, E) to the same shape.

    attention_mask (B, T) is negative for padding and positive for global tokens; the bool masks
    (B, T) repeat it.
    """
    if output_attentions or collects_weights(self):
        raise NotImplementedError(
            f"omniattn.hf: {type(self).__name__} gives no output_attentions with this package's "
            "attention; use omniattn.hf.patch(model, attention=False)"
        )
    if attention_mask is not None:
        is_index_masked = attention_mask < 0 if is_index_masked is None else is_index_masked
        if is_index_global_attn is None:
            is_index_global_attn = attention_mask > 0
    index = None
    if is_index_global_attn is not None and is_global_attn is not False:
        index = _positions(is_index_global_attn)
    sets = _SETS if index is not None else _SETS[:1]
    out = longformer_attention(
        *(
            getattr(self, name)(hidden_states).unflatten(-1, (self.num_heads, self.head_dim))
            for names in sets
            for name in names
        ),
        window=2 * self.one_sided_attn_window_size,
        global_index=index,
        key_padding=None if is_index_masked is None else ~is_index_masked,
        dropout_p=self.dropout if self.training else 0.0,
    )
    return (out.flatten(2),)


def _positions(marked: Tensor) -> Tensor:
    """Returns the positions (B, G) where a bool (B, T) is True, with -1 after a row's last."""
    count = marked.sum(1)
    order = torch.argsort((~marked).to(torch.uint8), dim=1, stable=True)[:, : int(count.max())]
    rank = torch.arange(order.shape[1], device=marked.device)
    return torch.where(rank < count[:, None], order, -1)


def find_longformer(module: nn.Module) -> Finding:
    """Returns :func:`longformer_forward` for layers equivalent to it."""
    kind: Any = type(module)
    if kind.__name__ not in ("LongformerSelfAttention", "LEDEncoderSelfAttention"):
        return None
    return _found(kind)


@functools.cache
def _found(kind: Any) -> Finding:
    taken = list(inspect.signature(kind.forward).parameters)[1:]
    if taken != list(_TAKEN):
        return Left(f"its forward takes {', '.join(taken)}")
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "attention_window": [4]}
    with probing():
        mask = torch.zeros(2, 12, dtype=torch.float32)
        mask[0, 9:], mask[0, 2], mask[1, 5:7] = -1e4, 1e4, 1e4
        layer = kind(SimpleNamespace(**sizes, attention_probs_dropout_prob=0.0), 0).float()
        given = torch.randn(2, 12, 8, dtype=mask.dtype), mask, mask < 0, mask > 0, True
        ours, theirs = longformer_forward(layer, *given)[0], kind.forward(layer, *given)[0]
    same = torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    return longformer_forward if same else Left("it computes something else")
