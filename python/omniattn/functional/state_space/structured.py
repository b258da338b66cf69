"""Sums over the modes of structured state-space models."""

from __future__ import annotations

import torch
from torch import Tensor

from omniattn.checks.arguments import (
    implementation,
    require_int,
    require_like,
    require_shape,
    require_strided,
    require_tensor,
)
from omniattn.ops import structured as ops

__all__ = ["cauchy", "vandermonde"]


def vandermonde(c: Tensor, x: Tensor, length: int, *, backend: str | None = None) -> Tensor:
    """Computes sums of powers, the convolution kernels of diagonal state-space models.

    ``y[h, l] = 2 Re sum_n c[h, n] exp(l x[h, n])`` for l = 0, ..., length - 1.

    Args:
        c: (H, N) complex128 or complex64, or the same numbers as pairs (real, imaginary): (H, N, 2)
            float64 or float32, as torch.view_as_real gives them. Any strides.
        x: of c's shape and dtype, logarithms of the ratios; the powers do not grow if the real
            parts are <= 0.
        length: L, the number of powers, below 2^31.
        backend: None for the native kernel of c's device, "cpu" or "cuda" to insist on it,
            "reference" for the eager definition.

    Returns:
        y (H, L), float64 or float32.

    Raises:
        TypeError: a dtype is unsupported or differs from c's.
        ValueError: a shape, device or value is invalid.
        NotImplementedError: no native kernel for the device.

    Note:
        Never stores (H, N, L) numbers: forward and backward are products of tables of
        N sqrt(L) exponentials, which are computed in fp64 and rounded to the dtype, so that the
        error does not grow with L. Gradients flow to c and x; they do not depend on the number of
        threads. Second and forward-mode derivatives go through the eager definition. A NaN or
        infinity in x may reach all results of its row.

    Reference:
        Gu et al., On the Parameterization and Initialization of Diagonal State Space Models, 2022,
        arXiv:2206.11893.

    Example:
        >>> half = torch.tensor([[0.5]]).log().to(torch.complex64)
        >>> vandermonde(torch.ones(1, 1, dtype=torch.complex64), half, 4)
        tensor([[2.0000, 1.0000, 0.5000, 0.2500]])
    """
    op = "vandermonde"
    c = _as_pairs(op, "c", c)
    x = _terms_like(op, "x", x, c, "c")
    require_int(op, "length", length, 0, 2**31 - 1)
    y: Tensor = implementation(op, backend, c, ops.vandermonde)(c, x, length)
    return y


def cauchy(v: Tensor, z: Tensor, w: Tensor, *, backend: str | None = None) -> Tensor:
    """Computes sums over conjugate pairs of poles, the generating functions of S4.

    ``y[h, l] = sum_n v[h, n] / (z[l] - w[h, n]) + conj(v[h, n]) / (z[l] - conj(w[h, n]))``.

    Args:
        v: (H, N) complex128 or complex64, or the same numbers as pairs (real, imaginary): (H, N, 2)
            float64 or float32, as torch.view_as_real gives them. Any strides.
        z: (L,), or (L, 2) of pairs: where the sums are taken. It gets no gradient.
        w: of v's shape and dtype: the poles, none of which is at a z.
        backend: as in `vandermonde`.

    Returns:
        y (H, L) of v's dtype, or (H, L, 2) of pairs.

    Raises:
        TypeError: a dtype is unsupported or differs from v's.
        ValueError: a shape, device or value is invalid.
        NotImplementedError: a gradient of z; no native kernel for the device.

    Note:
        Never stores (H, N, L) numbers. Both fractions of a term are computed as one, with the
        error of their sum; its denominator is squared, so that ``|z - w|`` should be within 1e-9
        and 1e9 in fp32. Gradients flow to v and w; they do not depend on the number of threads.
        Second and forward-mode derivatives go through the eager definition.

    Reference:
        Gu, Goel and Re, Efficiently Modeling Long Sequences with Structured State Spaces, 2021,
        arXiv:2111.00396.

    Example:
        >>> z = torch.tensor([1j, 2 + 0j])
        >>> cauchy(torch.tensor([[1 + 0j]]), z, torch.tensor([[-1 + 0j]]))
        tensor([[1.0000-1.j, 0.6667+0.j]])
    """
    op = "cauchy"
    is_complex = isinstance(v, Tensor) and v.is_complex()
    v = _as_pairs(op, "v", v)
    z = _real(op, "z", z, v, "v")
    if z.ndim != 2 or z.shape[1] != 2:
        raise ValueError(
            f"{op}: z must have shape (L,), or (L, 2) of pairs, got pairs of shape {tuple(z.shape)}"
        )
    w = _terms_like(op, "w", w, v, "v")
    run = implementation(op, backend, v, ops.cauchy)
    if run is ops.cauchy:
        ops.refuse_point_gradient(z.requires_grad and torch.is_grad_enabled())
    y: Tensor = run(v, z, w)
    return torch.view_as_complex(y) if is_complex else y


def _real(op: str, name: str, t: Tensor, like: Tensor, like_name: str) -> Tensor:
    require_tensor(op, name, t)
    require_strided(op, name, t)
    t = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
    require_like(op, name, t, like, like_name)
    return t


def _as_pairs(op: str, name: str, t: Tensor) -> Tensor:
    """Returns (H, N) complex or (H, N, 2) real as (H, N, 2) real."""
    require_tensor(op, name, t)
    require_strided(op, name, t)
    if t.dtype not in (torch.complex64, torch.complex128, torch.float32, torch.float64):
        raise TypeError(
            f"{op}: {name} must be complex128 or complex64, or pairs of float64 or float32, "
            f"got {name}.dtype={t.dtype}"
        )
    pairs = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
    if pairs.ndim != 3 or pairs.shape[2] != 2:
        raise ValueError(
            f"{op}: {name} must be complex of shape (H, N), or real of shape (H, N, 2), "
            f"got {name}.shape={tuple(t.shape)}, {name}.dtype={t.dtype}"
        )
    return pairs


def _terms_like(op: str, name: str, t: Tensor, like: Tensor, like_name: str) -> Tensor:
    pairs = _real(op, name, t, like, like_name)
    require_shape(op, name, t, tuple(like.shape[:-1] if t.is_complex() else like.shape))
    return pairs
