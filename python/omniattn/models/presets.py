"""The models by name: small ones that `omniattn train` offers, and the sizes of releases."""

from __future__ import annotations

import math
from dataclasses import replace

from omniattn.models.deepseek import DeepSeekConfig
from omniattn.models.experts import MixtralConfig, SwitchConfig
from omniattn.models.llama import LlamaConfig
from omniattn.models.model import ModelConfig
from omniattn.reference import Llama3Scaling, YarnScaling

#: Name of an architecture in files -> its config.
ARCHITECTURES: dict[str, type[ModelConfig]] = {
    config.architecture: config
    for config in (LlamaConfig, MixtralConfig, SwitchConfig, DeepSeekConfig)
}

#: What `omniattn train` offers.
TRAINED: dict[str, ModelConfig] = {
    "llama-tiny": LlamaConfig(dim=64, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=176),
    "llama": LlamaConfig(),
    "llama-medium": LlamaConfig(
        dim=512, num_layers=8, num_heads=8, num_kv_heads=4, hidden_dim=1408
    ),
    # As many numbers are multiplied for a token as in "llama".
    "mixtral": MixtralConfig(hidden_dim=256),
    "switch": SwitchConfig(hidden_dim=768),
    # The published rate, 1e-3, is for a thousand times as many steps.
    "deepseek-moe": DeepSeekConfig(bias_rate=1e-2),
}

_LLAMA2 = LlamaConfig(
    vocab_size=32000,
    dim=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    hidden_dim=11008,
    max_positions=4096,
)
_LLAMA3 = replace(
    _LLAMA2,
    vocab_size=128256,
    num_kv_heads=8,
    hidden_dim=14336,
    max_positions=8192,
    rope_base=5e5,
)
_MIXTRAL = MixtralConfig(
    vocab_size=32000,
    dim=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    hidden_dim=14336,
    max_positions=32768,
    rope_base=1e6,
)

PRESETS: dict[str, ModelConfig] = TRAINED | {
    # The size of the tests: odd on purpose, so that every tail path of the kernels is hit.
    "llama-test": LlamaConfig(
        vocab_size=97, dim=48, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=96
    ),
    "llama-2-7b": _LLAMA2,
    "llama-2-70b": replace(
        _LLAMA2, dim=8192, num_layers=80, num_heads=64, num_kv_heads=8, hidden_dim=28672
    ),
    "llama-3-8b": _LLAMA3,
    "llama-3-70b": replace(_LLAMA3, dim=8192, num_layers=80, num_heads=64, hidden_dim=28672),
    "llama-3.1-8b": replace(_LLAMA3, max_positions=131072, rope_scaling=Llama3Scaling()),
    "mixtral-8x7b": _MIXTRAL,
    "mixtral-8x22b": replace(
        _MIXTRAL, dim=6144, num_layers=56, num_heads=48, hidden_dim=16384, max_positions=65536
    ),
    "deepseek-v3": DeepSeekConfig(
        vocab_size=129280,
        dim=7168,
        num_layers=61,
        num_heads=128,
        hidden_dim=18432,
        max_positions=163840,
        norm_eps=1e-6,
        rope_scaling=YarnScaling(40.0, 4096, mscale=1.0, mscale_all_dim=1.0),
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_dim=128,
        qk_rope_dim=64,
        v_dim=128,
        mscale=0.1 * math.log(40) + 1,
        dense_layers=3,
        expert_dim=2048,
        experts=256,
        top_k=8,
        groups=8,
        top_groups=4,
        route_scale=2.5,
    ),
}
