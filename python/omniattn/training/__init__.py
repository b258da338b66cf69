"""Training of the models: tasks with their data, recipes, the trainer."""

from omniattn.training.recipes import Recipe, recipe_of
from omniattn.training.tasks import (
    Batch,
    Digits,
    LanguageModeling,
    MaskedLanguageModeling,
    SpanCorruption,
    Task,
    TextTask,
)
from omniattn.training.trainer import (
    TrainConfig,
    Trainer,
    learning_rate,
    parameter_groups,
    saved_config,
)

__all__ = [
    "Batch",
    "Digits",
    "LanguageModeling",
    "MaskedLanguageModeling",
    "Recipe",
    "SpanCorruption",
    "Task",
    "TextTask",
    "TrainConfig",
    "Trainer",
    "learning_rate",
    "parameter_groups",
    "recipe_of",
    "saved_config",
]
