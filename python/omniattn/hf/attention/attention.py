"""The attention function of attn_implementation="omniattn"."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.utils.output_capturing import _active_collector

from omniattn import functional
from omniattn.functional import masks
from omniattn.hf.attention.masks import RuleMask
from omniattn.hf.attention.paged import is_paged, paged_attention
from omniattn.hf.attention.selected import attention_to_chosen
from omniattn.hf.common.packed import active

__all__ = ["attention_forward", "collects_weights"]

#: Keywords of transformers' attention functions that change the result and are not supported: the
#: caches of FlashAttention kernels.
#: Other keywords are ignored: models forward all their keyword arguments, also arguments of a
#: loss, a collator or another layer, so no list can be complete. A test compares this list with all
#: calls of attention functions in the installed transformers.
UNSUPPORTED = frozenset({"block_table", "cache", "cache_seqlens", "k_cache", "v_cache"})
#: Layers that set `is_causal` but attend to all keys when they get no mask.
_NEVER_CAUSAL = ("BridgeTowerSelfAttention",)


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
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Any = None,
    output_attentions: bool | None = None,
    cache: PagedAttentionCache | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Computes the attention of a transformers layer by :func:`omniattn.functional.attention`.

    Args:
        module: the calling layer; without a mask its `is_causal` decides.
        query: (B, Hq, Tq, D).
        key: (B, Hkv, Tk, D).
        value: (B, Hkv, Tk, Dv).
        attention_mask: a RuleMask, bool (True = attend) or additive float.
        dropout, scaling, softcap, s_aux (sinks), position_bias: of the layer.
        sinks: (B, Hq, Tq, 1), sinks of each query (Inkling 2).
        is_causal: overrides `module.is_causal`.
        sliding_window: used only without a mask; a mask already contains it.
        cu_seq_lens_q, cu_seq_lens_k: cumulative lengths of the sequences packed in one row.
        output_attentions: return the weights as well; the layer's config can request them, too.
        cache: of continuous batching, up to transformers 5.23; the mask is then ignored.
        indices: (B, Tq, n) keys chosen by an indexer (DeepSeek-V3.2), possibly masked ones.
        block_indices: (B, Hkv, Tq, n) blocks of keys chosen by it (MiniMax-M3), -1 for none.

    Returns:
        (B, Tq, Hq, Dv), and the weights (B, Hq, Tq, Tk) before dropout or None.

    Raises:
        NotImplementedError: a keyword that changes the result is not supported.
        ValueError: neither a mask nor `is_causal` is given.
    """
    paged = is_paged(cache, kwargs)
    _check_supported(module, attention_mask, {**kwargs, "cache": None if paged else cache})
    output_attentions = output_attentions or collects_weights(module)
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux}
    chooses = indices is not None or block_indices is not None
    other = bool(output_attentions) or cu_seq_lens_q is None
    if sinks is not None:
        options["sinks"] = sinks.squeeze(-1)
    only_alone = {"position_bias": position_bias, "sinks": sinks}
    _check_combined(module, only_alone, chooses, paged, other)
    if paged:
        assert cu_seq_lens_q is not None
        return paged_attention(
            module,
            query,
            key,
            value,
            cache,
            cu_seq_lens_q,
            cu_seq_lens_k=cu_seq_lens_k,
            **options,
            **kwargs,
        ), None
    packed = None
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        packed = _packed_mask(cu_seq_lens_q, cu_seq_lens_k, query, key)
    elif (packing := active()) is not None and not _has_documents(attention_mask):
        packed = packing.mask()  # the model's own mask ignores packing
    if chooses:
        options |= {"dropout_p": dropout, "packed": packed}
        options["output_attentions"] = bool(output_attentions)
        return attention_to_chosen(
            *(module, query, key, value, attention_mask, indices, block_indices), **options
        )
    mask, bias, keys = _mask_and_bias(
        module, query, key, attention_mask, position_bias, is_causal, sliding_window
    )
    if packed is not None:
        mask = packed if mask is None else packed & mask
    if query.shape[0] == 1:
        query = query.expand(key.shape[0], -1, -1, -1)
    q, k, v = (x.transpose(1, 2) for x in (query, key[:, :, :keys], value[:, :, :keys]))
    options |= {"bias": bias, **_as_options(mask)}
    if not output_attentions:
        return functional.attention(q, k, v, dropout_p=dropout, **options), None
    out, lse = functional.attention(q, k, v, dropout_p=dropout, return_lse=True, **options)
    weights = functional.attention_weights(q, k, lse, **options)
    return out, nn.functional.pad(weights, (0, key.shape[2] - keys))


def collects_weights(module: nn.Module) -> bool:
    """Returns True if weights are requested by the config or by the model's output hooks.

    Layers such as GPT-2's do not pass such requests on as `output_attentions`.
    """
    if getattr(getattr(module, "config", None), "output_attentions", False):
        return True
    if torch.compiler.is_compiling():
        return False
    return any(key.endswith("attentions") for key in _active_collector.get() or ())


def _has_documents(mask: Tensor | None) -> bool:
    if not isinstance(mask, RuleMask) or not isinstance(mask.rules, masks.All):
        return False
    return any(isinstance(rule, masks.Documents) for rule in mask.rules.masks)


