"""Delta rules with several keys for each token, computed by the recurrences of this package."""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn import functional as nnf
from typing_extensions import Unpack

from omniattn.checks.arguments import (
    cast_like,
    full_precision,
    implementation,
    require_bool,
    require_number,
    require_one_shape,
    require_shape,
    require_strided,
    require_tensor,
    use_reference,
)
from omniattn.checks.jagged import over_sequences
from omniattn.encoding.sequences import SequenceOptions, Sequences, sequences_of, spelled_out
from omniattn.functional.recurrences._common import (
    NO_DECAY,
    delta,
    first_of,
    is_step,
    log_decays,
    low_rank,
    repeated,
    require_heads,
    run,
    sequence_count,
    state_parts,
    unit_rows,
    widened,
)
from omniattn.ops import norm as norms
from omniattn.ops import scan as scans
from omniattn.reference.precision import widen

__all__ = [
    "comba",
    "gated_delta_product",
    "gated_delta_rule_2",
    "gated_oja_rule",
    "preconditioned_delta_rule",
]


@over_sequences("q", "k", "v", "g", "beta")
@spelled_out(SequenceOptions)
def gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    *,
    scale: float | None = None,
    l2norm: bool = False,
    **options: Unpack[SequenceOptions],
) -> tuple[Tensor, Tensor]:
    """Gated delta rule with n updates for each token, whose transition is a product of n factors.

    ``S_t = U_n(.. U_1(a_t S_{t-1}))``, ``U_j(S) = S + beta_tj k_tj (v_tj - S^T k_tj)^T``,
    ``a_t = exp(g_t)``, ``o_t = scale * S_t^T q_t``. The transition is ``a_t`` times the product of
    ``I - beta_tj k_tj k_tj^T``; with unit keys and beta = 2 these are Householder reflections.

    Args:
        q: (B, T, H, K), float64, float32, bfloat16 or float16, any strides.
        k: (B, T, n, H, K), of q's dtype, n >= 1 keys for each token in the order of their updates.
        v: (B, T, n, Hv, V), of q's dtype; Hv is a multiple of H, and head h of v reads head
            h // (Hv / H) of q and k.
        g: logarithms of the decays, <= 0: (B, T, Hv), or (B, T, Hv, K) for one of each channel of
            the keys; None for no decay.
        beta: (B, T, n, Hv), in (0, 1), or (0, 2) for transitions with negative eigenvalues.
        scale, l2norm: as in `delta_rule`.
        initial_state, cu_seqlens, backend: as in `gated_linear_attention`.

    Returns:
        o (B, T, Hv, V) of q's dtype, and the state (N, Hv, K, V) after the last token.

    Raises:
        TypeError: a dtype is unsupported or differs from q's.
        ValueError: a shape, device or value is invalid.

    Note:
        This is `gated_delta_rule`, or `kimi_delta_attention` with decays of channels, on n T
        tokens, and takes their time. fla has the n keys of a token one after another in T.

    Reference:
        Siems et al., DeltaProduct: Improving State-Tracking in Linear RNNs via Householder
        Products, 2025, arXiv:2502.10297. Verified against `ops/gated_delta_product/naive.py` of
        fla-org/flash-linear-attention, commit bc3b101d.

    Example:
        >>> one, v = torch.ones(1, 1, 1, 1), torch.tensor([4.0, 8.0]).view(1, 1, 2, 1, 1)
        >>> k, half = torch.ones(1, 1, 2, 1, 1), torch.full((1, 1, 2, 1), 0.5)
        >>> gated_delta_product(one, k, v, None, half)[0].flatten()  # 2, then 2 + (8 - 2) / 2
        tensor([5.])
    """
    op = "gated_delta_product"
    initial_state, cu_seqlens, backend = sequences_of(op, options)
    given = {"q": q, "k": k, "v": v, "beta": beta} | ({} if g is None else {"g": g})
    for name, t in given.items():
        require_tensor(op, name, t)
        require_strided(op, name, t)
    if q.ndim != 4:
        raise ValueError(f"{op}: q must have shape (B, T, H, K), got q.shape={tuple(q.shape)}")
    steps = q.shape[1]
    if k.ndim != 5 or k.shape[2] == 0 or k.shape != (*q.shape[:2], k.shape[2], *q.shape[2:]):
        raise ValueError(
            f"{op}: k must have shape (B, T, n, H, K) with n >= 1 and the sizes of q, "
            f"got k.shape={tuple(k.shape)}, q.shape={tuple(q.shape)}"
        )
    count = k.shape[2]
    if v.ndim != 5 or v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"{op}: v must have shape (B, T, n, Hv, V) with B, T and n of k, "
            f"got v.shape={tuple(v.shape)}, k.shape={tuple(k.shape)}"
        )
    require_shape(op, "beta", beta, tuple(v.shape[:4]))
    decays = NO_DECAY
    if g is not None:
        of_heads = (*q.shape[:2], v.shape[3])
        require_one_shape(op, "g", g, (of_heads, (*of_heads, q.shape[3])))
        decays = g.ndim
        g = first_of(count, g)
    if cu_seqlens is not None:
        sequence_count(op, q, cu_seqlens)
        cu_seqlens = cu_seqlens * count
    # Only the last of a token's updates is read.
    q = nnf.pad(q[:, :, None], (0, 0, 0, 0, count - 1, 0)).flatten(1, 2)
    k, v, beta = (t.flatten(1, 2) for t in (k, v, beta))
    sequences = Sequences(initial_state, cu_seqlens, backend)
    o, state = delta(op, q, k, v, beta, g, scale, l2norm, sequences, decays)
    return o.unflatten(1, (steps, count))[:, :, -1].contiguous(), state


