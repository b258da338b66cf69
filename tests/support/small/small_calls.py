"""Calls of every layer with gradients and of every model, past the buffers of the kernels.

Layers get two sequences of 133 tokens, models of 37.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from small_layers import LAYERS, OTHERS, valid_config
from small_presets import SMALL
from torch import Tensor, nn

from omniattn import modules
from omniattn.functional import Routing
from omniattn.models import EncoderDecoder, ModelConfig, SwinConfig, ViTConfig
from omniattn.models.presets import TRAINED
from omniattn.modules import RotaryEmbedding

BATCH, TOKENS = 2, 133
PRESETS = {**TRAINED, **{f"{name}-small": config for name, config in SMALL.items()}}
for _name in ("mae", "clip", "dino"):
    del PRESETS[_name]  # return (loss, outputs)
del PRESETS["llama-medium"]  # takes as long as ten others and has no layer of its own
#: Layers without gradients, or of models that are presets.
WITHOUT = {
    *("RotaryEmbedding", "SinCosPositional2d", "SinusoidalPositional"),
    *("MultiTokenPredictor", "T5RelativeBias"),
    *("AttentionResiduals", "HyperConnections", "ManifoldHyperConnections"),
}


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def rotated() -> dict[str, Any]:
    """For layers that rotate two features."""
    return {"x": random(BATCH, TOKENS, 8), "rope": RotaryEmbedding(2)(torch.arange(TOKENS))}


def grid(*shape: int) -> dict[str, Any]:
    return {"x": random(BATCH, *shape, 8)}


#: Arguments of layers that take more than x (B, T, 8).
ARGUMENTS: dict[str, Callable[[], dict[str, Any]]] = {
    **dict.fromkeys(
        ("CompressedSparseAttention", "DeepSeekSparseAttention", "MultiHeadLatentAttention"),
        rotated,
    ),
    "ALiBi": lambda: {"q_len": 70, "k_len": TOKENS},
    "DisentangledAttention": lambda: {
        "x": random(BATCH, TOKENS, 8),
        "positions": random(1024, 8),
    },
    "Engram": lambda: {
        "x": random(BATCH, TOKENS, 8),
        "tokens": torch.arange(BATCH * TOKENS).view(BATCH, TOKENS) % 32,
    },
    "Experts": lambda: {
        "x": random(BATCH * TOKENS, 8),
        "routing": Routing(
            torch.arange(2 * BATCH * TOKENS).view(-1, 2) % 4,
            random(BATCH * TOKENS, 2).sigmoid(),
            random(BATCH * TOKENS, 4),
        ),
    },
    "LearnedPositional": lambda: {"x": random(BATCH, 4, 8)},
    "MultiheadAttention": lambda: {n: random(TOKENS, BATCH, 8) for n in ("query", "key", "value")},
    "NeighborhoodAttention2D": lambda: grid(9, 15),
    "NeighborhoodAttention3D": lambda: grid(4, 5, 7),
    "PatchMerging": lambda: grid(14, 14),
    "RMSNormGated": lambda: {n: random(BATCH, TOKENS, 8) for n in ("x", "gate")},
    "SpatialReductionAttention": lambda: grid(12, 12),
    "SwinBlock": lambda: grid(14, 14),
    "WindowAttention": lambda: grid(14, 14),
}
TRAINABLE = [name for name in LAYERS if name not in WITHOUT]


def is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def layer_call(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """Returns a layer with random parameters, and its arguments by name."""
    torch.manual_seed(0)
    built = getattr(modules, name)(valid_config(name), **OTHERS.get(name, {}))
    for parameter in built.parameters():
        nn.init.normal_(parameter, std=0.3)
    make = ARGUMENTS.get(name, lambda: {"x": random(BATCH, TOKENS, 8)})
    return built, make()


def inputs_of(config: ModelConfig) -> list[Tensor]:
    if isinstance(config, ViTConfig | SwinConfig):
        return [random(BATCH, config.channels, config.image, config.image)]
    tokens = torch.arange(BATCH * 37).view(BATCH, -1) % 90
    return [tokens, tokens[:, :33]] if isinstance(config, EncoderDecoder.Config) else [tokens]


def model_call(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Returns a model, and its first arguments by name."""
    torch.manual_seed(0)
    built = PRESETS[name].build()
    names = inspect.signature(built.forward).parameters
    return built, dict(zip(names, inputs_of(PRESETS[name]), strict=False))
