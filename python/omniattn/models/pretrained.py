"""Models from models or folders of transformers, whatever their family."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from omniattn.checks.arguments import shown
from omniattn.models.checkpoint import CheckpointError
from omniattn.models.families import fla, mamba_ssm
from omniattn.models.hf import complement, copied
from omniattn.models.model import Model, ModelConfig, config_of_hf

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def from_hf(
    model_or_folder: PreTrainedModel | str | os.PathLike[str], *, backend: str | None = None
) -> Model:
    """Converts a transformers model of any family that this package has.

    Args:
        model_or_folder: a model, which keeps its weights, or a folder of `save_pretrained` with
            config.json and weights in one or more files of safetensors. Nothing is downloaded.
            Folders of flash-linear-attention's GLA, RetNet, DeltaNet, gated DeltaNet and
            DeltaProduct, Comba, KDA, HGRN, HGRN-2, LightNet, GSA, Raven, ABC, RWKV-6, RWKV-7,
            PaTH, Mamba-3, forgetting and plain transformer load without fla, and those of
            mamba-ssm's Mamba, Mamba-2 and Mamba-3 (config.json with d_model and ssm_cfg,
            pytorch_model.bin) without mamba-ssm.
        backend: backend of all ops of the model.

    Returns:
        The model; a copy on the same device and in the same dtype, or that of the folder on the
        CPU, in the dtype of its files and in eval mode. Files are read weight by weight, in the
        memory of the model and of one weight.

    Raises:
        FileNotFoundError: there is no such folder, or it has no config.json.
        NotImplementedError: this package lacks the architecture or one of its options.
        CheckpointError: weights are missing, are of another shape or do not belong to the model.

    Example:
        >>> import tempfile
        >>> from omniattn.models import PRESETS
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     PRESETS["llama-test"].build().to_hf().save_pretrained(folder)
        ...     model = from_hf(folder)
        >>> model.config == PRESETS["llama-test"]
        True
    """
    if not isinstance(model_or_folder, str | os.PathLike):
        return Model.from_hf(model_or_folder, backend=backend)
    folder = Path(model_or_folder)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            "from_hf: model_or_folder must be a model of transformers or a folder with "
            f"config.json, got {shown(str(folder))}"
        )
    if fla.model_type_of(folder) is not None:
        return fla.load(folder, backend)
    if mamba_ssm.is_folder(folder):
        return mamba_ssm.load(folder, backend)
    from transformers import AutoConfig

    theirs = AutoConfig.from_pretrained(folder, local_files_only=True)
    config = replace(kind_of_hf(theirs).from_hf(theirs), backend=backend)
    return _filled(config, _loaded(config.counterpart.model, folder))


def kind_of_hf(theirs: PreTrainedConfig) -> type[ModelConfig]:
    """Returns the config class for a config, by the name of its model if it has one."""
    if theirs.architectures:
        return config_of_hf(theirs.architectures[0])
    kinds = ModelConfig.architectures.values()
    types = Counter(kind.hf.config_class.model_type for kind in kinds if kind.hf is not None)
    if types[theirs.model_type] != 1:
        raise NotImplementedError(
            "from_hf: config.json must have architectures, or the model_type of one model of "
            f"omniattn.models, got model_type={shown(theirs.model_type)}"
        )
    return next(
        kind
        for kind in kinds
        if kind.hf is not None and kind.hf.config_class.model_type == theirs.model_type
    )


def _loaded(name: str, folder: Path) -> PreTrainedModel:
    """Returns the model of a folder with each of its weights, and no others."""
    import transformers

    model, report = getattr(transformers, name).from_pretrained(
        folder,
        dtype="auto",
        local_files_only=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    kinds = (("missing", "missing"), ("unexpected", "unknown"), ("mismatched", "of another shape"))
    for kind, word in kinds:
        if found := report[f"{kind}_keys"]:
            names = ", ".join(sorted(map(_described, found))[:5])
            raise CheckpointError(f"from_hf: {len(found)} weights in {folder} are {word}: {names}")
    loaded: PreTrainedModel = model
    return loaded


def _described(entry: Any) -> str:
    """Returns the name of a weight, with its shapes where they differ."""
    if isinstance(entry, str):
        return entry
    name, stored, wanted = entry
    return f"{name} {tuple(stored)} in place of {tuple(wanted)}"


def _filled(config: ModelConfig, theirs: PreTrainedModel) -> Model:
    """Returns the model with copies of the weights of theirs, which loses them.

    The weights of transformers stay in files that are mapped into memory. A copy does not change
    with its file, and each weight is released after it, so that the copies and one weight are all
    that has to stay in memory.
    """
    ours = config.build(device="meta", dtype=theirs.dtype)
    empty = ours.state_dict()
    groups = config.counterpart.groups(ours, theirs)
    for weight in (*theirs.parameters(), *theirs.buffers()):
        weight.data = weight.new_empty(0)
    state: dict[str, torch.Tensor] = {}
    while groups:
        names, sources = groups.pop()
        tensors = copied(sources, [empty[name] for name in names])
        state |= dict(zip(names, tensors, strict=True))
        del sources
    complement(state, (name for name, _ in config.counterpart.complements(ours)))
    ours.load_state_dict(state, assign=True)
    return ours.eval()
