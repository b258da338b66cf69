"""Models, their checkpoints and text generation."""

from omniattn.models.checkpoint import CheckpointError, load_model, save_model
from omniattn.models.decoder import Decoder
from omniattn.models.generate import generate, sample
from omniattn.models.llama import PRESETS, Llama, LlamaConfig

__all__ = [
    "PRESETS",
    "CheckpointError",
    "Decoder",
    "Llama",
    "LlamaConfig",
    "generate",
    "load_model",
    "sample",
    "save_model",
]
