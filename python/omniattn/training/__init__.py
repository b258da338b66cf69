"""Training: tasks with their data, recipes and the trainer."""

from omniattn.functional._keywords import explain_keywords
from omniattn.training.optimizer import WarmupCosine, parameter_groups, warmup_cosine
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
    "WarmupCosine",
    "learning_rate",
    "parameter_groups",
    "recipe_of",
    "saved_config",
    "warmup_cosine",
]

explain_keywords(__name__, __all__)
