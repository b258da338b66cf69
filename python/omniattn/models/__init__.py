"""Models, their checkpoints and text generation."""

from omniattn.models.checkpoint import CheckpointError, load_model, save_model
from omniattn.models.decoder import Decoder
from omniattn.models.deepseek import DeepSeekConfig, MLAConfig
from omniattn.models.experts import MixtralConfig, SwitchConfig
from omniattn.models.generate import generate, sample
from omniattn.models.llama import Llama, LlamaConfig
from omniattn.models.model import ModelConfig
from omniattn.models.presets import PRESETS

__all__ = [
    "PRESETS",
    "CheckpointError",
    "Decoder",
    "DeepSeekConfig",
    "Llama",
    "LlamaConfig",
    "MLAConfig",
    "MixtralConfig",
    "ModelConfig",
    "SwitchConfig",
    "generate",
    "load_model",
    "sample",
    "save_model",
]