@over_sequences("q", "k", "v", "p", "g", "beta")
@spelled_out(SequenceOptions)
def comba(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    l2norm: bool = False,
    erase_decayed: bool = False,
    **options: Unpack[SequenceOptions],
) -> tuple[Tensor, Tensor]:
    """Gated delta rule that erases with a key of its own.

    ``S_t = a_t S_{t-1} + beta_t k_t (v_t - S_{t-1}^T p_t)^T`` with ``a_t = exp(g_t)``,
    ``o_t = scale * S_t^T q_t``; with `erase_decayed` ``a_t S_{t-1}^T p_t`` is subtracted.

    Args:
        q, k, v, initial_state, cu_seqlens, backend: as in `gated_linear_attention`.
        p: (B, T, H, K), of q's dtype, the key of the values that are erased.
        g: (B, T, Hv), logarithms of the decays, <= 0, or (B, T, Hv, K).
        beta: (B, T, Hv), in (0, 1).
        scale: default K^-0.5.
        l2norm: divide q, k and p by ``sqrt(sum x^2 + 1e-6)`` first, rounded to their dtype. As in
            fla, this removes a factor of p that its channels share.
        erase_decayed: True to erase from the state after its decay, as `gated_delta_rule` does for
            p = k. The paper and fla's kernels erase from the state before it decays; fla's
            `naive_recurrent_comba`, from the state after.

    Returns:
        o (B, T, Hv, V) of q's dtype, and the state (N, Hv, K, V) after the last token.

    Raises:
        TypeError: a dtype is unsupported or differs from q's.
        ValueError: a shape, device or value is invalid.

    Note:
        Computed by `dplr_delta_rule`, in fp32 for half types.

    Reference:
        Hu et al., Comba: Improving Bilinear RNNs with Closed-loop Control, 2025, arXiv:2506.02475.
        Verified against both functions of `ops/comba/naive.py` of fla-org/flash-linear-attention,
        commit bc3b101d.

    Example:
        >>> one, half = torch.ones(1, 2, 1, 1), torch.full((1, 2, 1), 0.5)
        >>> comba(one, one, one, one, half.log(), half)[0].flatten()  # 0.5 / 2 + (1 - 0.5) / 2
        tensor([0.5000, 0.5000])
    """
    op = "comba"
    require_bool(op, "erase_decayed", erase_decayed)
    sequences = sequences_of(op, options)
    k, v = require_heads(op, q, k, v)
    p = cast_like(op, "p", p, q)
    require_shape(op, "p", p, tuple(k.shape))
    beta = widened(op, "beta", beta, v, (tuple(v.shape[:3]),))[..., None]
    q, k, p = _normalised(op, l2norm, sequences, q, k, p)
    copies = v.shape[2] // max(1, q.shape[2])
    erased = beta * repeated(widen(p), copies)
    return _two_keys(op, q, k, v, beta * v, erased, g, scale, sequences, erase_decayed)


