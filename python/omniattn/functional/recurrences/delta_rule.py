"""Delta rules: recurrences whose update depends on the state's prediction."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import Unpack

from omniattn.checks.jagged import over_sequences
from omniattn.encoding.sequences import SequenceOptions, sequences_of, spelled_out
from omniattn.functional.recurrences._common import (
    OF_CHANNELS,
    OF_HEADS,
    delta,
    log_decays,
    low_rank,
    require_heads,
)

__all__ = ["delta_rule", "dplr_delta_rule", "gated_delta_rule", "kimi_delta_attention"]


@over_sequences("q", "k", "v", "beta")
@spelled_out(SequenceOptions)
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    l2norm: bool = False,
    **options: Unpack[SequenceOptions],
) -> tuple[Tensor, Tensor]:
    """Linear attention that replaces the value stored under a key.

    ``S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T``, ``o_t = scale * S_t^T q_t``.

    Args:
        q, k, v, initial_state, cu_seqlens, backend: as in `gated_linear_attention`.
        beta: (B, T, Hv), in (0, 1), or (0, 2) for states that can change their sign.
        scale: default K^-0.5.
        l2norm: divide q and k by ``sqrt(sum x^2 + 1e-6)`` first, rounded to their dtype, as in fla.
            Keys longer than sqrt(2 / beta) make the state grow without bound.

    Returns:
        o (B, T, Hv, V) of q's dtype, and the state (N, Hv, K, V) after the last token.

    Raises:
        TypeError: a dtype is unsupported or differs from q's.
        ValueError: a shape, device or value is invalid.

    Reference:
        Yang et al., Parallelizing Linear Transformers with the Delta Rule, 2024, arXiv:2406.06484.

    Example:
        >>> one, v = torch.ones(1, 2, 1, 1), torch.tensor([4.0, 8.0]).view(1, 2, 1, 1)
        >>> delta_rule(one, one, v, torch.full((1, 2, 1), 0.5))[0].flatten()
        tensor([2., 5.])
    """
    op = "delta_rule"
    return delta(op, q, k, v, beta, None, scale, l2norm, sequences_of(op, options))


@over_sequences("q", "k", "v", "g", "beta")
@spelled_out(SequenceOptions)
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    l2norm: bool = False,
    **options: Unpack[SequenceOptions],
) -> tuple[Tensor, Tensor]:
    """Delta rule with a state that decays by a factor per head.

    ``S_t = a_t S_{t-1} + beta_t k_t (v_t - a_t S_{t-1}^T k_t)^T`` with ``a_t = exp(g_t)``,
    ``o_t = scale * S_t^T q_t``.

    Args:
        q, k, v, initial_state, cu_seqlens, backend: as in `gated_linear_attention`.
        g: (B, T, Hv), logarithms of the decays, <= 0.
        beta, scale, l2norm: as in `delta_rule`.

    Returns:
        o (B, T, Hv, V) of q's dtype, and the state (N, Hv, K, V) after the last token.

    Raises:
        TypeError: a dtype is unsupported or differs from q's.
        ValueError: a shape, device or value is invalid.

    Reference:
        Yang, Kautz and Hatamizadeh, Gated Delta Networks, 2024, arXiv:2412.06464.

    Example:
        >>> one, half = torch.ones(1, 2, 1, 1), torch.full((1, 2, 1), 0.5)
        >>> gated_delta_rule(one, one, one, half.log(), half)[0].flatten()
        tensor([0.5000, 0.6250])
    """
    op = "gated_delta_rule"
    return delta(op, q, k, v, beta, g, scale, l2norm, sequences_of(op, options), OF_HEADS)


@over_sequences("q", "k", "v", "g", "beta")
@spelled_out(SequenceOptions)
def kimi_delta_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    l2norm: bool = False,
    **options: Unpack[SequenceOptions],
) -> tuple[Tensor, Tensor]:
    """Delta rule with a state that decays by a factor per key channel.

    ``S_t = S' + beta_t k_t (v_t - S'^T k_t)^T`` with ``S' = diag(exp(g_t)) S_{t-1}``,
    ``o_t = scale * S_t^T q_t``.

    Args:
        q, k, v, initial_state, cu_seqlens, backend: as in `gated_linear_attention`.
        g: (B, T, Hv, K), logarithms of the decays, <= 0.
        beta, scale, l2norm: as in `delta_rule`.

    Returns:
        o (B, T, Hv, V) of q's dtype, and the state (N, Hv, K, V) after the last token.

    Raises:
        TypeError: a dtype is unsupported or differs from q's.
        ValueError: a shape, device or value is invalid.

    Reference:
        Kimi Team, Kimi Linear, 2025, arXiv:2510.26692.

    Example:
        >>> one, half = torch.ones(1, 2, 1, 1), torch.full((1, 2, 1), 0.5)
        >>> kimi_delta_attention(one, one, one, half[..., None].log(), half)[0].flatten()
        tensor([0.5000, 0.6250])
    """
    op = "kimi_delta_attention"
    return delta(op, q, k, v, beta, g, scale, l2norm, sequences_of(op, options), OF_CHANNELS)


@over_sequences("q", "k", "v", "a", "b", "g")
@spelled_out(SequenceOptions)
def dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    **options: Unpack[SequenceOptions],
) -> tuple[Tensor, Tensor]:
    """Recurrence whose transition matrix is diagonal plus rank one (DPLR).

    ``S_t = diag(exp(g_t)) S_{t-1} + b_t (S_{t-1}^T a_t)^T + k_t v_t^T``,
    ``o_t = scale * S_t^T q_t``. `a` reads the state before it decays.

    Args:
        q, k, v, initial_state, cu_seqlens, backend: as in `gated_linear_attention`.
        a, b: (B, T, H, K), of q's dtype. States grow without bound where the matrix
            ``diag(exp(g_t)) + b_t a_t^T`` stretches them.
        g: logarithms of the decays, <= 0: (B, T, Hv, K), or (B, T, Hv) for one of all channels.
        scale: default K^-0.5.

    Returns:
        o (B, T, Hv, V) of q's dtype, and the state (N, Hv, K, V) after the last token.

    Raises:
        TypeError: a dtype is unsupported or differs from q's.
        ValueError: a shape, device or value is invalid.

    Reference:
        Peng et al., RWKV-7 "Goose" with Expressive Dynamic State Evolution, 2025,
        arXiv:2503.14456.

    Example:
        >>> one, half = torch.ones(1, 2, 1, 1), torch.full((1, 2, 1), 0.5)
        >>> dplr_delta_rule(one, one, one, -one, one / 4, half.log())[0].flatten()
        tensor([1.0000, 1.2500])
    """
    op = "dplr_delta_rule"
    sequences = sequences_of(op, options)
    k, v = require_heads(op, q, k, v)
    shapes = (v.shape[:3], (*v.shape[:3], q.shape[-1]))
    g = log_decays(op, "g", g, v, shapes)
    if g.ndim == 3:
        g = g[..., None].expand(shapes[1])
    return low_rank(op, q, k, v, a, b, g, scale, sequences)
