"""Softpick attention: a rectified softmax, whose rows need not sum to one."""

from __future__ import annotations

from typing import Any, Literal, overload

from torch import Tensor
from typing_extensions import Unpack

from omniattn.checks.jagged import is_jagged, require_ragged
from omniattn.encoding.options import SoftpickOptions, pack, spelled_out
from omniattn.functional.attention._common import autocast, check_shapes
from omniattn.functional.attention._options import run
from omniattn.functional.attention.attention import attention

__all__ = ["softpick_attention"]


@overload
def softpick_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = False,
    backend: str | None = None,
    **options: Unpack[SoftpickOptions],
) -> Tensor: ...
@overload
def softpick_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[True],
    backend: str | None = None,
    **options: Unpack[SoftpickOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def softpick_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool,
    backend: str | None = None,
    **options: Unpack[SoftpickOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
@spelled_out(SoftpickOptions, last=("backend",))
def softpick_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool = False,
    backend: str | None = None,
    **options: Unpack[SoftpickOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention with a rectified softmax, in which keys with negative logits get no weight.

    ``O_i = sum_j w_ij v_j`` over the visible keys j, with ``z = scale q k^T`` and
    ``w_ij = relu(exp(z_ij) - 1) / sum_l |exp(z_il) - 1|``.

    The weights of a row sum to at most 1: a head may attend to nothing, and needs no sink for that.
    Keys with negative logits still get gradients, through the denominator. Memory grows with T.

    Args:
        q: (B, Tq, Hq, D), float64, float32, bfloat16 or float16.
        k: (B, Tk, Hkv, D) of q's dtype; Hq must be a multiple of Hkv.
        v: (B, Tk, Hkv, Dv) of q's dtype. All three may be jagged nested tensors: sequences of any
            lengths. :func:`attention_varlen` and :func:`attention_cached` take packed sequences
            and caches, with normalizer="softpick".
        return_lse: also return lse, with which :func:`merge_attention` merges sets of keys.
        causal, window_size, mask, bias, alibi_slopes: as in :func:`attention`. Hidden keys are not
            in the sums.
        scale, softcap, dropout_p, seed, backend: as in :func:`attention`.

    Returns:
        O (B, Tq, Hq, Dv) of q's dtype, and with return_lse ``lse = ln sum_l |exp(z_il) - 1|``
        (B, Hq, Tq) in float32 (float64 for float64). A query whose logits are all 0, or that sees
        no key, gives 0 and -inf, with gradients of 0.

    Raises:
        TypeError, ValueError, NotImplementedError: see :func:`attention`.

    Note:
        exp(z) - 1 keeps its relative precision near 0. Where z = 0, its derivatives are those of
        relu and abs, 0. Second and forward-mode derivatives recompute through the eager definition.

    Reference:
        Zuhri, Fuadi and Aji, Softpick: No Attention Sink, No Massive Activations with Rectified
        Softmax, 2025, arXiv:2504.20966. Equal to `naive_softpick_attn` of zaydzuhri/
        softpick-attention at commit c97f4dc without its eps in the denominator, which is 1e-8
        there, 1e-6 in its kernels, and in both relative to the largest exp(z) of the row.

    Example:
        >>> q = torch.ones(1, 1, 1, 1)
        >>> k = torch.tensor([3.0, 2.0, 0.5]).log().view(1, 3, 1, 1)
        >>> v = torch.tensor([7.0, 14.0, 99.0]).view(1, 3, 1, 1)
        >>> softpick_attention(q, k, v).item()  # weights 2, 1 and 0, divided by 2 + 1 + 1/2
        8.0
    """
    op = "softpick_attention"
    record = pack(op, options, SoftpickOptions)._replace(normalizer="softpick")
    if is_jagged(q):
        for name, t in (("k", k), ("v", v)):
            require_ragged(op, name, t)
        named: dict[str, Any] = record._asdict()
        return attention(q, k, v, return_lse=return_lse, backend=backend, **named)
    q, k, v = autocast(op, q, k, v)
    full = check_shapes(op, q, k, v)
    out, lse = run(op, q, k, v, full, record, return_lse, backend)
    return (out, lse) if return_lse else out
