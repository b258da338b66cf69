"""Folders of flash-linear-attention's models, such as those of fla-hub, without fla.

The names are those of flash-linear-attention 0.5.2, commit bc3b101dcb71, `fla/models`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from omniattn.checks.arguments import shown
from omniattn.models.decoders.blocks import BlocksConfig
from omniattn.models.families import fla_rwkv
from omniattn.models.families.folders import built, tensors_of
from omniattn.models.model import Model, ModelConfig
from omniattn.modules import (
    HGRN,
    HGRN2,
    ABCAttention,
    Attention,
    Comba,
    DecoderBlock,
    DeltaNet,
    GatedDeltaNet,
    GatedDeltaProduct,
    GatedLinearAttention,
    GatedMLP,
    GatedSlotAttention,
    KimiDeltaAttention,
    LightNet,
    Mamba3,
    MultiScaleRetention,
    PaTHAttention,
    Raven,
    RMSNorm,
    RotaryEmbedding,
)
from omniattn.modules.base.layer import LayerConfig

#: Options that all models have, with their defaults in fla.
_COMMON: dict[str, Any] = {
    "hidden_size": 2048,
    "hidden_ratio": 4,
    "intermediate_size": None,
    "num_hidden_layers": 24,
    "hidden_act": "swish",
    "norm_eps": 1e-6,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
    "attn": None,
    "attnres_block_size": None,
    "elementwise_affine": True,
}
#: Options that must have one value.
_FIXED: dict[str, Any] = {"hidden_act": "swish", "attn": None, "attnres_block_size": None}
_FIXED |= {"elementwise_affine": True}


def _convolution(o: Mapping[str, Any]) -> int:
    return o["conv_size"] if o["use_short_conv"] else 0


def _heads(o: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the width of a layer, and number and widths of its heads."""
    dim, heads = o["hidden_size"], o["num_heads"]
    sizes = {"head_dim": int(dim * o["expand_k"]), "v_head_dim": int(dim * o["expand_v"])}
    return {"dim": dim, "num_heads": heads} | {name: n // heads for name, n in sizes.items()}


def _gla(o: Mapping[str, Any]) -> LayerConfig:
    return GatedLinearAttention.Config(
        **_heads(o),
        conv_size=_convolution(o),
        gate="silu" if o["use_output_gate"] else None,
        norm_eps=o["norm_eps"],
    )


def _retnet(o: Mapping[str, Any]) -> LayerConfig:
    return MultiScaleRetention.Config(
        **_heads(o),
        conv_size=_convolution(o),
        gate="silu" if o["use_output_gate"] else None,
        norm_eps=o["norm_eps"],
    )


def _delta_net(o: Mapping[str, Any]) -> LayerConfig:
    return DeltaNet.Config(
        **_heads(o),
        conv_size=_convolution(o),
        gate="silu" if o["use_gate"] else None,
        norm_eps=o["norm_eps"],
        allow_neg_eigval=o["allow_neg_eigval"],
    )


def _gated_delta_net(o: Mapping[str, Any]) -> LayerConfig:
    return GatedDeltaNet.Config(
        o["hidden_size"],
        o["num_heads"],
        o["num_v_heads"],
        o["head_dim"],
        int(o["head_dim"] * o["expand_v"]),
        conv_size=_convolution(o),
        gate="silu" if o["use_gate"] else None,
        norm_eps=o["norm_eps"],
        allow_neg_eigval=o["allow_neg_eigval"],
    )


def _kda(o: Mapping[str, Any]) -> LayerConfig:
    return KimiDeltaAttention.Config(
        o["hidden_size"],
        o["num_heads"],
        o["num_v_heads"],
        o["head_dim"],
        int(o["head_dim"] * o["expand_v"]),
        conv_size=_convolution(o),
        norm_eps=o["norm_eps"],
        allow_neg_eigval=o["allow_neg_eigval"],
        lower_bound=o["lower_bound"],
    )


def _hgrn2(o: Mapping[str, Any]) -> LayerConfig:
    heads = o["hidden_size"] // o["expand_ratio"] if o["expand_ratio"] else o["num_heads"]
    return HGRN2.Config(
        o["hidden_size"],
        heads,
        head_dim=o["expand_ratio"] or o["hidden_size"] // heads,
        v_head_dim=o["hidden_size"] // heads,
        conv_size=_convolution(o),  # fla's layer does not use norm_eps
        channel_bounds=o["use_lower_bound"],
    )


def _lightnet(o: Mapping[str, Any]) -> LayerConfig:
    dim = o["hidden_size"]
    heads = o["num_heads"] or dim // o["expand_ratio"]
    return LightNet.Config(
        dim,
        heads,
        head_dim=o["expand_ratio"] or dim // heads,
        v_head_dim=dim // heads,
        conv_size=_convolution(o),
        gate_rank=o["gate_low_rank_dim"],
        norm_eps=1e-6,  # fla's layer does not use norm_eps
    )


def _gsa(o: Mapping[str, Any]) -> LayerConfig:
    return GatedSlotAttention.Config(
        **_heads(o),
        conv_size=_convolution(o),
        num_slots=o["num_slots"],
        gate_normalizer=o["gate_logit_normalizer"],  # fla's layer does not use norm_eps
    )


def _raven(o: Mapping[str, Any]) -> LayerConfig:
    return Raven.Config(
        **_heads(o),
        num_slots=o["num_slots"],
        top_k=o["topk"],
        decay="heads" if o["decay_type"] == "Mamba2" else "slots",
        router=o["router_score"],
        noise=o["add_gumbel_noise"],
        norm_eps=o["norm_eps"],
    )


def _abc(o: Mapping[str, Any]) -> LayerConfig:
    if o["clamp_min"] != -o["clamp_max"]:
        raise NotImplementedError(
            f"from_hf: clamp_min must be -clamp_max, got clamp_min={shown(o['clamp_min'])}, "
            f"clamp_max={shown(o['clamp_max'])}"
        )
    return ABCAttention.Config(
        **_heads(o),
        conv_size=_convolution(o),
        num_slots=o["num_slots"],
        clamp=o["clamp_max"],
        norm_eps=o["norm_eps"],
    )


def _hgrn(o: Mapping[str, Any]) -> LayerConfig:
    return HGRN.Config(
        o["hidden_size"],
        o["expand_ratio"],
        conv_size=_convolution(o),
        norm_eps=o["norm_eps"],
        channel_bounds=o["use_lower_bound"],
    )


def _value_heads(o: Mapping[str, Any]) -> dict[str, Any]:
    sizes = {name: o[name] for name in ("num_heads", "num_v_heads", "head_dim")}
    return {"dim": o["hidden_size"], **sizes, "v_head_dim": int(o["head_dim"] * o["expand_v"])}


def _comba(o: Mapping[str, Any]) -> LayerConfig:
    return Comba.Config(
        **_value_heads(o),
        conv_size=_convolution(o),
        gate="sigmoid" if o["use_output_gate"] else None,
        norm_eps=o["norm_eps"],
    )


def _gated_delta_product(o: Mapping[str, Any]) -> LayerConfig:
    return GatedDeltaProduct.Config(
        **_value_heads(o),
        conv_size=_convolution(o),
        gate="silu" if o["use_output_gate"] else None,
        norm_eps=o["norm_eps"],
        allow_neg_eigval=o["allow_neg_eigval"],
        num_householder=o["num_householder"],
    )


def _softmax(o: Mapping[str, Any], **options: Any) -> LayerConfig:
    return Attention.Config(
        o["hidden_size"],
        o["num_heads"],
        o["num_kv_heads"],
        bias=o["qkv_bias"],
        qk_norm="rms" if o["qk_norm"] else None,
        qk_norm_eps=1e-5,
        **options,
    )


def _transformer(o: Mapping[str, Any]) -> LayerConfig:
    window = o["window_size"]
    return _softmax(o, window_size=(-1, -1) if window is None else (window - 1, 0))


def _forgetting_transformer(o: Mapping[str, Any]) -> LayerConfig:
    gate = "elementwise" if o["use_output_gate"] else None
    return _softmax(o, rotary=False, forget_gate=True, gate=gate)


def _path_attn(o: Mapping[str, Any]) -> LayerConfig:
    return PaTHAttention.Config(
        o["hidden_size"],
        o["num_heads"],
        o["num_kv_heads"],
        w_rank=32 if o["use_low_rank_w"] else None,
        conv_size=3 if o["use_w_shortconv"] else 0,
    )


_Kind = tuple[
    Callable[[Mapping[str, Any]], LayerConfig | ModelConfig], dict[str, Any], dict[str, Any]
]
_CONV = {"use_short_conv": True, "conv_size": 4}
_SCALED = {"expand_k": 1.0, "expand_v": 1.0, "num_heads": 4}
_KEYS = {"num_kv_heads": None, "feature_map": None, "use_output_gate": True}
_HEADS = {"head_dim": 256, "num_heads": 6, "num_v_heads": None, "expand_v": 2.0}
_SOFTMAX = {"num_heads": 32, "num_kv_heads": None, "qkv_bias": False, "qk_norm": False,
            "window_size": None}  # fmt: skip
_DELTA = {"allow_neg_eigval": False, "use_gate": True, "head_dim": 256, "num_v_heads": None}
_RAVEN = {"feature_map": "swish", "use_output_gate": False, "bias_rmm": False}
_RAVEN |= {"router_type": "lin", "gate_logit_normalizer": 8, "rope_theta": 10000.0}


def _mamba3(o: Mapping[str, Any]) -> BlocksConfig:
    dim, eps = o["hidden_size"], o["norm_eps"]
    names = {"d_state": "state_size", "headdim": "head_dim", "ngroups": "n_groups"}
    given = {name: o[names.get(name, name)] for name in _MAMBA3}
    mixer = Mamba3.Config(dim, **given, decay="softplus", norm_eps=eps)
    residual_in_fp32 = o["residual_in_fp32"]
    block = DecoderBlock.Config(
        mixer, None, RMSNorm.Config(dim, eps), residual_in_fp32=residual_in_fp32
    )
    return BlocksConfig(
        vocab_size=o["vocab_size"],
        dim=dim,
        num_layers=o["num_hidden_layers"],
        tie_embeddings=o["tie_word_embeddings"],
        blocks=(block,),
    )


#: Options of Mamba-3 under our names.
_MAMBA3 = (
    *("d_state", "expand", "headdim", "ngroups", "rope_fraction", "A_floor", "is_mimo"),
    *("mimo_rank", "is_outproj_norm"),
)
#: model_type -> mixer, further options with their defaults, and options that must have one value.
KINDS: dict[str, _Kind] = {
    "gla": (
        _gla,
        _SCALED | _CONV | _KEYS | {"expand_k": 0.5, "use_short_conv": False, "clamp_min": None},
        {"feature_map": None, "clamp_min": None},
    ),
    "retnet": (
        _retnet,
        _SCALED | _CONV | _KEYS
        | {"expand_v": 2.0, "num_heads": 8, "use_short_conv": False, "hidden_ratio": 2},
        {"feature_map": None},
    ),
    "delta_net": (
        _delta_net,
        _SCALED | _CONV | _DELTA
        | {"num_heads": 16, "use_gate": False, "use_beta": True, "qk_norm": "l2",
           "qk_activation": "silu"},
        {"use_beta": True, "qk_norm": "l2", "qk_activation": "silu"},
    ),
    "gated_deltanet": (
        _gated_delta_net,
        _CONV | _DELTA | {"expand_v": 2.0, "num_heads": 6, "num_hidden_layers": 21},
        {},
    ),
    "kda": (
        _kda,
        _CONV | _DELTA | {"expand_v": 1.0, "num_heads": 16, "head_dim": 128, "lower_bound": None},
        {},
    ),
    "hgrn2": (
        _hgrn2,
        _CONV | {"num_heads": None, "expand_ratio": 128, "use_short_conv": False,
                 "use_lower_bound": True},
        {},
    ),
    "lightnet": (
        _lightnet,
        _CONV | {"num_heads": None, "expand_ratio": 128, "use_short_conv": False,
                 "gate_low_rank_dim": 128},
        {},
    ),
    "gsa": (
        _gsa,
        _SCALED | _CONV
        | {"use_short_conv": False, "num_slots": 64, "num_kv_heads": None,
           "gate_logit_normalizer": 8, "feature_map": "swish"},
        {"feature_map": "swish"},
    ),
    "raven": (
        _raven,
        _SCALED
        | {"num_slots": 64, "num_kv_heads": None, "decay_type": "Mamba2", "topk": 32,
           "router_score": "sigmoid", "add_gumbel_noise": True, "use_rope": False}
        | _RAVEN,
        _RAVEN,
    ),
    "abc": (
        _abc,
        _SCALED | _CONV
        | {"expand_k": 0.5, "use_short_conv": False, "num_slots": 64, "use_rope": True,
           "clamp_min": -32, "clamp_max": 32},
        {},
    ),
    "hgrn": (
        _hgrn,
        _CONV | {"expand_ratio": 1, "use_short_conv": False, "use_lower_bound": True},
        {},
    ),
    "comba": (
        _comba,
        _CONV | _HEADS | {"use_output_gate": True, "num_hidden_layers": 21,
                          "use_output_correction": True, "use_inner_decay": True},
        {"use_output_correction": True, "use_inner_decay": True},
    ),
    "gated_deltaproduct": (
        _gated_delta_product,
        _CONV | _HEADS | {"use_output_gate": True, "num_hidden_layers": 21, "num_householder": 1,
                          "use_forget_gate": False, "allow_neg_eigval": False},
        {"use_forget_gate": True},
    ),
    "transformer": (_transformer, _SOFTMAX | {"rope_theta": 10000.0}, {}),
    "forgetting_transformer": (
        _forgetting_transformer, _SOFTMAX | {"use_output_gate": False}, {"qk_norm": False},
    ),
    "path_attn": (
        _path_attn,
        {"num_heads": 32, "num_kv_heads": None, "use_forget_gate": False,
         "use_w_shortconv": True, "use_low_rank_w": True},
        {"use_forget_gate": False},
    ),
    "mamba3": (
        _mamba3,
        {"num_hidden_layers": 48, "hidden_act": "silu", "norm_eps": 1e-5, "state_size": 128,
         "expand": 2, "head_dim": 64, "n_groups": 1, "rope_fraction": 0.5, "A_floor": 1e-4,
         "is_mimo": False, "mimo_rank": 4, "is_outproj_norm": False, "residual_in_fp32": True,
         "use_bias": False},
        {"hidden_act": "silu", "use_bias": False},
    ),
    "rwkv6": (
        fla_rwkv.rwkv6,
        fla_rwkv.OPTIONS
        | {"hidden_ratio": 3.5, "expand_k": 0.5, "expand_v": 1.0, "num_heads": 4,
           "proj_low_rank_dim": 32, "gate_low_rank_dim": 64},
        fla_rwkv.FIXED | {"expand_k": 1.0, "expand_v": 1.0},
    ),
    "rwkv7": (
        fla_rwkv.rwkv7,
        fla_rwkv.OPTIONS
        | {"head_dim": 64, "num_heads": None, "value_dim": None}
        | {f"{part}_low_rank_dim": rank for part, rank in fla_rwkv.RANKS.items()},
        fla_rwkv.FIXED,
    ),
}  # fmt: skip
#: Kinds in which fewer key heads than query heads are a case of our layers.
_GROUPED = ("transformer", "forgetting_transformer", "path_attn")
#: Beginnings and parts of fla's names -> ours, in order.
_NAMES = (
    (r"^model\.embeddings\.", "embed_tokens."),
    (r"^model\.", ""),
    (r"^layers\.(\d+)\.attn_norm\.", r"layers.\1.input_layernorm."),
    (r"^layers\.(\d+)\.mlp_norm\.", r"layers.\1.post_attention_layernorm."),
    (r"^layers\.(\d+)\.attn\.", r"layers.\1.mixer."),
    (r"\.mixer\.g_norm(_swish_gate)?\.", ".mixer.o_norm."),
)
#: Further parts of the names of one model_type.
_OWN_NAMES = {
    "mamba3": (
        (r"^backbone\.embeddings\.", "embed_tokens."),
        (r"^backbone\.norm_f\.", "norm."),
        (r"^backbone\.", ""),
        (r"^layers\.(\d+)\.norm\.", r"layers.\1.input_layernorm."),
    ),
    "hgrn2": (
        (r"\.mixer\.f_(proj|conv1d)\.", r".mixer.k_\1."),
        (r"\.mixer\.i_(proj|conv1d)\.", r".mixer.v_\1."),
    ),
}


def model_type_of(folder: Path) -> str | None:
    """Returns the model_type of a folder if it is one of fla's models."""
    found = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    return found if found in KINDS else None


def config_of(folder: Path, backend: str | None) -> ModelConfig:
    """Returns the config of the model in a folder of fla.

    Raises:
        NotImplementedError: an option has no counterpart.
    """
    theirs = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind = theirs["model_type"]
    mixer_of, defaults, fixed = KINDS[kind]
    options = {name: theirs.get(name, value) for name, value in (_COMMON | defaults).items()}
    for name, value in (_FIXED | fixed).items():
        if options.get(name, value) != value:
            raise NotImplementedError(
                f"from_hf: {name} must be {value!r} in a model of fla of type {kind!r}, got "
                f"{name}={shown(options[name])}"
            )
    grouped = options.get("num_kv_heads") not in (None, options.get("num_heads"))
    if grouped and kind not in _GROUPED:
        raise NotImplementedError(
            f"from_hf: num_kv_heads must be num_heads, got {options['num_kv_heads']}; "
            "omniattn.compat.fla has layers with fewer"
        )
    mixer = mixer_of(options)
    if isinstance(mixer, ModelConfig):
        return replace(mixer, backend=backend)
    dim, eps = options["hidden_size"], options["norm_eps"]
    hidden = options["intermediate_size"]
    if hidden is None:
        hidden = int(dim * (options["hidden_ratio"] or 4) * 2 / 3)
        hidden = 256 * ((hidden + 255) // 256)
    block = DecoderBlock.Config(mixer, GatedMLP.Config(dim, hidden), RMSNorm.Config(dim, eps))
    keys, base = 0, 10000.0
    if options.get("use_rope", kind == "retnet"):
        keys = _heads(options)["head_dim"]
    elif kind == "transformer":
        keys, base = dim // options["num_heads"], options["rope_theta"] or base
    return BlocksConfig(
        vocab_size=options["vocab_size"],
        dim=dim,
        num_layers=options["num_hidden_layers"],
        tie_embeddings=options["tie_word_embeddings"],
        blocks=(block,),
        rope=RotaryEmbedding.Config(keys, base) if keys else None,
        backend=backend,
    )


def load(folder: Path, backend: str | None) -> Model:
    """Returns the model of a folder of fla, in the dtype of its embeddings and in eval mode."""
    config, kind = config_of(folder, backend), model_type_of(folder)
    theirs = {name: t for name, t in tensors_of(folder).items() if "rotary.inv_freq" not in name}
    if kind in ("rwkv6", "rwkv7"):
        found = fla_rwkv.weights(theirs)
    else:
        found = {_ours(name, kind): t for name, t in theirs.items()}
    if "lower_bounds" in found:  # learned shares of the layers, which the first one does not have
        shares = found.pop("lower_bounds").float().softmax(0)
        bounds = shares.cumsum(0) - shares[0]
        found |= {f"layers.{n}.mixer.lower_bounds": bound for n, bound in enumerate(bounds)}
    return built(config, found, folder)


def _ours(name: str, kind: str | None) -> str:
    for pattern, replacement in (*_NAMES, *_OWN_NAMES.get(kind or "", ())):
        name = re.sub(pattern, replacement, name)
    return name
