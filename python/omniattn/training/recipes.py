"""Tasks and options with which `python -m omniattn train` trains each architecture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omniattn.models import BertConfig, Decoder, ModelConfig, T5Config
from omniattn.models.vision import VisionConfig
from omniattn.training.tasks import (
    Digits,
    LanguageModeling,
    MaskedLanguageModeling,
    SpanCorruption,
    Task,
)


@dataclass(frozen=True)
class Recipe:
    """How a kind of model is trained.

    Args:
        task: data and loss of the training.
        options: fields of TrainConfig whose defaults differ.
    """

    task: type[Task]
    options: Mapping[str, Any] = field(default_factory=dict)


_RECIPES: dict[type, Recipe] = {
    Decoder.Config: Recipe(LanguageModeling),
    T5Config: Recipe(SpanCorruption),
    BertConfig: Recipe(MaskedLanguageModeling),
    VisionConfig: Recipe(Digits, {"batch": 64}),
}


def recipe_of(config: ModelConfig) -> Recipe:
    """The recipe of the nearest base class that has one.

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
