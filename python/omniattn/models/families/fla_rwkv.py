"""Folders of flash-linear-attention's RWKV-6 and RWKV-7."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from omniattn.models.families.rwkv import RWKV6Config, RWKV7Config

#: Options of both, with their defaults in fla, and options that must have one value.
OPTIONS: dict[str, Any] = {
    "hidden_act": "sqrelu",
    "norm_eps": 1e-5,
    "norm_first": True,
    "norm_bias": True,
    "elementwise_affine": True,
}
FIXED: dict[str, Any] = {"hidden_act": "sqrelu", "norm_first": True, "norm_bias": True}
RANKS = {"decay": 64, "gate": 128, "a": 64, "v": 16}
_NAMES = (
    (r"^model\.embeddings\.", "embed_tokens."),
    (r"^model\.", ""),
    (r"^layers\.0\.pre_norm\.", "embed_norm."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.attn\.", ".mixer."),
    (r"\.ffn\.", ".mlp."),
    (r"\.mixer\.g_norm\.", ".mixer.ln_x."),
    (r"\.mixer\.r_proj\.(linear\.)?", ".mixer.receptance."),
    (r"\.mixer\.k_proj\.(linear\.)?", ".mixer.key."),
    (r"\.mixer\.v_proj\.(linear\.)?", ".mixer.value."),
    (r"\.mixer\.g_proj\.(linear\.)?", ".mixer.gate."),
    (r"\.mixer\.o_proj\.", ".mixer.output."),
    (r"\.mixer\.bonus$", ".mixer.time_faaaa"),
    (r"\.mixer\.x_proj\.0\.mu$", ".mixer.time_maa_x"),
    (r"\.mixer\.x_proj\.0\.linear\.weight$", ".mixer.time_maa_w1"),
    (r"\.mixer\.x_proj\.2\.weight$", ".mixer.time_maa_w2"),
    (r"\.mixer\.w_proj\.linear\.lora\.0\.weight$", ".mixer.time_decay_w1"),
    (r"\.mixer\.w_proj\.linear\.lora\.2\.weight$", ".mixer.time_decay_w2"),
    (r"\.mixer\.w_proj\.linear\.lora\.2\.bias$", ".mixer.time_decay"),
    (r"\.mixer\.(\w)_lora\.lora\.0\.weight$", r".mixer.\g<1>1"),
    (r"\.mixer\.(\w)_lora\.lora\.2\.weight$", r".mixer.\g<1>2"),
    (r"\.mixer\.(\w)_lora\.lora\.2\.bias$", r".mixer.\g<1>0"),
    (r"\.mlp\.(key|receptance)\.mu$", lambda found: f".mlp.time_maa_{found[1][0]}"),
    (r"\.mlp\.(key|receptance)\.linear\.", r".mlp.\1."),
)
#: Vectors, which have shape (1, 1, dim) here, and matrices, which are transposed.
_VECTORS = re.compile(r"\.(x_\w|k_k|k_a|[wav]0|time_maa_[xwkvrg]|time_decay)$")
_MATRICES = re.compile(r"\.([wavg][12]|time_decay_w[12])$")
#: Order of the five parts in fla and here.
_THEIRS, _OURS = "rwkvg", "wkvrg"


def rwkv7(o: Mapping[str, Any]) -> RWKV7Config:
    dim = o["hidden_size"]
    head_dim = o["head_dim"] or dim // o["num_heads"]
    widths = o["value_dim"] if isinstance(o["value_dim"], list) else [o["value_dim"]]
    if any(width not in (None, dim) for width in widths):
        raise NotImplementedError(
            f"from_hf: value_dim must be hidden_size in a model of fla of type 'rwkv7', got "
            f"value_dim={o['value_dim']}, hidden_size={dim}"
        )
    ranks: dict[str, Any] = {f"{part}_rank": o[f"{part}_low_rank_dim"] for part in RANKS}
    return RWKV7Config(
        **_sizes(o, 4),
        **ranks,
        head_dim=head_dim,
        head_norm_eps=head_dim * o["norm_eps"],
    )


def rwkv6(o: Mapping[str, Any]) -> RWKV6Config:
    return RWKV6Config(
        **_sizes(o, 3.5),
        head_dim=o["hidden_size"] // o["num_heads"],
        mix_rank=o["proj_low_rank_dim"],
        decay_rank=o["gate_low_rank_dim"],
        head_norm_eps=o["norm_eps"],
    )


def _sizes(o: Mapping[str, Any], ratio: float) -> dict[str, Any]:
    dim, hidden = o["hidden_size"], o["intermediate_size"]
    if hidden is None:
        hidden = -(-int(dim * (o["hidden_ratio"] or ratio)) // 32) * 32
    return {
        "vocab_size": o["vocab_size"],
        "dim": dim,
        "num_layers": o["num_hidden_layers"],
        "tie_embeddings": o["tie_word_embeddings"],
        "hidden_dim": None if hidden == 4 * dim else hidden,
        "norm_eps": o["norm_eps"],
    }


def weights(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns fla's weights with our names and shapes."""
    ours: dict[str, Tensor] = {}
    for theirs, t in found.items():
        name = theirs
        for pattern, replacement in _NAMES:
            name = re.sub(pattern, replacement, name)
        stem, _, last = name.rpartition(".")
        if last == "x_x":  # the former name of x_r to x_g
            parts = {f"{stem}.x_{part}": each for part, each in zip("rwkvag", t, strict=True)}
        elif last == "x_bias":
            parts = {f"{stem}.time_maa_{part}": each for part, each in zip(_THEIRS, t, strict=True)}
        elif last == "time_maa_w1":
            parts = {name: _ordered(t.unflatten(0, (5, -1))).flatten(0, 1).mT}
        elif last == "time_maa_w2":
            parts = {name: _ordered(t.unflatten(1, (5, -1)).permute(1, 2, 0))}
        else:
            parts = {name: t.mT if _MATRICES.search(name) else t}
        for key, part in parts.items():
            ours[key] = part.reshape(1, 1, -1) if _VECTORS.search(key) else part
    return {name: t.contiguous() for name, t in ours.items()}


def _ordered(parts: Tensor) -> Tensor:
    """Returns the five parts in our order."""
    return parts[[_THEIRS.index(part) for part in _OURS]]
