"""A small config of every preset, and inputs for it."""

import math

from omniattn.models import (
    BertClassifierConfig,
    BertConfig,
    DeepSeekConfig,
    FalconMambaConfig,
    GPT2Config,
    JambaConfig,
    Mamba2Config,
    MambaConfig,
    MixtralConfig,
    SwinConfig,
    T5Config,
    ViTConfig,
    Zamba2Config,
)
from omniattn.reference import YarnScaling

_SIZES = {"vocab_size": 97, "dim": 48, "num_layers": 2, "num_heads": 4}


_IMAGES = {"channels": 3, "image": 32}


#: A small model of each architecture that transformers has too; Llama has its own tests.
SMALL = {
    "mixtral": MixtralConfig(**_SIZES, hidden_dim=40, experts=6, tie_embeddings=True),
    "deepseek": DeepSeekConfig(
        **_SIZES,
        hidden_dim=40,
        norm_eps=1e-6,
        rope_scaling=YarnScaling(4.0, 8, mscale=1.0, mscale_all_dim=1.0),
        mscale=0.1 * math.log(4) + 1,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_dim=8,
        qk_rope_dim=4,
        v_dim=8,
        expert_dim=20,
        experts=8,
        top_k=3,
        groups=4,
        top_groups=2,
        route_scale=2.5,
    ),
    "gpt2": GPT2Config(**_SIZES, max_positions=40, dropout_p=0.1),
    "gpt2-untied": GPT2Config(**_SIZES, max_positions=40, tie_embeddings=False),
    "mamba2": Mamba2Config(
        vocab_size=97, dim=48, num_layers=2, d_state=12, headdim=8, ngroups=2, dt_limit=(0.01, 2.0)
    ),
    "mamba": MambaConfig(vocab_size=97, dim=48, num_layers=2, d_state=5, dt_rank=7, bias=True),
    "mamba-tied": MambaConfig(
        vocab_size=97, dim=48, num_layers=2, conv_bias=False, tie_embeddings=True
    ),
    "falcon-mamba": FalconMambaConfig(
        vocab_size=97, dim=48, num_layers=2, d_state=5, dt_rank=7, mixer_norm_eps=1e-3
    ),
    "zamba2": Zamba2Config(
        **_SIZES | {"num_layers": 6},
        hybrid_layers=(1, 2, 5),
        num_transformers=2,
        num_kv_heads=4,
        hidden_dim=40,
        adapter_rank=3,
        adapt_attention=True,
        rope_base=500.0,
        d_state=12,
        headdim=8,
        ngroups=2,
        dt_min=0.01,
        bias=True,
    ),
    "zamba2-plain": Zamba2Config(
        **_SIZES | {"num_layers": 4},
        num_kv_heads=2,
        hidden_dim=40,
        adapter_rank=3,
        d_state=12,
        headdim=8,
    ),
    "jamba": JambaConfig(
        **_SIZES | {"num_layers": 4},
        num_kv_heads=2,
        hidden_dim=40,
        attention_period=3,
        attention_offset=1,
        experts=4,
        d_state=5,
        dt_rank=7,
    ),
    "jamba-dense": JambaConfig(**_SIZES, hidden_dim=40, attention_offset=0, experts=1),
    "t5": T5Config(**_SIZES | {"num_heads": 5}, hidden_dim=40, head_dim=12, dropout_p=0.1),
    "t5-gated": T5Config(**_SIZES, hidden_dim=40, head_dim=12, gated=True),
    "bert": BertConfig(**_SIZES, hidden_dim=40, max_positions=40, dropout_p=0.1),
    "bert-classifier": BertClassifierConfig(
        **_SIZES, hidden_dim=40, max_positions=40, dropout_p=0.1, classes=5
    ),
    "vit": ViTConfig(**_IMAGES, patch=8, dim=48, num_layers=2, num_heads=4),
    "swin": SwinConfig(**_IMAGES, patch=4, dim=24, depths=(2, 1, 1), heads=(2, 3, 4), window=2),
}
