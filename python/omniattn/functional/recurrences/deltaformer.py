"""DeltaFormer's attention, whose values are corrected by what attention to earlier ones reads."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from omniattn.checks.arguments import (
    cast_like,
    implementation,
    require_float,
    require_number,
    require_shape,
    require_strided,
    require_tensor,
)
from omniattn.checks.jagged import over_sequences
from omniattn.compositions.recurrences.deltaformer import deltaformer_attention as native
from omniattn.functional.recurrences._common import composed_sequence_count, widened

__all__ = ["deltaformer_attention"]


@over_sequences("q", "k", "v", "beta")
def deltaformer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    *,
    past: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention to values from which their own reading of earlier values is subtracted.

    ``u_t = v_t - beta_t sum_{j < t} softmax_{j < t}(scale q_t . k_j) u_j``,
    ``o_t = sum_{j <= t} softmax_{j <= t}(scale q_t . k_j) u_j``.

    Takes O(T^2) time as attention does, and O(T) memory.

    Args:
        q: (B, T, H, K), float64, float32, bfloat16 or float16, any strides.
        k: (B, P + T, H, K) of q's dtype: the keys of the P tokens of `past`, then those of v.
        v: (B, T, H, V) of q's dtype.
        beta: (B, T, H), floating-point, the share that is subtracted; None for 1.
        past: (B, P, H, V), floating-point: the u of P earlier tokens; None for P = 0.
        scale: default K^-0.5.
        cu_seqlens: (N + 1,) int32 or int64: B is 1, and tokens cu_seqlens[n] .. cu_seqlens[n + 1]
            are sequence n; only without `past`. Jagged nested tensors (B, j, ...) in place of
            (B, T, ...) bring their own boundaries, and o has them, too.
        backend: None for the native computation, "cpu" or "cuda" to insist on it, "reference" for
            the eager definition.

    Returns:
        o (B, T, H, V) of q's dtype, and u (B, T, H, V) in float32 (float64 for float64), which
        later tokens take as `past`.

    Raises:
        TypeError: a dtype is unsupported or differs from q's.
        ValueError: a shape, device or value is invalid.
        NotImplementedError: no native kernel for the device.

    Note:
        Blocks of 128 tokens read earlier blocks by `attention`, and solve a triangular system for
        their own values, both in fp32 for half types. One reading of the earlier values gives both
        u and o, since ``o_t`` is a mean of it and u_t. torch computes the systems, so the last bits
        may depend on the number of threads. Second and forward-mode derivatives go through the
        eager definition.

    Reference:
        Zhong et al., Understanding Transformer from the Perspective of Associative Memory, 2025,
        arXiv:2505.19488. Verified against `ops/deltaformer/naive.py` of
        fla-org/flash-linear-attention, commit bc3b101d.

    Example:
        >>> q, v = torch.zeros(1, 3, 1, 4), torch.tensor([4.0, 8.0, 6.0]).view(1, 3, 1, 1)
        >>> o, u = deltaformer_attention(q, q, v)
        >>> u.flatten(), o.flatten()
        (tensor([4., 4., 2.]), tensor([4.0000, 4.0000, 3.3333]))
    """
    op = "deltaformer_attention"
    require_float(op, "q", q)
    k, v = cast_like(op, "k", k, q, "q"), cast_like(op, "v", v, q, "q")
    for name, t in (("q", q), ("k", k), ("v", v)):
        require_strided(op, name, t)
    if q.ndim != 4:
        raise ValueError(f"{op}: q must have shape (B, T, H, K), got q.shape={tuple(q.shape)}")
    if v.ndim != 4 or v.shape[:3] != q.shape[:3]:
        raise ValueError(
            f"{op}: v must have shape (B, T, H, V) with B, T and H of q, "
            f"got v.shape={tuple(v.shape)}, q.shape={tuple(q.shape)}"
        )
    batch, steps, heads, size = q.shape
    seen = 0
    if past is not None:
        require_tensor(op, "past", past)
        shape = (batch, past.shape[1] if past.ndim == 4 else 0, heads, v.shape[3])
        past = widened(op, "past", past, v, (shape,))
        seen = shape[1]
        if cu_seqlens is not None:
            raise ValueError(f"{op}: past must be None with cu_seqlens, got {tuple(past.shape)}")
    require_shape(op, "k", k, (batch, seen + steps, heads, size))
    if beta is None:
        beta = torch.ones_like(widened(op, "v", v, v, (tuple(v.shape),))[..., 0])
    beta = widened(op, "beta", beta, v, (tuple(v.shape[:3]),))
    composed_sequence_count(op, q, cu_seqlens)
    if scale is None:
        scale = float(size) ** -0.5 if size > 0 else 1.0  # in fp64 also under torch.jit.trace
    require_number(op, "scale", scale)
    call = implementation(op, backend, q, native)
    return cast("tuple[Tensor, Tensor]", call(q, k, v, beta, past, cu_seqlens, float(scale)))
