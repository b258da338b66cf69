"""Losses with Liger Kernel's names, computed by the fused losses of this package."""

from omniattn.compat.liger.cross_entropy import (
    CrossEntropyOutput,
    LigerCrossEntropyLoss,
    LigerFusedLinearCrossEntropyLoss,
)
from omniattn.compat.liger.divergence import (
    LigerFusedLinearJSD,
    LigerFusedLinearJSDLoss,
    LigerJSD,
    LigerKLDIVLoss,
)
from omniattn.compat.liger.preference import (
    LigerFusedLinearCPOLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearSimPOLoss,
)
from omniattn.compat.liger.unpaired import LigerFusedLinearGRPOLoss, LigerFusedLinearKTOLoss

__all__ = [
    "CrossEntropyOutput",
    "LigerCrossEntropyLoss",
    "LigerFusedLinearCPOLoss",
    "LigerFusedLinearCrossEntropyLoss",
    "LigerFusedLinearDPOLoss",
    "LigerFusedLinearGRPOLoss",
    "LigerFusedLinearJSD",
    "LigerFusedLinearJSDLoss",
    "LigerFusedLinearKTOLoss",
    "LigerFusedLinearORPOLoss",
    "LigerFusedLinearSimPOLoss",
    "LigerJSD",
    "LigerKLDIVLoss",
]
