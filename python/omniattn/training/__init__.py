"""Training: tasks with their data, parts of recipes, fine-tuning and the trainer."""

from omniattn.functional._keywords import explain_keywords
from omniattn.training.instructions import InstructionCollator
from omniattn.training.master import MasterAdamW
from omniattn.training.optimizer import (
    WarmupCosine,
    clip_gradients,
    parameter_groups,
    warmup_cosine,
)
from omniattn.training.recipes import Recipe, recipe_of
from omniattn.training.recompute import recompute_blocks
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
    "InstructionCollator",
    "LanguageModeling",
    "MaskedLanguageModeling",
    "MasterAdamW",
    "Recipe",
    "SpanCorruption",
    "Task",
    "TextTask",
    "TrainConfig",
    "Trainer",
    "WarmupCosine",
    "clip_gradients",
    "learning_rate",
    "parameter_groups",
    "recipe_of",
    "recompute_blocks",
    "saved_config",
    "warmup_cosine",
]

explain_keywords(__name__, __all__)
