"""Titans: a linear memory that learns from past tokens by descent with momentum and forgetting."""

from __future__ import annotations

import torch
from torch import Tensor

from omniattn.checks.arguments import (
    implementation,
    require_int,
    require_number,
    require_range,
    require_shape,
    shown,
)
from omniattn.checks.jagged import over_sequences
from omniattn.compositions.fast_weights import fast_weights
from omniattn.functional.layers.norm import layer_norm
from omniattn.functional.recurrences._common import (
    composed_sequence_count,
    past_tokens,
    require_heads,
    state_parts,
    widened,
)
from omniattn.reference.precision import widen

__all__ = ["titans_linear"]

State = tuple[Tensor, Tensor, Tensor]


@over_sequences("q", "k", "v", "theta", "alpha", "eta")
def titans_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    alpha: Tensor | None = None,
    eta: Tensor | None = None,
    w: Tensor | None = None,
    b: Tensor | None = None,
    *,
    scale: float = 1.0,
    eps: float = 1e-6,
    mini_batch_size: int = 16,
    position: Tensor | None = None,
    initial_state: State | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, State]:
    """Titans' linear memory: reads by weights that descend a loss of past tokens with momentum.

    With the surprise ``S_t = eta_t S_{t-1} - theta_t k_t^T u_t`` and the weights
    ``M_t = (1 - alpha_t) M_{t-1} + S_t``, ``o_t = scale * q_t M_t``. u_t is the gradient of
    ``|z - v_t|^2`` by ``z = k_t N``, N the weights at the start of the mini-batch of t; the paper's
    form without chunks has mini-batches of one token. With w and b, as in fla, the loss is
    ``|LN(z) - (v_t - k_t)|^2`` with ``LN(z) = w norm(z) + b``, and ``o_t = y_t + LN(y_t)`` of
    ``y_t = scale * q_t M_t``.

    Args:
        q, k: (B, T, H, K), float64, float32, bfloat16 or float16, any strides; k usually of
            length 1.
        v: (B, T, H, V) of q's dtype; V = K with w and b.
        theta: (B, T, H), floating-point, step sizes.
        alpha: (B, T, H), floating-point, shares of the weights that are forgotten; None for 0.
        eta: (B, T, H), floating-point, shares of the momentum that are kept; None for 0.
        w, b: (H, V), floating-point, weight and bias of the norm; None for no norm.
        scale: factor of q.
        eps: added to the variances, > 0.
        mini_batch_size: number of tokens whose gradients are taken at the same weights.
        position: (N,) int32 or int64, >= 0, numbers of past tokens; None for 0.
        initial_state: (M_0, S_0, N) of shape (N, H, K, V) each, where N, the weights at the start
            of the open mini-batch, counts inside one only; None for zeros. N is B, or the number
            of sequences.
        cu_seqlens, backend: as in `gated_linear_attention`.

    Returns:
        o (B, T, H, V) of q's dtype, and the state after the last token in float32 (float64 for
        float64).

    Raises:
        TypeError: a dtype is unsupported or differs from q's.
        ValueError: a shape, device or value is invalid.
        NotImplementedError: no native kernel for the device.

    Note:
        Mini-batches follow each other, computed in fp32 for half types; factors of gates are
        products, never exponentials of differences of sums. A NaN or infinity may also reach
        outputs of earlier tokens of its mini-batch. The backward keeps the inputs only and
        recomputes M and S. Second and forward-mode derivatives go through the eager definition.

        fla's `naive.py` computes the gradient of the norm as ``D g - sum(g) / (D deviation) - ...``
        where its own comment has ``(D g - sum(g) - ...) / (D deviation)``; this function computes
        the latter, the gradient.

    Reference:
        Behrouz et al., Titans: Learning to Memorize at Test Time, 2025, arXiv:2501.00663, equations
        8 to 14. Verified against `ops/titans/naive.py` of fla-org/flash-linear-attention, commit
        bc3b101d, with these parentheses.

    Example:
        >>> q, theta = torch.tensor([1.0, 0.0]).expand(1, 2, 1, 2), torch.full((1, 2, 1), 0.25)
        >>> o, (M, S, N) = titans_linear(q, q, 2 * q, theta, mini_batch_size=1)
        >>> o[0, :, 0, 0]  # each step goes half of the way to 2
        tensor([1.0000, 1.5000])
    """
    op = "titans_linear"
    require_int(op, "mini_batch_size", mini_batch_size, 1)
    require_number(op, "eps", eps, above=0.0)
    require_number(op, "scale", scale)
    k, v = require_heads(op, q, k, v)
    heads, of_heads = q.shape[2], tuple(q.shape[:3])
    require_shape(op, "v", v, (*of_heads, q.shape[3] if w is not None else v.shape[3]))
    if (w is None) != (b is None):
        missing, given = ("w", "b") if w is None else ("b", "w")
        raise ValueError(f"{op}: {missing} must be given with {given}, got {missing}=None")
    theta = widened(op, "theta", theta, v, (of_heads,))
    alpha, eta = (
        None if t is None else widened(op, name, t, v, (of_heads,))
        for name, t in (("alpha", alpha), ("eta", eta))
    )
    w, b = (
        None if t is None else widened(op, name, t, v, ((heads, v.shape[3]),))
        for name, t in (("w", w), ("b", b))
    )
    count = composed_sequence_count(op, q, cu_seqlens)
    position = past_tokens(op, position, v, count)
    if position is not None:
        require_range(op, "position", position, least=0)
        if initial_state is None:
            raise ValueError(
                f"{op}: position must be None without initial_state, got position={shown(position)}"
            )
    shape = (count, heads, q.shape[3], v.shape[3])
    before = state_parts(op, initial_state, "M_0, S_0, N", v, (shape,) * 3) or (None,) * 3
    weights, momentum, anchor = before
    call = implementation(op, backend, q, fast_weights)
    y, weights, momentum, anchor = call(
        *(widen(q), widen(k), widen(v), 2 * theta),
        *(torch.zeros_like(theta) if eta is None else eta, None if alpha is None else 1 - alpha),
        *(w, b, weights, None if momentum is None else -momentum, anchor, position, cu_seqlens),
        *(int(mini_batch_size), float(eps), float(scale), False, False, w is not None),
    )
    if w is not None and b is not None:
        y = torch.addcmul(y + b, layer_norm(y, eps=float(eps), backend=backend), w)
    return y.to(q.dtype), (weights, -momentum, anchor)
