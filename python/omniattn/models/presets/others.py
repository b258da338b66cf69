"""Published sizes of the models outside the Llama family."""

from __future__ import annotations

from dataclasses import replace

from omniattn.models.decoders.gpt2 import GPT2Config
from omniattn.models.decoders.mamba import MambaConfig
from omniattn.models.decoders.mamba2 import Mamba2Config
from omniattn.models.decoders.transformer_xl import TransformerXLConfig
from omniattn.models.encoders.bert import BertConfig
from omniattn.models.families.alibi import BloomConfig, MPTConfig
from omniattn.models.families.falcon import FalconConfig
from omniattn.models.model import ModelConfig

_BLOOM = BloomConfig(vocab_size=250880, dim=1024, num_layers=24, num_heads=16)
_MPT = MPTConfig(vocab_size=50432, dim=4096, num_layers=32, num_heads=32)
_FALCON = FalconConfig(vocab_size=65024, dim=4544, num_layers=32, num_heads=71, hidden_dim=18176)
_FALCON_RW = replace(
    _FALCON,
    vocab_size=50304,
    dim=2048,
    num_layers=24,
    num_heads=32,
    num_kv_heads=32,
    hidden_dim=8192,
    placement="pre",
    alibi=True,
    bias=True,
)
_FALCON_40B = replace(
    _FALCON,
    dim=8192,
    num_layers=60,
    num_heads=128,
    num_kv_heads=8,
    hidden_dim=32768,
    placement="parallel_norms",
)
_GPT2 = GPT2Config(vocab_size=50257, dim=768, num_layers=12, num_heads=12, dropout_p=0.1)
_BERT = BertConfig(
    vocab_size=30522, dim=768, num_layers=12, num_heads=12, hidden_dim=3072, dropout_p=0.1
)
_MAMBA = MambaConfig(
    vocab_size=50280,
    dim=768,
    num_layers=24,
    init_std=0.1,
    residual_in_fp32=True,
    tie_embeddings=True,
)
_MAMBA2 = Mamba2Config(
    vocab_size=50288, dim=768, num_layers=24, residual_in_fp32=True, tie_embeddings=True
)

OTHERS: dict[str, ModelConfig] = {
    "gpt2-small": _GPT2,
    "gpt2-medium": replace(_GPT2, dim=1024, num_layers=24, num_heads=16),
    "gpt2-large": replace(_GPT2, dim=1280, num_layers=36, num_heads=20),
    "gpt2-xl": replace(_GPT2, dim=1600, num_layers=48, num_heads=25),
    "bloom-560m": _BLOOM,
    "bloom-1b1": replace(_BLOOM, dim=1536),
    "bloom-1b7": replace(_BLOOM, dim=2048),
    "bloom-3b": replace(_BLOOM, dim=2560, num_layers=30, num_heads=32),
    "bloom-7b1": replace(_BLOOM, dim=4096, num_layers=30, num_heads=32),
    "bloom": replace(_BLOOM, dim=14336, num_layers=70, num_heads=112),
    "mpt-7b": _MPT,
    "mpt-30b": replace(_MPT, dim=7168, num_layers=48, num_heads=64),
    "falcon-7b": _FALCON,
    "falcon-40b": _FALCON_40B,
    "falcon-180b": replace(_FALCON_40B, dim=14848, num_layers=80, num_heads=232, hidden_dim=59392),
    "falcon-11b": replace(
        _FALCON,
        dim=4096,
        num_layers=60,
        num_heads=32,
        num_kv_heads=8,
        hidden_dim=16384,
        rope_base=500042.0,
        max_positions=8192,
        tie_embeddings=False,
    ),
    "falcon-rw-1b": _FALCON_RW,
    "falcon-rw-7b": replace(
        _FALCON_RW,
        vocab_size=65024,
        dim=4096,
        num_layers=36,
        num_heads=64,
        num_kv_heads=64,
        hidden_dim=16384,
    ),
    "bert-base": _BERT,
    "bert-large": replace(_BERT, dim=1024, num_layers=24, num_heads=16, hidden_dim=4096),
    "transformer-xl-wt103": TransformerXLConfig(
        vocab_size=267735,
        dim=410,
        num_layers=16,
        num_heads=10,
        hidden_dim=2100,
        memory_length=150,
        dropout_p=0.1,
    ),
    "mamba-130m": _MAMBA,
    "mamba-370m": replace(_MAMBA, dim=1024, num_layers=48),
    "mamba-790m": replace(_MAMBA, dim=1536, num_layers=48),
    "mamba-1.4b": replace(_MAMBA, dim=2048, num_layers=48),
    "mamba-2.8b": replace(_MAMBA, dim=2560, num_layers=64),
    "mamba2-130m": _MAMBA2,
    "mamba2-370m": replace(_MAMBA2, dim=1024, num_layers=48),
    "mamba2-780m": replace(_MAMBA2, dim=1536, num_layers=48),
    "mamba2-1.3b": replace(_MAMBA2, dim=2048, num_layers=48),
    "mamba2-2.7b": replace(_MAMBA2, dim=2560, num_layers=64),
}
