"""A small config of every preset, and inputs for it."""

import math

from omniattn.models import (
    BertClassifierConfig,
    BertConfig,
    BigBirdConfig,
    BloomConfig,
    DebertaConfig,
    DebertaV2Config,
    DeepSeekConfig,
    DeepSeekV2Config,
    DeepSeekV32Config,
    DiffLlamaConfig,
    ElectraDiscriminatorConfig,
    ElectraGeneratorConfig,
    FalconConfig,
    FalconMambaConfig,
    Gemma2Config,
    GPT2Config,
    JambaConfig,
    KimiLinearConfig,
    Llama4Config,
    LongformerConfig,
    Mamba2Config,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    MPTConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    RobertaConfig,
    RWKV4Config,
    SwinConfig,
    T5Config,
    ViTConfig,
    XLSTMConfig,
    Zamba2Config,
    ZambaConfig,
)
from omniattn.reference import Llama3Scaling, YarnScaling

_SIZES = {"vocab_size": 97, "dim": 48, "num_layers": 2, "num_heads": 4}


_IMAGES = {"channels": 3, "image": 32}


_TEXTS = {**_SIZES, "hidden_dim": 40, "max_positions": 40, "dropout_p": 0.1}

#: Encoders other than BERT; without random blocks, which transformers draws otherwise.
ENCODERS = {
    "roberta": RobertaConfig(**_TEXTS, token_types=2),
    "electra-generator": ElectraGeneratorConfig(**_TEXTS, embedding_dim=24),
    "electra-discriminator": ElectraDiscriminatorConfig(**_TEXTS, embedding_dim=24),
    "electra-equal": ElectraDiscriminatorConfig(**_TEXTS, embedding_dim=48),
    "deberta": DebertaConfig(**_TEXTS, max_distance=9, token_types=2),
    "deberta-positions": DebertaConfig(**_TEXTS, adds_positions=True, legacy=True),
    "deberta-v2": DebertaV2Config(
        **_TEXTS, max_distance=12, buckets=8, convolution=3, token_types=2
    ),
    "deberta-v2-own": DebertaV2Config(
        **_TEXTS,
        max_distance=9,
        buckets=0,
        relative_norm=False,
        share_projections=False,
        convolution=5,
        conv_activation="tanh",
        legacy=True,
    ),
    "deberta-v3": DebertaV2Config(**_TEXTS, max_distance=40, buckets=16),
    "longformer": LongformerConfig(**_TEXTS, window=(4, 8)),
    "bigbird": BigBirdConfig(**_TEXTS, block=8, n_random=1),
}


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
    **{
        name: ENCODERS[name]
        for name in (
            *("roberta", "electra-generator", "electra-discriminator"),
            *("deberta", "deberta-v2", "longformer", "bigbird"),
        )
    },
    "vit": ViTConfig(**_IMAGES, patch=8, dim=48, num_layers=2, num_heads=4),
    "swin": SwinConfig(**_IMAGES, patch=4, dim=24, depths=(2, 1, 1), heads=(2, 3, 4), window=2),
}

_GROUPED = {**_SIZES, "num_kv_heads": 2, "hidden_dim": 40}
_EXPERTS = {"experts": 6, "top_k": 3, "expert_dim": 20}

_LATENT = {
    **{"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_dim": 8, "qk_rope_dim": 4, "v_dim": 8},
    **{"hidden_dim": 40, "experts": 8, "top_k": 3, "expert_dim": 20},
}

