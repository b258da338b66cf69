"""Configs by the name of a preset, a Hugging Face config.json or a checkpoint; dtypes by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeAlias

import torch

from omniattn.checks.arguments import require_int, shown
from omniattn.models import PRESETS, ModelConfig, checkpoint
from omniattn.models.pretrained import kind_of_hf
from omniattn.suggestions import did_you_mean

#: A config, the name of a preset, or the path of a config.json, a checkpoint or their folder.
Source: TypeAlias = "ModelConfig | str | Path"

#: Short and long names of dtypes.
DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
    "fp64": torch.float64,
    "float64": torch.float64,
}


def config_of(source: Source) -> ModelConfig:
    """Returns the config that a source names.

    Args:
        source: a config of `omniattn.models`; the name of a preset; or the path of a Hugging Face
            config.json, of the folder with it, of a checkpoint of this package, or of a run's
            folder.

    Raises:
        ValueError: the name of no preset, with the nearest names; a file without a model type.
        NotImplementedError: a model type without a counterpart, or with unsupported options.

    Example:
        >>> config_of("llama-3-8b").dim
        4096
    """
    if isinstance(source, ModelConfig):
        return source
    if not isinstance(source, str | Path):
        raise TypeError(
            "calculate: config must be a config, the name of a preset or a path, "
            f"got config={shown(source)}"
        )
    if isinstance(source, str) and source in PRESETS:
        return PRESETS[source]
    path = Path(source)
    if path.is_dir():
        run = path / "checkpoint.safetensors"
        path = run if run.is_file() else path / "config.json"
    if not path.is_file():
        raise ValueError(
            "calculate: config must be the name of a preset, a config.json, a checkpoint or the "
            f"folder of one of them, got config={str(source)!r}{did_you_mean(str(source), PRESETS)}"
        )
    if path.suffix == ".safetensors":
        return checkpoint.config_of(checkpoint.read_checkpoint(path)[1])
    return _from_file(path)


def _from_file(path: Path) -> ModelConfig:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"calculate: {path} must be JSON: {error}") from error
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise ValueError(f"calculate: {path} must name its model_type, as config.json does")
    from transformers import CONFIG_MAPPING

    if values["model_type"] not in CONFIG_MAPPING:
        raise NotImplementedError(
            "calculate: model_type must be one that transformers knows, got "
            f"model_type={shown(values['model_type'])} in {path}"
            f"{did_you_mean(values['model_type'], CONFIG_MAPPING)}"
        )
    theirs = CONFIG_MAPPING[values["model_type"]].from_dict(values)
    return kind_of_hf(theirs).from_hf(theirs)


def dtype_of(dtype: torch.dtype | str) -> torch.dtype:
    """Returns a floating-point dtype by its name.

    Example:
        >>> dtype_of("bf16")
        torch.bfloat16
    """
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found not in DTYPES.values():
        raise ValueError(
            f"calculate: dtype must be one of {', '.join(DTYPES)}, got dtype={shown(dtype)}"
            f"{did_you_mean(dtype, DTYPES)}"
        )
    assert isinstance(found, torch.dtype)
    return found


def require_sizes(op: str, **sizes: int) -> None:
    """Raises unless all sizes are positive integers."""
    for name, value in sizes.items():
        require_int(op, name, value, 1)
