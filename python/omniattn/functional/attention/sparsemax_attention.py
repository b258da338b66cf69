"""Attention with sparse weights: sparsemax and entmax."""

from __future__ import annotations

from torch import Tensor

from omniattn.checks.arguments import (
    implementation,
    require_bool,
    require_number,
)
from omniattn.checks.jagged import over_sequences
from omniattn.compositions.attention.sparsemax_attention import sparsemax_attention as composed
from omniattn.functional.attention._common import autocast, check_shapes, require_sequences
from omniattn.reference.attention.attention import default_scale

__all__ = ["sparsemax_attention"]


@over_sequences("q", "k", "v")
def sparsemax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    alpha: float = 2.0,
    causal: bool = False,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Attention in which most keys get a weight of exactly 0: sparsemax, or alpha-entmax.

    ``O_i = sum_j p_ij v_j`` over the visible keys j, with ``z = scale q k^T`` and

        p_ij = relu((alpha - 1) z_ij - tau_i)^(1 / (alpha - 1)),  tau_i such that sum_j p_ij = 1

    For alpha = 2 this is the point of the simplex next to z_i, for alpha to 1 it is softmax. Memory
    grows with T, not T^2.

    Args:
        q: (B, Tq, Hq, D), float64, float32, bfloat16 or float16.
        k: (B, Tk, Hkv, D) of q's dtype; Hq must be a multiple of Hkv.
        v: (B, Tk, Hkv, Dv) of q's dtype.
        alpha: 2 for sparsemax, 1.5 for 1.5-entmax; above 1.05 and at most 2.
        causal: True if query i sees the keys up to i + Tk - Tq.
        scale: default D^-0.5.
        cu_seqlens: (N + 1,), int32 or int64, boundaries of sequences packed along T, with B = 1 and
            Tq = Tk. Instead, q, k and v may be jagged nested tensors with the same boundaries.
        backend: None, "cpu" or "cuda" to compute it by the package's kernels of q's device,
            "reference" for the eager definition.

    Returns:
        O (B, Tq, Hq, Dv) of q's dtype. A query that sees no key gives 0.

    Raises:
        TypeError: a dtype is unsupported or differs from q's.
        ValueError: a shape, device or value is invalid.

    Note:
        A composition of torch's ops over blocks of queries, on any device: the time is that of the
        products and of about 5 to 12 passes over the logits of a block. tau is found by Newton's
        method within rounding errors. The gradient is that of the implicit function; where a key
        is about to enter the support it is one of the two one-sided ones. Second and forward-mode
        derivatives recompute through the eager definition.

    Reference:
        Martins and Astudillo, From Softmax to Sparsemax, 2016, arXiv:1602.02068; Peters et al.,
        Sparse Sequence-to-Sequence Models (entmax), 2019, arXiv:1905.05702; Correia et al.,
        Adaptively Sparse Transformers, 2019, arXiv:1909.00015.

    Example:
        >>> q, k = torch.ones(1, 1, 1, 1), torch.tensor([1.0, 0.5, -2.0]).view(1, 3, 1, 1)
        >>> v = torch.tensor([4.0, 8.0, 99.0]).view(1, 3, 1, 1)
        >>> sparsemax_attention(q, k, v).item()  # weights 3/4, 1/4 and 0
        5.0
    """
    op = "sparsemax_attention"
    q, k, v = autocast(op, q, k, v)
    check_shapes(op, q, k, v)
    require_number(op, "alpha", alpha)
    if not 1.05 < alpha <= 2:
        raise ValueError(f"{op}: alpha must be above 1.05 and at most 2, got alpha={alpha}")
    require_bool(op, "causal", causal)
    if scale is not None:
        require_number(op, "scale", scale)
    if cu_seqlens is not None:
        require_sequences(op, cu_seqlens, q, k)
    attend = implementation(op, backend, q, composed)
    scale = default_scale(q.shape[3]) if scale is None else scale
    out: Tensor = attend(q, k, v, cu_seqlens, float(alpha), causal, float(scale))
    return out