#: Further families of transformers, whose layers are those of the models above.
FAMILIES = {
    "mistral": MistralConfig(**_GROUPED, window=9),
    "mistral-full": MistralConfig(**_GROUPED, window=None, head_dim=16),
    "qwen2": Qwen2Config(**_GROUPED),
    "qwen2-windowed": Qwen2Config(
        **_GROUPED | {"num_layers": 3}, head_dim=16, window=5, schedule=("full", "swa", "swa")
    ),
    "qwen3": Qwen3Config(**_GROUPED, head_dim=16, tie_embeddings=True),
    "qwen2-moe": Qwen2MoeConfig(**_GROUPED, **_EXPERTS, shared_dim=24),
    "qwen2-moe-dense": Qwen2MoeConfig(
        **_GROUPED | {"num_layers": 4},
        **_EXPERTS,
        shared_dim=24,
        renormalize=True,
        expert_period=2,
        dense_layers=(1,),
    ),
    "qwen3-moe": Qwen3MoeConfig(**_GROUPED, **_EXPERTS, head_dim=16),
    "qwen3-next": Qwen3NextConfig(
        **_GROUPED | {"num_layers": 3},
        **_EXPERTS,
        shared_dim=24,
        head_dim=16,
        schedule=("linear", "full"),
        rotary_share=0.5,
        linear_head_dim=8,
        linear_v_head_dim=12,
    ),
    "bloom": BloomConfig(**_SIZES, norm_eps=1e-6),
    "bloom-untied": BloomConfig(**_SIZES | {"num_heads": 3}, tie_embeddings=False),
    "mpt": MPTConfig(**_SIZES | {"num_heads": 6}),
    "falcon-7b": FalconConfig(**_SIZES, hidden_dim=40),
    "falcon-40b": FalconConfig(**_GROUPED, placement="parallel_norms", rope_base=500.0),
    "falcon-11b": FalconConfig(**_GROUPED, tie_embeddings=False, bias=True),
    "falcon-rw": FalconConfig(
        **_GROUPED | {"num_kv_heads": 4}, placement="pre", alibi=True, bias=True
    ),
    "rwkv-4": RWKV4Config(vocab_size=97, dim=48, num_layers=2, hidden_dim=40),
    "deepseek-v2": DeepSeekV2Config(
        **_SIZES,
        **_LATENT,
        groups=4,
        top_groups=2,
        route_scale=16.0,
        rope_scaling=YarnScaling(4.0, 8, mscale=0.7, mscale_all_dim=0.7),
        mscale=0.1 * 0.7 * math.log(4) + 1,
    ),
    "deepseek-v2-lite": DeepSeekV2Config(**_SIZES, **_LATENT | {"q_lora_rank": None}),
    "deepseek-v3.2": DeepSeekV32Config(
        **_SIZES,
        **_LATENT,
        groups=4,
        top_groups=2,
        route_scale=2.5,
        rope_scaling=YarnScaling(4.0, 8, mscale=1.0, mscale_all_dim=1.0),
        mscale=0.1 * math.log(4) + 1,
        index_heads=16,  # with few, many scores would be 0, and ties depend on the library
        index_dim=8,
        index_topk=6,
    ),
    "kimi-linear": KimiLinearConfig(
        **_SIZES | {"num_layers": 3},
        **_LATENT | {"q_lora_rank": None},
        schedule=("linear", "full"),
        linear_head_dim=16,
    ),
    "llama4-scout": Llama4Config(
        **_GROUPED | {"num_layers": 4},
        head_dim=16,
        schedule=("rope", "nope"),
        chunk_size=10,
        query_period=7,
        experts=6,
        expert_dim=20,
        rope_scaling=Llama3Scaling(8.0, 1.0, 1.0, 16),
    ),
    "llama4-maverick": Llama4Config(
        **_GROUPED,
        schedule=("rope", "nope"),
        chunk_size=None,
        qk_norm=False,
        query_growth=0.0,
        experts=6,
        top_k=2,
        expert_dim=20,
        expert_period=2,
    ),
    "xlstm": XLSTMConfig(**_SIZES | {"dim": 128}, hidden_dim=40, gate_cap=2.0, logit_softcap=3.0),
    "diffllama": DiffLlamaConfig(**_GROUPED),
    "zamba": ZambaConfig(
        **_SIZES | {"num_layers": 4}, num_kv_heads=2, hidden_dim=40, d_state=5, dt_rank=7
    ),
    "gemma2": Gemma2Config(
        **_GROUPED, window=9, head_dim=16, query_scalar=10, softcap=3.0, logit_softcap=5.0
    ),
    "gemma2-uncapped": Gemma2Config(
        **_GROUPED, window=9, schedule=("full",), softcap=0.0, logit_softcap=0.0
    ),
}
