"""RWKV's own checkpoints: files .pth with the names of RWKV-LM."""

from __future__ import annotations

import os
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from omniattn.checks.arguments import shown
from omniattn.models.checkpoint import CheckpointError
from omniattn.models.families.rwkv import (
    RWKV4Config,
    RWKV5Config,
    RWKV6Config,
    RWKV7Config,
    RWKVConfig,
)
from omniattn.models.model import Model

#: Beginnings of RWKV-LM's names -> ours; blocks.0.ln0 is the norm of the embeddings.
_WORDS = {
    "emb": "embed_tokens",
    "blocks.0.ln0": "embed_norm",
    "ln_out": "norm",
    "head": "lm_head",
}
#: Parts of a block in RWKV-LM -> ours.
_PARTS = {
    "ln1": "input_layernorm",
    "ln2": "post_attention_layernorm",
    "att": "mixer",
    "ffn": "mlp",
}
#: Weights of the first time mix that tell the versions apart; the first that fits.
_VERSIONS: tuple[tuple[type[RWKVConfig], tuple[str, ...]], ...] = (
    (RWKV7Config, ("r_k", "w1", "a1", "g1")),
    (RWKV6Config, ("time_maa_w1", "time_decay_w1", "time_faaaa")),
    (RWKV5Config, ("gate.weight", "time_faaaa")),
    (RWKV4Config, ("time_first", "time_mix_k")),
)


def from_rwkv(path: Path | str | os.PathLike[str], *, backend: str | None = None) -> Model:
    """Loads a checkpoint of RWKV-4, RWKV-5 (5.2), RWKV-6 or RWKV-7 in the form of RWKV-LM.

    The version and the sizes follow from the names and shapes of the weights. Only tensors are read
    from the file; it cannot run code.

    Args:
        path: file .pth with ``emb.weight``, ``blocks.0.att.key.weight`` and so on.
        backend: backend of all ops of the model.

    Returns:
        The model on the CPU, in the dtype of the file's embeddings and in eval mode.

    Raises:
        OSError: the file cannot be read.
        CheckpointError: it is damaged or none of RWKV, or weights are missing, unknown or of
            another shape.
    """
    with open(path, "rb"):  # a missing or unreadable file is an OSError with its own message
        pass
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"from_rwkv: {path} is damaged or no checkpoint ({error})") from error
    if not isinstance(weights, dict) or not all(isinstance(t, Tensor) for t in weights.values()):
        raise CheckpointError(
            f"from_rwkv: {path} must hold tensors by name, got {shown(type(weights).__name__)}"
        )
    try:
        config = _config_of(weights)
    except (KeyError, IndexError, ValueError) as error:
        raise CheckpointError(
            f"from_rwkv: {path} must have the weights of RWKV-4, 5.2, 6 or 7 by the names of "
            f"RWKV-LM, got {shown(sorted(weights)[:4])} ({type(error).__name__}: {error})"
        ) from error
    model = replace(config, backend=backend).build(device="meta", dtype=weights["emb.weight"].dtype)
    _fill(model, weights, path)
    return model.eval()


def _config_of(weights: dict[str, Tensor]) -> RWKVConfig:
    """Returns the config that follows from the names and shapes of the weights."""
    mixer = "blocks.0.att."
    found = {name: t.shape for name, t in weights.items()}
    own = {name.removeprefix(mixer) for name in found if name.startswith(mixer)}
    kind = next((kind for kind, names in _VERSIONS if own.issuperset(names)), None)
    if kind is None:
        raise KeyError(mixer)
    vocab_size, dim = found["emb.weight"]
    layers = {int(name.split(".")[1]) for name in found if name.startswith("blocks.")}
    hidden = found["blocks.0.ffn.key.weight"][0]
    sizes: dict[str, Any] = {"hidden_dim": None if hidden == 4 * dim else hidden}
    if kind is not RWKV4Config:
        heads = found[mixer + ("r_k" if kind is RWKV7Config else "time_faaaa")][0]
        sizes["head_dim"] = dim // heads
    if kind is RWKV6Config:
        sizes["mix_rank"] = found[mixer + "time_maa_w1"][1] // 5
        sizes["decay_rank"] = found[mixer + "time_decay_w1"][1]
    elif kind is RWKV7Config:
        ranks = {"decay_rank": "w1", "a_rank": "a1", "gate_rank": "g1"}
        sizes |= {option: found[mixer + name][1] for option, name in ranks.items()}
        if len(layers) > 1:
            sizes["v_rank"] = found["blocks.1.att.v1"][1]
    return kind(vocab_size=vocab_size, dim=dim, num_layers=max(layers) + 1, **sizes)


def _ours(name: str) -> str:
    """Returns our name of a weight."""
    for theirs, ours in _WORDS.items():
        if name.startswith(theirs + "."):
            return ours + name.removeprefix(theirs)
    match = re.fullmatch(r"blocks\.(\d+)\.(\w+)\.(.+)", name)
    return f"layers.{match[1]}.{_PARTS.get(match[2], match[2])}.{match[3]}" if match else name


def _theirs(name: str) -> str:
    """Returns RWKV-LM's name of one of our weights."""
    for theirs, ours in _WORDS.items():
        if name.startswith(ours + "."):
            return theirs + name.removeprefix(ours)
    parts = {ours: theirs for theirs, ours in _PARTS.items()}
    match = re.fullmatch(r"layers\.(\d+)\.(\w+)\.(.+)", name)
    return f"blocks.{match[1]}.{parts.get(match[2], match[2])}.{match[3]}" if match else name


def _fill(model: Model, weights: dict[str, Tensor], path: object) -> None:
    """Gives a model on the meta device the weights of a file, in the dtypes of the model."""
    empty = model.state_dict()
    try:
        found = model.load_state_dict(
            {_ours(name): tensor for name, tensor in weights.items()}, strict=False, assign=True
        )
    except RuntimeError as error:  # weights of another shape
        named = re.sub(r"(?<=mismatch for )[\w.]+", lambda name: _theirs(name[0]), str(error))
        raise CheckpointError(f"from_rwkv: {path}: {named}") from error
    for names, word in ((found.missing_keys, "missing"), (found.unexpected_keys, "unknown")):
        if names:
            named = ", ".join(sorted(map(_theirs, names))[:5])
            raise CheckpointError(f"from_rwkv: {len(names)} weights in {path} are {word}: {named}")
    for name, tensor in model.state_dict().items():
        if tensor.dtype != empty[name].dtype:  # decays stay in fp32
            model.get_parameter(name).data = tensor.to(empty[name].dtype)
