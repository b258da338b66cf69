"""mamba-ssm 2: selective scan and step, Mamba-2 scan, layers, and norms."""

from omniattn.compat._mamba.layers import mamba_inner_fn, mamba_split_conv1d_scan_combined
from omniattn.compat._mamba.mamba3 import Mamba3, heavy_tail_activation
from omniattn.compat._mamba.modules import Block, GatedMLP, Mamba, Mamba2
from omniattn.compat._mamba.parts import (
    GatedLayerNorm,
    GatedRMSNorm,
    RMSNorm,
    layer_norm_fn,
    layernorm_fn,
    mamba_chunk_scan,
    rms_norm_fn,
    rmsnorm_fn,
    ssd_selective_scan,
    swiglu,
)
from omniattn.compat._mamba.scan import (
    selective_scan_fn,
    selective_scan_ref,
    selective_state_update,
)
from omniattn.compat._mamba.ssd import mamba_chunk_scan_combined
from omniattn.compat._norms import layer_norm_linear_fn

__all__ = [
    "Block",
    "GatedLayerNorm",
    "GatedMLP",
    "GatedRMSNorm",
    "Mamba",
    "Mamba2",
    "Mamba3",
    "RMSNorm",
    "heavy_tail_activation",
    "layer_norm_fn",
    "layer_norm_linear_fn",
    "layernorm_fn",
    "mamba_chunk_scan",
    "mamba_chunk_scan_combined",
    "mamba_inner_fn",
    "mamba_split_conv1d_scan_combined",
    "rms_norm_fn",
    "rmsnorm_fn",
    "selective_scan_fn",
    "selective_scan_ref",
    "selective_state_update",
    "ssd_selective_scan",
    "swiglu",
]
