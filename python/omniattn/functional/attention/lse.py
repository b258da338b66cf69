"""Uses of attention's log-sum-exp: attention weights, and merging of several sets of keys."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from typing_extensions import Unpack

from omniattn import reference
from omniattn.checks.arguments import implementation, require_bool, require_float, shown
from omniattn.encoding.options import WeightOptions, pack, spelled_out
from omniattn.functional.attention._common import (
    autocast,
    check_shapes,
    require_lse,
    require_parameter,
)
from omniattn.functional.attention._options import checked_codes, without_query_sinks
from omniattn.ops import attention as ops

__all__ = ["attention_weights", "merge_attention"]


@spelled_out(WeightOptions)
def attention_weights(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    *,
    column_sums: bool = False,
    group_sums: bool = False,
    backend: str | None = None,
    **options: Unpack[WeightOptions],
) -> Tensor:
    """Returns the weights P of :func:`attention` from the lse that it returned, for inspection.

    ``P = exp(logits - lse)``, as in the call with the same arguments, before dropout. Rows sum
    to 1 as far as lse resolves it: an lse of size x is rounded by up to eps x / 2, and the weights
    of the row are off by the factor e to the power of that.

    Args:
        q: (B, Tq, Hq, D), as in :func:`attention`; k (B, Tk, Hkv, D).
        k: see q.
        lse: (B, Hq, Tq) as attention returned it, sinks included; read with softmax only.
        causal, window_size, mask, bias, scale, softcap, alibi_slopes, relative: as in that call.
        relative_keys, relative_queries, sinks, head_scale, normalizer, score_mod: as in that call.
        backend: as in that call.
        column_sums: return the sums over queries instead, the weight that each key received (the
            statistic of H2O, Zhang et al. 2023, arXiv:2306.14048); no (Tq, Tk) tensor is made.
        group_sums: return the sums over the query heads that share a kv head, as the choice of
            blocks of NSA reads them (Yuan et al. 2025, arXiv:2502.11089); with column_sums over
            both.

    Returns:
        P (B, Hq, Tq, Tk) of q's dtype, 0 where not allowed, or sums of it in float32 (float64 for
        float64): without Tq for column_sums, with Hkv instead of Hq for group_sums.

    Raises:
        TypeError, ValueError, NotImplementedError: see :func:`attention`.

    Note:
        Gradients, to q, k, lse and parameters, recompute through the eager definition.

    Example:
        >>> from omniattn.functional import attention
        >>> q = k = torch.zeros(1, 2, 1, 4)
        >>> _, lse = attention(q, k, k, causal=True, return_lse=True)
        >>> attention_weights(q, k, lse, causal=True)
        tensor([[[[1.0000, 0.0000],
                  [0.5000, 0.5000]]]])
    """
    op = "attention_weights"
    require_bool(op, "column_sums", column_sums)
    require_bool(op, "group_sums", group_sums)
    q, k, _ = autocast(op, q, k, k)
    full = check_shapes(op, q, k, k)
    require_lse(op, lse, q, full[:3])
    record = pack(op, options, WeightOptions)
    if record.normalizer in ("stick_breaking", "softpick"):
        raise ValueError(
            f"{op}: normalizer must not be {record.normalizer!r}, as lse gives no weights"
        )
    record, _ = without_query_sinks(op, q, record)  # lse has them
    codes = checked_codes(op, q, full, record)
    weigh = implementation(op, backend, q, ops.attention_weights)
    weights: Tensor = weigh(q, k, lse, *codes, column_sums, group_sums)
    return weights


def merge_attention(
    outs: Sequence[Tensor], lses: Sequence[Tensor], *, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Merges results of attention to disjoint sets of keys into attention to their union.

    ``lse = ln sum_n exp(lse_n)``, ``O = sum_n exp(lse_n - lse) O_n``. This is exact, so keys can be
    split over calls, caches or machines in any way.

    Args:
        outs: O_n (B, Tq, Hq, Dv) of each set.
        lses: lse_n (B, Hq, Tq) of each set, without sinks.
        sinks: (Hq,) or (B, Hq, Tq), see :func:`attention`; added once, here.

    Returns:
        O of the dtype of outs[0], and lse.

    Raises:
        ValueError: no sets, or shapes that differ.

    Note:
        Differentiable through outs, lses and sinks. A query without a key in any set gives 0.

    Example:
        >>> from omniattn.functional import attention
        >>> q, k = torch.zeros(1, 1, 1, 4), torch.zeros(1, 3, 1, 4)
        >>> v = torch.tensor([1.0, 3.0, 8.0]).view(1, 3, 1, 1)
        >>> first = attention(q, k[:, :2], v[:, :2], return_lse=True)
        >>> second = attention(q, k[:, 2:], v[:, 2:], return_lse=True)
        >>> merge_attention(*zip(first, second))[0].item()
        4.0
    """
    op = "merge_attention"
    for name, parts in (("outs", outs), ("lses", lses)):
        if not isinstance(parts, (tuple, list)):
            raise TypeError(f"{op}: {name} must be a list of tensors, got {name}={shown(parts)}")
        for part in parts:
            require_float(op, f"each of {name}", part)
    if len(outs) == 0 or len(outs) != len(lses):
        raise ValueError(
            f"{op}: outs and lses must have the same length >= 1, got len(outs)={len(outs)}, "
            f"len(lses)={len(lses)}"
        )
    if outs[0].dim() != 4:
        raise ValueError(
            f"{op}: outs must have shape (B, Tq, Hq, Dv), got outs[0].shape={tuple(outs[0].shape)}"
        )
    b, t, h = outs[0].shape[:3]
    for out, lse in zip(outs, lses, strict=True):
        if out.shape != outs[0].shape or lse.shape != (b, h, t):
            raise ValueError(
                f"{op}: all must have shapes {tuple(outs[0].shape)} and {(b, h, t)}, "
                f"got out.shape={tuple(out.shape)}, lse.shape={tuple(lse.shape)}"
            )
    if sinks is not None:
        require_parameter(op, "sinks", sinks, outs[0], [(h,), (b, h, t)])
    return reference.merge_attention(outs, lses, sinks=sinks)
