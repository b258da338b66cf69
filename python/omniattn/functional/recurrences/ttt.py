"""TTT-Linear: a linear model that learns from past tokens by gradient descent."""

from __future__ import annotations

import torch
from torch import Tensor

from omniattn.checks.arguments import (
    implementation,
    require_choice,
    require_int,
    require_number,
    require_shape,
)
from omniattn.checks.jagged import over_sequences
from omniattn.compositions.recurrences.fast_weights import fast_weights
from omniattn.functional.layers.norm import layer_norm
from omniattn.functional.recurrences._common import (
    composed_sequence_count,
    place_of_state,
    require_heads,
    state_parts,
    widened,
)
from omniattn.reference.precision import widen

__all__ = ["ttt_linear"]

State = tuple[Tensor, Tensor, Tensor, Tensor]
RESIDUALS = ("output", "query")


@over_sequences("q", "k", "v", "eta", "lr")
def ttt_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    b: Tensor,
    eta: Tensor,
    lr: Tensor | None = None,
    *,
    scale: float | None = None,
    eps: float = 1e-6,
    mini_batch_size: int = 16,
    residual: str = "output",
    position: Tensor | None = None,
    initial_state: State | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, State]:
    """TTT-Linear: reads by a linear model that descends the loss of reconstructing past values.

    The loss of token s is ``|LN(k_s W + B) - (v_s - k_s)|^2 / 2`` with ``LN(z) = w norm(z) + b``,
    and u_s its gradient by ``k_s W + B``. All gradients of a mini-batch are taken at its first
    weights W_0, B_0: with ``G_t = sum_s lr_s k_s^T u_s`` and ``g_t = sum_s lr_s u_s`` over its
    tokens s <= t, ``W_t = W_0 - eta_t G_t``, ``B_t = B_0 - eta_t g_t``, ``y_t = scale * q_t W_t +
    B_t`` and ``o_t = y_t + LN(y_t)``. The last W_t and B_t of a mini-batch are the first of the
    next.

    Args:
        q: (B, T, H, D), float64, float32, bfloat16 or float16, any strides.
        k, v: (B, T, H, D), of q's dtype; k usually of length 1 or rotated.
        w, b: (H, D), floating-point: weight and bias of the norm.
        eta: (B, T, H), floating-point, the step size at which token t reads and, if it is the last
            of its mini-batch, the weights descend.
        lr: (B, T, H), floating-point, factors of the gradients of tokens; None for 1.
        scale: factor of q, default D^-0.5.
        eps: added to the variances, > 0.
        mini_batch_size: number of tokens whose gradients are taken at the same weights.
        residual: what is added to LN(y): "output" for y, as in fla, or "query" for scale * q, as in
            the authors' ttt-lm.
        position: (N,) int32 or int64, >= 0, numbers of past tokens, of which those of the open
            mini-batch count; None for 0.
        initial_state: (W_0, B_0, G, g) of shapes (N, H, D, D), (N, H, D), (N, H, D, D) and
            (N, H, D), where G and g are the sums of the open mini-batch; None for zeros. N is B, or
            the number of sequences.
        cu_seqlens, backend: as in `gated_linear_attention`.

    Returns:
        o (B, T, H, D) of q's dtype, and the state after the last token in float32 (float64 for
        float64).

    Raises:
        TypeError: a dtype is unsupported or differs from q's.
        ValueError: a shape, device or value is invalid.
        NotImplementedError: no native kernel for the device.

    Note:
        Mini-batches follow each other, computed in fp32 for half types. A NaN or infinity may also
        reach outputs of earlier tokens of its mini-batch. The backward keeps the inputs only and
        recomputes W. Second and forward-mode derivatives go through the eager definition.

        A last mini-batch that is not complete stays open in the state, so that tokens can follow
        one by one; fla's final state has taken its step instead, ``W_0 - eta_T G``.

    Reference:
        Sun et al., Learning to (Learn at Test Time): RNNs with Expressive Hidden States, 2024,
        arXiv:2407.04620. Verified against `ops/ttt/naive.py` of fla-org/flash-linear-attention,
        commit bc3b101d, and with lr against `TTTLinear` of test-time-training/ttt-lm-pytorch,
        commit cd831db1.

    Example:
        >>> q, w = torch.tensor([1.0, 0.0]).expand(1, 2, 1, 2), torch.ones(1, 2)
        >>> eta = torch.full((1, 2, 1), 0.5)
        >>> o, (W, B, G, g) = ttt_linear(q, q, 2 * q, w, 0 * w, eta, mini_batch_size=2)
        >>> o.shape, G.abs().max().item()  # the mini-batch is complete
        (torch.Size([1, 2, 1, 2]), 0.0)
    """
    op = "ttt_linear"
    require_choice(op, "residual", residual, RESIDUALS)
    require_int(op, "mini_batch_size", mini_batch_size, 1)
    require_number(op, "eps", eps, above=0.0)
    k, v = require_heads(op, q, k, v)
    require_shape(op, "v", v, tuple(q.shape))
    size, of_heads = q.shape[3], tuple(q.shape[:3])
    w, b = (widened(op, name, t, v, (tuple(q.shape[2:]),)) for name, t in (("w", w), ("b", b)))
    eta = widened(op, "eta", eta, v, (of_heads,))
    lr = None if lr is None else widened(op, "lr", lr, v, (of_heads,))
    count = composed_sequence_count(op, q, cu_seqlens)
    position = place_of_state(op, position, v, count, initial_state)
    shapes = ((count, *q.shape[2:], size), (count, *q.shape[2:])) * 2
    before = state_parts(op, initial_state, "W_0, B_0, G, g", v, shapes) or (None,) * 4
    if scale is None:
        scale = size**-0.5 if size > 0 else 1.0
    require_number(op, "scale", scale)
    call = implementation(op, backend, q, fast_weights)
    weights, momentum = (
        None if t is None else _join(t, row) for t, row in (before[:2], before[2:])
    )
    y, weights, momentum, _ = call(
        *(widen(q), widen(k), widen(v), lr, None, eta, w, b, weights, momentum, None),
        *(position, cu_seqlens, int(mini_batch_size), float(eps), float(scale)),
        *(True, True, True),
    )
    normal = layer_norm(y, eps=float(eps), backend=backend)
    o = torch.addcmul(b + (y if residual == "output" else widen(q) * scale), normal, w)
    return o.to(q.dtype), (
        *(weights[:, :, :-1], weights[:, :, -1]),
        *(momentum[:, :, :-1], momentum[:, :, -1]),
    )


def _join(matrix: Tensor, row: Tensor | None) -> Tensor:
    """Appends a bias to weights, as their last row."""
    assert row is not None
    return torch.cat((matrix, row[:, :, None]), 2)
