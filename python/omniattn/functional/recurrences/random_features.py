"""Random features that estimate exponential kernels, and attention with them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from omniattn.checks.arguments import (
    FLOATS,
    require_bool,
    require_choice,
    require_device,
    require_float,
    require_int,
    require_number,
    shown,
    use_reference,
)
from omniattn.checks.jagged import over_sequences, token_wise
from omniattn.checks.packed import Packed
from omniattn.encoding.sequences import Sequences
from omniattn.functional.layers.gemm import linear
from omniattn.functional.recurrences._common import require_heads, run, sequence_count, widened
from omniattn.functional.recurrences.linear_attention import totals
from omniattn.reference.precision import compute_dtype, widen

__all__ = ["orthogonal_gaussian", "random_feature_attention", "random_features"]

State = tuple[Tensor, Tensor]

#: Kinds of features; signed ones have a factor of sines and cosines.
FEATURES = ("positive", "hyperbolic", "trigonometric", "gaussian", "exp_random")
_SIGNED = ("trigonometric", "gaussian")
#: Kinds with a factor exp(-|y|^2 / 2).
_HALVED = ("positive", "hyperbolic")


def orthogonal_gaussian(
    rows: int,
    size: int,
    *,
    row_norm: str = "chi",
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Draws Gaussian vectors, orthogonal within each group of `size` consecutive ones.

    Args:
        rows, size: number of vectors, and of their elements.
        row_norm: "chi" for the length of Gaussian vectors, so that each vector has their
            distribution; or "sqrt_d" for the length sqrt(size), which makes estimates biased.
        generator: generator of the random numbers.
        device, dtype: of the result.

    Returns:
        (rows, size).

    Raises:
        TypeError: the dtype is not floating-point, or `generator` not a generator.
        ValueError: a size is below 1, or the norm is unknown.

    Reference:
        Choromanski et al., Rethinking Attention with Performers, 2020, arXiv:2009.14794.

    Example:
        >>> w = orthogonal_gaussian(2, 2, row_norm="sqrt_d", dtype=torch.float64)
        >>> torch.allclose(w @ w.T, 2 * torch.eye(2, dtype=torch.float64))
        True
    """
    op = "orthogonal_gaussian"
    require_int(op, "rows", rows, 1)
    require_int(op, "size", size, 1)
    require_choice(op, "row_norm", row_norm, ("chi", "sqrt_d"))
    if dtype is not None and dtype not in FLOATS:
        raise TypeError(
            f"{op}: dtype must be float64, float32, bfloat16 or float16, got dtype={shown(dtype)}"
        )
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(
            f"{op}: generator must be a torch.Generator, got generator={shown(generator)}"
        )
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=wide)

    blocks = draw(-(-rows // size), size, size)
    q, r = torch.linalg.qr(blocks)
    # With the signs of R's diagonal Q is uniform over all orthogonal matrices.
    q = q * torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)[:, None]
    directions = q.mT.flatten(0, 1)[:rows]
    if row_norm == "chi":
        return (directions * draw(rows, size).norm(dim=1, keepdim=True)).to(dtype)
    return (directions * math.sqrt(size)).to(dtype)


@token_wise()
def random_features(
    x: Tensor, weight: Tensor, *, kind: str = "positive", scale: float | None = None
) -> Tensor:
    """Computes phi, ``E[phi(q) . phi(k)] = exp(scale * q . k)`` over Gaussian weight rows.

    With y = sqrt(scale) x and m rows:

    - "positive": ``exp(W y - |y|^2 / 2) / sqrt(m)``, FAVOR+.
    - "hyperbolic": ``exp(+-W y - |y|^2 / 2) / sqrt(2 m)``, of lower variance.
    - "trigonometric": ``exp(|y|^2 / 2) [sin(W y), cos(W y)] / sqrt(m)``, whose products may be
      negative.
    - "gaussian": without the exp: the kernel ``exp(-|y_q - y_k|^2 / 2)``.
    - "exp_random": ``exp(W y) / sqrt(m)``: the kernel ``exp(|y_q + y_k|^2 / 2)``.

    Args:
        x: (..., K), float64, float32, bfloat16 or float16; or a jagged nested tensor, and then
            so is the result.
        weight: (m, K), floating-point, see `orthogonal_gaussian`.
        kind: one of the above.
        scale: of the kernel; default K^-0.5, and 1 for "exp_random".

    Returns:
        (..., m), or (..., 2 m) of "hyperbolic", "trigonometric" and "gaussian", in float32 (float64
        for float64).

    Raises:
        TypeError: a dtype that is unsupported.
        ValueError: a shape or option is invalid.

    Note:
        The exponentials overflow for x of large norm. The Performer layer first subtracts exponents
        that cancel in its normalised result.

    Reference:
        Choromanski et al., Rethinking Attention with Performers, 2020, arXiv:2009.14794.
        Peng et al., Random Feature Attention, 2021, arXiv:2103.02143.

    Example:
        >>> q, k = torch.tensor([0.3, -0.5]), torch.tensor([0.2, 0.4])
        >>> w = orthogonal_gaussian(100_000, 2, generator=torch.Generator().manual_seed(0))
        >>> estimate = random_features(q, w, scale=1.0) @ random_features(k, w, scale=1.0)
        >>> round(estimate.item(), 2), round((q @ k).exp().item(), 2)
        (0.87, 0.87)
    """
    ((exponents, factors),) = log_features("random_features", (x,), weight, kind, scale)
    features = exponents.exp() if factors is None else exponents.exp() * factors
    count = features.shape[-1] if kind not in _SIGNED else weight.shape[0]
    return features * count**-0.5


def log_features(
    op: str, inputs: tuple[Tensor, ...], weight: Tensor, kind: str, scale: float | None
) -> list[tuple[Tensor, Tensor | None]]:
    """Returns (a, f) of each input's features ``exp(a) f / sqrt(count)``; f is None for ones.

    All inputs have the same dtype and size.
    """
    x = inputs[0]
    require_float(op, "x", x)
    require_choice(op, "kind", kind, FEATURES)
    require_float(op, "weight", weight)
    require_device(op, "weight", weight, x, "q" if op == "random_feature_attention" else "x")
    size = x.shape[-1] if x.ndim else 0
    if weight.ndim != 2 or weight.shape[1] != size or min(weight.shape) == 0:
        raise ValueError(
            f"{op}: weight must have shape (m, K) with m > 0 and the K > 0 of x, got "
            f"weight.shape={tuple(weight.shape)}, x.shape={tuple(x.shape)}"
        )
    if scale is None:
        scale = 1.0 if kind == "exp_random" else size**-0.5
    require_number(op, "scale", scale, 0)
    root, weight = scale**0.5, weight.to(compute_dtype(x))
    return [_log_features(widen(t) * root, weight, kind) for t in inputs]


def _log_features(y: Tensor, weight: Tensor, kind: str) -> tuple[Tensor, Tensor | None]:
    w = _product(y, weight)
    if kind == "exp_random":
        return w, None
    half = y.square().sum(-1, keepdim=True) / 2
    if kind in _SIGNED:
        return half if kind == "trigonometric" else 0 * half, torch.cat((w.sin(), w.cos()), -1)
    return (w if kind == "positive" else torch.cat((w, -w), -1)) - half, None


def _half_norms(x: Tensor, scale: float | None) -> Tensor:
    """Computes |y|^2 / 2 (..., 1), with y as in `random_features`."""
    scale = x.shape[-1] ** -0.5 if scale is None else scale
    return widen(x).square().sum(-1, keepdim=True) * (scale / 2)


@over_sequences("q", "k", "v")
def random_feature_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    *,
    kind: str = "positive",
    causal: bool = True,
    scale: float | None = None,
    eps: float = 1e-6,
    feature_eps: float = 0.0,
    initial_state: State | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, State]:
    """Estimates softmax attention in O(T) by random features (Performer, RFA).

    ``o_t = sum_s (phi(q_t) . phi(k_s)) v_s / sum_s phi(q_t) . phi(k_s)`` over s <= t, or over all s
    if not causal, with the phi of `random_features`. No exponential of a positive number is taken.
    Each feature of the keys is divided by e^M, where M is the feature's largest exponent so far (of
    all tokens if not causal); when M grows, the state decays accordingly. The features of a query
    are multiplied by e^M and then divided by the exponential of their largest exponent. So positive
    features have a denominator of at least 1.

    Args:
        q: (B, T, H, K), float64, float32, bfloat16 or float16.
        k, v: (B, T, H, K) and (B, T, H, V), of q's dtype.
        weight: (m, K), Gaussian rows, see `orthogonal_gaussian`.
        kind, scale: kind and scale of features, as in `random_features`.
        causal: if True, a token sees only itself and earlier tokens.
        eps: minimum magnitude of the denominator of "trigonometric" and "gaussian" features, whose
            products may be negative; smaller ones keep their sign. The denominator is the sum of
            products of features divided as above, without their 1 / sqrt(count).
        feature_eps: added to features after the division; only if not causal, since a sum of such
            features cannot be rescaled to a later M. Queries are then divided by the exponential of
            their largest W y, without ``-|y|^2 / 2``, and all keys of a sequence by the exponential
            of their largest W y, which is M, as in performer-pytorch, where feature_eps is 1e-4.
        initial_state: (S, M), only if causal: S (N, H, K', V + 1), the sum of the keys' features,
            without their 1 / sqrt(count), and [v, 1] divided by e^M; M (N, H, K'), or (N, H, 1) of
            kinds with signs, -inf before the first token, where S is 0. N is B, or the number of
            sequences.
        cu_seqlens: (N + 1,) int32 or int64: B is 1, and tokens cu_seqlens[n] .. cu_seqlens[n + 1]
            are sequence n, with a state of its own. Jagged nested tensors (B, j, ...) in place of
            (B, T, ...) bring their own boundaries, and the output has them, too.
        backend: None for the native kernel of q's device, "cpu" or "cuda" to insist on it,
            "reference" for the eager definition.

    Returns:
        o (B, T, H, V) of q's dtype, and the state (S, M) after the last token in float32 (float64
        for float64).

    Raises:
        TypeError: a dtype is unsupported or differs from q's.
        ValueError: a shape, device or value is invalid.

    Note:
        The divisors of features cancel and are constants in the backward. Gradients flow to q, k,
        v, the weight and S.

    Reference:
        Choromanski et al., Rethinking Attention with Performers, 2020, arXiv:2009.14794.
        Peng et al., Random Feature Attention, 2021, arXiv:2103.02143.

    Example:
        >>> zero, v = torch.zeros(1, 2, 1, 4), torch.tensor([1.0, 3.0]).view(1, 2, 1, 1)
        >>> o, _ = random_feature_attention(zero, zero, v, torch.ones(8, 4))
        >>> o.flatten()  # all products are equal
        tensor([1., 2.])
    """
    op = "random_feature_attention"
    k, v = require_heads(op, q, k, v)
    if v.shape[2] != q.shape[2]:
        raise ValueError(
            f"{op}: v must have the heads of q, got v.shape={tuple(v.shape)}, "
            f"q.shape={tuple(q.shape)}"
        )
    require_bool(op, "causal", causal)
    require_number(op, "eps", eps, 0)
    require_number(op, "feature_eps", feature_eps, 0)
    use_reference(op, backend, q)
    packed = Packed(q, sequence_count(op, q, cu_seqlens), cu_seqlens)
    (a_q, f_q), (a_k, f_k) = log_features(op, (q, k), weight, kind, scale)
    before = _checked_state(op, initial_state, causal, feature_eps, a_k, f_k, v, packed.count)
    with torch.no_grad():
        largest = None if before is None else before[1]
        w_q, w_k = a_q, a_k
        if feature_eps > 0 and kind in _HALVED:
            w_q, w_k = (a + _half_norms(x, scale) for a, x in ((a_q, q), (a_k, k)))
        shift, decay, last = _shifts(w_k, causal, feature_eps > 0, largest, packed)
        top = (w_q + shift).amax(-1, keepdim=True)
    phi_q, phi_k = (a_q + shift - top).exp(), (a_k - shift).exp()
    if f_q is not None and f_k is not None:
        phi_q, phi_k = phi_q * f_q, phi_k * f_k
    if feature_eps > 0:
        phi_q, phi_k = phi_q + feature_eps, phi_k + feature_eps
    least = eps if kind in _SIGNED else 0.0
    if causal:
        state = None if before is None else before[0]
        o, s = run(
            *(op, phi_q, phi_k, widen(v), decay, 1.0, Sequences(state, cu_seqlens, backend)),
            normalize=True,
            eps=least,
        )
    else:
        whole = Sequences(None, cu_seqlens, backend)
        o, s = totals(op, phi_q, phi_k, widen(v), whole, divide=True, eps=least, ordered=True)
    return o.to(v.dtype), (s, last)


