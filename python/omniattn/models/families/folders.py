"""Models from weights by our names, and the weights in the files of a folder."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from torch import Tensor

from omniattn.models.checkpoint import CheckpointError
from omniattn.models.model import Model, ModelConfig


def built(config: ModelConfig, found: dict[str, Tensor], folder: Path) -> Model:
    """Returns the model with these weights, in the dtype of its embeddings and in eval mode."""
    if "embed_tokens.weight" not in found:
        raise CheckpointError(f"from_hf: the weights of the embeddings are missing in {folder}")
    model = config.build(device="meta", dtype=found["embed_tokens.weight"].dtype)
    empty = model.state_dict()
    if "lm_head.weight" not in empty:  # the head has the weights of the embeddings
        found.pop("lm_head.weight", None)
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


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Returns the weights of all safetensors files of a folder, or of its pytorch_model.bin."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    found: dict[str, Tensor] = {}
    paths = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    for path in paths:
        try:
            if path.suffix == ".bin":
                found |= torch.load(path, map_location="cpu", weights_only=True)
            else:
                found |= load_file(path)
        except (SafetensorError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"from_hf: {path} is damaged ({error})") from error
    return found
