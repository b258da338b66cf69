"""Folders of mamba-ssm's language models: Mamba, Mamba-2 and Mamba-3, without mamba-ssm.

The names are those of mamba-ssm 2.3, `models/mixer_seq_simple.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from omniattn.checks.arguments import shown
from omniattn.models.decoders.blocks import BlocksConfig
from omniattn.models.families.folders import built, tensors_of
from omniattn.models.model import Model
from omniattn.modules import DecoderBlock, Mamba, Mamba2, Mamba3, RMSNorm
from omniattn.modules.base.layer import LayerConfig

#: ssm_cfg["layer"] -> config of the mixer, and options that it takes under mamba-ssm's names.
LAYERS: dict[str, tuple[Callable[..., LayerConfig], tuple[str, ...]]] = {
    "Mamba1": (Mamba.Config, ("d_state", "d_conv", "expand", "dt_rank", "conv_bias", "bias")),
    "Mamba2": (
        Mamba2.Config,
        ("d_state", "d_conv", "expand", "headdim", "ngroups", "dt_limit", "bias", "conv_bias"),
    ),
    "Mamba3": (
        Mamba3.Config,
        ("d_state", "expand", "headdim", "ngroups", "rope_fraction", "A_floor", "is_mimo",
         "mimo_rank", "is_outproj_norm"),
    ),
}  # fmt: skip
#: Options of the layers that affect only initial values, or the speed.
_WITHOUT_EFFECT = {
    "dt_min", "dt_max", "dt_init", "dt_scale", "dt_init_floor", "A_init_range", "conv_init",
    "chunk_size", "use_fast_path", "use_mem_eff_path", "fuse_pregate_headwise_norm", "dropout",
}  # fmt: skip
#: Options that must have one value.
_FIXED: dict[str, Any] = {"d_intermediate": 0, "attn_layer_idx": [], "rms_norm": True}
_LAYER_FIXED: dict[str, Any] = {"D_has_hdim": False, "rmsnorm": True, "norm_before_gate": False}
#: Beginnings and parts of mamba-ssm's names -> ours.
_NAMES = (
    (r"^backbone\.embedding\.", "embed_tokens."),
    (r"^backbone\.norm_f\.", "norm."),
    (r"^backbone\.", ""),
    (r"^layers\.(\d+)\.norm\.", r"layers.\1.input_layernorm."),
)


def is_folder(folder: Path) -> bool:
    """Returns True for a folder with mamba-ssm's form of config.json."""
    theirs = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return {"d_model", "n_layer"} <= theirs.keys() and "model_type" not in theirs


def config_of(folder: Path, backend: str | None) -> BlocksConfig:
    """Returns the config of the model in a folder of mamba-ssm.

    Raises:
        NotImplementedError: an option has no counterpart.
    """
    theirs = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    given = dict(theirs.get("ssm_cfg") or {})
    kind = given.pop("layer", "Mamba1")
    if kind not in LAYERS:
        raise NotImplementedError(
            f"from_hf: ssm_cfg['layer'] must be one of {', '.join(LAYERS)}, got {shown(kind)}"
        )
    _require(theirs, _FIXED)
    _require(given, _LAYER_FIXED)
    create, names = LAYERS[kind]
    unknown = given.keys() - {*names, *_WITHOUT_EFFECT, *_LAYER_FIXED}
    if unknown:
        raise NotImplementedError(
            f"from_hf: ssm_cfg must have options of {kind} that this package has, got "
            f"{shown(sorted(unknown))}"
        )
    options = {name: given[name] for name in names if name in given}
    if options.get("dt_rank") == "auto":
        del options["dt_rank"]
    if "dt_limit" in options:
        options["dt_limit"] = tuple(options["dt_limit"])
    dim, multiple = theirs["d_model"], theirs.get("pad_vocab_size_multiple", 8)
    block = DecoderBlock.Config(
        create(dim, **options),
        None,
        RMSNorm.Config(dim, 1e-5),
        residual_in_fp32=theirs.get("residual_in_fp32", True),
    )
    return BlocksConfig(
        vocab_size=-(-theirs["vocab_size"] // multiple) * multiple,
        dim=dim,
        num_layers=theirs["n_layer"],
        tie_embeddings=theirs.get("tie_embeddings", True),
        blocks=(block,),
        backend=backend,
    )


def _require(given: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    for name, value in fixed.items():
        if given.get(name, value) != value:
            raise NotImplementedError(
                f"from_hf: {name} must be {value!r} in a model of mamba-ssm, got "
                f"{name}={shown(given[name])}"
            )


def load(folder: Path, backend: str | None) -> Model:
    """Returns the model of a folder of mamba-ssm, in the dtype of its embeddings and in eval
    mode."""
    found = {}
    for name, t in tensors_of(folder).items():
        for pattern, replacement in _NAMES:
            name = re.sub(pattern, replacement, name)
        found[name] = t
    return built(config_of(folder, backend), found, folder)