def _product(y: Tensor, weight: Tensor) -> Tensor:
    """Computes y W^T in the dtype of sums, also under autocast; thread-independent on the CPU."""
    if y.is_meta:
        return y @ weight.T
    with torch.autocast(y.device.type, enabled=False):
        return linear(y, weight, backend="cpu") if y.is_cpu else y @ weight.T


def _checked_state(
    op: str,
    state: State | None,
    causal: bool,
    feature_eps: float,
    a: Tensor,
    factors: Tensor | None,
    v: Tensor,
    count: int,
) -> State | None:
    """Checks a state; returns S and M in the dtype of sums."""
    if causal and feature_eps > 0:
        raise ValueError(
            f"{op}: feature_eps must be 0 where causal=True, got feature_eps={feature_eps}"
        )
    if state is None:
        return None
    if not causal:
        raise ValueError(f"{op}: initial_state must be None where causal=False, got one")
    if not isinstance(state, tuple) or len(state) != 2:
        raise TypeError(
            f"{op}: initial_state must be a tuple (S, M), got "
            f"type(initial_state)={type(state).__name__}"
        )
    features = (a if factors is None else factors).shape[-1]
    shapes = ((count, v.shape[2], features, v.shape[3] + 1), (count, v.shape[2], a.shape[-1]))
    s, m = (
        widened(op, name, part, v, (shape,))
        for name, part, shape in zip("SM", state, shapes, strict=True)
    )
    return s, m


