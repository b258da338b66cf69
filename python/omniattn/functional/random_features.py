"""Random features whose products estimate exponential kernels, and attention on them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from omniattn.functional._checks import (
    require_choice,
    require_float,
    require_int,
    require_number,
)
from omniattn.functional._jagged import token_wise
from omniattn.functional.recurrence import gated_linear_attention
from omniattn.reference.precision import compute_dtype, widen

__all__ = ["orthogonal_gaussian", "random_features"]

#: Kinds of features; the signed ones have a factor of sines and cosines.
FEATURES = ("positive", "hyperbolic", "trigonometric", "gaussian", "exp_random")
_SIGNED = ("trigonometric", "gaussian")


def orthogonal_gaussian(
    rows: int,
    size: int,
    *,
    row_norm: str = "chi",
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Gaussian vectors; each group of `size` consecutive ones is orthogonal.

    Args:
        rows, size: number of vectors and of their elements.
        row_norm: "chi", the length of Gaussian vectors, so that each vector alone has their
            distribution; or "sqrt_d" for the length sqrt(size), which makes estimates biased.
        generator: of the random numbers.
        device, dtype: of the result.

    Returns:
        (rows, size).

    Raises:
        ValueError: a size below 1 or an unknown norm.

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
    """phi with ``E[phi(q) . phi(k)] = exp(scale * q . k)`` over Gaussian rows of the weight.

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
        ValueError: a shape or option that does not fit.

    Note:
        The exponentials of long x overflow. The layer Performer divides what cancels in its mean
        out before it takes them.

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
    exponents, factors = log_features("random_features", x, weight, kind, scale)
    features = exponents.exp() if factors is None else exponents.exp() * factors
    count = features.shape[-1] if kind not in _SIGNED else weight.shape[0]
    return features * count**-0.5


def log_features(
    op: str, x: Tensor, weight: Tensor, kind: str, scale: float | None
) -> tuple[Tensor, Tensor | None]:
    """a and f of features ``exp(a) f / sqrt(count)``; f is None for all ones."""
    require_float(op, "x", x)
    require_choice(op, "kind", kind, FEATURES)
    size = x.shape[-1] if x.ndim else 0
    if weight.ndim != 2 or weight.shape[1] != size or min(weight.shape) == 0:
        raise ValueError(
            f"{op}: weight must have shape (m, K) with m > 0 and the K > 0 of x, got "
            f"weight.shape={tuple(weight.shape)}, x.shape={tuple(x.shape)}"
        )
    if scale is None:
        scale = 1.0 if kind == "exp_random" else size**-0.5
    require_number(op, "scale", scale, 0)
    y = widen(x) * scale**0.5
    w = y @ weight.to(y.dtype).T
    if kind == "exp_random":
        return w, None
    half = y.square().sum(-1, keepdim=True) / 2
    if kind in _SIGNED:
        return half if kind == "trigonometric" else 0 * half, torch.cat((w.sin(), w.cos()), -1)
    return (w if kind == "positive" else torch.cat((w, -w), -1)) - half, None


def random_feature_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    *,
    kind: str,
    causal: bool,
    scale: float | None,
    eps: float,
    feature_eps: float,
    initial_state: tuple[Tensor, Tensor] | None,
    backend: str | None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The mean of v weighted by products of features, and the state (S, M) after the last token.

    q, k (B, T, H, K), v (B, T, H, V) -> o like v. No exponential of a positive number is taken:
    each feature of the keys is divided by the exponential of its largest exponent M so far (of all
    tokens if not causal), as which the state decays where M grows, and each query by that of its
    largest after times e^M. So positive features have a denominator of at least 1. What is divided
    cancels and is a constant for gradients.

    S (B, H, K', V + 1) is the sum of the keys' features and [v, 1]; M (B, H, K'), or one of the
    signed kinds, -inf before the first token.

    `feature_eps` is added after the exponential, which is then divided by one M for all features
    of the keys, and only if not causal: a sum of such features does not follow a later M.
    """
    op = "Performer"
    a_q, f_q = log_features(op, q, weight, kind, scale)
    a_k, f_k = log_features(op, k, weight, kind, scale)
    wide = widen(v)
    ones = torch.cat((wide, wide.new_ones(*v.shape[:3], 1)), -1)
    with torch.no_grad():
        shift, decay, last = _shifts(a_k, causal, feature_eps > 0, initial_state)
        top = (a_q + shift).amax(-1, keepdim=True)
    phi_q, phi_k = (a_q + shift - top).exp(), (a_k - shift).exp()
    if f_q is not None and f_k is not None:
        phi_q, phi_k = phi_q * f_q, phi_k * f_k
    if feature_eps > 0:
        phi_q, phi_k = phi_q + feature_eps, phi_k + feature_eps
    if causal:
        before = None if initial_state is None else initial_state[0]
        o, s = gated_linear_attention(
            phi_q, phi_k, ones, decay, scale=1.0, initial_state=before, backend=backend
        )
    else:
        s = torch.einsum("bthk,bthv->bhkv", phi_k, ones)
        o = torch.einsum("bthk,bhkv->bthv", phi_q, s)
    o, den = o[..., :-1], o[..., -1:]
    if kind in _SIGNED:
        den = torch.where(den.abs() < eps, torch.where(den < 0, -eps, eps), den)
    return (o / den).to(v.dtype), (s, last)


def _shifts(
    a: Tensor, causal: bool, one: bool, state: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """M of each token, its decay ln(e^M_{t-1} / e^M_t) and the last M, of the exponents of keys."""
    if state is None:
        before = torch.full_like(a[:, :1].sum(1, keepdim=True), -math.inf)
    else:
        before = state[1][:, None].to(a.dtype)
    every = torch.cat((before, a), 1)
    if not causal:
        shift = every.amax((1, 3) if one else 1, keepdim=True)
        return shift, torch.zeros_like(a), shift[:, 0]
    shifts = every.cummax(1).values
    # Nothing decays where there is no token yet.
    decay = (shifts[:, :-1] - shifts[:, 1:]).nan_to_num(neginf=0.0)
    return shifts[:, 1:], decay.squeeze(-1) if a.shape[-1] == 1 else decay, shifts[:, -1]


def empty_state(
    like: Tensor, batch: int, heads: int, features: int, size: int, kind: str
) -> dict[str, Tensor]:
    """S and M before the first token, where `features` is the number of rows of the weight."""
    count = features if kind in ("positive", "exp_random") else 2 * features
    maxima = 1 if kind in _SIGNED else count
    dtype = compute_dtype(like)
    return {
        "s": like.new_zeros(batch, heads, count, size + 1, dtype=dtype),
        "m": like.new_full((batch, heads, maxima), -math.inf, dtype=dtype),
    }
