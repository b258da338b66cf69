"""Task and options of `python -m omniattn train` for each architecture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omniattn.models import (
    Decoder,
    ElectraConfig,
    EncoderDecoder,
    ModelConfig,
    TransformerXLConfig,
)
from omniattn.models.encoders.bert import MaskedConfig
from omniattn.models.vision import CLIPConfig, DeiTConfig, DINOConfig, MAEConfig, VisionConfig
from omniattn.suggestions import did_you_mean
from omniattn.training.answers import Instructions
from omniattn.training.images import CroppedDigits, DistilledDigits
from omniattn.training.shapes import CaptionedShapes, MaskedShapes
from omniattn.training.tasks import (
    Digits,
    LanguageModeling,
    MaskedLanguageModeling,
    ReplacedTokens,
    SpanCorruption,
    Task,
)


@dataclass(frozen=True)
class Recipe:
    """Training recipe of an architecture.

    Args:
        task: class with the data and the loss.
        options: values that replace defaults of TrainConfig.
    """

    task: type[Task]
    options: Mapping[str, Any] = field(default_factory=dict)


_RECIPES: dict[type, Recipe] = {
    Decoder.Config: Recipe(LanguageModeling),
    TransformerXLConfig: Recipe(LanguageModeling),
    EncoderDecoder.Config: Recipe(SpanCorruption),
    MaskedConfig: Recipe(MaskedLanguageModeling),
    ElectraConfig: Recipe(ReplacedTokens),
    VisionConfig: Recipe(Digits, {"batch": 64}),
    DeiTConfig: Recipe(DistilledDigits, {"batch": 64}),
    MAEConfig: Recipe(MaskedShapes, {"batch": 128, "steps": 600, "lr": 2e-3}),
    CLIPConfig: Recipe(CaptionedShapes, {"batch": 64, "steps": 300}),
    DINOConfig: Recipe(
        CroppedDigits,
        {
            **{"batch": 32, "steps": 300, "lr": 1e-3, "min_lr": 1e-5},
            **{"clip": 3.0, "clip_each": True},
        },
    ),
}


def recipe_of(config: ModelConfig) -> Recipe:
    """Returns the recipe of the config's class or of its nearest base class with one.

    Raises:
        ValueError: no base class has one.
    """
    for kind in type(config).__mro__:
        if kind in _RECIPES:
            return _RECIPES[kind]
    known = ", ".join(kind.__qualname__ for kind in _RECIPES)
    raise ValueError(
        f"recipe_of: config must be one of {known} or derived from it, got {type(config).__name__}"
    )


#: Tasks of decoders by name, in place of that of their recipe.
TASKS: dict[str, type[Task]] = {"instructions": Instructions}


def task_of(config: ModelConfig, name: str | None = None) -> type[Task]:
    """Returns the task of a model: that of its recipe, or one of TASKS by its name.

    Raises:
        ValueError: an unknown name, or a named task for a model that is no decoder.
    """
    if name is None:
        return recipe_of(config).task
    if name not in TASKS:
        raise ValueError(
            f"task_of: name must be one of {', '.join(TASKS)}, got {name!r}"
            f"{did_you_mean(name, TASKS)}"
        )
    if not isinstance(config, Decoder.Config):
        raise ValueError(
            f"task_of: config must be that of a decoder for {name}, got {type(config).__name__}"
        )
    return TASKS[name]
