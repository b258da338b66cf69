"""The attention function of attn_implementation="omniattn"."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from omniattn import functional
from omniattn.functional import masks
from omniattn.hf.masks import RuleMask

__all__ = ["attention_forward"]

#: Keywords of transformers' attention functions that change the result and are not computed here:
#: chosen keys (DeepSeek-V3.2, MiniMax-M3), sinks of each query (Inkling 2), paged caches, weights.
#: All others pass by: models hand on whatever they were called with, also what belongs to a loss, a
#: collator or another layer, so that no list of those can be complete. A test holds this one
#: against all calls of attention functions in the installed transformers.
UNSUPPORTED = frozenset(
    {
        "block_indices",
        "block_table",
        "cache",
        "cache_seqlens",
        "indices",
        "k_cache",
        "output_attentions",
        "sinks",
        "v_cache",
    }
)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of a transformers model, by :func:`omniattn.functional.attention`.

    Args:
        module: the calling layer; without a mask its `is_causal` decides.
        query: (B, Hq, Tq, D).
        key: (B, Hkv, Tk, D).
        value: (B, Hkv, Tk, Dv).
        attention_mask: a RuleMask, bool (True = attend) or additive float.
        dropout, scaling, softcap, s_aux (sinks), position_bias: of the layer.
        is_causal: overrides `module.is_causal`.
        sliding_window: acts where no mask is given; a mask already contains it.
        cu_seq_lens_q, cu_seq_lens_k: ends of the sequences packed in a row of a batch of one.

    Returns:
        (B, Tq, Hq, Dv) and None.

    Raises:
        NotImplementedError: a keyword that changes the result and is not computed here.
        ValueError: no mask, and the layer does not say whether it is causal.
    """
    unsupported = [
        name
        for name, x in kwargs.items()
        if name in UNSUPPORTED and x is not None and x is not False
    ]
    if unsupported:
        raise NotImplementedError(
            f"omniattn.hf: {type(module).__name__} passes {', '.join(unsupported)}, which this "
            'attention does not compute; use attn_implementation="eager"'
        )
    if attention_mask is None and getattr(module, "compressor", None) is not None:
        raise NotImplementedError(  # only compiled models get no mask
            f"omniattn.hf: {type(module).__name__} appends compressed keys and their mask to a "
            'mask, which compiled models do not have; use attn_implementation="eager" to compile it'
        )
    keys = key.shape[2]
    mask: masks.Mask | None = None
    bias = position_bias
    if isinstance(attention_mask, RuleMask) and attention_mask.rules == masks.All(()):
        mask = None  # fits any keys: BERT as a decoder makes it for the new token alone
    elif isinstance(attention_mask, RuleMask):
        if attention_mask.shape[2:] != (query.shape[2], keys):
            raise ValueError(
                f"omniattn.hf: {type(module).__name__} must attend to what its mask was made for, "
                f"got Tq={query.shape[2]}, Tk={keys}, {attention_mask!r}"
            )
        mask, keys = attention_mask.rules, attention_mask.keys
    elif attention_mask is None:
        mask = _default_mask(module, query.shape[2], is_causal, sliding_window)
    elif attention_mask.dtype == torch.bool:
        mask = masks.BoolMask(attention_mask)
    elif bias is None:
        bias = attention_mask
    else:
        bias = bias + attention_mask
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        packed = _packed_mask(cu_seq_lens_q, cu_seq_lens_k, query, key)
        mask = packed if mask is None else packed & mask
    if bias is not None:
        bias = bias[..., :keys]
    if query.shape[0] == 1:
        query = query.expand(key.shape[0], -1, -1, -1)
    q, k, v = (x.transpose(1, 2) for x in (query, key[:, :, :keys], value[:, :, :keys]))
    out = functional.attention(
        q,
        k,
        v,
        mask=mask,
        bias=bias,
        scale=scaling,
        softcap=softcap or 0.0,
        sinks=s_aux,
        dropout_p=dropout,
    )
    return out, None


def _default_mask(
    module: nn.Module, queries: int, is_causal: bool | None, window: int | None
) -> masks.Mask | None:
    """What transformers means by no mask: one new token, or queries from the first key on."""
    if is_causal is None:
        is_causal = getattr(module, "is_causal", None)
    if is_causal is None or (window is not None and not is_causal):
        raise ValueError(
            f"omniattn.hf: {type(module).__name__} must give a mask, or is_causal and no window "
            f"unless causal, got is_causal={is_causal}, sliding_window={window}"
        )
    left = -1 if window is None else window - 1
    if queries == 1:
        return masks.SlidingWindow(left, -1)
    return masks.SlidingWindow(left, 0, top_left=True) if is_causal else None


def _packed_mask(
    cu_q: Tensor | None, cu_k: Tensor | None, query: Tensor, key: Tensor
) -> masks.Mask:
    """Pairs within one of the sequences that are packed in a row."""
    if cu_q is None or cu_k is None or query.shape[0] != 1:
        raise ValueError(
            "omniattn.hf: cu_seq_lens_q and cu_seq_lens_k must come together and with a batch of "
            f"one, got cu_seq_lens_q={cu_q}, cu_seq_lens_k={cu_k}, B={query.shape[0]}"
        )
    queries, keys = (masks.Documents.from_cu_seqlens(cu).queries for cu in (cu_q, cu_k))
    return masks.Documents(queries, keys)
