"""Linear attention and retention: recurrences with a matrix state per head."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as nnf
from typing_extensions import Unpack

from omniattn.checks.arguments import (
    require_bool,
    require_choice,
    require_number,
    require_range,
    require_tensor,
    shown,
    use_reference,
)
from omniattn.checks.jagged import over_sequences
from omniattn.encoding.sequences import SequenceOptions, Sequences, sequences_of, spelled_out
from omniattn.functional.recurrences._common import (
    NO_DECAY,
    OF_CHANNELS,
    OF_HEADS,
    attempt,
    log_decays,
    repeated,
    require_heads,
    run,
    sequence_count,
    widened,
)
from omniattn.ops.recurrence import FEATURE_MAPS as _FUSED
from omniattn.reference.layers.activation import log_sigmoid as log_sigmoid
from omniattn.reference.precision import compute_dtype, widen
from omniattn.reference.recurrences.recurrence import FEATURE_MAPS as FEATURE_MAPS
from omniattn.reference.recurrences.recurrence import SIGNED as SIGNED
from omniattn.reference.recurrences.recurrence import divisor

__all__ = [
    "gated_linear_attention",
    "linear_attention",
    "retention",
]


@over_sequences("q", "k", "v", "g", "beta")
@spelled_out(SequenceOptions)
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: str | Callable[[Tensor], Tensor] = "elu1",
    causal: bool = True,
    normalize: bool | None = None,
    scale: float | None = None,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    eps: float = 1e-6,
    **options: Unpack[SequenceOptions],
) -> tuple[Tensor, Tensor]:
    """Attention with the kernel ``phi(q) . phi(k)`` in place of ``exp(q . k)``.

    ``o_t = sum_s (phi(q_t) . phi(k_s)) v_s / sum_s phi(q_t) . phi(k_s)`` over s <= t, or over all s
    if not causal; without the denominator if not `normalize`. Takes O(T) time and memory, by the
    state ``S_t = S_{t-1} + phi(k_t) [v_t, 1]^T``, whose last column gives the denominator. With
    gates ``S_t = diag(exp(g_t)) S_{t-1} + (beta_t * phi(k_t)) [v_t, 1]^T``.

    Args:
        q: (B, T, H, K), float64, float32, bfloat16 or float16, any strides.
        k: (B, T, H, K), of q's dtype.
        v: (B, T, Hv, V), of q's dtype; Hv is a multiple of H, and head h of v reads head
            h // (Hv / H) of q and k.
        feature_map: phi: "elu1" (elu(x) + 1), "relu", "squared_relu", "exp", "softmax" (over the
            features), "taylor" (whose kernel is 1 + u + u^2 / 2 of u = q . k / sqrt(K), as in
            Based), "square" (whose kernel is u^2, as in ReBased), "identity"; or a function
            (..., K) -> (..., K').
        causal: if True, a token sees only itself and earlier tokens.
        normalize: divide by the denominator; default: True, but False for "identity" or a function.
        scale: q and k are multiplied by its square root before phi; default 1.
        g: logarithms of the decays, <= 0: (B, T, Hv, K') or (B, T, Hv); only if causal.
        beta: factors of the keys' features: (B, T, H, K') or (B, T, H).
        eps: minimum magnitude of the denominator; smaller ones keep their sign. With 0, a token
            whose weights are all 0 gets NaN.
        initial_state: (N, Hv, K', V + 1), or V without a denominator; computed in float32 (float64
            for float64); only if causal. N is B, or the number of sequences.
        cu_seqlens: (N + 1,) int32 or int64: B is 1, and tokens cu_seqlens[n] .. cu_seqlens[n + 1]
            are sequence n, with a state of its own. Jagged nested tensors (B, j, ...) in place of
            (B, T, ...) bring their own boundaries, and the output has them, too.
        backend: None for the native kernel of q's device, "cpu" or "cuda" to insist on it,
            "reference" for the eager definition.

    Returns:
        o (B, T, Hv, V) of q's dtype, and the state after the last token.

    Raises:
        TypeError: a dtype is unsupported or differs from q's.
        ValueError: a shape, device or value is invalid.

    Note:
        Features and sums are in fp32 (fp64 for fp64) and rounded once, after the division. Causal
        kernels compute "elu1", "relu", "squared_relu" and "exp" themselves, without a scale and a
        beta per feature. Other features, and all products if not causal, are torch's, whose last
        bits may depend on the number of threads.

        States are computed by products over blocks of steps: a NaN or infinity may also reach
        outputs of up to 31 earlier steps.

    Reference:
        Katharopoulos et al., Transformers are RNNs, 2020, arXiv:2006.16236.

    Example:
        >>> one = torch.ones(1, 2, 1, 1)
        >>> o, state = linear_attention(one, one, torch.tensor([1.0, 4.0]).view(1, 2, 1, 1))
        >>> o.flatten(), state.flatten()
        (tensor([1.0000, 2.5000]), tensor([10.,  4.]))
    """
    op = "linear_attention"
    sequences = sequences_of(op, options)
    require_bool(op, "causal", causal)
    if isinstance(feature_map, str) or not callable(feature_map):
        require_choice(op, "feature_map", feature_map, FEATURE_MAPS)
        phi, positive = FEATURE_MAPS[feature_map], feature_map not in SIGNED
    else:
        phi, positive = feature_map, False
    divide = positive if normalize is None else normalize
    require_bool(op, "normalize", divide)
    require_number(op, "eps", eps, 0)
    k, v = require_heads(op, q, k, v)
    if not causal:
        for name, t in (("initial_state", sequences.initial_state), ("g", g)):
            if t is not None:
                raise ValueError(
                    f"{op}: {name} must be None where causal=False, got {name}={shown(t)}"
                )
    if beta is not None:
        require_tensor(op, "beta", beta)
    sequence_count(op, q, sequences.cu_seqlens)
    dtype, features = v.dtype, "identity"
    if scale is not None:
        require_number(op, "scale", scale, 0)
    of_heads = beta is not None and beta.ndim == 3  # such factors can multiply v instead of k
    if causal and scale is None and (beta is None or of_heads) and feature_map in _FUSED:
        features = feature_map
    else:  # features of half inputs stay in fp32
        q, k, v = widen(q), widen(k), widen(v)
        if scale is not None:
            q, k = q * scale**0.5, k * scale**0.5
        q, k = _features(op, phi, q, k)
    if beta is not None:
        beta = widened(op, "beta", beta, q, (tuple(k.shape[:3]), tuple(k.shape)), "q")
        if causal and of_heads:
            beta = repeated(beta, v.shape[2] // max(1, q.shape[2]))
        else:
            k, beta = k * (beta[..., None] if of_heads else beta), None
    if g is not None:
        g = log_decays(op, "g", g, v, (tuple(v.shape[:3]), (*v.shape[:3], q.shape[-1])))
    if causal:
        o, state = run(
            *(op, q, k, v, g, 1.0, sequences),
            beta=beta,
            feature_map=features,
            normalize=divide,
            eps=eps,
        )
    else:
        use_reference(op, sequences.backend, q)
        o, state = totals(op, q, k, v, sequences, divide=divide, eps=eps)
    return o.to(dtype), state


@over_sequences("q", "k", "v", "g", "gv")
@spelled_out(SequenceOptions)
def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    *,
    gv: Tensor | None = None,
    scale: float | None = None,
    **options: Unpack[SequenceOptions],
) -> tuple[Tensor, Tensor]:
    """Linear attention whose state decays.

    ``S_t = diag(exp(g_t)) S_{t-1} diag(exp(gv_t)) + k_t v_t^T``, ``o_t = scale * S_t^T q_t``.

    Args:
        q: (B, T, H, K), float64, float32, bfloat16 or float16, any strides.
        k: (B, T, H, K), of q's dtype.
        v: (B, T, Hv, V), of q's dtype; Hv is a multiple of H, and head h of v reads head
            h // (Hv / H) of q and k.
        g: logarithms of the decays, <= 0: (B, T, Hv, K), or (B, T, Hv) for one of all channels;
            None for no decay.
        gv: (B, T, Hv, V), logarithms of the decays of the values' channels, <= 0; None for no
            decay.
        scale: default K^-0.5.
        initial_state: (N, Hv, K, V), of any floating dtype, but computed in float32 (float64 for
            float64); None for zeros. N is B, or the number of sequences.
        cu_seqlens: (N + 1,) int32 or int64: B is 1, and tokens cu_seqlens[n] .. cu_seqlens[n + 1]
            are sequence n, with a state of its own. Jagged nested tensors (B, j, ...) in place of
            (B, T, ...) bring their own boundaries, and the output has them, too.
        backend: None for the native kernel of q's device, "cpu" or "cuda" to insist on it,
            "reference" for the eager definition.

    Returns:
        o (B, T, Hv, V) of q's dtype, and the state (N, Hv, K, V) after the last token in float32
        (float64 for float64).

    Raises:
        TypeError: a dtype is unsupported or differs from q's.
        ValueError: a shape, device or value is invalid.
        NotImplementedError: no native kernel for the device.

    Note:
        States, decays and sums are in fp32 (fp64 for fp64). Gradients flow to all tensors, from o
        and from the final state; they do not depend on the number of threads. Second and
        forward-mode derivatives are sums of such recurrences; derivatives along decays lose two to
        three digits where decays differ by orders of magnitude.

        Steps are computed by matrix products, 16 or more at a time. So a NaN or infinity may also
        reach outputs of up to 31 earlier steps; finite inputs have no such effect.

        On the CPU a g or gv above 0, which would make states grow, raises an error. This is not
        checked on a GPU, where the check would synchronise, or while a call is traced or compiled.
        NaN raises no error, but appears in the results.

    Reference:
        Yang et al., Gated Linear Attention Transformers, 2023, arXiv:2312.06635.

    Example:
        >>> one = torch.ones(1, 3, 1, 1)
        >>> o, state = gated_linear_attention(one, one, one, torch.tensor(0.5).log() * one)
        >>> o.flatten()
        tensor([1.0000, 1.5000, 1.7500])
    """
    op = "gated_linear_attention"
    sequences = sequences_of(op, options)
    found = attempt(op, q, k, v, g, scale, sequences, (NO_DECAY, OF_HEADS, OF_CHANNELS), gv=gv)
    if found is not None:
        return found
    k, v = require_heads(op, q, k, v)
    if g is not None:
        g = log_decays(op, "g", g, v, (v.shape[:3], (*v.shape[:3], q.shape[-1])))
    if gv is not None:
        gv = log_decays(op, "gv", gv, v, (tuple(v.shape),))
    return run(op, q, k, v, g, scale, sequences, gv=gv)


@over_sequences("q", "k", "v")
@spelled_out(SequenceOptions)
def retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    gamma: Tensor | None = None,
    scale: float | None = None,
    normalize: bool = False,
    **options: Unpack[SequenceOptions],
) -> tuple[Tensor, Tensor]:
    """Linear attention with a constant decay per head.

    ``S_t = gamma_h S_{t-1} + k_t v_t^T``, ``o_t = scale * S_t^T q_t``.

    Args:
        q, k, v, cu_seqlens, backend: as in `gated_linear_attention`.
        gamma: (Hv,) in [0, 1], default ``1 - 2^(-5 - h)``; its gradient is NaN at 0.
        scale: default K^-0.5.
        normalize: the weights ``R_ts = scale (q_t . k_s) gamma^(t - s)`` are divided by the root of
            ``sum_s gamma^(t - s)``, and then o_t by ``max(|sum_s R_ts|, 1)``, a constant for
            gradients, as in the paper's section 2.2. A norm of o undoes these divisions, up to its
            eps.
        initial_state: (N, Hv, K, V), as in `gated_linear_attention`. With `normalize` (N, Hv,
            K + 1, V + 1): the last column has the sums of keys, and the last row has the sum of the
            powers of gamma in its last element and zeros elsewhere.

    Returns:
        o (B, T, Hv, V) of q's dtype, and the state after the last token, like initial_state.

    Raises:
        TypeError: a dtype is unsupported or differs from q's.
        ValueError: a shape, device or value is invalid.

    Reference:
        Sun et al., Retentive Network, 2023, arXiv:2307.08621.

    Example:
        >>> one = torch.ones(1, 3, 1, 1)
        >>> retention(one, one, one, gamma=torch.tensor([0.5]))[0].flatten()
        tensor([1.0000, 1.5000, 1.7500])
    """
    op = "retention"
    sequences = sequences_of(op, options)
    k, v = require_heads(op, q, k, v)
    heads, wide = v.shape[2], compute_dtype(v)
    if gamma is None:
        gamma = 1 - torch.exp2(-5 - torch.arange(heads, dtype=wide, device=v.device))
    gamma = widened(op, "gamma", gamma, v, ((heads,),))
    require_range(op, "gamma", gamma, 0.0, 1.0)
    require_bool(op, "normalize", normalize)
    g = gamma.log().expand(*v.shape[:2], heads)
    if not normalize:
        return run(op, q, k, v, g, scale, sequences)
    initial_state, cu_seqlens, backend = sequences
    count, powers = sequence_count(op, q, cu_seqlens), None
    if initial_state is not None:
        shape = (count, heads, q.shape[-1] + 1, v.shape[-1] + 1)
        initial_state = widened(op, "initial_state", initial_state, v, (shape,))
        powers, initial_state = initial_state[:, :, -1:, -1:], initial_state[:, :, :-1]
    values = torch.cat((v, v.new_ones(*v.shape[:3], 1)), -1)
    sequences = Sequences(initial_state, cu_seqlens, backend)
    o, s = run(op, q, k, values, g, scale, sequences, fp32_output=True)
    # Sums of powers; without states, the whole batch shares them.
    g = g if powers is not None else g[:1]
    one = torch.ones_like(g)[..., None]
    sums, last = run(op, one, one, one, g, 1.0, Sequences(powers, cu_seqlens, backend))
    o = o * sums.rsqrt()
    largest = o[..., -1:].detach().abs().clamp(min=1)
    below = nnf.pad(last, (v.shape[-1], 0)).expand(count, -1, -1, -1)
    return (o[..., :-1] / largest).to(v.dtype), torch.cat((s, below), 2)


def _features(
    op: str, phi: Callable[[Tensor], Tensor], q: Tensor, k: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns phi(q) and phi(k); checks the results of a caller's function."""
    results = phi(q), phi(k)
    for x in results:
        if not isinstance(x, Tensor):
            raise TypeError(f"{op}: feature_map must give a torch.Tensor, got {shown(x)}")
        if x.ndim != 4 or x.shape[:3] != q.shape[:3]:
            batch, steps, heads = q.shape[:3]
            raise ValueError(
                f"{op}: feature_map must give a tensor of shape ({batch}, {steps}, {heads}, K'), "
                f"got one of shape {tuple(x.shape)}"
            )
        if x.dtype != q.dtype:
            raise TypeError(
                f"{op}: feature_map must give a tensor of dtype {q.dtype}, got one of {x.dtype}"
            )
    sizes = tuple(x.shape[-1] for x in results)
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"{op}: feature_map must give as many features of k as of q, got {sizes[1]} and "
            f"{sizes[0]}"
        )
    return results


