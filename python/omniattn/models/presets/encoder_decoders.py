"""Published sizes of encoder-decoders."""

from __future__ import annotations

from dataclasses import replace

from omniattn.models.encoder_decoders.bart import (
    BartConfig,
    MarianConfig,
    MBartConfig,
    TransformerConfig,
)
from omniattn.models.encoder_decoders.image_to_text import ImageToTextConfig
from omniattn.models.encoder_decoders.switch import SwitchTransformerConfig
from omniattn.models.encoder_decoders.t5 import T5Config
from omniattn.models.model import ModelConfig
from omniattn.models.vision import ViTConfig

#: About as many tokens as the paper's byte-pair encoding of English and German.
_TRANSFORMER = TransformerConfig(
    vocab_size=37000,
    dim=512,
    num_layers=6,
    num_heads=8,
    hidden_dim=2048,
    dropout_p=0.1,
    label_smoothing=0.1,
)
_BART = BartConfig(
    vocab_size=50265, dim=768, num_layers=6, num_heads=12, hidden_dim=3072, dropout_p=0.1
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
_T5_3B = replace(_T5, dim=1024, num_layers=24, num_heads=32, head_dim=128, hidden_dim=16384)
#: Releases in transformers, which limit experts to 64 tokens of a sequence.
_SWITCH = SwitchTransformerConfig(
    vocab_size=32128,
    dim=768,
    num_layers=12,
    num_heads=12,
    head_dim=64,
    hidden_dim=3072,
    dropout_p=0.1,
    capacity_factor=None,
    capacity=64,
    balance_coefficient=1e-3,
    z_coefficient=1e-3,
)

ENCODER_DECODERS: dict[str, ModelConfig] = {
    "t5-small": _T5,
    "t5-base": _T5_BASE,
    "t5-large": replace(_T5, dim=1024, num_layers=24, num_heads=16, hidden_dim=4096),
    "t5-3b": _T5_3B,
    "t5-11b": replace(_T5_3B, num_heads=128, hidden_dim=65536),
    "t5-v1.1-small": replace(
        _T5_BASE, dim=512, num_layers=8, num_heads=6, hidden_dim=1024, gated=True
    ),
    "t5-v1.1-base": replace(_T5_BASE, hidden_dim=2048, gated=True),
    "t5-v1.1-large": replace(_T5_3B, num_heads=16, head_dim=64, hidden_dim=2816, gated=True),
    "t5-v1.1-xl": replace(_T5_3B, dim=2048, head_dim=64, hidden_dim=5120, gated=True),
    "t5-v1.1-xxl": replace(
        _T5_3B, dim=4096, num_heads=64, head_dim=64, hidden_dim=10240, gated=True
    ),
    **{f"switch-base-{n}": replace(_SWITCH, experts=n) for n in (8, 16, 32, 64, 128, 256)},
    "switch-large-128": replace(
        _SWITCH, dim=1024, num_layers=24, num_heads=16, hidden_dim=4096, experts=128
    ),
    "switch-xxl-128": replace(
        _SWITCH, dim=4096, num_layers=24, num_heads=64, hidden_dim=10240, gated=True, experts=128
    ),
    "switch-c-2048": replace(
        *(_SWITCH,),
        dim=2080,
        num_layers=15,
        num_heads=32,
        hidden_dim=6144,
        experts=2048,
        expert_period=1,
    ),
    # 36 layers in both stacks; the vocabulary of T5, as that of the paper is not public.
    "gshard-600b": replace(
        *(_SWITCH,),
        dim=1024,
        num_layers=18,
        num_heads=16,
        head_dim=128,
        hidden_dim=8192,
        experts=2048,
        top_k=2,
        capacity_factor=2.0,
        capacity=None,
    ),
    "transformer-base": _TRANSFORMER,
    "transformer-big": replace(
        _TRANSFORMER, dim=1024, num_heads=16, hidden_dim=4096, dropout_p=0.3
    ),
    "bart-base": _BART,
    "bart-large": replace(
        _BART,
        dim=1024,
        num_layers=12,
        num_heads=16,
        hidden_dim=4096,
        attention_dropout_p=0.1,
        activation_dropout_p=0.1,
    ),
    "vit-gpt2": ImageToTextConfig(
        vocab_size=50257,
        dim=768,
        num_layers=12,
        num_heads=12,
        hidden_dim=3072,
        dropout_p=0.1,
        attention_dropout_p=0.1,
        vision=ViTConfig(
            classes=0, channels=3, image=224, patch=16, dim=768, num_layers=12, num_heads=12
        ),
    ),
    "mbart-large": MBartConfig(
        vocab_size=250027,
        dim=1024,
        num_layers=12,
        num_heads=16,
        hidden_dim=4096,
        dropout_p=0.1,
        attention_dropout_p=0.1,
    ),
    "opus-mt-en-de": MarianConfig(
        vocab_size=58101, dim=512, num_layers=6, num_heads=8, hidden_dim=2048, dropout_p=0.1
    ),
}
