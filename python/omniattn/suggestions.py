"""Suggestions for unknown names in errors; does not import torch."""

from __future__ import annotations

import difflib
from collections.abc import Collection

#: Name in another library -> our name, to suggest for unknown keywords.
ELSEWHERE = {
    "attention_mask": "mask",
    "attn_mask": "mask",
    "block_mask": "mask",
    "dropout": "dropout_p",
    "embed_dim": "dim",
    "hidden_act": "activation",
    "hidden_size": "dim",
    "intermediate_size": "hidden_dim",
    "is_causal": "causal",
    "key_padding_mask": "mask",
    "learning_rate": "lr",
    "logits_soft_cap": "softcap",
    "max_position_embeddings": "max_positions",
    "n_embd": "dim",
    "n_head": "num_heads",
    "n_layer": "num_layers",
    "norm_epsilon": "norm_eps",
    "num_attention_heads": "num_heads",
    "num_hidden_layers": "num_layers",
    "num_key_value_heads": "num_kv_heads",
    "padding_mask": "mask",
    "rms_norm_eps": "norm_eps",
    "s_aux": "sinks",
    "softmax_scale": "scale",
    "state_cache": "state",
    "tie_word_embeddings": "tie_embeddings",
}


def did_you_mean(name: object, known: Collection[str]) -> str:
    """Returns `"; did you mean 'x'?"` for the known name nearest to `name`, or ""."""
    if not isinstance(name, str):
        return ""
    found = [ours] if (ours := ELSEWHERE.get(name)) in known else _nearest(name, known)
    return f"; did you mean {found[0]!r}?" if found else ""


def _nearest(name: str, known: Collection[str]) -> list[str]:
    lower = {each.lower(): each for each in known}
    return [lower[each] for each in difflib.get_close_matches(name.lower(), lower, 1)]
