"""Dtype rule of all references: half inputs are computed in fp32 and rounded once, at the end."""

import torch


def widen(x: torch.Tensor) -> torch.Tensor:
    """fp16 and bf16 to fp32; every other dtype unchanged."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """Dtype in which sums over elements of x accumulate: fp64 for fp64, else fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def complex_dtype(x: torch.Tensor) -> torch.dtype:
    """Complex counterpart of `compute_dtype`; torch.compile does not support
    `torch.dtype.to_complex`."""
    return torch.complex128 if x.dtype == torch.float64 else torch.complex64
