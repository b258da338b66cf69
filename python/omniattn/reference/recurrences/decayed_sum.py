"""States of recurrences with diagonal transitions, without their outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from omniattn.reference.precision import compute_dtype
from omniattn.reference.recurrences.recurrence import FEATURE_MAPS


def decayed_sum(
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    gv: Tensor | None,
    feature_map: str = "identity",
    from_start: bool = False,
    before_own: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """S = sum_t diag(a_t) phi(k_t) (beta_t v_t)^T diag(b_t); returns S, a and b.

    a_t and b_t are the products of exp(g) and exp(gv) over the tokens after t; with `from_start`
    over those through t, with `before_own` through the one before t. The a and b that are returned
    are those of all tokens.

    k (B, T, Hk, K), v and gv (B, T, Hv, V), g (B, T, Hv, K) or (B, T, Hv, 1), beta (B, T, Hv),
    S (B, Hv, K, V), a (B, Hv, K), b (B, Hv, V), empty without gv.
    """
    dtype = compute_dtype(k)
    k = FEATURE_MAPS[feature_map](k.to(dtype))
    k = k.repeat_interleave(v.shape[2] // max(k.shape[2], 1), 2)
    u = v.to(dtype)
    if beta is not None:
        u = u * beta[..., None]
    decay = k.new_ones(k.shape[0], *k.shape[2:])
    value_decay = k.new_empty(0)
    before = before_own or not from_start
    if g is not None:
        k = k * _products(g, from_start, before)
        decay = decay * g.sum(1).exp()
    if gv is not None:
        u = u * _products(gv, from_start, before)
        value_decay = gv.sum(1).exp()
    return torch.einsum("bthk,bthv->bhkv", k, u), decay, value_decay


def _products(g: Tensor, from_start: bool, before: bool) -> Tensor:
    """Returns the products of the decays exp(g) from one end to each token, or to before it."""
    sums = (g if from_start else g.flip(1)).cumsum(1)
    if before:
        sums = torch.cat((torch.zeros_like(g[:, :1]), sums[:, :-1]), 1)
    return (sums if from_start else sums.flip(1)).exp()