def _check_supported(
    module: nn.Module, attention_mask: Tensor | None, given: dict[str, Any]
) -> None:
    """Raises NotImplementedError for arguments that this package does not support."""
    unsupported = [
        name
        for name, x in given.items()
        if name in UNSUPPORTED and x is not None and x is not False
    ]
    if unsupported:
        raise NotImplementedError(
            f"omniattn.hf: {type(module).__name__} passes {', '.join(unsupported)}, which this "
            'attention does not compute; use attn_implementation="eager"'
        )
    if attention_mask is None and getattr(module, "compressor", None) is not None:
        raise NotImplementedError(  # only compiled models call it without a mask
            f"omniattn.hf: {type(module).__name__} appends compressed keys and their mask to a "
            'mask, which compiled models do not have; use attn_implementation="eager" to compile it'
        )


def _check_combined(
    module: nn.Module, given: dict[str, Tensor | None], chooses: bool, paged: bool, other: bool
) -> None:
    """Raises NotImplementedError for arguments that are supported only separately.

    `given` has arguments that neither chosen keys nor continuous batching support; `other` is True
    for further ones that the latter does not.
    """
    passed = [name for name, x in given.items() if x is not None]
    if paged and (chooses or other or passed):
        raise NotImplementedError(
            f"omniattn.hf: {type(module).__name__} supports no {', '.join(given)}, chosen keys or "
            'attention weights in continuous batching; use attn_implementation="paged|eager"'
        )
    if chooses and passed:
        raise NotImplementedError(
            f"omniattn.hf: {type(module).__name__} passes {', '.join(passed)} with chosen keys, "
            'which is not supported together; use attn_implementation="eager"'
        )


def _mask_and_bias(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    bias: Tensor | None,
    is_causal: bool | None,
    window: int | None,
) -> tuple[masks.Mask | None, Tensor | None, int]:
    """Converts transformers' mask arguments to mask rules, a bias and the number of keys."""
    keys = key.shape[2]
    mask: masks.Mask | None = None
    if isinstance(attention_mask, RuleMask) and attention_mask.rules == masks.All(()):
        mask = None  # valid for any keys: BERT as a decoder makes it for the new token only
    elif isinstance(attention_mask, RuleMask) and _is_of_first_token(attention_mask, query):
        mask = None  # broadcasts: made for no past keys if the cache's first layer has none
    elif isinstance(attention_mask, RuleMask) and _is_of_one_query(attention_mask, query, keys):
        mask = masks.BoolMask(attention_mask.visible())  # broadcasts over queries: BridgeTower
    elif isinstance(attention_mask, RuleMask):
        if attention_mask.shape[2:] != (query.shape[2], keys):
            raise ValueError(
                f"omniattn.hf: {type(module).__name__} must attend with the lengths of its mask, "
                f"got Tq={query.shape[2]}, Tk={keys}, {attention_mask!r}{_remedy(attention_mask)}"
            )
        mask, keys = attention_mask.rules, attention_mask.keys
    elif attention_mask is None:
        mask = _default_mask(module, query.shape[2], is_causal, window)
    elif attention_mask.dtype == torch.bool:
        mask = masks.BoolMask(attention_mask)
    elif bias is None:
        bias = attention_mask
    else:
        bias = bias + attention_mask
    return mask, None if bias is None else bias[..., :keys], keys


def _as_options(mask: masks.Mask | None) -> dict[str, Any]:
    """Returns the options of `functional.attention` for a mask; plain values are encoded once."""
    if isinstance(mask, masks.All) and len(mask.masks) == 1:
        (mask,) = mask.masks
    if type(mask) is masks.Causal:
        return {"causal": True}
    if type(mask) is masks.SlidingWindow and not mask.top_left:
        return {"window_size": (mask.left, mask.right)}
    return {"mask": mask}


def _remedy(mask: RuleMask) -> str:
    """Returns the error's advice for a model whose first layer has no attention, hence no keys."""
    if mask.shape[3] > 1:
        return ""
    return (
        "; after a first layer of linear attention, a mask of padded tokens is made for one key: "
        "pass use_cache=False, or prompts without padding"
    )


def _is_of_first_token(mask: RuleMask, query: Tensor) -> bool:
    causal = masks.All((masks.Causal(),))
    return query.shape[2] == 1 and mask.shape[2:] == (1, 1) and mask.rules == causal


def _is_of_one_query(mask: RuleMask, query: Tensor, keys: int) -> bool:
    return query.shape[2] > 1 and mask.shape[2:] == (1, keys)


def _default_mask(
    module: nn.Module, queries: int, is_causal: bool | None, window: int | None
) -> masks.Mask | None:
    """Returns the mask that None implies: for one new token, or for queries from the first key."""
    if is_causal is None:
        is_causal = getattr(module, "is_causal", None)
    if is_causal is None or (window is not None and not is_causal):
        raise ValueError(
            f"omniattn.hf: {type(module).__name__} must give a mask, or is_causal and no window "
            f"unless causal, got is_causal={is_causal}, sliding_window={window}"
        )
    left = -1 if window is None else window - 1
    if type(module).__name__ in _NEVER_CAUSAL:
        is_causal = False
    if queries == 1:
        return masks.SlidingWindow(left, -1)
    return masks.SlidingWindow(left, 0, top_left=True) if is_causal else None


def _packed_mask(
    cu_q: Tensor | None, cu_k: Tensor | None, query: Tensor, key: Tensor
) -> masks.Mask:
    """Returns the mask of pairs within the same packed sequence."""
    if cu_q is None or cu_k is None or query.shape[0] != 1:
        raise ValueError(
            "omniattn.hf: cu_seq_lens_q and cu_seq_lens_k must come together and with a batch of "
            f"one, got cu_seq_lens_q={cu_q}, cu_seq_lens_k={cu_k}, B={query.shape[0]}"
        )
    of = masks.Documents.from_cu_seqlens
    return masks.Documents(of(cu_q, query.shape[2]).queries, of(cu_k, key.shape[2]).queries)
