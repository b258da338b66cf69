"""Dtype rule of all references: half inputs are computed in fp32 and rounded once, at the end."""

import torch


def widen(x: torch.Tensor) -> torch.Tensor:
    """fp16 and bf16 to fp32; every other dtype unchanged."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """What sums over elements of x are accumulated in: fp32, fp64 for fp64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def complex_dtype(x: torch.Tensor) -> torch.dtype:
    """The same of complex numbers; torch.compile does not know `torch.dtype.to_complex`."""
    return torch.complex128 if x.dtype == torch.float64 else torch.complex64
