"""Multi-token attention: weights that depend on neighbouring queries, keys and heads."""

from __future__ import annotations

from torch import Tensor

from omniattn.checks.arguments import (
    cast_like,
    implementation,
    require_bool,
    require_int,
    require_number,
    require_shape,
)
from omniattn.compositions.attention.multi_token import multi_token_attention as composed
from omniattn.functional.attention._common import autocast, check_shapes
from omniattn.reference.attention.attention import default_scale

__all__ = ["multi_token_attention"]


def multi_token_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    head_weight: Tensor | None = None,
    *,
    causal: bool = True,
    scale: float | None = None,
    lead: int = 0,
    backend: str | None = None,
) -> Tensor:
    """Attention whose logits are convolved over queries and keys, and its weights over heads.

    With ``s = scale q k^T``, 0 where key j is hidden from query i, and -inf for hidden keys in the
    softmax,

        c_hij = sum_ab weight_hab s_h,i+a-cq+1,j+b-ck//2,  P = softmax(c),
        A_o = sum_c P_c head_weight_nco for the heads of group n,  O = A v

    Args:
        q: (B, Tq, Hq, D), float64, float32, bfloat16 or float16.
        k: (B, Tk, Hkv, D) of q's dtype; Hq must be a multiple of Hkv.
        v: (B, Tk, Hkv, Dv) of q's dtype.
        weight: (Hq, cq, ck) of q's dtype, for the logits of a query and the cq - 1 before it, and
            of the ck keys around a key, ck odd.
        head_weight: (Hq / C, C, C) of q's dtype, for each C neighbouring heads, from head c to head
            o; None for no mixing.
        causal: True if query i sees the keys up to i + Tk - Tq.
        scale: default D^-0.5.
        lead: number of queries at the start that only the next ones read, for example the last
            cq - 1 before a decoding step.
        backend: None for the native kernel of q's device, "cpu" or "cuda" to insist on it,
            "reference" for the eager definition.

    Returns:
        O (B, Tq - lead, Hq, Dv) of q's dtype. A query that sees no key gives 0.

    Raises:
        TypeError: a dtype is unsupported or differs from q's.
        ValueError: a shape, device or value is invalid.

    Note:
        CPU kernels compute in the accumulator type of q's dtype. A block of 32 queries recomputes
        the logits of the cq - 1 queries before it and holds the weights of a group of heads for all
        keys, so that memory grows with T, not T^2. Results do not depend on the number of
        threads. Other devices compose torch's ops over blocks of queries. Logits before the first
        query count as 0. Second and forward-mode derivatives recompute through the eager
        definition.

    Reference:
        Golovneva et al., Multi-Token Attention, 2025, arXiv:2504.00927. Masks as in
        projects/mta/mta_transformer.py of facebookresearch/RAM at commit 0372dab, with
        pad_key="both".

    Example:
        >>> q = k = torch.zeros(1, 3, 1, 4)
        >>> v = torch.tensor([1.0, 3.0, 8.0]).view(1, 3, 1, 1)
        >>> multi_token_attention(q, k, v, torch.ones(1, 2, 3)).flatten()
        tensor([1., 2., 4.])
    """
    op = "multi_token_attention"
    q, k, v = autocast(op, q, k, v)
    check_shapes(op, q, k, v)
    weight = cast_like(op, "weight", weight, q, "q")
    heads = q.shape[2]
    sizes = weight.shape[1:] if weight.dim() == 3 else (1, 1)
    require_shape(op, "weight", weight, (heads, *sizes))
    if sizes[0] < 1 or sizes[1] % 2 == 0:
        raise ValueError(
            f"{op}: weight must have shape (Hq, cq >= 1, odd ck), "
            f"got weight.shape={tuple(weight.shape)}"
        )
    if head_weight is None:
        head_weight = q.new_ones(heads, 1, 1)
    else:
        head_weight = cast_like(op, "head_weight", head_weight, q, "q")
        size = head_weight.shape[-1] if head_weight.dim() == 3 else 1
        if size < 1 or heads % size:
            raise ValueError(
                f"{op}: head_weight must have shape (Hq / C, C, C) with C a divisor of Hq={heads}, "
                f"got head_weight.shape={tuple(head_weight.shape)}"
            )
        require_shape(op, "head_weight", head_weight, (heads // size, size, size))
    require_bool(op, "causal", causal)
    require_int(op, "lead", lead, 0, q.shape[1])
    if scale is not None:
        require_number(op, "scale", scale)
    scale = default_scale(q.shape[3]) if scale is None else scale
    attend = implementation(op, backend, q, composed)
    out: Tensor = attend(q, k, v, weight, head_weight, causal, float(scale), int(lead))
    return out