@over_sequences("q", "k", "v", "g", "b", "w")
@spelled_out(SequenceOptions)
def gated_delta_rule_2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    *,
    scale: float | None = None,
    l2norm: bool = False,
    **options: Unpack[SequenceOptions],
) -> tuple[Tensor, Tensor]:
    """Delta rule with a gate for each erased channel of keys and each written channel of values.

    ``S_t = S' + k_t (w_t * v_t - S'^T (b_t * k_t))^T`` with ``S' = diag(exp(g_t)) S_{t-1}``,
    ``o_t = scale * S_t^T q_t``. With b = w = beta this is `kimi_delta_attention`.

    Args:
        q, k, v, initial_state, cu_seqlens, backend: as in `gated_linear_attention`.
        g: (B, T, Hv, K), logarithms of the decays, <= 0, or (B, T, Hv).
        b: (B, T, Hv, K) or (B, T, H, K), in (0, 1), the share that is erased.
        w: (B, T, Hv, V), in (0, 1), the share that is written.
        scale, l2norm: as in `delta_rule`.

    Returns:
        o (B, T, Hv, V) of q's dtype, and the state (N, Hv, K, V) after the last token.

    Raises:
        TypeError: a dtype is unsupported or differs from q's.
        ValueError: a shape, device or value is invalid.

    Note:
        Computed by `dplr_delta_rule`, in fp32 for half types.

    Reference:
        Hatamizadeh, Choi and Kautz, Gated DeltaNet-2: Decoupling Erase and Write in Linear
        Attention, 2026, arXiv:2605.22791. Verified against `ops/gdn2/naive.py` of
        fla-org/flash-linear-attention, commit bc3b101d.

    Example:
        >>> one, half = torch.ones(1, 2, 1, 1), torch.full((1, 2, 1, 1), 0.5)
        >>> gated_delta_rule_2(one, one, one, 0 * one, half, one)[0].flatten()  # 1, 1 + (1 - 1 / 2)
        tensor([1.0000, 1.5000])
    """
    op = "gated_delta_rule_2"
    sequences = sequences_of(op, options)
    k, v = require_heads(op, q, k, v)
    of_keys = (*v.shape[:3], k.shape[3]), tuple(k.shape)
    b = widened(op, "b", b, v, of_keys)
    w = widened(op, "w", w, v, (tuple(v.shape),))
    q, k = _normalised(op, l2norm, sequences, q, k)
    copies = v.shape[2] // max(1, q.shape[2])
    erased = b * k if b.shape[2] == k.shape[2] else b * repeated(widen(k), copies)
    return _two_keys(op, q, k, v, w * v, erased, g, scale, sequences, True)


@over_sequences("q", "k", "v", "gv", "beta")
@spelled_out(SequenceOptions)
def gated_oja_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gv: Tensor | None,
    beta: Tensor,
    *,
    scale: float | None = None,
    **options: Unpack[SequenceOptions],
) -> tuple[Tensor, Tensor]:
    """Oja's rule: a delta rule that corrects keys by what the state reads for their values.

    ``S_t = S' + beta_t (k_t - S' v_t) v_t^T`` with ``S' = S_{t-1} diag(exp(gv_t))``,
    ``o_t = scale * S_t^T q_t``. Values should have a length of about 1, as keys in `delta_rule`.

    Args:
        q, k, v, initial_state, cu_seqlens, backend: as in `gated_linear_attention`.
        gv: (B, T, Hv, V), logarithms of the decays of the values' channels, <= 0; None for no
            decay.
        beta: (B, T, Hv), in (0, 1).
        scale: default K^-0.5.

    Returns:
        o (B, T, Hv, V) of q's dtype, and the state (N, Hv, K, V) after the last token.

    Raises:
        TypeError: a dtype is unsupported or differs from q's.
        ValueError: a shape, device or value is invalid.

    Note:
        Computed in fp32 for half types by two recurrences: `kimi_delta_attention` of 2 T tokens
        with keys v and values k, whose outputs are S' v, and `gated_linear_attention` with the
        corrected keys.

    Reference:
        Oja, Simplified neuron model as a principal component analyzer, 1982,
        doi:10.1007/BF00275687. Verified against `recurrent_oja_ref` in `tests/ops/test_oja.py` of
        fla-org/flash-linear-attention, commit bc3b101d.

    Example:
        >>> one, half = torch.ones(1, 2, 1, 1), torch.full((1, 2, 1), 0.5)
        >>> gated_oja_rule(one, one, one, None, half)[0].flatten()  # 1 / 2, 1 / 2 + (1 - 1 / 2) / 2
        tensor([0.5000, 0.7500])
    """
    op = "gated_oja_rule"
    sequences = sequences_of(op, options)
    initial_state, cu_seqlens, backend = sequences
    k, v = require_heads(op, q, k, v)
    beta = widened(op, "beta", beta, v, (tuple(v.shape[:3]),))
    if gv is not None:
        gv = log_decays(op, "gv", gv, v, (tuple(v.shape),))
    count, dtype = sequence_count(op, q, cu_seqlens), v.dtype
    if initial_state is not None:
        shape = (count, v.shape[2], q.shape[3], v.shape[3])
        initial_state = widened(op, "initial_state", initial_state, v, (shape,))
    copies = v.shape[2] // max(1, q.shape[2])
    q, k, v = repeated(widen(q), copies), repeated(widen(k), copies), widen(v)
    if is_step(q, cu_seqlens):
        known = _read_values(initial_state, v, gv)
    else:
        known = _known(op, k, v, gv, beta, Sequences(initial_state, cu_seqlens, backend))
    corrected = beta[..., None] * (k if known is None else k - known)
    own = sequences._replace(initial_state=initial_state)
    o, state = run(op, q, corrected, v, None, scale, own, gv=gv)
    return o.to(dtype), state


