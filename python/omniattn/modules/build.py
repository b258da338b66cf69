"""The layer that a Config describes, where a place takes several kinds."""

from __future__ import annotations

from typing import Any

from omniattn.modules.attention import Attention
from omniattn.modules.differential import DifferentialAttention
from omniattn.modules.mla import MultiHeadLatentAttention
from omniattn.modules.mlp import MLP, GatedMLP
from omniattn.modules.moe import MoE
from omniattn.modules.norm import LayerNorm, RMSNorm

AttentionConfig = Attention.Config | DifferentialAttention.Config | MultiHeadLatentAttention.Config
FeedForwardConfig = GatedMLP.Config | MLP.Config | MoE.Config
NormConfig = RMSNorm.Config | LayerNorm.Config

_LAYERS: dict[type, Any] = {
    layer.Config: layer
    for layer in (
        Attention,
        DifferentialAttention,
        MultiHeadLatentAttention,
        GatedMLP,
        MLP,
        MoE,
        RMSNorm,
        LayerNorm,
    )
}


def build(config: AttentionConfig | FeedForwardConfig | NormConfig, **factory: Any) -> Any:
    """The module of this config; `factory` is its device and dtype."""
    if type(config) not in _LAYERS:
        known = ", ".join(kind.__qualname__ for kind in _LAYERS)
        raise TypeError(f"build: config must be one of {known}, got config={config!r}")
    return _LAYERS[type(config)](config, **factory)
