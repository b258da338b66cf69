"""Stick-breaking attention: each key takes a share of what the keys after it left."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from omniattn import reference
from omniattn.checks.arguments import (
    is_causal_bias,
    require_bool,
    require_seed,
    use_reference,
)
from omniattn.checks.jagged import is_jagged, require_ragged
from omniattn.encoding.options import StickBreakingOptions, pack, spelled_out
from omniattn.functional.attention._common import autocast, check_shapes
from omniattn.functional.attention._options import checked_codes, run
from omniattn.functional.attention.attention import attention
from omniattn.functional.masks import BoolMask, Chunked, Mask

__all__ = ["stick_breaking_attention"]

#: Keys before the query's own.
_EARLIER = Chunked(1, back=(1, None))


def before_query(op: str, mask: Any) -> Any:
    """Returns the mask that also hides each query's own key and all keys after it.

    A value that is no mask is returned for the error that names it.
    """
    if is_causal_bias(mask):
        raise TypeError(f"{op}: mask must not be a CausalBias, as the function is causal")
    if isinstance(mask, Tensor) and mask.dtype == torch.bool:
        mask = BoolMask(mask)
    if mask is None or isinstance(mask, Mask):
        return _EARLIER if mask is None else mask & _EARLIER
    return mask


@overload
def stick_breaking_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attend_current: bool = False,
    return_remainder: Literal[False] = False,
    backend: str | None = None,
    **options: Unpack[StickBreakingOptions],
) -> Tensor: ...
@overload
def stick_breaking_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attend_current: bool = False,
    return_remainder: Literal[True],
    backend: str | None = None,
    **options: Unpack[StickBreakingOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def stick_breaking_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attend_current: bool = False,
    return_remainder: bool,
    backend: str | None = None,
    **options: Unpack[StickBreakingOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
@spelled_out(StickBreakingOptions, last=("backend",))
def stick_breaking_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attend_current: bool = False,
    return_remainder: bool = False,
    backend: str | None = None,
    **options: Unpack[StickBreakingOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention in which each key takes a share of what the keys after it left.

    ``O_i = sum_j w_ij v_j`` over the keys j before query i, with ``z = scale q k^T`` and

        w_ij = sigmoid(z_ij) prod_{j < l < i} (1 - sigmoid(z_il))

    so that near keys come first and no positions are encoded. The weights of a row sum to at most
    1, and ``1 - sum_j w_ij = prod_j (1 - sigmoid(z_ij))`` remains. Memory grows with T, not T^2.

    Args:
        q: (B, Tq, Hq, D), float64, float32, bfloat16 or float16. The queries are the last Tq of the
            Tk tokens.
        k: (B, Tk, Hkv, D) of q's dtype; Hq must be a multiple of Hkv.
        v: (B, Tk, Hkv, Dv) of q's dtype. All three may be jagged nested tensors: sequences of any
            lengths. :func:`attention_varlen` and :func:`attention_cached` take packed sequences
            and caches, with normalizer="stick_breaking" and causal=True; the mask
            ``masks.Chunked(1, back=(1, None))`` then hides a query's own key.
        attend_current: True if a query sees its own key as well.
        return_remainder: also return what remains of each query's stick.
        window_size, mask, scale, softcap, dropout_p, seed, backend: as in :func:`attention`. Hidden
            keys take no share.

    Returns:
        O (B, Tq, Hq, Dv) of q's dtype, and with return_remainder the remainder (B, Hq, Tq) in
        float32 (float64 for float64). A query that sees no key gives 0, and 1 remains.

    Raises:
        TypeError, ValueError, NotImplementedError: see :func:`attention`.

    Note:
        Sums of ln(1 - sigmoid(z)) are in the accumulator's precision, and exact for large logits:
        no weight is a difference of large numbers. In the backward each kv head is the work of one
        thread. Second and forward-mode derivatives recompute through the eager definition.

    Reference:
        Tan et al., Scaling Stick-Breaking Attention, 2024, arXiv:2410.17980. Equal to
        `stickbreaking` of shawntan/stickbreaking-attention at commit ea69b8d. Its `sb_attn_varlen`
        has the option attend_current, and inv_temp for scale.

    Example:
        >>> q = k = torch.zeros(1, 3, 1, 4)
        >>> v = torch.tensor([4.0, 8.0, 1.0]).view(1, 3, 1, 1)
        >>> out, remainder = stick_breaking_attention(q, k, v, return_remainder=True)
        >>> out.flatten(), remainder.flatten()
        (tensor([0., 2., 5.]), tensor([1.0000, 0.5000, 0.2500]))
    """
    op = "stick_breaking_attention"
    require_bool(op, "attend_current", attend_current)
    require_bool(op, "return_remainder", return_remainder)
    record = pack(op, options, StickBreakingOptions)
    if not is_jagged(q):
        q, k, v = autocast(op, q, k, v)
        full = check_shapes(op, q, k, v)
        if use_reference(op, backend, q):
            checked_codes(op, q, full, record)
            if record.dropout_p > 0:
                require_seed(op, record.seed, q)
            return reference.stick_breaking_attention(
                *(q, k, v),
                attend_current=attend_current,
                return_remainder=return_remainder,
                **options,
            )
    record = record._replace(causal=True, normalizer="stick_breaking")
    if not attend_current:
        record = record._replace(mask=before_query(op, record.mask))
    if is_jagged(q):
        for name, t in (("k", k), ("v", v)):
            require_ragged(op, name, t)
        named: dict[str, Any] = record._asdict()
        out, lse = attention(q, k, v, return_lse=True, backend=backend, **named)
    else:
        out, lse = run(op, q, k, v, full, record, return_remainder, backend)
    return (out, lse.exp()) if return_remainder else out
