"""Models by name: small ones for `python -m omniattn train`, and published sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from omniattn.checks.arguments import shown
from omniattn.models.bert import BertConfig
from omniattn.models.blocks import BlocksConfig
from omniattn.models.deepseek import DeepSeekConfig, MLAConfig
from omniattn.models.differential import DifferentialConfig
from omniattn.models.experts import MixtralConfig, SwitchConfig
from omniattn.models.gpt2 import GPT2Config
from omniattn.models.hybrid import hybrid_schedule
from omniattn.models.jamba import JambaConfig
from omniattn.models.llama import LlamaConfig
from omniattn.models.mamba import MambaConfig
from omniattn.models.mamba2 import Mamba2Config
from omniattn.models.model import ModelConfig
from omniattn.models.t5 import T5Config
from omniattn.models.vision import SwinConfig, ViTConfig
from omniattn.models.zamba2 import Zamba2Config
from omniattn.modules import (
    MLSTM,
    NSA,
    S4D,
    SLSTM,
    Attention,
    BigBirdAttention,
    DecoderBlock,
    DeepSeekSparseAttention,
    DeltaAttention,
    DeltaNet,
    DeterministicSparseAttention,
    DualChunkAttention,
    GatedDeltaNet,
    GatedLinearAttention,
    GatedMLP,
    HubSpokeAttention,
    KimiDeltaAttention,
    LayerNorm,
    LinearAttention,
    LocalStridedAttention,
    LongformerAttention,
    Mamba,
    MoBA,
    MultiScaleRetention,
    Performer,
    RMSNorm,
    RotaryEmbedding,
    RoutedBlockAttention,
    RWKV4TimeMix,
    RWKV5TimeMix,
    RWKV6TimeMix,
    RWKV7TimeMix,
    RWKVChannelMix,
    SelectiveAttention,
)
from omniattn.modules.base.layer import LayerConfig
from omniattn.reference import Llama3Scaling, YarnScaling
from omniattn.suggestions import did_you_mean


def _recurrent(mixer: LayerConfig, rope: RotaryEmbedding.Config | None = None) -> BlocksConfig:
    """Returns a decoder of the size of "llama" with another mixer."""
    base = LlamaConfig()
    mlp, norm = GatedMLP.Config(base.dim, base.hidden_dim), RMSNorm.Config(base.dim)
    return BlocksConfig(
        dim=base.dim,
        num_layers=base.num_layers,
        blocks=(DecoderBlock.Config(mixer, mlp, norm),),
        rope=rope,
    )


def _samba() -> BlocksConfig:
    """Returns a decoder of the size of "llama" with alternating Mamba and window attention."""
    base = LlamaConfig()
    mlp, norm = GatedMLP.Config(base.dim, base.hidden_dim), RMSNorm.Config(base.dim)
    near = Attention.Config(base.dim, base.num_heads, base.num_kv_heads, window_size=(63, 0))
    mixers: dict[str, LayerConfig] = {"mamba": Mamba.Config(base.dim), "window": near}
    return BlocksConfig(
        dim=base.dim,
        num_layers=base.num_layers,
        blocks=tuple(
            DecoderBlock.Config(mixers[layer.mixer], mlp, norm)
            for layer in hybrid_schedule("samba", 2)
        ),
        rope=RotaryEmbedding.Config(base.dim // base.num_heads),
    )


def _sparse(mixers: tuple[LayerConfig, ...], *, rotated: bool = True) -> BlocksConfig:
    """Returns a decoder of the size of "llama" that cycles through these mixers."""
    base = LlamaConfig()
    mlp, norm = GatedMLP.Config(base.dim, base.hidden_dim), RMSNorm.Config(base.dim)
    return BlocksConfig(
        dim=base.dim,
        num_layers=base.num_layers,
        blocks=tuple(DecoderBlock.Config(mixer, mlp, norm) for mixer in mixers),
        rope=RotaryEmbedding.Config(base.dim // base.num_heads) if rotated else None,
    )


def _rwkv(version: int) -> BlocksConfig:
    """Returns a decoder of the size of "llama" from RWKV layers, initialised by layer index."""
    base = LlamaConfig()
    mixers: dict[int, Callable[..., LayerConfig]] = {
        4: RWKV4TimeMix.Config,
        5: RWKV5TimeMix.Config,
        6: RWKV6TimeMix.Config,
        7: RWKV7TimeMix.Config,
    }
    blocks = []
    for layer in range(base.num_layers):
        place = base.dim, layer, base.num_layers
        mlp = RWKVChannelMix.Config(*place, receptance=version < 7)
        mixer = mixers[version](*place)
        blocks.append(DecoderBlock.Config(mixer, mlp, LayerNorm.Config(base.dim)))
    return BlocksConfig(dim=base.dim, num_layers=base.num_layers, blocks=tuple(blocks))


def _xlstm() -> BlocksConfig:
    """Returns a decoder of the size of "llama" from mLSTM blocks; the second block is sLSTM."""
    base = LlamaConfig()
    hidden = math.ceil(1.3 * base.dim / 64) * 64
    norm = LayerNorm.Config(base.dim, bias=False)
    blocks = []
    for layer in range(base.num_layers):
        place = base.dim, 3, layer, base.num_layers
        if layer == 1:
            mlp = GatedMLP.Config(base.dim, hidden, "geglu")
            blocks.append(DecoderBlock.Config(SLSTM.Config(*place), mlp, norm))
        else:
            blocks.append(DecoderBlock.Config(MLSTM.Config(*place), None, norm))
    return BlocksConfig(dim=base.dim, num_layers=base.num_layers, blocks=tuple(blocks))


#: Models that `python -m omniattn train` offers.
TRAINED: dict[str, ModelConfig] = {
    "llama-tiny": LlamaConfig(dim=64, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=176),
    "llama": LlamaConfig(),
    "llama-medium": LlamaConfig(
        dim=512, num_layers=8, num_heads=8, num_kv_heads=4, hidden_dim=1408
    ),
    # As many multiplications per token as in "llama".
    "mixtral": MixtralConfig(hidden_dim=256),
    "switch": SwitchConfig(hidden_dim=768),
    # The published rate, 1e-3, is for a thousand times as many steps.
    "deepseek-moe": DeepSeekConfig(bias_rate=1e-2),
    "deepseek-moe-mtp": DeepSeekConfig(bias_rate=1e-2, mtp_depths=1),
    "gpt2": GPT2Config(),
    "mla": MLAConfig(),
    "differential": DifferentialConfig(),
    "selective": _recurrent(SelectiveAttention.Config(192, 3), RotaryEmbedding.Config(64)),
    "linear": _recurrent(LinearAttention.Config(192, 3)),
    "delta-attention": _recurrent(DeltaAttention.Config(192, 3)),
    "performer": _recurrent(Performer.Config(192, 3)),
    "gla": _recurrent(GatedLinearAttention.Config(192, 3)),
    "retnet": _recurrent(MultiScaleRetention.Config(192, 3), RotaryEmbedding.Config(64)),
    "deltanet": _recurrent(DeltaNet.Config(192, 3)),
    "gated-deltanet": _recurrent(GatedDeltaNet.Config(192, 3)),
    "kda": _recurrent(KimiDeltaAttention.Config(192, 3)),
    "rwkv4": _rwkv(4),
    "rwkv5": _rwkv(5),
    "rwkv6": _rwkv(6),
    "rwkv7": _rwkv(7),
    "s4d": _recurrent(S4D.Config(192)),
    "xlstm": _xlstm(),
    "mamba2": Mamba2Config(num_layers=8, d_state=64, headdim=48),
    # Half of the published period, so that four layers include all kinds.
    "jamba": JambaConfig(
        num_layers=4, attention_period=4, attention_offset=2, hidden_dim=256, experts=4
    ),
    "samba": _samba(),
    "zamba2": Zamba2Config(),
    "longformer": _sparse(
        (LongformerAttention.Config(192, 6, 2, window=64, global_index=(0, 64, 128), causal=True),)
    ),
    # Each layer has other random blocks.
    "bigbird": _sparse(
        tuple(
            BigBirdAttention.Config(
                192, 6, 2, block=16, n_random=2, draw=layer, causal=True, max_length=4096
            )
            for layer in range(4)
        )
    ),
    "hub-spoke": _sparse(
        (HubSpokeAttention.Config(192, 6, 2, window=31, global_every=32, dual="disjoint"),)
    ),
    "detsa": _sparse((DeterministicSparseAttention.Config(192, 6, 2, window=31, stride=8),)),
    "dual-chunk": _sparse(
        (DualChunkAttention.Config(192, 6, 2, chunk_size=96, local_window=32),), rotated=False
    ),
    "local-strided": _sparse((LocalStridedAttention.Config(192, 6, 2, window=32, stride=8),)),
    "nsa": _sparse(
        (NSA.Config(192, 6, 2, None, 16, 8, 16, 6, 32, compress_dim=64),),
    ),
    # Single tokens also select blocks, so that generation matches training.
    "moba": _sparse((MoBA.Config(192, 6, 2, block_size=16, topk=4, decode="moba"),)),
    "dsa": _recurrent(
        DeepSeekSparseAttention.Config(
            *(192, 6, 96, 64, 32, 16, 32), index_heads=4, index_dim=32, index_topk=32
        ),
        RotaryEmbedding.Config(16),
    ),
    "routed-blocks": _sparse(
        (RoutedBlockAttention.Config(192, 6, 2, block_size=16, topk=4, router_dim=32),)
    ),
    "mamba": MambaConfig(num_layers=8),
    "t5": T5Config(),
    "bert": BertConfig(),
    # The published 0.02 is for layers ten times as wide; small layers would start to learn late.
    "vit": ViTConfig(init_std=0.1),
    "swin": SwinConfig(init_std=0.1),
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
_GPT2 = GPT2Config(vocab_size=50257, dim=768, num_layers=12, num_heads=12, dropout_p=0.1)
_BERT = BertConfig(
    vocab_size=30522, dim=768, num_layers=12, num_heads=12, hidden_dim=3072, dropout_p=0.1
)
_T5 = T5Config(
    vocab_size=32128,
    dim=512,
    num_layers=6,
    num_heads=8,
    head_dim=64,
    hidden_dim=2048,
    dropout_p=0.1,
)
_T5_BASE = replace(_T5, dim=768, num_layers=12, num_heads=12, hidden_dim=3072)
_MAMBA = MambaConfig(
    vocab_size=50280,
    dim=768,
    num_layers=24,
    init_std=0.1,
    residual_in_fp32=True,
    tie_embeddings=True,
)
_VIT = ViTConfig(
    classes=1000, channels=3, image=224, patch=16, dim=768, num_layers=12, num_heads=12
)
_SWIN = SwinConfig(
    classes=1000,
    channels=3,
    image=224,
    patch=4,
    dim=96,
    depths=(2, 2, 6, 2),
    heads=(3, 6, 12, 24),
    window=7,
    drop_path_p=0.2,
)


class _Presets(dict[str, ModelConfig]):
    def __missing__(self, name: object) -> ModelConfig:
        raise KeyError(
            f"PRESETS: name must be that of a model, got name={shown(name)}"
            f"{did_you_mean(name, self)}"
        )


_PUBLISHED: dict[str, ModelConfig] = {
    # For tests: odd sizes, so that every tail path of the kernels runs.
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
    "gpt2-small": _GPT2,
    "gpt2-medium": replace(_GPT2, dim=1024, num_layers=24, num_heads=16),
    "gpt2-large": replace(_GPT2, dim=1280, num_layers=36, num_heads=20),
    "gpt2-xl": replace(_GPT2, dim=1600, num_layers=48, num_heads=25),
    "bert-base": _BERT,
    "bert-large": replace(_BERT, dim=1024, num_layers=24, num_heads=16, hidden_dim=4096),
    "t5-small": _T5,
    "t5-base": _T5_BASE,
    "t5-large": replace(_T5, dim=1024, num_layers=24, num_heads=16, hidden_dim=4096),
    "t5-v1.1-base": replace(_T5_BASE, hidden_dim=2048, gated=True),
    "mamba-130m": _MAMBA,
    "mamba-370m": replace(_MAMBA, dim=1024, num_layers=48),
    "mamba-790m": replace(_MAMBA, dim=1536, num_layers=48),
    "mamba-1.4b": replace(_MAMBA, dim=2048, num_layers=48),
    "mamba-2.8b": replace(_MAMBA, dim=2560, num_layers=64),
    "vit-b-16": _VIT,
    "vit-l-16": replace(_VIT, dim=1024, num_layers=24, num_heads=16),
    "vit-h-14": replace(_VIT, patch=14, dim=1280, num_layers=32, num_heads=16),
    "swin-t": _SWIN,
    "swin-s": replace(_SWIN, depths=(2, 2, 18, 2), drop_path_p=0.3),
    "swin-b": replace(_SWIN, dim=128, depths=(2, 2, 18, 2), heads=(4, 8, 16, 32), drop_path_p=0.5),
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

#: Models by name.
PRESETS: dict[str, ModelConfig] = _Presets(TRAINED | _PUBLISHED)
