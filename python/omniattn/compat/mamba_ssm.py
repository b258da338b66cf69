"""mamba-ssm 2: selective scan and step, Mamba-2 scan, and fused layers of both."""

from omniattn.compat._mamba_layers import mamba_inner_fn, mamba_split_conv1d_scan_combined
from omniattn.compat._mamba_scan import (
    selective_scan_fn,
    selective_scan_ref,
    selective_state_update,
)
from omniattn.compat._mamba_ssd import mamba_chunk_scan_combined

__all__ = [
    "mamba_chunk_scan_combined",
    "mamba_inner_fn",
    "mamba_split_conv1d_scan_combined",
    "selective_scan_fn",
    "selective_scan_ref",
    "selective_state_update",
]
