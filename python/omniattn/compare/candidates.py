"""Models of a comparison from names, classes, configs and modules."""

from __future__ import annotations

import inspect
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from omniattn.checks.arguments import shown
from omniattn.compare.baselines import ModuleMixer, takes_width
from omniattn.compare.cells import described
from omniattn.compare.mixers import FULL, KINDS, Candidate, Frame, Kind, Place
from omniattn.models import BlocksConfig, Decoder, ModelConfig
from omniattn.modules import LayerConfig, Mixer
from omniattn.suggestions import did_you_mean

_RATIO = re.compile(r"([1-9]\d{0,2}):([1-9]\d{0,2})")


@dataclass(frozen=True)
class WholeModel(Candidate):
    """Decoder of a user's config, of which only the hidden width of the MLPs changes."""

    whole: Any = None

    def config(self, frame: Frame, hidden: int) -> Any:
        """Returns the config with this hidden width, if it has one."""
        config = replace(self.whole, vocab_size=frame.vocab)
        if isinstance(config, BlocksConfig):
            blocks = tuple(replace(b, mlp=_widened(b.mlp, hidden)) for b in config.blocks)
            return replace(config, blocks=blocks)
        return _widened(config, hidden)


def _widened(config: Any, hidden: int) -> Any:
    known = config is not None and "hidden_dim" in {field.name for field in fields(config)}
    return replace(config, hidden_dim=hidden) if known else config


def candidates(models: Sequence[Any] | Mapping[str, Any]) -> list[Candidate]:
    """Returns the models of a comparison.

    Args:
        models: names, see `omniattn.compare.run`; or names in the report -> models.

    Raises:
        ValueError: a name is unknown, or two models have one name.
        TypeError: a model is none that can be compared.
    """
    if isinstance(models, str) or not isinstance(models, Sequence | Mapping):
        raise TypeError(f"compare: models must be a list or a dict, got models={shown(models)}")
    if isinstance(models, Mapping):
        found = [replace(candidate(model), name=name) for name, model in models.items()]
    else:
        found = [candidate(model) for model in models]
    if not found:
        raise ValueError("compare: models must not be empty")
    names = [each.name for each in found]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"compare: models must have different names, got {name!r} twice; "
                "a dict gives them names"
            )
    return found


def candidate(model: Any) -> Candidate:
    """Returns a model of a comparison."""
    if isinstance(model, str):
        return _named(model)
    if isinstance(model, ModelConfig):
        return _whole(model)
    if isinstance(model, LayerConfig) and issubclass(model.layer, Mixer):
        kind = Kind(lambda place: _placed(model, place), rotates=True)
        return Candidate(model.layer.__name__, (kind,), _version(model.layer))
    if isinstance(model, type) and issubclass(model, Mixer):
        return Candidate(model.__name__, (_of_class(model),), _version(model))
    if callable(model) and takes_width(model):
        kind = Kind(lambda place: ModuleMixer.Config(place.dim, model))
        return Candidate(_name(model), (kind,), _version(model))
    raise TypeError(
        "compare: a model must be a name, a Mixer or its Config, the config of a decoder, or a "
        f"class or function that makes a module from dim, its one argument, got {shown(model)}"
    )


def _named(name: str) -> Candidate:
    base, at, ratio = name.partition("@")
    if base not in KINDS:
        raise ValueError(
            f"compare: models must be among {', '.join(KINDS)}, or NAME@n:m with layers of "
            f"attention, got {name!r}{did_you_mean(base, KINDS)}"
        )
    plain = Candidate(name, (KINDS[base],))
    return hybrid(plain, ratio, name) if at else plain


def hybrid(plain: Candidate, ratio: str, name: str | None = None) -> Candidate:
    """Returns n layers of a mixer and m of attention in turn, for the ratio "n:m"."""
    found = _RATIO.fullmatch(ratio)
    if found is None:
        raise ValueError(f"compare: a ratio must be n:m, such as 3:1, got {ratio!r}")
    n, m = int(found[1]), int(found[2])
    kinds = plain.kinds[:1] * n + (FULL,) * m
    return replace(plain, name=name or f"{plain.name}@{ratio}", kinds=kinds)


def _whole(model: ModelConfig) -> WholeModel:
    if not isinstance(model, Decoder.Config):
        raise TypeError(
            f"compare: models must be decoders, got the config {type(model).__qualname__}"
        )
    name = type(model).__qualname__.removesuffix("Config")
    return WholeModel(name, (), described(model), whole=model)


def _of_class(layer: type[Mixer]) -> Kind:
    known = {field.name for field in fields(layer.Config)}
    if "dim" not in known:
        raise TypeError(f"compare: {layer.__name__}.Config must have a field dim")

    def mixer(place: Place) -> LayerConfig:
        sizes = {
            "dim": place.dim,
            "num_heads": place.heads,
            "layer_idx": place.layer,
            "num_layers": place.layers,
        }
        config: LayerConfig = layer.Config(**{n: v for n, v in sizes.items() if n in known})
        return config

    return Kind(mixer, rotates=True)


def _placed(config: Any, place: Place) -> LayerConfig:
    known = {field.name for field in fields(config)}
    sizes = {"dim": place.dim, "layer_idx": place.layer, "num_layers": place.layers}
    found: LayerConfig = replace(config, **{n: v for n, v in sizes.items() if n in known})
    return found


def _name(model: Callable[..., Any]) -> str:
    return str(getattr(model, "__name__", type(model).__name__))


def _version(model: Any) -> str:
    """Returns a checksum of a user's file, so that stored results of former code are noticed."""
    if str(getattr(model, "__module__", "")).startswith("omniattn."):
        return ""
    try:
        source = Path(inspect.getfile(model)).read_bytes()
    except (TypeError, OSError):  # defined in a notebook
        return ""
    return f"{zlib.crc32(source):08x}"
