"""Published sizes of recurrent decoders, and of hybrids and variants from the same papers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from omniattn.models.decoders.blocks import BlocksConfig
from omniattn.models.decoders.differential import DifferentialConfig
from omniattn.models.decoders.hybrid import hybrid_schedule
from omniattn.models.families.rwkv import RWKV4Config, RWKV5Config, RWKV6Config, RWKV7Config
from omniattn.models.families.xlstm import XLSTMConfig
from omniattn.models.families.zamba import ZambaConfig
from omniattn.models.model import ModelConfig
from omniattn.modules import (
    MLP,
    MLSTM,
    S4,
    Attention,
    DecoderBlock,
    GatedMLP,
    LayerNorm,
    Mamba,
    MultiScaleRetention,
    RMSNorm,
    RotaryEmbedding,
)
from omniattn.modules.base.layer import LayerConfig

_RWKV4 = RWKV4Config(vocab_size=50277, dim=768, num_layers=12)
_RWKV5 = RWKV5Config(vocab_size=65536, dim=1024, num_layers=24, hidden_dim=3584)
_RWKV6 = RWKV6Config(vocab_size=65536, dim=2048, num_layers=24, hidden_dim=7168)
_RWKV7 = RWKV7Config(
    vocab_size=65536,
    dim=768,
    num_layers=12,
    decay_rank=64,
    a_rank=64,
    v_rank=32,
    gate_rank=128,
)
_RWKV7_1B5 = replace(
    _RWKV7, dim=2048, num_layers=24, decay_rank=96, a_rank=96, v_rank=64, gate_rank=256
)


def _blocks(
    dim: int, num_layers: int, blocks: tuple[DecoderBlock.Config, ...], **options: Any
) -> BlocksConfig:
    return BlocksConfig(dim=dim, num_layers=num_layers, blocks=blocks, **options)


def _retnet(dim: int, num_layers: int, heads: int) -> BlocksConfig:
    """Returns a RetNet, whose values are twice as wide as its keys (table 2 of the paper)."""
    block = DecoderBlock.Config(
        MultiScaleRetention.Config(dim, heads, rope_interleaved=True, normalize=True),
        MLP.Config(dim, 2 * dim, "gelu", bias=False),
        LayerNorm.Config(dim),
    )
    rope = RotaryEmbedding.Config(dim // heads)
    return _blocks(dim, num_layers, (block,), vocab_size=50257, rope=rope, tie_embeddings=True)


def _samba(dim: int, num_layers: int, heads: int, hidden: int) -> BlocksConfig:
    """Returns a Samba; each Mamba and each window attention counts as a layer, with its SwiGLU."""
    mlp, norm = GatedMLP.Config(dim, hidden), RMSNorm.Config(dim)
    window = Attention.Config(dim, heads, window_size=(2047, 0))
    mixers: dict[str, LayerConfig] = {"mamba": Mamba.Config(dim), "window": window}
    pair = hybrid_schedule("samba", 2)
    blocks = tuple(DecoderBlock.Config(mixers[layer.mixer], mlp, norm) for layer in pair)
    rope = RotaryEmbedding.Config(dim // heads)
    return _blocks(dim, num_layers, blocks, vocab_size=32000, rope=rope, tie_embeddings=True)


def _xlstm(dim: int, num_layers: int) -> BlocksConfig:
    """Returns an xLSTM[1:0] of the first paper: mLSTM blocks without feed-forward layers."""
    norm = LayerNorm.Config(dim, bias=False)
    blocks = tuple(
        DecoderBlock.Config(MLSTM.Config(dim, 4, layer, num_layers), None, norm)
        for layer in range(num_layers)
    )
    return _blocks(dim, num_layers, blocks, vocab_size=50304)


def _s4(dim: int, num_layers: int) -> BlocksConfig:
    """Returns the language model of S4's paper, with a plain embedding in place of an adaptive.

    Each of its layers has two S4 and an MLP, so that it has two blocks here.
    """
    mlp, norm = MLP.Config(dim, 4 * dim, "gelu"), LayerNorm.Config(dim)
    blocks = tuple(DecoderBlock.Config(S4.Config(dim), part, norm) for part in (None, mlp))
    return _blocks(dim, 2 * num_layers, blocks, vocab_size=267735, tie_embeddings=True)


def _differential(dim: int, num_layers: int, heads: int) -> DifferentialConfig:
    """Returns a DIFF Transformer with heads of 2 x 128, and SwiGLUs of 8/3 dim."""
    return DifferentialConfig(
        vocab_size=100288,
        dim=dim,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=128,
        hidden_dim=dim * 8 // 3,
    )


RECURRENT: dict[str, ModelConfig] = {
    "rwkv-4-169m": _RWKV4,
    "rwkv-4-430m": replace(_RWKV4, dim=1024, num_layers=24),
    "rwkv-4-1b5": replace(_RWKV4, dim=2048, num_layers=24),
    "rwkv-4-3b": replace(_RWKV4, dim=2560, num_layers=32),
    "rwkv-4-7b": replace(_RWKV4, dim=4096, num_layers=32),
    "rwkv-4-14b": replace(_RWKV4, dim=5120, num_layers=40),
    "rwkv-5-0.4b": _RWKV5,
    "rwkv-5-1.5b": replace(_RWKV5, dim=2048, hidden_dim=7168),
    "rwkv-5-3b": replace(_RWKV5, dim=2560, num_layers=32, hidden_dim=8960),
    "rwkv-5-7b": replace(_RWKV5, dim=4096, num_layers=32, hidden_dim=14336),
    "rwkv-6-1.6b": _RWKV6,
    "rwkv-6-3b": replace(_RWKV6, dim=2560, num_layers=32, hidden_dim=8960),
    "rwkv-6-7b": replace(
        _RWKV6, dim=4096, num_layers=32, hidden_dim=14336, mix_rank=64, decay_rank=128
    ),
    "rwkv-7-0.1b": _RWKV7,
    "rwkv-7-0.4b": replace(_RWKV7, dim=1024, num_layers=24),
    "rwkv-7-1.5b": _RWKV7_1B5,
    "rwkv-7-2.9b": replace(_RWKV7_1B5, dim=2560, num_layers=32, gate_rank=320),
    "retnet-1.3b": _retnet(2048, 24, 8),
    "retnet-2.7b": _retnet(2560, 32, 10),
    "retnet-6.7b": _retnet(4096, 32, 16),
    "samba-421m": _samba(1536, 12, 12, 4096),
    "samba-1.3b": _samba(2304, 18, 18, 6144),
    "xlstm-125m": _xlstm(768, 24),
    "xlstm-350m": _xlstm(1024, 48),
    "xlstm-760m": _xlstm(1536, 48),
    "xlstm-1.3b": _xlstm(2048, 48),
    "xlstm-7b": XLSTMConfig(
        vocab_size=50304, dim=4096, num_layers=32, num_heads=8, hidden_dim=10944
    ),
    "zamba-7b": ZambaConfig(
        vocab_size=32000,
        dim=3712,
        num_layers=76,
        hybrid_layers=(2, *range(7, 76, 6)),
        num_heads=16,
        num_kv_heads=16,
        hidden_dim=14848,
    ),
    "s4-wt103": _s4(1024, 16),
    "diff-3b": _differential(3072, 28, 12),
}
