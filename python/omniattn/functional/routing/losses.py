"""Load balancing losses and updates, and the router z-loss."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from omniattn.checks.arguments import clamp, require_float, require_number, require_shape, shown
from omniattn.functional.routing._checks import require_integers_on, require_mask
from omniattn.functional.routing.groups import TokenGroups
from omniattn.functional.routing.routers import check_groups
from omniattn.functional.routing.routing import Routing, count_rows, require_routing, widen

BALANCE_LOSSES = (
    "switch",
    "seed",
    "gshard",
    "deepseek_v2",
    "deepseek_v2_device",
    "deepseek_v2_communication",
    "deepseek_v3",
)


def load_balance_loss(
    scores: Tensor,
    index: Tensor,
    *,
    kind: str = "switch",
    token_mask: Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
) -> Tensor:
    """Auxiliary load balancing loss, without its coefficient.

    With n tokens, c_e assignments to expert e and ``P_e = mean of scores[:, e]``:

    ===========================  ==================================================================
    switch                       ``E sum_e (c_e / n) P_e``; with k slots Mixtral's, uniform value k
    seed                         ``sum_e (c_e / n) P_e``
    gshard                       ``1/E sum_e (c1_e / n) P_e``, c1 counts the first choices alone
    deepseek_v2                  ``sum_e f_e P_e``, ``f_e = E c_e / (k n)``
    deepseek_v2_device           ``sum_d (mean of f_e in d) (sum of P_e in d)`` over groups d
    deepseek_v2_communication    ``sum_d f_d (sum of P_e in d)``, ``f_d = groups / (top_groups n)``
                                 times the tokens that have an expert in d
    deepseek_v3                  deepseek_v2 of each sequence, with scores divided by their sum over
                                 the experts, averaged over the sequences
    ===========================  ==================================================================

    Args:
        scores: (..., E), of a :class:`Routing`; (..., T, E) for deepseek_v3.
        index: (..., k), the assignments before any was dropped.
        kind: one of `BALANCE_LOSSES`.
        token_mask: (...) bool, False for tokens (padding) that do not count; their index must be
            -1. Or None.
        groups: devices, for the two forms that have them.
        top_groups: devices that a token may be sent to.

    Returns:
        () in fp32, or fp64 for fp64 scores. The gradient flows only through P. 0 without tokens.

    Raises:
        TypeError: scores that are not floating point, an index that is not integers, a token_mask
            that is not bool.
        ValueError: a kind, grouping, shape or device that does not fit.
        RuntimeError: an index of E or more.

    Reference:
        Fedus et al., 2021, arXiv:2101.03961; Lepikhin et al., 2020, arXiv:2006.16668; DeepSeek-AI,
        2024, arXiv:2405.04434 and arXiv:2412.19437.

    Example:
        >>> from omniattn.functional import softmax_top_k
        >>> routing = softmax_top_k(torch.zeros(4, 8), 2)
        >>> load_balance_loss(routing.scores, routing.experts)
        tensor(2.)
    """
    return balance_over(TokenGroups(), scores, index, kind, token_mask, groups, top_groups)


def balance_over(
    ranks: TokenGroups,
    scores: Tensor,
    index: Tensor,
    kind: str,
    token_mask: Tensor | None,
    groups: int,
    top_groups: int,
) -> Tensor:
    """Returns `load_balance_loss` of the tokens of several ranks."""
    op = "load_balance_loss"
    require_float(op, "scores", scores)
    require_integers_on(op, "index", index, scores, "scores")
    if kind not in BALANCE_LOSSES:
        raise ValueError(
            f"{op}: kind must be one of {', '.join(BALANCE_LOSSES)}, got kind={shown(kind)}"
        )
    if 0 in (index.dim(), scores.dim()) or index.shape[:-1] != scores.shape[:-1]:
        raise ValueError(
            f"{op}: scores must have shape (..., E) and index (..., k), "
            f"got index.shape={tuple(index.shape)}, scores.shape={tuple(scores.shape)}"
        )
    if token_mask is None:
        token_mask = torch.ones(index.shape[:-1], dtype=torch.bool, device=index.device)
    require_mask(op, token_mask, scores, "scores")
    scores = widen(scores)
    *leading, experts = scores.shape
    k = max(1, index.shape[-1])
    check_groups(op, experts, groups, top_groups)
    sequences, tokens = 1, math.prod(leading)
    if kind == "deepseek_v3":
        if leading:
            sequences, tokens = math.prod(leading[:-1]), leading[-1]
        scores = scores / clamp(scores.sum(-1, keepdim=True), torch.finfo(scores.dtype).tiny)
    scores = scores.reshape(sequences, tokens, experts)
    index = index.long().reshape(sequences, tokens, index.shape[-1])
    real = token_mask.reshape(sequences, tokens, 1)
    counted = index[..., :1] if kind == "gshard" else index
    totals = ranks.totals_of_sequences if kind == "deepseek_v3" else ranks.totals
    mean, fraction, n = totals(
        scores.masked_fill(~real, 0.0).sum(1),
        count_rows(counted.flatten(1), experts).to(scores.dtype),
        real.sum(1),
    )
    n = n.clamp(min=1)
    mean, fraction = mean / n, fraction / n
    if kind in ("seed", "switch", "gshard"):
        factor = {"seed": 1.0, "switch": experts, "gshard": 1 / experts}[kind]
        return factor * (fraction * mean).sum()
    f = fraction * experts / k
    if kind == "deepseek_v2":
        return (f * mean).sum()
    if kind == "deepseek_v3":
        count = torch.full((1,), sequences, device=n.device)
        total, count = ranks.totals((f * mean).sum()[None], count)
        return (total / count.clamp(min=1)).squeeze(0)
    in_groups = mean.view(groups, -1).sum(-1)
    if kind == "deepseek_v2_device":
        return (f.view(groups, -1).mean(-1) * in_groups).sum()
    group = torch.where(index < 0, groups, index // (experts // groups))
    visited = scores.new_zeros(sequences, tokens, groups + 1)
    (sent,) = ranks.totals(visited.scatter(-1, group, 1.0)[..., :groups].sum((0, 1)))
    return (sent * groups / (top_groups * n[0]) * in_groups).sum()


def router_z_loss(logits: Tensor, *, token_mask: Tensor | None = None) -> Tensor:
    """Router z-loss, ``mean of logsumexp(logits)^2`` over the tokens, which keeps logits small.

    Args:
        logits: (..., E), floating point; in fp32 for half ones.
        token_mask: (...) bool, False for tokens that do not count, or None.

    Returns:
        () in the compute dtype, before its coefficient (1e-3). 0 for no tokens.

    Raises:
        TypeError: logits that are not floating point, a token_mask that is not bool.
        ValueError: a token_mask of another shape or device.

    Reference:
        Zoph et al., ST-MoE, 2022, arXiv:2202.08906.

    Example:
        >>> router_z_loss(torch.tensor([[2.0, 1.0, 0.0, -1.0]]))
        tensor(5.954...)
    """
    return z_loss_over(TokenGroups(), logits, token_mask)


def z_loss_over(ranks: TokenGroups, logits: Tensor, token_mask: Tensor | None) -> Tensor:
    """Returns `router_z_loss` of the tokens of several ranks."""
    require_float("router_z_loss", "logits", logits)
    if logits.dim() == 0:
        raise ValueError("router_z_loss: logits must have shape (..., E), got logits.shape=()")
    square = widen(logits).logsumexp(-1).square()
    count = torch.full((), square.numel(), device=logits.device)
    if token_mask is not None:
        require_mask("router_z_loss", token_mask, logits, "logits")
        square, count = square.masked_fill(~token_mask, 0.0), token_mask.sum()
    total, count = ranks.totals(square.sum()[None], count[None])
    return (total / count.clamp(min=1)).squeeze(0)


def expert_importance(routing: Routing) -> Tensor:
    """Returns the sum of each expert's weights, (E,); its :func:`cv_squared` is a loss.

    Raises:
        TypeError: no :class:`Routing`.
        RuntimeError: an index of E or more.

    Reference:
        Shazeer et al., 2017, arXiv:1701.06538.

    Example:
        >>> from omniattn.functional import top_k_softmax
        >>> expert_importance(top_k_softmax(torch.tensor([[0.0, 0.0], [0.0, 0.0]]), 1))
        tensor([2., 0.])
    """
    require_routing("expert_importance", routing)
    sums = routing.weights.new_zeros(routing.scores.shape[-1])
    index = routing.experts.flatten()
    weights = routing.weights.flatten().masked_fill(index < 0, 0.0)
    return sums.scatter_add(0, index.clamp(min=0), weights)


def cv_squared(values: Tensor) -> Tensor:
    """Returns the squared coefficient of variation of the experts' importance or load.

    ``variance / (mean^2 + 1e-10)`` with the population's variance; importance comes from
    :func:`expert_importance`, load from :func:`noisy_top_k`.

    Example:
        >>> cv_squared(torch.tensor([1.0, 3.0]))
        tensor(0.2500)
    """
    require_float("cv_squared", "values", values)
    values = widen(values)
    return values.var(correction=0) / (values.mean().square() + 1e-10)


@torch.no_grad()
def update_router_bias(bias: Tensor, counts: Tensor, rate: float = 1e-3) -> None:
    """Updates the bias of :func:`sigmoid_top_k` in place, after each step.

    ``bias_e += rate sign(mean of counts - counts_e)``

    Args:
        bias: (E,), floating point.
        counts: (E,), assignments of the step, summed over all ranks.
        rate: 1e-3; 0 at the end of training.

    Raises:
        TypeError: a bias that is not floating point, counts that are not integers.
        ValueError: counts of another shape or device, a rate that is not finite.

    Reference:
        Wang et al., Auxiliary-Loss-Free Load Balancing Strategy, 2024, arXiv:2408.15664.

    Example:
        >>> bias = torch.zeros(3)
        >>> update_router_bias(bias, torch.tensor([4, 1, 1]))
        >>> bias
        tensor([-0.0010,  0.0010,  0.0010])
    """
    op = "update_router_bias"
    require_float(op, "bias", bias)
    require_integers_on(op, "counts", counts, bias, "bias")
    require_shape(op, "counts", counts, bias.shape)
    require_number(op, "rate", rate)
    counts = counts.double()
    bias.add_(rate * (counts.mean() - counts).sign().to(bias.dtype))
