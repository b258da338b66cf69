"""Parallax: attention with a linear correction by a second query."""

from __future__ import annotations

from torch import Tensor

from omniattn.checks.arguments import (
    cast_like,
    implementation,
    require_bool,
    require_number,
    require_pair,
    require_shape,
)
from omniattn.checks.jagged import over_sequences
from omniattn.compositions.attention.parallax import parallax_attention as composed
from omniattn.functional.attention._common import (
    LONGEST,
    autocast,
    check_shapes,
    require_sequences,
)
from omniattn.reference.attention.attention import default_scale

__all__ = ["parallax_attention"]


@over_sequences("q", "r", "k", "v")
def parallax_attention(
    q: Tensor,
    r: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Attention minus the covariance of its values and keys, times a second query: Parallax.

    With ``p = softmax(scale q k^T)`` and ``s = r k^T`` over the visible keys,

        O_i = sum_j p_ij (1 - s_ij + sum_l p_il s_il) v_j = sum_j p_ij v_j - Cov_p(v, k) r_i

    Memory grows with T, not T^2.

    Args:
        q: (B, Tq, Hq, D), float64, float32, bfloat16 or float16.
        r: (B, Tq, Hq, D) of q's dtype, the second queries, which `scale` does not multiply; 0 gives
            attention.
        k: (B, Tk, Hkv, D) of q's dtype; Hq must be a multiple of Hkv.
        v: (B, Tk, Hkv, Dv) of q's dtype.
        causal: True if query i sees the keys up to i + Tk - Tq.
        window_size: (left, right): keys from left before to right after that position, inclusive;
            -1 for no limit.
        scale: default D^-0.5.
        cu_seqlens: (N + 1,), int32 or int64, boundaries of sequences packed along T, with B = 1 and
            Tq = Tk. Instead, q, r, k and v may be jagged nested tensors with the same boundaries.
        backend: None for the native kernel of q's device, "cpu" or "cuda" to insist on it,
            "reference" for the eager definition.

    Returns:
        O (B, Tq, Hq, Dv) of q's dtype. A query that sees no key gives 0.

    Raises:
        TypeError: a dtype is unsupported or differs from q's.
        ValueError: a shape, device or value is invalid.

    Note:
        The backward recomputes the weights, on the CPU twice, where each head of q and sequence is
        the work of one thread. Its products of three factors for each pair of tokens do not occur
        in the backward of `attention`, so the CPU has separate kernels, which multiply in fp32
        (fp64 for fp64). CUDA tensors take torch's ops over blocks of queries. Second and
        forward-mode derivatives recompute through the eager definition.

    Reference:
        Zuo et al., Parallax: Parameterized Local Linear Attention for Language Modeling, 2026,
        arXiv:2605.29157. As in fla/ops/parallax/naive.py of fla-org/flash-linear-attention at
        commit 012a873, whose window_size=w is window_size=(w - 1, 0) here.

    Example:
        >>> q, k = torch.zeros(1, 1, 1, 1), torch.tensor([0.0, 1.0]).view(1, 2, 1, 1)
        >>> v = torch.tensor([2.0, 6.0]).view(1, 2, 1, 1)
        >>> parallax_attention(q, torch.ones(1, 1, 1, 1), k, v).item()  # 4 - 1
        3.0
    """
    op = "parallax_attention"
    q, k, v = autocast(op, q, k, v)
    check_shapes(op, q, k, v)
    r = cast_like(op, "r", r, q, "q")
    require_shape(op, "r", r, tuple(q.shape))
    require_bool(op, "causal", causal)
    require_pair(op, "window_size", window_size, -1, LONGEST)
    if scale is not None:
        require_number(op, "scale", scale)
    if cu_seqlens is not None:
        require_sequences(op, cu_seqlens, q, k)
    attend = implementation(op, backend, q, composed)
    scale = default_scale(q.shape[3]) if scale is None else scale
    left, right = (int(n) for n in window_size)
    out: Tensor = attend(q, r, k, v, cu_seqlens, left, 0 if causal else right, float(scale))
    return out
