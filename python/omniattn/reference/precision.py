"""Dtype rule of all definitions: fp32 computation for half inputs, one rounding at the end."""

import torch


def widen(x: torch.Tensor) -> torch.Tensor:
    """Converts fp16 and bf16 to fp32; returns other dtypes unchanged."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """Returns the dtype for sums over elements of x: fp64 for fp64, else fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def complex_dtype(x: torch.Tensor) -> torch.dtype:
    """Returns the complex counterpart of `compute_dtype`.

    torch.compile does not support `torch.dtype.to_complex`.
    """
    return torch.complex128 if x.dtype == torch.float64 else torch.complex64


def unit(x: torch.Tensor) -> torch.Tensor:
    """Divides rows by their length, with fla's eps, and rounds them to their dtype."""
    wide = widen(x)
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)
