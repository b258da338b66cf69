"""Folders of flash-linear-attention's models, such as those of fla-hub, without fla.

The names are those of flash-linear-attention 0.5.2, commit bc3b101dcb71, `fla/models`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from omniattn.checks.arguments import shown
from omniattn.models.blocks import BlocksConfig
from omniattn.models.checkpoint import CheckpointError
from omniattn.models.model import Model
from omniattn.modules import (
    HGRN2,
    ABCAttention,
    DecoderBlock,
    DeltaNet,
    GatedDeltaNet,
    GatedLinearAttention,
    GatedMLP,
    GatedSlotAttention,
    KimiDeltaAttention,
    LightNet,
    MultiScaleRetention,
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


_Kind = tuple[Callable[[Mapping[str, Any]], LayerConfig], dict[str, Any], dict[str, Any]]
_CONV = {"use_short_conv": True, "conv_size": 4}
_SCALED = {"expand_k": 1.0, "expand_v": 1.0, "num_heads": 4}
_KEYS = {"num_kv_heads": None, "feature_map": None, "use_output_gate": True}
_DELTA = {"allow_neg_eigval": False, "use_gate": True, "head_dim": 256, "num_v_heads": None}
_RAVEN = {"feature_map": "swish", "use_output_gate": False, "bias_rmm": False}
_RAVEN |= {"router_type": "lin", "gate_logit_normalizer": 8, "rope_theta": 10000.0}
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
        {"use_lower_bound": False},
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
}  # fmt: skip
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
    "hgrn2": (
        (r"\.mixer\.f_(proj|conv1d)\.", r".mixer.k_\1."),
        (r"\.mixer\.i_(proj|conv1d)\.", r".mixer.v_\1."),
    ),
}


def model_type_of(folder: Path) -> str | None:
    """Returns the model_type of a folder if it is one of fla's models."""
    found = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    return found if found in KINDS else None


def config_of(folder: Path, backend: str | None) -> BlocksConfig:
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
    if options.get("num_kv_heads") not in (None, options.get("num_heads")):
        raise NotImplementedError(
            f"from_hf: num_kv_heads must be num_heads, got {options['num_kv_heads']}; "
            "omniattn.compat.fla has layers with fewer"
        )
    dim, eps = options["hidden_size"], options["norm_eps"]
    hidden = options["intermediate_size"]
    if hidden is None:
        hidden = int(dim * (options["hidden_ratio"] or 4) * 2 / 3)
        hidden = 256 * ((hidden + 255) // 256)
    block = DecoderBlock.Config(
        mixer_of(options), GatedMLP.Config(dim, hidden), RMSNorm.Config(dim, eps)
    )
    rotates = options.get("use_rope", kind == "retnet")
    keys = _heads(options)["head_dim"] if rotates else 0
    return BlocksConfig(
        vocab_size=options["vocab_size"],
        dim=dim,
        num_layers=options["num_hidden_layers"],
        tie_embeddings=options["tie_word_embeddings"],
        blocks=(block,),
        rope=RotaryEmbedding.Config(keys) if keys else None,
        backend=backend,
    )


def load(folder: Path, backend: str | None) -> Model:
    """Returns the model of a folder of fla, in the dtype of its embeddings and in eval mode."""
    config, kind = config_of(folder, backend), model_type_of(folder)
    found = {
        _ours(name, kind): t
        for name, t in _tensors(folder).items()
        if "rotary.inv_freq" not in name
    }
    if "embed_tokens.weight" not in found:
        raise CheckpointError(f"from_hf: model.embeddings.weight is missing in {folder}")
    model = config.build(device="meta", dtype=found["embed_tokens.weight"].dtype)
    empty = model.state_dict()
    if config.tie_embeddings:
        found["lm_head.weight"] = found["embed_tokens.weight"]
    for word, names in (("missing", empty.keys() - found), ("unknown", found.keys() - empty)):
        if names:
            named = ", ".join(sorted(names)[:5])
            raise CheckpointError(f"from_hf: {len(names)} weights in {folder} are {word}: {named}")
    for name, like in empty.items():
        if found[name].shape != like.shape:
            raise CheckpointError(
                f"from_hf: a weight in {folder} is of another shape: {name} "
                f"{tuple(found[name].shape)}, wanted {tuple(like.shape)}"
            )
    weights = {name: found[name].to(like.dtype) for name, like in empty.items()}
    model.load_state_dict(weights, assign=True)
    return model.eval()


def _ours(name: str, kind: str | None) -> str:
    for pattern, replacement in (*_NAMES, *_OWN_NAMES.get(kind or "", ())):
        name = re.sub(pattern, replacement, name)
    return name


def _tensors(folder: Path) -> dict[str, Tensor]:
    """Returns the weights of all safetensors files of a folder."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            found |= load_file(path)
        except SafetensorError as error:
            raise CheckpointError(f"from_hf: {path} is damaged ({error})") from error
    return found
