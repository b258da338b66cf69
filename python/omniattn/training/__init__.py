"""Training: tasks with their data, parts of recipes, fine-tuning and the trainer."""

from omniattn.functional._keywords import explain_keywords
from omniattn.training.answers import Instructions
from omniattn.training.augment import Augment
from omniattn.training.images import CroppedDigits, DistilledDigits
from omniattn.training.instructions import InstructionCollator
from omniattn.training.master import MasterAdamW
from omniattn.training.optimizer import (
    WarmupCosine,
    clip_gradients,
    parameter_groups,
    warmup_cosine,
)
from omniattn.training.peers import RankError
from omniattn.training.probes import linear_probe, nearest_neighbors
from omniattn.training.recipes import Recipe, recipe_of, task_of
from omniattn.training.recompute import recompute_blocks
from omniattn.training.shapes import CaptionedShapes, MaskedShapes
from omniattn.training.tasks import (
    Batch,
    Digits,
    LanguageModeling,
    MaskedLanguageModeling,
    ReplacedTokens,
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
    "Augment",
    "Batch",
    "CaptionedShapes",
    "CroppedDigits",
    "Digits",
    "DistilledDigits",
    "InstructionCollator",
    "Instructions",
    "LanguageModeling",
    "MaskedLanguageModeling",
    "MaskedShapes",
    "MasterAdamW",
    "RankError",
    "Recipe",
    "ReplacedTokens",
    "SpanCorruption",
    "Task",
    "TextTask",
    "TrainConfig",
    "Trainer",
    "WarmupCosine",
    "clip_gradients",
    "learning_rate",
    "linear_probe",
    "nearest_neighbors",
    "parameter_groups",
    "recipe_of",
    "recompute_blocks",
    "saved_config",
    "task_of",
    "warmup_cosine",
]

explain_keywords(__name__, __all__)
