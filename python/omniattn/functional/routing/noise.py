"""Noise for the training of routers."""

from __future__ import annotations

import torch
from torch import Tensor

from omniattn.checks.arguments import (
    clamp,
    require_float,
    require_like,
    require_number,
    require_seed,
    require_shape,
)
from omniattn.functional.layers.random import normal_like, uniform_like
from omniattn.functional.layers.topk import top_k
from omniattn.functional.routing._checks import require_mask
from omniattn.functional.routing.routers import checked_logits, top_k_softmax
from omniattn.functional.routing.routing import Routing, expert_counts, widen


def noisy_top_k(
    logits: Tensor,
    noise_logits: Tensor,
    k: int,
    *,
    seed: Tensor | None = None,
    noise_eps: float = 0.0,
    token_mask: Tensor | None = None,
) -> tuple[Routing, Tensor]:
    """Noisy top-k gating.

    ``h = logits + eps (softplus(noise_logits) + noise_eps)``, ``eps ~ N(0, 1)``;
    ``w = softmax(top-k of h)``

    Args:
        logits: (..., E), floating point.
        noise_logits: of the same shape and dtype.
        k: in [1, E].
        seed: [seed, offset] (2,) int64 of the Philox noise; None for no noise, outside of training.
        noise_eps: 0 (paper) or 1e-2 (tensor2tensor).
        token_mask: (...) bool, False for tokens (padding) that the load does not count, or None.

    Returns:
        The routing, with softmax(h) as scores, and load (E,), the expected number of tokens per
        expert: the sum of the probabilities that an expert stays in the top k if only its noise is
        redrawn. Without noise, or for k = E, the actual number of tokens.

    Raises:
        TypeError, ValueError: see :func:`softmax_top_k`; noise_logits of another shape, dtype or
            device, a noise_eps that is negative or not finite, a token_mask that does not fit.

    Reference:
        Shazeer et al., Outrageously Large Neural Networks, 2017, arXiv:1701.06538.

    Example:
        >>> noisy_top_k(torch.tensor([[2.0, 1.0, 0.0]]), torch.zeros(1, 3), 1)[1]
        tensor([1., 0., 0.])
    """
    op = "noisy_top_k"
    clean = checked_logits(op, logits, k)
    require_like(op, "noise_logits", noise_logits, logits, "logits")
    require_shape(op, "noise_logits", noise_logits, logits.shape)
    require_number(op, "noise_eps", noise_eps, 0)
    if token_mask is not None:
        require_mask(op, token_mask, logits, "logits")
    experts = clean.shape[-1]

    def masked(values: Tensor, hidden: float) -> Tensor:
        return values if token_mask is None else values.masked_fill(~token_mask[..., None], hidden)

    if seed is None:
        routing = top_k_softmax(clean, k)
        return routing, expert_counts(masked(routing.experts, -1), experts).to(clean.dtype)
    deviation = torch.nn.functional.softplus(noise_logits.to(clean.dtype)) + noise_eps
    noise = normal_like(clean, seed=require_seed(op, seed, clean)).to(clean.dtype)
    h = clean + noise * deviation
    routing = top_k_softmax(h, k)
    if k == experts:
        return routing, expert_counts(masked(routing.experts, -1), experts).to(clean.dtype)
    # k-th largest of the other experts: the (k + 1)-th of all for selected experts, else the k-th.
    best = top_k(h, k + 1)[0]
    inside = torch.zeros_like(h, dtype=torch.bool).scatter(-1, routing.experts, 1)
    threshold = torch.where(inside, best[..., k:], best[..., k - 1 : k])
    # Vanishing noise would give 0 / 0, and a gradient 0 * inf.
    stays = torch.special.ndtr((clean - threshold) / clamp(deviation, 1e-10))
    return routing, masked(stays, 0.0).reshape(-1, experts).sum(0)


def router_jitter(x: Tensor, eps: float, seed: Tensor) -> Tensor:
    """Returns the router's tokens with each element times U(1 - eps, 1 + eps); training only.

    Args:
        x: any shape, floating point.
        eps: in [0, 1); Switch uses 1e-2.
        seed: [seed, offset] (2,) int64 of the Philox noise.

    Returns:
        A tensor of x's shape and dtype.

    Raises:
        ValueError: an eps out of range.

    Reference:
        Fedus, Zoph and Shazeer, Switch Transformers, 2021, arXiv:2101.03961.

    Example:
        >>> bool((router_jitter(torch.ones(99), 0.1, torch.tensor([1, 0])) - 1).abs().max() <= 0.1)
        True
    """
    op = "router_jitter"
    require_float(op, "x", x)
    require_number(op, "eps", eps, 0, below=1)
    noise = uniform_like(x, seed=require_seed(op, seed, x))
    return (widen(x) * (1 + eps * (2 * noise - 1))).to(x.dtype)
