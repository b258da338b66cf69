"""Attention with products of Householder-like matrices between keys and queries (PaTH)."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from omniattn import reference
from omniattn.checks.arguments import (
    full_precision,
    require_bool,
    require_number,
    require_shape,
    use_reference,
)
from omniattn.checks.jagged import over_sequences
from omniattn.checks.packed import require_all_tokens
from omniattn.compositions.attention.path_attention import path_attention as composed
from omniattn.functional.attention._common import (
    autocast,
    check_shapes,
    require_bias,
    require_int32_or_int64,
)
from omniattn.reference.attention.attention import default_scale
from omniattn.reference.values import require_all_rows

__all__ = ["path_attention"]


@overload
def path_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    return_keys: Literal[False] = False,
    backend: str | None = None,
) -> Tensor: ...
@overload
def path_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    return_keys: bool,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...
@over_sequences("q", "k", "v", "w", "beta", "g")
def path_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    return_keys: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention whose positions are products of matrices that depend on the tokens (PaTH).

    ``O = softmax(scale q_i^T M_i M_(i-1) ... M_(j+1) k_j + c_i - c_j) v`` over the keys j up to
    query i, with ``M_t = I - beta_t w_t w_t^T`` and ``c_t = g_0 + ... + g_t``. For w of length 1
    and beta = 2 each matrix is a reflection. Nothing overflows with strong gates, and no (T, T)
    tensor is made. Calls take about twice as long as causal `attention`.

    Args:
        q: (B, T, Hq, D), float64, float32, bfloat16 or float16. The queries are the last T of the
            Tk tokens.
        k: (B, Tk, Hkv, D) of q's dtype; Hq must be a multiple of Hkv. The first Tk - T keys are
            those that a call with `return_keys` returned for the earlier tokens.
        v: (B, Tk, Hkv, Dv) of q's dtype.
        w: (B, T, Hkv, D), usually of length 1.
        beta: (B, T, Hkv), in (0, 2) for w of length 1.
        g: (B, Tk, Hq), logarithms of forget gates (PaTH-FoX), such as ``logsigmoid(x)``; None for
            none. Values below -1000, -inf among them, count as -1000 and have no gradient. w, beta
            and g may be of any floating dtype not wider than q's accumulator.
        scale: default D^-0.5.
        cu_seqlens: (N + 1,), int32 or int64, boundaries of sequences packed along T, with B = 1.
            Instead, all tensors may be jagged nested tensors with the same boundaries.
        return_keys: also return the keys after the last token, ``M_T ... M_(j+1) k_j``, for calls
            with later tokens.
        backend: None, "cpu" or "cuda" to compute it by the package's kernels of q's device,
            "reference" for the eager definition.

    Returns:
        O (B, T, Hq, Dv) of q's dtype, and with return_keys the keys (B, Tk, Hkv, D).

    Raises:
        TypeError: a dtype is unsupported or differs from q's.
        ValueError: a shape, device or value is invalid.

    Note:
        Products of matrices are computed in fp32 (fp64 for fp64), gates are summed in fp64. For the
        gradients a call keeps log2(T / 64) + 1 copies of q, k and O.

    Reference:
        Yang et al., PaTH Attention: Position Encoding via Accumulating Householder Transformations,
        2025, arXiv:2505.16381. Equal to `naive_path_attn` of fla-org/flash-linear-attention at
        commit bc3b101, which multiplies g by `scale`, too: pass ``g * scale`` for its results.

    Example:
        >>> q = k = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).view(1, 2, 1, 2)
        >>> w = torch.tensor([0.5, 0.5]).sqrt().expand(1, 2, 1, 2)
        >>> v, beta = torch.tensor([0.0, 1.0]).view(1, 2, 1, 1), torch.full((1, 2, 1), 2.0)
        >>> path_attention(q, k, v, w, beta, scale=1.0).flatten()
        tensor([0.0000, 0.8808])
    """
    op = "path_attention"
    q, k, v = autocast(op, q, k, v)
    batch, heads, steps, total = check_shapes(op, q, k, v)
    if steps > total:
        raise ValueError(f"{op}: T must be at most Tk, got T={steps}, Tk={total}")
    of_keys = (batch, steps, k.shape[2])
    given = [("w", w, (*of_keys, q.shape[3])), ("beta", beta, of_keys)]
    if g is not None:
        given.append(("g", g, (batch, total, heads)))
    for name, t, shape in given:
        require_bias(op, name, t, q)
        require_shape(op, name, t, shape)
    if scale is not None:
        require_number(op, "scale", scale)
    require_bool(op, "return_keys", return_keys)
    ids = None
    if cu_seqlens is not None:
        ids = sequence_ids(op, cu_seqlens, q, total, return_keys)
    if use_reference(op, backend, q) or q.numel() == 0 or v.numel() == 0:
        return reference.path_attention(
            q, k, v, w, beta, g, scale=scale, cu_seqlens=cu_seqlens, return_keys=return_keys
        )
    scale = default_scale(q.shape[3]) if scale is None else scale
    with full_precision(q):
        out, keys = composed(q, k, v, w, beta, g, ids, scale, return_keys)
    return (out, keys) if return_keys else out


def sequence_ids(op: str, cu_seqlens: Tensor, q: Tensor, total: int, return_keys: bool) -> Tensor:
    """Returns the number of each token's sequence (1, T)."""
    require_int32_or_int64(op, "cu_seqlens", cu_seqlens, q)
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1 or q.shape[0] != 1:
        raise ValueError(
            f"{op}: cu_seqlens must have shape (N + 1,), and q B = 1, "
            f"got cu_seqlens.shape={tuple(cu_seqlens.shape)}, q.shape={tuple(q.shape)}"
        )
    if not require_all_tokens(op, cu_seqlens, q.shape[1]):
        require_all_rows(op, cu_seqlens, q.shape[1])
    if return_keys or q.shape[1] != total:
        raise ValueError(
            f"{op}: cu_seqlens must be None with return_keys or keys of earlier calls, "
            f"got T={q.shape[1]}, Tk={total}, return_keys={return_keys}"
        )
    tokens = torch.arange(total, device=q.device)
    return torch.searchsorted(cu_seqlens.long(), tokens, right=True)[None]
