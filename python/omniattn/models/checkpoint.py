"""Checkpoints: one safetensors file with tensors and metadata, written atomically."""

import json
import os
import sys
import zlib
from pathlib import Path

import torch

from omniattn.models.model import Model, ModelConfig, UnknownLayer
from omniattn.modules.base.layer import Layer


class CheckpointError(ValueError):
    """The file is not a checkpoint of this package, or is damaged."""


def _digest(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> str:
    """Returns the CRC-32 of all bytes, ordered by name; safetensors does not detect bit flips."""
    crc = zlib.crc32(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(tensors):
        t = tensors[name]
        crc = zlib.crc32(f"{name} {t.dtype} {tuple(t.shape)}".encode(), crc)
        data = t.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        crc = zlib.crc32(data.numpy().data, crc)
    return f"{crc:08x}"


def write_checkpoint(
    path: Path | str, tensors: dict[str, torch.Tensor], metadata: dict[str, str]
) -> None:
    """Writes atomically: a crash, an interrupt or a full disk leaves the previous file intact.

    Raises:
        OSError: if the file cannot be written; the partial file is removed.
    """
    from safetensors.torch import save

    path = Path(path)
    tensors = {name: t.detach().contiguous() for name, t in tensors.items()}
    content = save(tensors, metadata | {"crc32": _digest(tensors, metadata)})
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_checkpoint(path: Path | str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Reads the tensors (on the CPU) and the metadata of a file of `write_checkpoint`.

    Raises:
        OSError: if the file cannot be read.
        CheckpointError: if it is damaged or not a checkpoint.
    """
    from safetensors import SafetensorError, safe_open

    with open(path, "rb"):  # a missing or unreadable file is an OSError with its own message
        pass
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise CheckpointError(
            f"checkpoint: {path} is damaged or no checkpoint ({error})"
        ) from error
    if "crc32" not in metadata:
        raise CheckpointError(
            f"checkpoint: {path} was not written by omniattn, which adds a checksum; a model of "
            "transformers is loaded from its folder, by omniattn.models.from_hf"
        )
    if metadata.pop("crc32") != _digest(tensors, metadata):
        raise CheckpointError(f"checkpoint: {path} is damaged (its checksum does not match)")
    return tensors, metadata


def model_metadata(model: Model) -> dict[str, str]:
    """Returns the metadata that `load_model` needs in addition to the weights."""
    config = model.config
    layers = {type(module) for module in model.modules() if isinstance(module, Layer)}
    modules = {kind.__module__ for kind in layers | {type(config)}}
    own = sorted(name for name in modules if not name.startswith("omniattn."))
    return {
        "architecture": config.architecture,
        "config": json.dumps(config.to_dict()),
        "modules": json.dumps(own),
    }


def config_of(metadata: dict[str, str], backend: str | None = None) -> ModelConfig:
    """Returns the model config in the metadata of a file.

    Raises:
        CheckpointError: if the architecture or a layer is unknown.
    """
    modules = json.loads(metadata.get("modules", "[]"))
    missing = [name for name in modules if name not in sys.modules] or modules
    which = ", ".join(missing) or "the module that defines it"
    known = ModelConfig.architectures
    architecture = known.get(metadata.get("architecture", ""))
    if architecture is None:
        raise CheckpointError(
            f"checkpoint: architecture must be one of {', '.join(known)}, or be defined before "
            f"(import {which} first), got architecture={metadata.get('architecture')!r}"
        )
    values = json.loads(metadata["config"]) | {"backend": backend}
    try:
        return architecture.from_dict(values)
    except UnknownLayer as error:
        raise CheckpointError(
            f"checkpoint: layers must be defined before a model of them is loaded: import {which} "
            f"first, got type={error.kind!r}"
        ) from None


def save_model(model: Model, path: Path | str) -> None:
    """Writes weights and config, atomically; needs safetensors.

    Raises:
        TypeError: if the model is not one of this package.
        OSError: if the file cannot be written; the partial file is removed.
    """
    if not isinstance(model, Model):
        raise TypeError(
            "save_model: model must be a model of omniattn.models, "
            f"got type(model)={type(model).__name__}"
        )
    write_checkpoint(path, model.state_dict(), model_metadata(model))


def load_model(
    path: Path | str,
    *,
    device: torch.device | str | None = None,
    backend: str | None = None,
) -> Model:
    """Loads the model from a file of `save_model` or a training checkpoint, in eval mode.

    Args:
        path: the safetensors file.
        device: device of the parameters, default CPU; their dtype is that of the file.
        backend: backend of all ops of the model.

    Raises:
        OSError: if the file cannot be read.
        CheckpointError: if it is damaged or holds an unknown architecture.
    """
    tensors, metadata = read_checkpoint(path)
    model = config_of(metadata, backend).build(device="meta")
    model.load_state_dict({n: t for n, t in tensors.items() if "/" not in n}, assign=True)
    return model.to(device).eval()
