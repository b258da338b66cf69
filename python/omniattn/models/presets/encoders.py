"""Published sizes of text encoders other than BERT."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from omniattn.models.encoders.deberta import DebertaConfig, DebertaV2Config
from omniattn.models.encoders.electra import ElectraDiscriminatorConfig, ElectraGeneratorConfig
from omniattn.models.encoders.roberta import RobertaConfig
from omniattn.models.encoders.sparse import BigBirdConfig, LongformerConfig
from omniattn.models.model import ModelConfig

_LARGE: dict[str, Any] = {"dim": 1024, "num_layers": 24, "num_heads": 16, "hidden_dim": 4096}
_ROBERTA = RobertaConfig(
    vocab_size=50265, dim=768, num_layers=12, num_heads=12, hidden_dim=3072, dropout_p=0.1
)
_GENERATOR = ElectraGeneratorConfig(
    vocab_size=30522,
    dim=256,
    num_layers=12,
    num_heads=4,
    hidden_dim=1024,
    dropout_p=0.1,
    embedding_dim=128,
)
_DISCRIMINATOR = ElectraDiscriminatorConfig(
    vocab_size=30522,
    dim=768,
    num_layers=12,
    num_heads=12,
    hidden_dim=3072,
    dropout_p=0.1,
    embedding_dim=768,
)
_DEBERTA = DebertaConfig(
    vocab_size=50265, dim=768, num_layers=12, num_heads=12, hidden_dim=3072, dropout_p=0.1
)
_DEBERTA_V2 = DebertaV2Config(
    vocab_size=128100,
    dim=1536,
    num_layers=24,
    num_heads=24,
    hidden_dim=6144,
    dropout_p=0.1,
    convolution=3,
)
_DEBERTA_V3 = replace(_DEBERTA_V2, dim=768, num_heads=12, hidden_dim=3072, convolution=0)
_LONGFORMER = LongformerConfig(
    vocab_size=50265, dim=768, num_layers=12, num_heads=12, hidden_dim=3072, dropout_p=0.1
)
_BIGBIRD = BigBirdConfig(
    vocab_size=50358, dim=768, num_layers=12, num_heads=12, hidden_dim=3072, dropout_p=0.1
)

ENCODERS: dict[str, ModelConfig] = {
    "roberta-base": _ROBERTA,
    "roberta-large": replace(_ROBERTA, **_LARGE),
    "electra-small-generator": _GENERATOR,
    "electra-base-generator": replace(_GENERATOR, embedding_dim=768),
    "electra-large-generator": replace(_GENERATOR, num_layers=24, embedding_dim=1024),
    "electra-small-discriminator": replace(
        _DISCRIMINATOR, dim=256, num_heads=4, hidden_dim=1024, embedding_dim=128
    ),
    "electra-base-discriminator": _DISCRIMINATOR,
    "electra-large-discriminator": replace(_DISCRIMINATOR, **_LARGE, embedding_dim=1024),
    "deberta-base": _DEBERTA,
    "deberta-large": replace(_DEBERTA, **_LARGE),
    "deberta-xlarge": replace(_DEBERTA, **_LARGE | {"num_layers": 48}),
    "deberta-v2-xlarge": _DEBERTA_V2,
    "deberta-v2-xxlarge": replace(_DEBERTA_V2, num_layers=48),
    "deberta-v3-xsmall": replace(_DEBERTA_V3, dim=384, num_layers=12, num_heads=6, hidden_dim=1536),
    "deberta-v3-small": replace(_DEBERTA_V3, num_layers=6),
    "deberta-v3-base": replace(_DEBERTA_V3, num_layers=12),
    "deberta-v3-large": replace(_DEBERTA_V3, **_LARGE),
    "longformer-base-4096": _LONGFORMER,
    "longformer-large-4096": replace(_LONGFORMER, **_LARGE),
    "bigbird-roberta-base": _BIGBIRD,
    "bigbird-roberta-large": replace(_BIGBIRD, **_LARGE),
}