def feature_size(feature_map: str, size: int) -> int:
    """Returns the number of features of a vector of `size`."""
    if feature_map == "square":
        return size * (size + 1) // 2
    return 1 + size + size * size if feature_map == "taylor" else size


def totals(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequences,
    *,
    divide: bool = False,
    eps: float = 0.0,
    ordered: bool = False,
) -> tuple[Tensor, Tensor]:
    """Computes non-causal attention, by the state after each sequence's last token: o, states.

    If `ordered`, our kernels compute the sums, independently of the number of threads.
    """
    _, cu_seqlens, backend = sequences
    if cu_seqlens is None and not ordered:
        group = v.shape[2] // max(1, q.shape[2])
        q, k = (t.repeat_interleave(group, 2, output_size=v.shape[2]) for t in (q, k))
        if divide:
            v = torch.cat((v, v.new_ones(*v.shape[:3], 1)), -1)
        with torch.autocast(q.device.type, enabled=False):
            states = torch.einsum("bthk,bthv->bhkv", k, v)
            o = torch.einsum("bthk,bhkv->bthv", q, states)
        return (o[..., :-1] / divisor(o[..., -1:], None, eps) if divide else o), states
    # Outputs of the first pass are unused; eps = 1 avoids divisions by 0.
    empty = Sequences(None, cu_seqlens, backend)
    _, states = run(op, q, k, v, None, 1.0, empty, normalize=divide, eps=1.0)
    whole, nothing = Sequences(states, cu_seqlens, backend), torch.zeros_like(k)
    return run(op, q, nothing, v, None, 1.0, whole, normalize=divide, eps=eps)
