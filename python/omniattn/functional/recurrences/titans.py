"""Memories that learn from past tokens by descent with momentum and forgetting.

A step of Titans descends the loss of one token, a step of ATLAS those of the last ones together.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from omniattn.checks.arguments import (
    implementation,
    require_int,
    require_number,
    require_shape,
    require_tensor,
)
from omniattn.checks.jagged import over_sequences
from omniattn.compositions.recurrences.atlas import omega, orthogonal_omega
from omniattn.compositions.recurrences.fast_weights import fast_weights
from omniattn.compositions.recurrences.memory_mlp import memory_mlp
from omniattn.functional.layers.norm import layer_norm
from omniattn.functional.recurrences._common import (
    composed_sequence_count,
    place_of_state,
    require_heads,
    state_parts,
    widened,
)
from omniattn.reference.precision import widen

__all__ = ["atlas_linear", "titans_linear", "titans_mlp"]

State = tuple[Tensor, Tensor, Tensor]
Windowed = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


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
        position: (N,) int32 or int64, >= 0, numbers of past tokens, with initial_state only;
            None for 0.
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
    position = place_of_state(op, position, v, count, initial_state)
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


@over_sequences("q", "k", "v", "theta", "alpha", "eta")
def titans_mlp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    alpha: Tensor | None = None,
    eta: Tensor | None = None,
    *,
    initial_state: State,
    hidden: Sequence[int] = (),
    scale: float = 1.0,
    mini_batch_size: int = 16,
    position: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, State]:
    """Titans' deep memory: the weights of an MLP that descends a loss with momentum and forgetting.

    ``M(x) = gelu(.. gelu(x W_1) W_2 ..) W_L`` with the momentum ``S_t = eta_t S_{t-1} - theta_t
    g_t``, the weights ``M_t = (1 - alpha_t) M_{t-1} + S_t`` and the outputs ``o_t = M_t(scale
    q_t)``. g_t is the gradient of ``|N(k_t) - v_t|^2`` by the weights N that the memory has at the
    start of the mini-batch of t. Without hidden layers this is `titans_linear`.

    Args:
        q, k: (B, T, H, K), float64, float32, bfloat16 or float16, any strides; k usually of
            length 1.
        v: (B, T, H, V) of q's dtype.
        theta: (B, T, H), floating-point, step sizes.
        alpha: (B, T, H), floating-point, shares of the weights that are forgotten; None for 0.
        eta: (B, T, H), floating-point, shares of the momentum that are kept; None for 0.
        initial_state: (M_0, S_0, N) of shape (N, H, P) each: the rows of all matrices W_1 (K, F_1),
            W_2 (F_1, F_2), .., W_L (F_{L-1}, V), one after another. N, the weights at the start of
            the open mini-batch, counts inside one only. It must be given, as a deep memory of zeros
            learns nothing. N is B, or the number of sequences.
        hidden: widths F_1, .., F_{L-1} of the hidden layers.
        scale: factor of q.
        mini_batch_size: number of tokens whose gradients are taken at the same weights.
        position: (N,) int32 or int64, >= 0, numbers of past tokens, with initial_state only;
            None for 0.
        cu_seqlens, backend: as in `gated_linear_attention`.

    Returns:
        o (B, T, H, V) of q's dtype, and the state after the last token in float32 (float64 for
        float64).

    Raises:
        TypeError: a dtype is unsupported or differs from q's, or there is no initial_state.
        ValueError: a shape, device or value is invalid.

    Note:
        Mini-batches follow each other, computed in fp32 for half types, by torch's products on all
        devices. Nothing bounds the weights: step sizes that suit a linear memory may let a deep one
        diverge. A NaN or infinity may also reach outputs of earlier tokens of its mini-batch. The
        backward keeps the inputs only and recomputes M and S, with the states of all mini-batches
        in memory. Second and forward-mode derivatives go through the eager definition.

    Reference:
        Behrouz et al., Titans: Learning to Memorize at Test Time, 2025, arXiv:2501.00663, equations
        8 to 14 with a deep memory; the MLP is `MemoryMLP` of lucidrains/titans-pytorch.

    Example:
        >>> x, theta = torch.ones(1, 2, 1, 1), torch.full((1, 2, 1), 0.25)
        >>> M = torch.ones(1, 1, 2)  # two matrices with one number each
        >>> o, _ = titans_mlp(
        ...     x, x, 2 * x, theta, initial_state=(M, 0 * M, M), hidden=[1], mini_batch_size=1
        ... )
        >>> o.flatten()
        tensor([2.2955, 1.5942])
    """
    op = "titans_mlp"
    require_int(op, "mini_batch_size", mini_batch_size, 1)
    require_number(op, "scale", scale)
    for n, width in enumerate(hidden):
        require_int(op, f"hidden[{n}]", width, 1)
    k, v = require_heads(op, q, k, v)
    heads, of_heads = q.shape[2], tuple(q.shape[:3])
    require_shape(op, "v", v, (*of_heads, v.shape[3]))
    theta = widened(op, "theta", theta, v, (of_heads,))
    alpha, eta = (
        None if t is None else widened(op, name, t, v, (of_heads,))
        for name, t in (("alpha", alpha), ("eta", eta))
    )
    count = composed_sequence_count(op, q, cu_seqlens)
    position = place_of_state(op, position, v, count, initial_state)
    widths = [q.shape[3], *hidden, v.shape[3]]
    size = sum(a * b for a, b in itertools.pairwise(widths))
    state = state_parts(op, initial_state, "M_0, S_0, N", v, ((count, heads, size),) * 3)
    if state is None:
        raise TypeError(f"{op}: initial_state must be a tuple (M_0, S_0, N), got None")
    weights, momentum, anchor = state
    call = implementation(op, backend, q, memory_mlp)
    o, *state = call(
        *(widen(q), widen(k), widen(v), -2 * theta, weights),
        *(torch.zeros_like(theta) if eta is None else eta, None if alpha is None else 1 - alpha),
        *(momentum, anchor, position, cu_seqlens),
        *([int(width) for width in hidden], int(mini_batch_size), float(scale)),
    )
    return o.to(q.dtype), tuple(state)


@over_sequences("q", "k", "v", "gamma", "theta", "alpha", "eta")
def atlas_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma: Tensor,
    theta: Tensor | None = None,
    alpha: Tensor | None = None,
    eta: Tensor | None = None,
    *,
    scale: float = 1.0,
    newton_schulz_steps: int = 0,
    mini_batch_size: int = 16,
    position: Tensor | None = None,
    initial_state: Windowed | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Windowed]:
    """ATLAS' linear memory: weights that descend the losses of the last C tokens (Omega rule).

    With the momentum ``S_t = eta_t S_{t-1} - sum_j gamma_tj k_{t-j}^T u_{t-j}`` over j = 0 .. C - 1
    and the weights ``M_t = (1 - alpha_t) M_{t-1} + theta_t S_t``, ``o_t = scale * q_t M_t``. u_i is
    the gradient of ``|z - v_i|^2`` by ``z = k_i N``, N the weights at the start of the mini-batch
    of t; mini-batches of one token have those of the token before. With C = 1 this is
    `titans_linear`, whose theta is this gamma.

    With Newton-Schulz steps an orthogonal matrix takes the place of S_t in M_t: of ``X_0 = S_t /
    |S_t|`` each step makes ``3.4445 X - 4.775 X X^T X + 2.0315 (X X^T)^2 X``, whose singular values
    approach 1, as in the optimizer Muon.

    Args:
        q, k: (B, T, H, K), float64, float32, bfloat16 or float16, any strides; k usually of
            length 1, and both often polynomial features.
        v: (B, T, H, V) of q's dtype.
        gamma: (B, T, H, C), floating-point, C >= 1: the weight of the loss of token t - j in the
            step of token t. Tokens before the first one have no loss.
        theta: (B, T, H), floating-point, step sizes of the weights; None for 1.
        alpha: (B, T, H), floating-point, shares of the weights that are forgotten; None for 0.
        eta: (B, T, H), floating-point, shares of the momentum that are kept; None for 0.
        scale: factor of q.
        newton_schulz_steps: number of steps, 5 in the paper; 0 for S_t itself.
        mini_batch_size: number of tokens whose gradients are taken at the same weights.
        position: (N,) int32 or int64, >= 0, numbers of past tokens, with initial_state only;
            None for 0.
        initial_state: (M_0, S_0, N, keys, values): three of shape (N, H, K, V), where N, the
            weights at the start of the open mini-batch, counts inside one only, and the k and v of
            the C - 1 tokens before, (N, C - 1, H, K) and (N, C - 1, H, V), zeros where there are
            none; None for zeros. N is B, or the number of sequences.
        cu_seqlens, backend: as in `gated_linear_attention`.

    Returns:
        o (B, T, H, V) of q's dtype, and the state after the last token in float32 (float64 for
        float64).

    Raises:
        TypeError: a dtype is unsupported or differs from q's.
        ValueError: a shape, device or value is invalid.

    Note:
        Mini-batches follow each other, computed in fp32 for half types; factors of gates are
        products, never exponentials of differences of sums. A NaN or infinity may also reach
        outputs of earlier tokens of its mini-batch. The backward keeps the inputs only and
        recomputes M and S. Second and forward-mode derivatives go through the eager definition.
        The CPU has a kernel for calls without Newton-Schulz steps; calls with them, and CUDA, use
        torch's products. These steps cost about ``10 n min(K, V) K V`` multiply-adds a token, and
        memory for a matrix of each token of a mini-batch.

    Reference:
        Behrouz et al., ATLAS: Learning to Optimally Memorize the Context at Test Time, 2025,
        arXiv:2505.23735. There alpha is the share that is kept, eta the step size and theta the
        share of the momentum; the names here are those of Titans. Verified against the gradients,
        window, momentum and forgetting of `OmegaRNNMemoryCell` of engineerA314/atlas-rnn, commit
        1a2cf8a2, which reads the weights before their step.

    Example:
        >>> q, gamma = torch.tensor([1.0, 0.0]).expand(1, 2, 1, 2), torch.full((1, 2, 1, 2), 0.25)
        >>> o, state = atlas_linear(q, q, 2 * q, gamma, mini_batch_size=1)
        >>> o[0, :, 0, 0]  # the second step has two tokens to learn from
        tensor([1., 2.])
    """
    op = "atlas_linear"
    require_int(op, "mini_batch_size", mini_batch_size, 1)
    require_int(op, "newton_schulz_steps", newton_schulz_steps, 0)
    require_number(op, "scale", scale)
    k, v = require_heads(op, q, k, v)
    heads, of_heads = q.shape[2], tuple(q.shape[:3])
    require_shape(op, "v", v, (*of_heads, v.shape[3]))
    require_tensor(op, "gamma", gamma)
    window = gamma.shape[-1] if gamma.dim() == 4 else 1
    gamma = widened(op, "gamma", gamma, v, ((*of_heads, max(1, window)),))
    theta, alpha, eta = (
        None if t is None else widened(op, name, t, v, (of_heads,))
        for name, t in (("theta", theta), ("alpha", alpha), ("eta", eta))
    )
    count = composed_sequence_count(op, q, cu_seqlens)
    position = place_of_state(op, position, v, count, initial_state)
    shape = (count, heads, q.shape[3], v.shape[3])
    past = ((count, window - 1, heads, width) for width in shape[2:])
    names = "M_0, S_0, N, keys, values"
    before = state_parts(op, initial_state, names, v, (*(shape,) * 3, *past)) or (None,) * 5
    weights, momentum, anchor, keys, values = before
    steps = [int(newton_schulz_steps)] if newton_schulz_steps else []
    call = implementation(op, backend, q, orthogonal_omega if steps else omega)
    o, weights, momentum, anchor, keys, values = call(
        *(q, k, v, 2 * gamma, theta, torch.zeros_like(gamma[..., 0]) if eta is None else eta),
        *(None if alpha is None else 1 - alpha, weights),
        *(None if momentum is None else -momentum, anchor, keys, values, position, cu_seqlens),
        *(*steps, int(mini_batch_size), float(scale)),
    )
    return o, (weights, -momentum, anchor, keys, values)
