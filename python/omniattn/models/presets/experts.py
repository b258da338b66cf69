"""Published sizes of decoders with experts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from omniattn.models.decoders.deepseek import DeepSeekConfig, DeepSeekV2Config, DeepSeekV32Config
from omniattn.models.decoders.experts import MixtralConfig
from omniattn.models.decoders.jamba import JambaConfig
from omniattn.models.families.kimi import KimiLinearConfig
from omniattn.models.families.llama4 import Llama4Config
from omniattn.models.families.qwen import Qwen2MoeConfig, Qwen3MoeConfig
from omniattn.models.families.qwen_next import Qwen3NextConfig
from omniattn.models.model import ModelConfig
from omniattn.reference import Llama3Scaling, YarnScaling

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
_QWEN15_MOE = Qwen2MoeConfig(
    vocab_size=151936,
    dim=2048,
    num_layers=24,
    num_heads=16,
    num_kv_heads=16,
    hidden_dim=5632,
    max_positions=8192,
    rope_base=1e6,
    experts=60,
    top_k=4,
    expert_dim=1408,
    shared_dim=5632,
)
_QWEN3_MOE = Qwen3MoeConfig(
    vocab_size=151936,
    dim=2048,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    hidden_dim=6144,
    max_positions=40960,
    rope_base=1e6,
    experts=128,
    top_k=8,
    expert_dim=768,
)
_DEEPSEEK_V2 = DeepSeekV2Config(
    vocab_size=102400,
    dim=5120,
    num_layers=60,
    num_heads=128,
    hidden_dim=12288,
    max_positions=163840,
    rope_scaling=YarnScaling(40.0, 4096, mscale=0.707, mscale_all_dim=0.707),
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_dim=128,
    qk_rope_dim=64,
    v_dim=128,
    mscale=0.1 * 0.707 * math.log(40) + 1,
    expert_dim=1536,
    experts=160,
    top_k=6,
    groups=8,
    top_groups=3,
    route_scale=16.0,
)
_DEEPSEEK_V3: dict[str, Any] = {
    "vocab_size": 129280,
    "dim": 7168,
    "num_layers": 61,
    "num_heads": 128,
    "hidden_dim": 18432,
    "max_positions": 163840,
    "norm_eps": 1e-6,
    "rope_scaling": YarnScaling(40.0, 4096, mscale=1.0, mscale_all_dim=1.0),
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_dim": 128,
    "qk_rope_dim": 64,
    "v_dim": 128,
    "mscale": 0.1 * math.log(40) + 1,
    "dense_layers": 3,
    "expert_dim": 2048,
    "experts": 256,
    "top_k": 8,
    "groups": 8,
    "top_groups": 4,
    "route_scale": 2.5,
}
_LLAMA4 = Llama4Config(
    vocab_size=202048,
    dim=5120,
    num_layers=48,
    num_heads=40,
    num_kv_heads=8,
    head_dim=128,
    hidden_dim=16384,
    max_positions=10485760,
    rope_base=5e5,
    rope_scaling=Llama3Scaling(16.0, 1.0, 1.0, 8192),
    expert_dim=8192,
)

EXPERTS: dict[str, ModelConfig] = {
    "mixtral-8x7b": _MIXTRAL,
    "mixtral-8x22b": replace(
        _MIXTRAL, dim=6144, num_layers=56, num_heads=48, hidden_dim=16384, max_positions=65536
    ),
    "qwen1.5-moe-a2.7b": _QWEN15_MOE,
    "qwen2-57b-a14b": replace(
        _QWEN15_MOE,
        dim=3584,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        hidden_dim=18944,
        max_positions=131072,
        experts=64,
        top_k=8,
        expert_dim=2560,
        shared_dim=20480,
    ),
    "qwen3-30b-a3b": _QWEN3_MOE,
    "qwen3-235b-a22b": replace(
        _QWEN3_MOE, dim=4096, num_layers=94, num_heads=64, hidden_dim=12288, expert_dim=1536
    ),
    "qwen3-next-80b-a3b": Qwen3NextConfig(
        vocab_size=151936,
        dim=2048,
        num_layers=48,
        num_heads=16,
        num_kv_heads=2,
        head_dim=256,
        hidden_dim=5120,
        max_positions=262144,
        rope_base=1e7,
        experts=512,
        top_k=10,
        expert_dim=512,
        shared_dim=512,
        linear_heads=16,
        linear_v_heads=32,
        linear_head_dim=128,
        linear_v_head_dim=128,
    ),
    "jamba-v0.1": JambaConfig(
        vocab_size=65536,
        dim=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        hidden_dim=14336,
        experts=16,
    ),
    "deepseek-v2": _DEEPSEEK_V2,
    "deepseek-v2-lite": replace(
        _DEEPSEEK_V2,
        dim=2048,
        num_layers=27,
        num_heads=16,
        hidden_dim=10944,
        q_lora_rank=None,
        expert_dim=1408,
        experts=64,
        groups=1,
        top_groups=1,
        route_scale=1.0,
    ),
    "deepseek-v3": DeepSeekConfig(**_DEEPSEEK_V3),
    "deepseek-v3.2": DeepSeekV32Config(
        **_DEEPSEEK_V3, index_heads=64, index_dim=128, index_topk=2048
    ),
    "kimi-linear-48b-a3b": KimiLinearConfig(
        vocab_size=163840,
        dim=2304,
        num_layers=27,
        num_heads=32,
        hidden_dim=9216,
        max_positions=1048576,
        kv_lora_rank=512,
        qk_nope_dim=128,
        qk_rope_dim=64,
        v_dim=128,
        dense_layers=1,
        expert_dim=1024,
        experts=256,
        top_k=8,
        schedule=(*("linear", "linear", "linear", "full") * 6, "linear", "linear", "full"),
        linear_heads=32,
        linear_head_dim=128,
    ),
    "llama-4-scout": _LLAMA4,
    "llama-4-maverick": replace(
        _LLAMA4,
        max_positions=1048576,
        rope_scaling=None,
        qk_norm=False,
        experts=128,
        expert_period=2,
    ),
}
