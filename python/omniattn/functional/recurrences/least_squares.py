"""MesaNet and Gated KalmaNet: linear attention whose queries solve least-squares problems."""

from __future__ import annotations

import torch
from torch import Tensor

from omniattn.checks.arguments import (
    implementation,
    require_bool,
    require_int,
    require_number,
    require_range,
    require_shape,
    use_reference,
)
from omniattn.checks.jagged import over_sequences
from omniattn.compositions.recurrences.least_squares import mesa_solve
from omniattn.encoding.sequences import Sequences
from omniattn.functional.recurrences._common import (
    composed_sequence_count,
    log_decays,
    require_heads,
    run,
    state_parts,
    unit_rows,
    widened,
)
from omniattn.ops import norm as norms
from omniattn.ops import scan as scans
from omniattn.reference.precision import widen

__all__ = ["gated_kalmanet", "mesa_net"]


@over_sequences("q", "k", "v", "g", "beta")
def mesa_net(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    lamb: Tensor,
    *,
    max_iterations: int = 30,
    l2norm: bool = False,
    initial_state: tuple[Tensor, Tensor] | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Reads values by the linear map of keys to values that is optimal for all past tokens.

    ``o_t = G_t^T (H_t + diag(lamb))^-1 q_t`` with ``H_t = exp(g_t) H_{t-1} + beta_t k_t k_t^T`` and
    ``G_t = exp(g_t) G_{t-1} + beta_t k_t v_t^T``: the output for q_t of the matrix W that minimises
    the sum of ``exp(g_{s+1} + .. + g_t) beta_s |v_s - W k_s|^2``, regularised by lamb.

    Args:
        q: (B, T, H, K), float64, float32, bfloat16 or float16, any strides.
        k: (B, T, H, K), of q's dtype; usually of length 1, see `l2norm`.
        v: (B, T, H, V), of q's dtype.
        g: (B, T, H), logarithms of the decays, <= 0.
        beta: (B, T, H), in (0, 1), the weights of tokens.
        lamb: (H, K), floating-point, >= 0: the strength of the regularisation. The paper's layer
            has at least 0.25.
        max_iterations: most steps of conjugate gradients. They end earlier where all residuals are
            rounding errors, after at most K steps but for rounding.
        l2norm: divide q and k by ``sqrt(sum x^2 + 1e-6)`` first, rounded to their dtype.
        initial_state: (H, G) of shapes (N, H, K, K) and (N, H, K, V); None for zeros. H is
            symmetric. N is B, or the number of sequences.
        cu_seqlens, backend: as in `gated_linear_attention`; the reference solves exactly.

    Returns:
        o (B, T, H, V) of q's dtype, and (H, G) after the last token in float32 (float64 for
        float64).

    Raises:
        TypeError: a dtype is unsupported or differs from q's.
        ValueError: a shape, device or value is invalid.
        NotImplementedError: no native kernel for the device.

    Note:
        Each step of conjugate gradients is one call of the kernel of `gated_linear_attention` for
        all tokens, in fp32 for half types, and all steps for a single token are one call; a
        residual that is not 0 after `max_iterations` steps remains. The backward takes as many
        steps for the gradient of q, and gives the gradients of the exact solutions (implicit
        function theorem), so that no step is saved. fla adds 1e-5 to denominators of the steps,
        which ends its improvement at residuals of about 3e-3. A NaN or infinity in k, v, g or beta
        may also reach outputs of up to 31 earlier tokens. Second and forward-mode derivatives go
        through the eager definition.

    Reference:
        von Oswald et al., MesaNet: Sequence Modeling by Locally Optimal Test-Time Training, 2025,
        arXiv:2506.05233. Verified against `naive_mesa_net_exact` of `ops/mesa_net/naive.py` of
        fla-org/flash-linear-attention, commit bc3b101d.

    Example:
        >>> one, v = torch.ones(1, 2, 1, 1), torch.tensor([4.0, 8.0]).view(1, 2, 1, 1)
        >>> g, beta = torch.zeros(1, 2, 1), torch.ones(1, 2, 1)
        >>> mesa_net(one, one, v, g, beta, torch.ones(1, 1))[0].flatten()  # 4 / 2, (4 + 8) / 3
        tensor([2., 4.])
    """
    op = "mesa_net"
    require_int(op, "max_iterations", max_iterations, 1)
    require_bool(op, "l2norm", l2norm)
    k, v = require_heads(op, q, k, v)
    require_shape(op, "v", v, (*q.shape[:3], v.shape[3]))
    of_heads = tuple(q.shape[:3])
    g = log_decays(op, "g", g, v, (of_heads,))
    beta = widened(op, "beta", beta, v, (of_heads,))
    lamb = widened(op, "lamb", lamb, v, (tuple(q.shape[2:]),))
    require_range(op, "lamb", lamb, least=0.0)
    count = composed_sequence_count(op, q, cu_seqlens)
    shapes = (count, *q.shape[2:], q.shape[3]), (count, *q.shape[2:], v.shape[3])
    kk, kv = state_parts(op, initial_state, "H, G", v, shapes) or (None, None)
    use_reference(op, backend, q)  # checks backend, before the norm does
    if l2norm and q.shape[3] > 0:
        q, k = unit_rows(implementation("rms_norm", backend, q, norms.norm), q, k)
    solve = implementation(op, backend, q, mesa_solve)
    wide = widen(k)
    lamb = lamb.expand(q.shape)
    x, kk = solve(widen(q), wide, g, beta, lamb, kk, cu_seqlens, int(max_iterations))
    o, kv = run(op, x, wide, widen(v), g, 1.0, Sequences(kv, cu_seqlens, backend), beta=beta)
    return o.to(v.dtype), (kk, kv)


@over_sequences("q", "k", "v", "g", "gk", "alpha")
def gated_kalmanet(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    alpha: Tensor | None = None,
    *,
    scale: float | None = None,
    ridge_ratio: float = 0.02,
    max_iterations: int = 30,
    initial_state: tuple[Tensor, Tensor] | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Reads values by a ridge regression on all past tokens, relative to the norm of their keys.

    ``o_t = scale U_t^T (q_t + alpha_t (x_t - q_t))`` with ``x_t = (H_t + ridge_ratio |H_t| I)^-1
    q_t``, ``H_t = exp(gk_t) H_{t-1} + k_t k_t^T`` and ``U_t = exp(g_t) U_{t-1} + k_t v_t^T``. Where
    g is gk and alpha is 1, o_t is the output for q_t of the matrix W that minimises the sum of
    ``exp(g_{s+1} + .. + g_t) |v_s - W k_s|^2`` and of ``ridge_ratio |H_t| |W|^2``, with Frobenius
    norms: a Kalman filter in its steady state. alpha = 0 is `gated_linear_attention`.

    Args:
        q: (B, T, H, K), float64, float32, bfloat16 or float16, any strides.
        k: (B, T, H, K), of q's dtype; of length 1 times the weight of the token in the layer, which
            gives v the same weight.
        v: (B, T, H, V), of q's dtype.
        g: (B, T, H), logarithms of the decays of U, <= 0; None for no decay.
        gk: (B, T, H), the same for H.
        alpha: (B, T, H), floating-point: the share of the regression; None for 1.
        scale: default K^-0.5.
        ridge_ratio: > 0, the strength of the regularisation relative to the norm of H. The
            condition number of the systems is at most 1 + 1 / ridge_ratio.
        max_iterations: most steps of conjugate gradients. They end earlier where all residuals are
            rounding errors, after at most K steps but for rounding.
        initial_state: (H, U) of shapes (N, H, K, K) and (N, H, K, V); None for zeros. H is
            symmetric and has no negative eigenvalue. N is B, or the number of sequences.
        cu_seqlens, backend: as in `gated_linear_attention`; the reference solves exactly.

    Returns:
        o (B, T, H, V) of q's dtype, and (H, U) after the last token in float32 (float64 for
        float64).

    Raises:
        TypeError: a dtype is unsupported or differs from q's.
        ValueError: a shape, device or value is invalid.
        NotImplementedError: no native kernel for the device.

    Note:
        Solved as in `mesa_net`, in fp32 for half types, with gradients of the exact solutions. The
        paper and fla take 30 steps of Chebyshev's iteration, which leave errors of up to 4e-4 of x
        at a ratio of 0.02. Conjugate gradients leave no more, in the norm of the system, after one
        step more. The norms are a scan: ``|H_t|^2 = exp(2 gk_t) |H_{t-1}|^2 + 2 k_t^T H_t k_t -
        |k_t|^4``. Where H_t is 0, x_t is q_t. Second and forward-mode derivatives go through the
        eager definition.

    Reference:
        Peng et al., Gated KalmaNet: A Fading Memory Layer Through Test-Time Ridge Regression, 2025,
        arXiv:2511.21016. Verified against `naive_recurrent_gka` of `ops/gka/naive.py` of
        fla-org/flash-linear-attention, commit b22c42ca.

    Example:
        >>> one, v = torch.ones(1, 2, 1, 1), torch.tensor([4.0, 8.0]).view(1, 2, 1, 1)
        >>> gated_kalmanet(one, one, v, ridge_ratio=1.0)[0].flatten()  # 4 / 2, (4 + 8) / 4
        tensor([2., 3.])
    """
    op = "gated_kalmanet"
    require_int(op, "max_iterations", max_iterations, 1)
    require_number(op, "ridge_ratio", ridge_ratio)
    if not ridge_ratio > 0:
        raise ValueError(f"{op}: ridge_ratio must be > 0, got ridge_ratio={ridge_ratio}")
    k, v = require_heads(op, q, k, v)
    require_shape(op, "v", v, (*q.shape[:3], v.shape[3]))
    of_heads = tuple(q.shape[:3])
    if g is not None:
        g = log_decays(op, "g", g, v, (of_heads,))
    gk = widen(q.new_zeros(of_heads)) if gk is None else gk
    gk = log_decays(op, "gk", gk, v, (of_heads,))
    count = composed_sequence_count(op, q, cu_seqlens)
    shapes = (count, *q.shape[2:], q.shape[3]), (count, *q.shape[2:], v.shape[3])
    kk, kv = state_parts(op, initial_state, "H, U", v, shapes) or (None, None)
    wide, keys = widen(q), widen(k)
    y, _ = run(op, keys, keys, keys, gk, 1.0, Sequences(kk, cu_seqlens, backend))
    # sum, as autocast would round vecdot's arguments
    added = 2 * (keys * y).sum(-1) - keys.square().sum(-1).square()
    scan = implementation(op, backend, q, scans.linear_scan)
    before = None if kk is None else kk.square().sum((-2, -1))
    total, _ = scan(added, 2 * gk, before, cu_seqlens)
    lamb = ridge_ratio * torch.where(total > 0, total, ridge_ratio**-2).sqrt()
    solve = implementation(op, backend, q, mesa_solve)
    beta, ridge = torch.ones_like(gk), lamb[..., None].expand(q.shape)
    x, kk = solve(wide, keys, gk, beta, ridge, kk, cu_seqlens, int(max_iterations))
    if alpha is not None:
        x = wide + widened(op, "alpha", alpha, v, (of_heads,))[..., None] * (x - wide)
    o, kv = run(op, x, keys, widen(v), g, scale, Sequences(kv, cu_seqlens, backend))
    return o.to(v.dtype), (kk, kv)
