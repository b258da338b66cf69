"""Small models that `python -m omniattn train` offers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from omniattn.models.decoders.blocks import BlocksConfig
from omniattn.models.decoders.deepseek import DeepSeekConfig, MLAConfig
from omniattn.models.decoders.differential import DifferentialConfig
from omniattn.models.decoders.experts import MixtralConfig, SwitchConfig
from omniattn.models.decoders.gpt2 import GPT2Config
from omniattn.models.decoders.hybrid import hybrid_schedule
from omniattn.models.decoders.jamba import JambaConfig
from omniattn.models.decoders.llama import LlamaConfig
from omniattn.models.decoders.mamba import MambaConfig
from omniattn.models.decoders.mamba2 import Mamba2Config
from omniattn.models.decoders.zamba2 import Zamba2Config
from omniattn.models.encoder_decoders.bart import TransformerConfig
from omniattn.models.encoder_decoders.t5 import T5Config
from omniattn.models.encoders.bert import BertConfig
from omniattn.models.encoders.deberta import DebertaV2Config
from omniattn.models.encoders.electra import ElectraConfig
from omniattn.models.families.falcon import FalconConfig
from omniattn.models.families.kimi import KimiLinearConfig
from omniattn.models.families.llama4 import Llama4Config
from omniattn.models.families.xlstm import XLSTMConfig
from omniattn.models.model import ModelConfig
from omniattn.models.vision import (
    CLIPConfig,
    DeiTConfig,
    DINOConfig,
    MAEConfig,
    SwinConfig,
    ViTConfig,
)
from omniattn.modules import (
    HGRN,
    HGRN2,
    MLSTM,
    NSA,
    S4D,
    SLSTM,
    ABCAttention,
    AtlasLinear,
    Attention,
    AttentionResiduals,
    BigBirdAttention,
    Comba,
    CompressedSparseAttention,
    CyclicFlowAttention,
    DecoderBlock,
    DeepSeekSparseAttention,
    DeltaAttention,
    DeltaFormerAttention,
    DeltaNet,
    DeterministicSparseAttention,
    DualChunkAttention,
    Engram,
    GatedDeltaNet,
    GatedDeltaNet2,
    GatedDeltaProduct,
    GatedKalmaNet,
    GatedLinearAttention,
    GatedMLP,
    GatedSlotAttention,
    HubSpokeAttention,
    HyperConnections,
    KimiDeltaAttention,
    LayerNorm,
    LightNet,
    LightningAttention,
    LinearAttention,
    LocalStridedAttention,
    LogLinearMamba2,
    LongformerAttention,
    Longhorn,
    Mamba,
    Mamba3,
    ManifoldHyperConnections,
    MesaNet,
    MixtureOfMemories,
    MoBA,
    MultiHeadLatentAttention,
    MultiScaleRetention,
    MultiTokenAttention,
    ParallaxAttention,
    PaTHAttention,
    Performer,
    PrecondGatedDeltaNet,
    PrecondKDA,
    Raven,
    ReBased,
    RMSNorm,
    Rodimus,
    RotaryEmbedding,
    RoutedBlockAttention,
    RWKV4TimeMix,
    RWKV5TimeMix,
    RWKV6TimeMix,
    RWKV7TimeMix,
    RWKVChannelMix,
    SelectAttention,
    SelectiveAttention,
    TitansLinear,
    TitansMLP,
    TTTLinear,
    WallAttention,
)
from omniattn.modules.base.layer import LayerConfig


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


def _lightning() -> BlocksConfig:
    """Returns a decoder of the size of "llama" whose decays are slower in later layers."""
    base = LlamaConfig()
    mlp, norm = GatedMLP.Config(base.dim, base.hidden_dim), RMSNorm.Config(base.dim)
    mixers = (
        LightningAttention.Config(base.dim, 3, layer_idx=layer, num_layers=base.num_layers)
        for layer in range(base.num_layers)
    )
    return BlocksConfig(
        dim=base.dim,
        num_layers=base.num_layers,
        blocks=tuple(DecoderBlock.Config(mixer, mlp, norm) for mixer in mixers),
    )


def _sparse(
    mixers: tuple[LayerConfig, ...],
    *,
    rotated: bool = True,
    **options: Any,
) -> BlocksConfig:
    """Returns a decoder of the size of "llama" that cycles through these mixers."""
    base = LlamaConfig()
    mlp, norm = GatedMLP.Config(base.dim, base.hidden_dim), RMSNorm.Config(base.dim)
    return BlocksConfig(
        dim=base.dim,
        num_layers=base.num_layers,
        blocks=tuple(DecoderBlock.Config(mixer, mlp, norm, **options) for mixer in mixers),
        rope=RotaryEmbedding.Config(base.dim // base.num_heads) if rotated else None,
    )


def _engram() -> BlocksConfig:
    """Returns "llama" with Engram in every other layer."""
    base = _sparse((Attention.Config(192, 6, 2),))
    ngrams = Engram.Config(base.dim, base.vocab_size, (2048, 2048), ngram_dim=128, num_heads=4)
    return replace(base, engram=ngrams, engram_layers=(1, 3))


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
    "kimi-linear": KimiLinearConfig(),
    "llama4": Llama4Config(chunk_size=64, query_period=64, experts=4, expert_dim=256),
    "falcon": FalconConfig(),
    "gpt2": GPT2Config(),
    "mla": MLAConfig(),
    "differential": DifferentialConfig(),
    "stick-breaking": _sparse(
        (Attention.Config(192, 6, 2, normalizer="stick_breaking", attend_current=False),),
        rotated=False,
    ),
    "softpick": _sparse((Attention.Config(192, 6, 2, normalizer="softpick"),)),
    "forgetting": _sparse((Attention.Config(192, 6, 2, forget_gate=True),), rotated=False),
    "path": _sparse((PaTHAttention.Config(192, 6, 2, w_rank=None),), rotated=False),
    "wall": _sparse((WallAttention.Config(192, 6, 2),), rotated=False),
    "ssmax": _sparse((Attention.Config(192, 6, 2, log_scale=True),)),
    "parallax": _sparse((ParallaxAttention.Config(192, 6, 2),)),
    "mta": _sparse((MultiTokenAttention.Config(192, 6, query_size=4, key_size=5),)),
    "mfa": _sparse((Attention.Config(192, 6, 1, q_rank=96),)),
    "tpa": _sparse((Attention.Config(192, 6, ranks=(6, 2, 2)),)),
    "mlra": _recurrent(
        MultiHeadLatentAttention.Config(
            *(192, 6, 96, 128, 32, 16, 32), num_latents=4, num_branches=4, latent_scale=True
        ),
        RotaryEmbedding.Config(16),
    ),
    "resformer": _sparse(
        tuple(
            Attention.Config(192, 6, 2, value_residual="later" if layer else "first")
            for layer in range(4)
        )
    ),
    "yoco": _sparse(
        (
            *(Attention.Config(192, 6, 2, window_size=(63, 0)),) * 2,
            *(Attention.Config(192, 6, 2, shared_kv=kind) for kind in ("source", "reader")),
        )
    ),
    "hyper": _sparse((Attention.Config(192, 6, 2),), streams=HyperConnections.Config(192)),
    "mhc": _sparse((Attention.Config(192, 6, 2),), streams=ManifoldHyperConnections.Config(192)),
    "attnres": _sparse((Attention.Config(192, 6, 2),), streams=AttentionResiduals.Config(192)),
    "canon": _sparse((Attention.Config(192, 6, 2),), canon="ABCD"),
    "engram": _engram(),
    "select": _recurrent(SelectAttention.Config(192, 3), RotaryEmbedding.Config(64)),
    "selective": _recurrent(SelectiveAttention.Config(192, 3), RotaryEmbedding.Config(64)),
    "deltaformer": _recurrent(DeltaFormerAttention.Config(192, 3), RotaryEmbedding.Config(64)),
    "linear": _recurrent(LinearAttention.Config(192, 3)),
    "delta-attention": _recurrent(DeltaAttention.Config(192, 3)),
    "performer": _recurrent(Performer.Config(192, 3)),
    "gla": _recurrent(GatedLinearAttention.Config(192, 3)),
    "retnet": _recurrent(MultiScaleRetention.Config(192, 3), RotaryEmbedding.Config(64)),
    "deltanet": _recurrent(DeltaNet.Config(192, 3)),
    "gated-deltanet": _recurrent(GatedDeltaNet.Config(192, 3)),
    "gated-deltaproduct": _recurrent(GatedDeltaProduct.Config(192, 3)),
    "gated-deltanet2": _recurrent(GatedDeltaNet2.Config(192, 3)),
    "mom": _recurrent(MixtureOfMemories.Config(192, 3, num_memories=4)),
    "comba": _recurrent(Comba.Config(192, 3)),
    "hgrn": _recurrent(HGRN.Config(192)),
    "rodimus": _recurrent(Rodimus.Config(192, 32)),
    "hgrn2": _recurrent(HGRN2.Config(192, 3)),
    "lightning": _lightning(),
    "lightnet": _recurrent(LightNet.Config(192, 3, gate_rank=32)),
    "based": _recurrent(LinearAttention.Config(192, 3, feature_map="taylor", feature_dim=16)),
    "rebased": _recurrent(ReBased.Config(192, 3, feature_dim=16)),
    "kda": _recurrent(KimiDeltaAttention.Config(192, 3)),
    "gsa": _recurrent(GatedSlotAttention.Config(192, 3, num_slots=32)),
    "raven": _recurrent(Raven.Config(192, 3, num_slots=32, top_k=8)),
    "abc": _recurrent(ABCAttention.Config(192, 3), RotaryEmbedding.Config(32)),
    "precond-gated-deltanet": _recurrent(PrecondGatedDeltaNet.Config(192, 3)),
    "precond-kda": _recurrent(PrecondKDA.Config(192, 3)),
    "mesanet": _recurrent(MesaNet.Config(192, 3)),
    "cyfa": _recurrent(CyclicFlowAttention.Config(192, 3, num_slots=63)),
    "gated-kalmanet": _recurrent(GatedKalmaNet.Config(192, 3)),
    "ttt": _recurrent(TTTLinear.Config(192, 3, use_gate=True, share_qk=True)),
    "titans": _recurrent(TitansLinear.Config(192, 3)),
    "titans-mlp": _recurrent(TitansMLP.Config(192, 3, memory_dim=64)),
    "atlas": _recurrent(AtlasLinear.Config(192, 3, head_dim=16, v_head_dim=64, degree=2)),
    "rwkv4": _rwkv(4),
    "rwkv5": _rwkv(5),
    "rwkv6": _rwkv(6),
    "rwkv7": _rwkv(7),
    "s4d": _recurrent(S4D.Config(192)),
    "xlstm": _xlstm(),
    "xlstm-large": XLSTMConfig(),
    "mamba2": Mamba2Config(num_layers=8, d_state=64, headdim=48),
    "longhorn": _recurrent(Longhorn.Config(192)),
    "mamba3": _recurrent(Mamba3.Config(192, 64, headdim=48)),
    "log-linear-mamba2": _recurrent(LogLinearMamba2.Config(192, 64, headdim=48)),
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
    "csa": _recurrent(
        CompressedSparseAttention.Config(
            *(192, 6, 32, 96, 16, 3, 64),
            window=32,
            index_topk=16,
            index_heads=4,
            index_dim=32,
        ),
        RotaryEmbedding.Config(16),
    ),
    "hca": _recurrent(
        CompressedSparseAttention.Config(
            *(192, 6, 32, 96, 16, 3, 64),
            window=32,
            compress_rate=16,
            overlap=False,
            index_topk=None,
        ),
        RotaryEmbedding.Config(16),
    ),
    "routed-blocks": _sparse(
        (RoutedBlockAttention.Config(192, 6, 2, block_size=16, topk=4, router_dim=32),)
    ),
    "mamba": MambaConfig(num_layers=8),
    "t5": T5Config(),
    "transformer": TransformerConfig(),
    "bert": BertConfig(),
    "electra": ElectraConfig(),
    "deberta": DebertaV2Config(max_distance=128, buckets=32, mask_decoder=True),
    # The published 0.02 is for layers ten times as wide; small layers would start to learn late.
    "vit": ViTConfig(init_std=0.1),
    "swin": SwinConfig(init_std=0.1),
    "deit": DeiTConfig(init_std=0.1),
    "mae": MAEConfig(channels=3, image=16, patch=4, norm_pix=True),
    "clip": CLIPConfig(channels=3, image=16, patch=4, vocab_size=257, context=48, text_layers=2),
    "dino": DINOConfig(
        init_std=0.1,
        head_dim=128,
        bottleneck=32,
        prototypes=64,
        momentum=0.98,
        warmup=0.3,
        centering="sinkhorn",
    ),
}
