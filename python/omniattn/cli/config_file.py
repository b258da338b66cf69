"""Reads configs and models from users' Python files."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from omniattn.cli.errors import CommandError
from omniattn.models import ModelConfig
from omniattn.suggestions import did_you_mean
from omniattn.training import TrainConfig


def read_config(path: Path, name: str) -> TrainConfig | ModelConfig:
    """Returns the config `name` of a Python file, which is imported as a module.

    Raises:
        CommandError: the file cannot be read, or has no config of this name.
    """
    module = _imported(path, "--config")
    if not hasattr(module, name):
        configs = [n for n, x in vars(module).items() if isinstance(x, TrainConfig | ModelConfig)]
        raise CommandError(f"--config: {path} has no {name}{did_you_mean(name, configs)}")
    config = getattr(module, name)
    if not isinstance(config, TrainConfig | ModelConfig):
        raise CommandError(
            f"--config: {name} must be a TrainConfig or the config of a model, "
            f"got {type(config).__name__}"
        )
    return config


def read_model(path: Path, name: str) -> object:
    """Returns `name` of a Python file, which is imported as a module, for `compare --models`.

    Raises:
        CommandError: the file cannot be read, or lacks the name.
    """
    module = _imported(path, "--models")
    if not hasattr(module, name):
        raise CommandError(f"--models: {path} has no {name}{did_you_mean(name, [*vars(module)])}")
    model: object = getattr(module, name)
    return model


def _imported(path: Path, option: str) -> ModuleType:
    """Imports a Python file of an option, once."""
    module = sys.modules.get(path.stem)
    if module is None:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise CommandError(f"{option} must name a file *.py, got {path}")
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(path.parent.absolute()))  # as for a script
        try:
            spec.loader.exec_module(module)
        except BaseException as error:
            del sys.modules[path.stem]
            if isinstance(error, OSError) and error.filename == str(path.absolute()):
                raise CommandError(f"cannot read {path}: {error.strerror or error}") from error
            raise
    elif Path(module.__file__ or "").absolute() != path.absolute():
        raise CommandError(
            f"{option} must not have the name of a module that is in use, got {path}"
        )
    return module
