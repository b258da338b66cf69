"""Models, their checkpoints and text generation."""

from omniattn.functional._keywords import explain_keywords
from omniattn.models.checkpoint import CheckpointError, load_model, save_model
from omniattn.models.classifiers import (
    SequenceClassifier,
    SequenceClassifierConfig,
    TokenClassifier,
    TokenClassifierConfig,
)
from omniattn.models.decoders.blocks import SCHEDULES, BlocksConfig, layer_schedule
from omniattn.models.decoders.decoder import Decoder
from omniattn.models.decoders.deepseek import (
    DeepSeekConfig,
    DeepSeekV2Config,
    DeepSeekV32Config,
    MLAConfig,
)
from omniattn.models.decoders.differential import DifferentialConfig, DiffLlamaConfig
from omniattn.models.decoders.experts import MixtralConfig, SwitchConfig
from omniattn.models.decoders.gpt2 import GPT2Config
from omniattn.models.decoders.hybrid import HybridLayer, hybrid_schedule
from omniattn.models.decoders.jamba import JambaConfig
from omniattn.models.decoders.llama import Llama, LlamaConfig
from omniattn.models.decoders.mamba import FalconMambaConfig, MambaConfig
from omniattn.models.decoders.mamba2 import Mamba2Config
from omniattn.models.decoders.transformer_xl import TransformerXL, TransformerXLConfig
from omniattn.models.decoders.zamba2 import Zamba2, Zamba2Config
from omniattn.models.encoder_decoders.bart import (
    BartConfig,
    MarianConfig,
    MBartConfig,
    TransformerConfig,
)
from omniattn.models.encoder_decoders.encoder_decoder import EncoderDecoder
from omniattn.models.encoder_decoders.image_to_text import ImageToText, ImageToTextConfig
from omniattn.models.encoder_decoders.switch import SwitchTransformerConfig
from omniattn.models.encoder_decoders.t5 import T5, T5Config
from omniattn.models.encoders.bert import Bert, BertClassifier, BertClassifierConfig, BertConfig
from omniattn.models.encoders.deberta import Deberta, DebertaConfig, DebertaV2Config
from omniattn.models.encoders.electra import (
    Electra,
    ElectraConfig,
    ElectraDiscriminatorConfig,
    ElectraGeneratorConfig,
    ReplacedTokenDetector,
)
from omniattn.models.encoders.roberta import RobertaConfig
from omniattn.models.encoders.sparse import BigBirdConfig, LongformerConfig
from omniattn.models.families.alibi import BloomConfig, MPTConfig
from omniattn.models.families.falcon import FalconConfig
from omniattn.models.families.gemma import Gemma2Config
from omniattn.models.families.kimi import KimiLinearConfig
from omniattn.models.families.llama4 import Llama4Config
from omniattn.models.families.mistral import MistralConfig
from omniattn.models.families.qwen import (
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from omniattn.models.families.qwen_next import Qwen3NextConfig
from omniattn.models.families.rwkv import (
    RWKV4Config,
    RWKV5Config,
    RWKV6Config,
    RWKV7Config,
)
from omniattn.models.families.rwkv_files import from_rwkv
from omniattn.models.families.xlstm import XLSTMConfig
from omniattn.models.families.zamba import ZambaConfig
from omniattn.models.generation import generate, sample, stream
from omniattn.models.model import Model, ModelConfig
from omniattn.models.pooling import pool_kv_heads
from omniattn.models.presets import PRESETS
from omniattn.models.pretrained import from_hf
from omniattn.models.routers import Routers
from omniattn.models.vision import (
    CLIP,
    DINO,
    MAE,
    PVT,
    CLIPConfig,
    DeiT,
    DeiTConfig,
    DINOConfig,
    DINOFeaturesConfig,
    Dinov2ClassifierConfig,
    Dinov2Config,
    Dinov2RegistersClassifierConfig,
    Dinov2RegistersConfig,
    MAEConfig,
    PVTConfig,
    PVTv2,
    PVTv2Config,
    Swin,
    SwinConfig,
    ViT,
    ViTConfig,
)

__all__ = [
    "CLIP",
    "DINO",
    "MAE",
    "PRESETS",
    "PVT",
    "SCHEDULES",
    "T5",
    "BartConfig",
    "Bert",
    "BertClassifier",
    "BertClassifierConfig",
    "BertConfig",
    "BigBirdConfig",
    "BlocksConfig",
    "BloomConfig",
    "CLIPConfig",
    "CheckpointError",
    "DINOConfig",
    "DINOFeaturesConfig",
    "Deberta",
    "DebertaConfig",
    "DebertaV2Config",
    "Decoder",
    "DeepSeekConfig",
    "DeepSeekV2Config",
    "DeepSeekV32Config",
    "DeiT",
    "DeiTConfig",
    "DiffLlamaConfig",
    "DifferentialConfig",
    "Dinov2ClassifierConfig",
    "Dinov2Config",
    "Dinov2RegistersClassifierConfig",
    "Dinov2RegistersConfig",
    "Electra",
    "ElectraConfig",
    "ElectraDiscriminatorConfig",
    "ElectraGeneratorConfig",
    "EncoderDecoder",
    "FalconConfig",
    "FalconMambaConfig",
    "GPT2Config",
    "Gemma2Config",
    "HybridLayer",
    "ImageToText",
    "ImageToTextConfig",
    "JambaConfig",
    "KimiLinearConfig",
    "Llama",
    "Llama4Config",
    "LlamaConfig",
    "LongformerConfig",
    "MAEConfig",
    "MBartConfig",
    "MLAConfig",
    "MPTConfig",
    "Mamba2Config",
    "MambaConfig",
    "MarianConfig",
    "MistralConfig",
    "MixtralConfig",
    "Model",
    "ModelConfig",
    "PVTConfig",
    "PVTv2",
    "PVTv2Config",
    "Qwen2Config",
    "Qwen2MoeConfig",
    "Qwen3Config",
    "Qwen3MoeConfig",
    "Qwen3NextConfig",
    "RWKV4Config",
    "RWKV5Config",
    "RWKV6Config",
    "RWKV7Config",
    "ReplacedTokenDetector",
    "RobertaConfig",
    "Routers",
    "SequenceClassifier",
    "SequenceClassifierConfig",
    "Swin",
    "SwinConfig",
    "SwitchConfig",
    "SwitchTransformerConfig",
    "T5Config",
    "TokenClassifier",
    "TokenClassifierConfig",
    "TransformerConfig",
    "TransformerXL",
    "TransformerXLConfig",
    "ViT",
    "ViTConfig",
    "XLSTMConfig",
    "Zamba2",
    "Zamba2Config",
    "ZambaConfig",
    "from_hf",
    "from_rwkv",
    "generate",
    "hybrid_schedule",
    "layer_schedule",
    "load_model",
    "pool_kv_heads",
    "sample",
    "save_model",
    "stream",
]

explain_keywords(__name__, __all__)
