"""Attention of transformers' layers to keys chosen by an indexer.

The indexer chooses single keys (DeepSeek-V3.2 and successors) or blocks of keys (MiniMax-M3).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from omniattn import functional
from omniattn.functional import masks
from omniattn.hf.attention.masks import RuleMask

__all__ = ["attention_to_chosen"]


def attention_to_chosen(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    indices: Tensor | None,
    block_indices: Tensor | None,
    *,
    packed: masks.Mask | None,
    output_attentions: bool,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Computes attention to the keys that are both chosen and unmasked.

    Args:
        module: the calling layer, whose indexer has the block size.
        query: (B, Hq, Tq, D).
        key: (B, Hkv, Tk, D).
        value: (B, Hkv, Tk, Dv).
        attention_mask: mask over all keys; None is causal.
        indices: (B, Tq, n) key indices, possibly masked ones: a query with fewer than n unmasked
            keys gets arbitrary others.
        block_indices: (B, Hkv, Tq, n) block indices instead, -1 for none.
        packed: mask of pairs within the same packed sequence.
        output_attentions: return the weights as well.
        options: scale, softcap, sinks and dropout_p of `functional.selected_attention`.

    Returns:
        (B, Tq, Hq, Dv), and the weights (B, Hq, Tq, Tk) before dropout or None.
    """
    keys, block = key.shape[2], 1
    whole_blocks = block_indices is not None and packed is None and _is_causal(attention_mask)
    if whole_blocks:
        assert isinstance(attention_mask, RuleMask) and block_indices is not None
        keys, block, lists = attention_mask.keys, _block_size(module), block_indices
    else:
        chosen = _tokens(module, indices, block_indices, keys)
        lists = _without_hidden(module, chosen, attention_mask, packed, query.shape[2], keys)
    q, k, v = (x.transpose(1, 2) for x in (query, key[:, :, :keys], value[:, :, :keys]))
    attend = functional.selected_attention
    options |= {"block_size": block, "causal": whole_blocks}
    if not output_attentions:
        return attend(q, k, v, lists, **options), None
    out, lse = attend(q, k, v, lists, return_lse=True, **options)
    weights = _weights(q, k, lse, lists, options)
    return out, nn.functional.pad(weights, (0, key.shape[2] - keys))


def _is_causal(mask: Tensor | None) -> bool:
    return isinstance(mask, RuleMask) and mask.rules == masks.All((masks.Causal(),))


def _block_size(module: Any) -> int:
    return int(module.indexer.block_size)


def _tokens(
    module: nn.Module, indices: Tensor | None, block_indices: Tensor | None, keys: int
) -> Tensor:
    """Returns the chosen keys (B, 1 | Hkv, Tq, n), -1 for none."""
    if block_indices is None:
        assert indices is not None
        return indices[:, None]
    size = _block_size(module)
    inside = torch.arange(size, device=block_indices.device)
    found = block_indices[..., None] * size + inside
    return found.masked_fill((block_indices[..., None] < 0) | (found >= keys), -1).flatten(3)


def _without_hidden(
    module: nn.Module,
    chosen: Tensor,
    mask: Tensor | None,
    packed: masks.Mask | None,
    queries: int,
    keys: int,
) -> Tensor:
    """Returns `chosen` with -1 for masked keys."""
    if mask is None:  # causal: one new token, or queries from the first key
        if queries > 1:
            chosen = _up_to(chosen, 0)
    elif isinstance(mask, RuleMask) and (parts := _plain_rules(mask)) is not None:
        chosen = _up_to(chosen, mask.keys - queries)
        for part in parts:
            if isinstance(part, masks.KeyLengths):
                chosen = chosen.masked_fill(chosen >= part.lengths[:, None, None, None], -1)
            elif isinstance(part, masks.KeyPadding):
                chosen = _where(chosen, part.real[:, None, None].expand(-1, -1, queries, -1))
    else:
        chosen = _where(chosen, _visible(module, mask))
    return chosen if packed is None else _where(chosen, packed.dense(queries, keys))


def _plain_rules(mask: RuleMask) -> tuple[masks.Mask, ...] | None:
    """Returns the rules of a causal mask with padding, which need no dense mask; else None."""
    rules = mask.rules
    if not isinstance(rules, masks.All) or rules.masks[:1] != (masks.Causal(),):
        return None
    padding = (masks.KeyLengths, masks.KeyPadding)
    return rules.masks if all(isinstance(each, padding) for each in rules.masks[1:]) else None


def _up_to(chosen: Tensor, first: int) -> Tensor:
    """Returns `chosen` with -1 for keys after query i's own position, `first` + i."""
    rows = torch.arange(first, first + chosen.shape[2], device=chosen.device)[:, None]
    return chosen.masked_fill(chosen > rows, -1)


def _where(chosen: Tensor, seen: Tensor) -> Tensor:
    """Returns `chosen` (B, H, Tq, n) with -1 where seen (B | 1, 1 | H, Tq, Tk) is False."""
    every = seen.expand(*chosen.shape[:2], -1, -1)
    return chosen.masked_fill(~every.gather(3, chosen.clamp(min=0).long()), -1)


def _visible(module: nn.Module, mask: Tensor) -> Tensor:
    if isinstance(mask, RuleMask):
        return mask.visible()
    if mask.dtype == torch.bool:
        return mask
    seen = mask == 0
    # A traced tensor has no values to check.
    if torch.compiler.is_compiling() or bool((seen | (mask < -1e4)).all()):
        return seen
    raise NotImplementedError(
        f"omniattn.hf: {type(module).__name__} attends to chosen keys with an attention_mask of "
        "other values than 0 and large negative numbers, which is not supported; use "
        'attn_implementation="eager"'
    )


def _weights(q: Tensor, k: Tensor, lse: Tensor, lists: Tensor, options: dict[str, Any]) -> Tensor:
    """Computes the weights (B, Hq, Tq, Tk) of a call from its lists of keys."""
    block = options["block_size"]
    blocks = -(-k.shape[1] // block)
    shape = (*lists.shape[:3], blocks + 1)
    target = torch.where(lists < 0, blocks, lists).long()
    listed = torch.zeros(shape, dtype=torch.bool, device=q.device).scatter(3, target, 1)
    listed = listed[..., :blocks].repeat_interleave(block, 3)[..., : k.shape[1]]
    if listed.shape[1] > 1:
        listed = listed.repeat_interleave(q.shape[2] // listed.shape[1], 1)
    kept = {name: options[name] for name in ("scale", "softcap", "sinks", "causal")}
    return functional.attention_weights(q, k, lse, mask=masks.BoolMask(listed), **kept)
