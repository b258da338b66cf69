"""RWKV-5, 6 and 7, and decaying weighted means of values with r . k in the exponent."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from omniattn.checks.arguments import is_traced, require_range, use_reference
from omniattn.checks.jagged import over_sequences
from omniattn.encoding.sequences import SequenceOptions, sequences_of, spelled_out
from omniattn.functional.attention.attention import attention, attention_varlen
from omniattn.functional.recurrences._common import (
    log_decays,
    low_rank,
    repeated,
    require_heads,
    run,
    sequence_count,
    widened,
)
from omniattn.functional.recurrences.scan import rwkv4
from omniattn.reference.precision import widen

__all__ = ["rwkv6", "rwkv7", "rwkv_quadratic", "rwkv_recurrent"]


@over_sequences("r", "k", "v", either=("w",))
@spelled_out(SequenceOptions)
def rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    *,
    scale: float | None = 1.0,
    **options: Unpack[SequenceOptions],
) -> tuple[Tensor, Tensor]:
    """Gated linear attention with a bonus u for the present token, which does not decay.

    ``o_t = scale * (S_{t-1} + diag(u) k_t v_t^T)^T r_t``,
    ``S_t = diag(exp(w_t)) S_{t-1} + k_t v_t^T``. RWKV-5 is this with a constant w.

    Args:
        r: (B, T, H, K), float64, float32, bfloat16 or float16, any strides.
        k: (B, T, H, K), of r's dtype.
        v: (B, T, Hv, V), of r's dtype; Hv is a multiple of H, and head h of v reads head
            h // (Hv / H) of r and k.
        w: logarithms of the decays, <= 0: (B, T, Hv, K), or (Hv, K) for all tokens. They are
            neither decays nor the inputs of RWKV's ``exp(-exp(.))``.
        u: (Hv, K), the bonus.
        scale: 1 in RWKV; None for K^-0.5.
        initial_state: (N, Hv, K, V), of any floating dtype, but computed in float32 (float64 for
            float64); None for zeros. N is B, or the number of sequences.
        cu_seqlens: (N + 1,) int32 or int64: B is 1, and tokens cu_seqlens[n] .. cu_seqlens[n + 1]
            are sequence n, with a state of its own. Jagged nested tensors (B, j, ...) in place of
            (B, T, ...) bring their own boundaries, and the output has them, too.
        backend: None for the native kernel of r's device, "cpu" or "cuda" to insist on it,
            "reference" for the eager definition.

    Returns:
        o (B, T, Hv, V) of r's dtype, and the state (N, Hv, K, V) after the last token in float32
        (float64 for float64).

    Raises:
        TypeError: a dtype is unsupported or differs from r's.
        ValueError: a shape, device or value is invalid.
        NotImplementedError: no native kernel for the device.

    Note:
        As in `gated_linear_attention`.

    Reference:
        Peng et al., Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence, 2024,
        arXiv:2404.05892.

    Example:
        >>> one = torch.ones(1, 3, 1, 1)
        >>> o, state = rwkv6(one, one, one, torch.tensor([[0.5]]).log(), torch.tensor([[2.0]]))
        >>> o.flatten(), state.flatten()
        (tensor([2.0000, 3.0000, 3.5000]), tensor([1.7500]))
    """
    op = "rwkv6"
    sequences = sequences_of(op, options)
    k, v = require_heads(op, r, k, v, "r")
    heads, size = v.shape[2], r.shape[-1]
    wide = (*v.shape[:3], size)
    w = log_decays(op, "w", w, v, (wide, (heads, size))).expand(wide)
    u = widened(op, "u", u, v, ((heads, size),))
    bonus = u.expand(sequence_count(op, r, sequences.cu_seqlens, "r"), heads, size)
    return run(op, r, k, v, w, scale, sequences, bonus=bonus, q_name="r")


@over_sequences("r", "w", "k", "v", "a", "b")
@spelled_out(SequenceOptions)
def rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    scale: float | None = 1.0,
    **options: Unpack[SequenceOptions],
) -> tuple[Tensor, Tensor]:
    """RWKV-7's recurrence: `dplr_delta_rule` with RWKV-7's order of arguments.

    ``S_t = diag(exp(w_t)) S_{t-1} + b_t (S_{t-1}^T a_t)^T + k_t v_t^T``,
    ``o_t = scale * S_t^T r_t``. With the normalised key kk and the learning rate alpha of RWKV-7,
    a is -kk and b is kk * alpha.

    Args:
        r, k, v, initial_state, cu_seqlens, backend: as in `rwkv6`.
        w: (B, T, Hv, K), logarithms of the decays, <= 0.
        a, b: (B, T, H, K), of r's dtype.
        scale: 1 in RWKV; None for K^-0.5.

    Returns:
        o (B, T, Hv, V) of r's dtype, and the state (N, Hv, K, V) after the last token.

    Raises:
        TypeError: a dtype is unsupported or differs from r's.
        ValueError: a shape, device or value is invalid.

    Reference:
        Peng et al., RWKV-7 "Goose" with Expressive Dynamic State Evolution, 2025,
        arXiv:2503.14456.

    Example:
        >>> one = torch.ones(1, 2, 1, 1)
        >>> rwkv7(one, torch.log(one / 2), one, one, -one, one / 4)[0].flatten()
        tensor([1.0000, 1.2500])
    """
    op = "rwkv7"
    sequences = sequences_of(op, options)
    k, v = require_heads(op, r, k, v, "r")
    w = log_decays(op, "w", w, v, ((*v.shape[:3], r.shape[-1]),))
    return low_rank(op, r, k, v, a, b, w, scale, sequences, "r")


@over_sequences("r", "k", "v")
def rwkv_quadratic(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Softmax of r . k with weights that decay with distance.

    ``y_i = sum_{j<=i} e^(r_i . k_j - (i - j) w) v_j / (the same without v)``: `attention` with the
    slopes w of ALiBi and a scale of 1. No model named RWKV computes this or `rwkv_recurrent`: r is
    not in the exponents there. The two differ from each other, too: here the present r weighs all
    tokens, so that no state of a fixed size can take the place of past keys.

    Args:
        r: (B, T, H, K), float64, float32, bfloat16 or float16, any strides.
        k: (B, T, H, K), of r's dtype.
        v: (B, T, Hv, V), of r's dtype; Hv is a multiple of H, and head h of v reads head
            h // (Hv / H) of r and k.
        w: (Hv,), floating-point, >= 0: the decay of a head. Or (Hv, V), a decay and a softmax per
            value channel, which takes V times the time and copies of r and k.
        cu_seqlens: (N + 1,) int32 or int64: B is 1, and tokens cu_seqlens[n] .. cu_seqlens[n + 1]
            are sequence n. Jagged nested tensors (B, j, ...) in place of (B, T, ...) bring their
            own boundaries, and the output has them, too.
        backend: None for the native kernel of r's device, "cpu" or "cuda" to insist on it,
            "reference" for the eager definition.

    Returns:
        y (B, T, Hv, V) of r's dtype.

    Raises:
        TypeError: a dtype is unsupported or differs from r's.
        ValueError: a shape, device or value is invalid.
        NotImplementedError: no native kernel for the device.

    Note:
        As in `attention`, in O(T) memory and O(T^2) time; gradients flow to all tensors.

    Reference:
        ALiBi: Press et al., Train Short, Test Long, 2021, arXiv:2108.12409. RWKV: Peng et al.,
        2023, arXiv:2305.13048.

    Example:
        >>> one, v = torch.ones(1, 2, 1, 1), torch.tensor([3.0, 6.0]).view(1, 2, 1, 1)
        >>> rwkv_quadratic(one, one, v, torch.tensor([2.0]).log()).flatten()  # (3 / 2 + 6) / 1.5
        tensor([3., 5.])
    """
    op = "rwkv_quadratic"
    k, v, w = _weighted(op, r, k, v, w)
    use_reference(op, backend, r)
    sequence_count(op, r, cu_seqlens, "r")
    shape, slopes = v.shape, w.flatten()
    if w.ndim == 2:  # each channel of v is a head
        v = v.flatten(2).unsqueeze(3)
    copies = v.shape[2] // max(1, r.shape[2])
    r, k = repeated(r, copies), repeated(k, copies)
    options: Any = {"scale": 1.0, "causal": True, "alibi_slopes": slopes, "backend": backend}
    if cu_seqlens is None:
        return attention(r, k, v, **options).view(shape)
    # Traced boundaries have no values, so the longest sequence is unknown.
    longest = (shape[1], shape[1]) if is_traced() else ()
    packed = (r[0], k[0], v[0], cu_seqlens, cu_seqlens, *longest)
    return attention_varlen(*packed, **options).view(shape)