def _shifts(
    a: Tensor, causal: bool, one: bool, before: Tensor | None, packed: Packed
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns each token's M, its log-decay M_{t-1} - M_t and the last M, from keys' exponents."""
    if before is None:
        before = a.new_full((packed.count, *a.shape[2:]), -math.inf)
    if one:
        a = a.amax(-1, keepdim=True)
        before = before[..., :1]
    shifts = torch.maximum(packed.running_max(a), packed.of_tokens(before))
    last = packed.last(shifts, before)
    if not causal:
        return packed.of_tokens(last), torch.zeros_like(a), last
    earlier = torch.cat((torch.full_like(shifts[:, :1], -math.inf), shifts[:, :-1]), 1)
    first = torch.zeros(a.shape[1], dtype=torch.bool, device=a.device)
    if packed.bounds is None:
        first[:1] = True
    else:
        first = torch.cat((first[:1] | True, packed.index[1:] != packed.index[:-1]))
    earlier = torch.where(first.view(1, -1, 1, 1), packed.of_tokens(before), earlier)
    # No decay before the first token.
    decay = (earlier - shifts).nan_to_num(neginf=0.0)
    return shifts, decay.squeeze(-1) if a.shape[-1] == 1 else decay, last


def empty_state(
    like: Tensor, batch: int, heads: int, features: int, size: int, kind: str
) -> dict[str, Tensor]:
    """Returns S and M before the first token; `features` is the number of weight rows."""
    count = features if kind in ("positive", "exp_random") else 2 * features
    maxima = 1 if kind in _SIGNED else count
    dtype = compute_dtype(like)
    return {
        "s": like.new_zeros(batch, heads, count, size + 1, dtype=dtype),
        "m": like.new_full((batch, heads, maxima), -math.inf, dtype=dtype),
    }