def _known(
    op: str, k: Tensor, v: Tensor, gv: Tensor | None, beta: Tensor, sequences: Sequences
) -> Tensor:
    """Returns S' v of all tokens."""
    start, cu_seqlens, backend = sequences
    # The first of a token's steps reads the decayed state, and the second one writes.
    keys, values = (t.repeat_interleave(2, 1) for t in (v, k))
    writes = nnf.pad(beta[:, :, None], (0, 0, 1, 0)).flatten(1, 2)
    bounds = None if cu_seqlens is None else cu_seqlens * 2
    known, _ = run(
        *(op, keys, keys, values, None if gv is None else first_of(2, gv), 1.0),
        Sequences(None if start is None else start.mT, bounds, backend),
        beta=writes,
        delta=True,
    )
    return known[:, ::2]


def _read_values(state: Tensor | None, v: Tensor, gv: Tensor | None) -> Tensor | None:
    """Returns S' v of one token after a state (N, Hv, K, V), None for no state."""
    if state is None:
        return None
    with full_precision(v):
        decayed = v if gv is None else v * gv.exp()
        return (state @ decayed[:, 0, :, :, None])[:, None, ..., 0]


@over_sequences("q", "k", "v", "g", "beta", "g_atk", "beta_atk")
def preconditioned_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    g_atk: Tensor,
    beta_atk: Tensor,
    log_atk_scale: Tensor | float = -0.2,
    *,
    x: float = 1.5,
    eps: float = 1e-6,
    scale: float | None = None,
    l2norm: bool = False,
    initial_state: tuple[Tensor, Tensor] | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Gated delta rule whose writes have channels scaled by the mean squares of past keys.

    ``S_t = S' + beta_t (m_t * k_t) (v_t - S'^T k_t)^T`` with ``S' = diag(exp(g_t)) S_{t-1}``,
    ``o_t = scale * S_t^T q_t``. The preconditioner ``m_t = x^(-r / (1 + |r|))`` with
    ``r = ln(A_t + eps) - log_atk_scale`` lies in (1 / x, x), and is smaller for channels with a
    larger ``A_t = exp(g_atk_t) A_{t-1} + beta_atk_t k_t^2``.

    Args:
        q: (B, T, H, K), float64, float32, bfloat16 or float16, any strides.
        k: (B, T, H, K), of q's dtype.
        v: (B, T, Hv, V), of q's dtype; Hv is a multiple of H, and head h of v reads head
            h // (Hv / H) of q and k.
        g: (B, T, Hv), logarithms of the decays, <= 0, for the preconditioned gated delta rule; or
            (B, T, Hv, K) for preconditioned Kimi delta attention.
        beta: (B, T, Hv), in (0, 1), or (0, 2) for transitions with negative eigenvalues.
        g_atk: (B, T, H), logarithms of the decays of A, <= 0.
        beta_atk: (B, T, H), in (0, 1).
        log_atk_scale: (H,), or a number: logarithms of A where m is 1.
        x: bound of m, at least 1; with beta in (0, 1) and keys of length 1, states do not grow for
            x up to 2.
        eps: > 0.
        scale: default K^-0.5.
        l2norm: divide q and k by ``sqrt(sum x^2 + 1e-6)`` first, rounded to their dtype.
        initial_state: (S, A) of shapes (N, Hv, K, V) and (N, H, K); None for zeros. N is B, or the
            number of sequences.
        cu_seqlens, backend: as in `gated_linear_attention`.

    Returns:
        o (B, T, Hv, V) of q's dtype, and (S, A) after the last token in float32 (float64 for
        float64).

    Raises:
        TypeError: a dtype is unsupported or differs from q's.
        ValueError: a shape, device or value is invalid.

    Note:
        Computed by `linear_scan` and `dplr_delta_rule`, in fp32 for half types.

    Reference:
        Tumma, Loo and Rus, Preconditioned DeltaNet: Curvature-aware Sequence Modeling for Linear
        Recurrences, 2026, arXiv:2604.21100. Verified against `naive.py` in
        `ops/precond_gated_delta_rule` and `ops/precond_kda` of fla-org/flash-linear-attention,
        commit bc3b101d.

    Example:
        >>> one, g, b = torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1), torch.ones(1, 1, 1)
        >>> preconditioned_delta_rule(one, one, one, g, b, g, b, 0.0)[0].item()  # A = 1: m is 1
        0.9999995827674866
    """
    op = "preconditioned_delta_rule"
    require_number(op, "x", x, least=1.0)
    require_number(op, "eps", eps, above=0.0)
    k, v = require_heads(op, q, k, v)
    of_keys = tuple(k.shape[:3])
    g_atk = log_decays(op, "g_atk", g_atk, v, (of_keys,))
    beta_atk = widened(op, "beta_atk", beta_atk, v, (of_keys,))
    beta = widened(op, "beta", beta, v, (tuple(v.shape[:3]),))[..., None]
    if isinstance(log_atk_scale, Tensor):
        log_atk_scale = widened(op, "log_atk_scale", log_atk_scale, v, (of_keys[2:],))[:, None]
    else:
        require_number(op, "log_atk_scale", log_atk_scale)
    count = sequence_count(op, q, cu_seqlens)
    shapes = (count, v.shape[2], k.shape[3], v.shape[3]), (count, *k.shape[2:])
    state, squares = state_parts(op, initial_state, "S, A", v, shapes) or (None, None)
    sequences = Sequences(state, cu_seqlens, backend)
    q, k = _normalised(op, l2norm, sequences, q, k)

    wide = widen(k)
    scan = implementation(op, backend, q, scans.linear_scan)
    a, squares = scan(
        (beta_atk[..., None] * wide.square()).flatten(2),
        g_atk[..., None].expand_as(wide).flatten(2),
        None if squares is None else squares.flatten(1),
        cu_seqlens,
    )
    r = (a.view_as(wide) + eps).log() - log_atk_scale
    written = wide * (-math.log(x) * nnf.softsign(r)).exp()
    erased = beta * repeated(wide, v.shape[2] // max(1, q.shape[2]))
    o, state = _two_keys(op, q, written, v, beta * v, erased, g, scale, sequences, True)
    return o, (state, squares.view(shapes[1]))


def _normalised(op: str, l2norm: bool, sequences: Sequences, *rows: Tensor) -> list[Tensor]:
    """Returns rows of length 1 if `l2norm`, else the rows."""
    require_bool(op, "l2norm", l2norm)
    use_reference(op, sequences.backend, rows[0])  # checks backend, before the norm does
    if not l2norm or rows[0].shape[-1] == 0:
        return list(rows)
    norm = implementation("rms_norm", sequences.backend, rows[0], norms.norm)
    return unit_rows(norm, *rows)


def _two_keys(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    u: Tensor,
    erased: Tensor,
    g: Tensor,
    scale: float | None,
    sequences: Sequences,
    decayed: bool,
) -> tuple[Tensor, Tensor]:
    """Computes ``S_t = S' + k_t (u_t - E^T e_t)^T``, S' = diag(exp(g_t)) S_{t-1}.

    E is S' if `decayed`, else S_{t-1}. u (B, T, Hv, V) and e, which is `erased` (B, T, H or Hv, K),
    are in fp32 (fp64 for fp64), as the computation is; o has the dtype of v."""
    of_heads = tuple(v.shape[:3])
    of_channels = (*of_heads, q.shape[3])
    g = log_decays(op, "g", g, v, (of_heads, of_channels))
    g = g if g.ndim == 4 else g[..., None]
    copies = v.shape[2] // max(1, q.shape[2])
    q, k = repeated(widen(q), copies), repeated(widen(k), copies)
    if erased.shape[2] != v.shape[2]:
        erased = repeated(erased, copies)
    a = -g.exp() * erased if decayed else -erased
    o, state = low_rank(op, q, k, u, a, k, g.expand(of_channels), scale, sequences)
    return o.to(v.dtype), state