@over_sequences("r", "k", "v")
@spelled_out(SequenceOptions)
def rwkv_recurrent(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    **options: Unpack[SequenceOptions],
) -> tuple[Tensor, Tensor]:
    """Decaying mean whose weights are fixed when their token arrives.

    ``y_t = s_t / n_t``, ``s_t = e^-w s_{t-1} + e^(r_t . k_t) v_t``,
    ``n_t = e^-w n_{t-1} + e^(r_t . k_t)``: the weight of token j is ``e^(r_j . k_j - (t - j) w)``.
    `rwkv_quadratic` has r_t in the place of r_j.

    Args:
        r, k, v, cu_seqlens, backend: as in `rwkv_quadratic`.
        w: (Hv,) or (Hv, V), floating-point, >= 0: the decay of a head or of each of its channels.
        initial_state: (N, 3, Hv, V): s and n, both times ``e^-max``, and max. None for the state of
            no tokens, (0, 0, -1e38). N is B, or the number of sequences.

    Returns:
        y (B, T, Hv, V) of r's dtype, and the state (N, 3, Hv, V) after the last token in float32
        (float64 for float64).

    Raises:
        TypeError: a dtype is unsupported or differs from r's.
        ValueError: a shape, device or value is invalid.
        NotImplementedError: no native kernel for the device.

    Note:
        This is `rwkv4` with the keys r . k and u = w, in O(T) time. The products are summed in
        float32 (float64 for float64), as are weights and states.

    Reference:
        Peng et al., RWKV: Reinventing RNNs for the Transformer Era, 2023, arXiv:2305.13048.

    Example:
        >>> one, v = torch.ones(1, 2, 1, 1), torch.tensor([3.0, 6.0]).view(1, 2, 1, 1)
        >>> y, state = rwkv_recurrent(one, one, v, torch.tensor([2.0]).log())
        >>> y.flatten()  # all products are 1, so that the two forms are the same
        tensor([3., 5.])
    """
    op = "rwkv_recurrent"
    sequences = sequences_of(op, options)
    k, v, w = _weighted(op, r, k, v, w)
    heads, width = v.shape[2:]
    initial_state, cu_seqlens, backend = sequences
    use_reference(op, backend, r)
    count = sequence_count(op, r, cu_seqlens, "r")
    if initial_state is not None:
        shape = (count, 3, heads, width)
        initial_state = widened(op, "initial_state", initial_state, v, (shape,)).flatten(2)
    score = (widen(r) * widen(k)).sum(-1, keepdim=True)
    score = repeated(score, heads // max(1, r.shape[2])).expand(v.shape)
    w = (w if w.ndim == 2 else w[:, None]).expand(heads, width).flatten()
    channels = w, w, score.flatten(2), widen(v).flatten(2)
    y, state = rwkv4(*channels, **sequences._replace(initial_state=initial_state)._asdict())
    return y.view(v.shape).to(v.dtype), state.unflatten(2, (heads, width))


def _weighted(op: str, r: Tensor, k: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Checks the tensors; returns k, v and w."""
    k, v = require_heads(op, r, k, v, "r")
    heads, width = v.shape[2:]
    w = widened(op, "w", w, v, ((heads,), (heads, width)))
    require_range(op, "w", w, least=0.0)
    if w.is_cpu and not is_traced() and w.isposinf().any():  # would make the present token NaN
        raise ValueError(f"{op}: w must be finite, got w.max()=inf")
    return k, v, w
