"""Models of images."""

from omniattn.models.vision.classifier import Classifier, VisionConfig
from omniattn.models.vision.clip import CLIP, CLIPConfig
from omniattn.models.vision.deit import DeiT, DeiTConfig
from omniattn.models.vision.dino import DINO, DINOConfig, DINOFeaturesConfig
from omniattn.models.vision.dinov2 import (
    Dinov2ClassifierConfig,
    Dinov2Config,
    Dinov2RegistersClassifierConfig,
    Dinov2RegistersConfig,
)
from omniattn.models.vision.mae import MAE, MAEConfig
from omniattn.models.vision.pvt import PVT, PVTConfig
from omniattn.models.vision.pvt_v2 import PVTv2, PVTv2Config
from omniattn.models.vision.swin import Swin, SwinConfig
from omniattn.models.vision.vit import ViT, ViTConfig

__all__ = [
    "CLIP",
    "DINO",
    "MAE",
    "PVT",
    "CLIPConfig",
    "Classifier",
    "DINOConfig",
    "DINOFeaturesConfig",
    "DeiT",
    "DeiTConfig",
    "Dinov2ClassifierConfig",
    "Dinov2Config",
    "Dinov2RegistersClassifierConfig",
    "Dinov2RegistersConfig",
    "MAEConfig",
    "PVTConfig",
    "PVTv2",
    "PVTv2Config",
    "Swin",
    "SwinConfig",
    "ViT",
    "ViTConfig",
    "VisionConfig",
]
