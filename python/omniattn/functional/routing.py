"""Routers of mixtures of experts, their losses, and capacity: small functions of plain torch.

A router turns logits (..., E) into a :class:`Routing` that
:func:`omniattn.functional.moe_experts` executes. They compute in fp32 (fp64 for fp64), choose by
:func:`omniattn.functional.top_k`, so that equal scores go to the smaller expert on every device,
and differentiate as they are written. Slots without an expert have index -1 and weight 0.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from omniattn.functional._checks import require_float, require_shape
from omniattn.functional.topk import top_k
from omniattn.reference import philox

__all__ = [
    "BALANCE_LOSSES",
    "Routing",
    "cv_squared",
    "drop_over_capacity",
    "drop_second_at_random",
    "expert_capacity",
    "expert_choice",
    "expert_counts",
    "load_balance_loss",
    "noisy_top_k",
    "router_jitter",
    "router_z_loss",
    "sigmoid_top_k",
    "softmax_top_k",
    "top_k_softmax",
    "update_router_bias",
]

BALANCE_LOSSES = (
    "switch",
    "seed",
    "gshard",
    "deepseek_v2",
    "deepseek_v2_device",
    "deepseek_v2_communication",
    "deepseek_v3",
)
ROUTER_GRADS = ("exact", "ste", "ste_dense")


class Routing(NamedTuple):
    """What a router decided.

    Attributes:
        experts: (..., k) int64, the expert of each slot, -1 for none.
        weights: (..., k) in the compute dtype.
        scores: (..., E) in the compute dtype, what the losses average: softmax or sigmoid.
    """

    experts: Tensor
    weights: Tensor
    scores: Tensor


# routers ------------------------------------------------------------------------------------------


def softmax_top_k(
    logits: Tensor,
    k: int,
    *,
    renormalize: bool = False,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
    router_grad: str = "exact",
) -> Routing:
    """The k most probable experts, with their probabilities as weights.

    ``p = softmax(logits)``; ``w = scale p`` of the chosen, divided by their sum to `renormalize`

    Args:
        logits: (..., E), floating point.
        k: in [1, E]. With k = 1 and `renormalize` the weight is 1 and the router learns nothing.
        renormalize: False for Switch (k = 1), Jamba and DeepSeek-V2; True for Mixtral, Qwen3-MoE.
        scale: factor of the weights (DeepSeek-V2: 16).
        groups: experts form this many equal groups, of which only the `top_groups` with the largest
            single probability take part (DeepSeek-V2: 3 of 8).
        top_groups: in [1, groups].
        router_grad: "exact" for the derivative of the formula; "ste" to treat the weights of the
            chosen as their p in the backward; "ste_dense" to let every expert's output reach its p:
            all E are evaluated, with weight 0 where not chosen, and only their p sees a gradient.

    Returns:
        experts, weights (..., k), or (..., E) for "ste_dense"; scores = p.

    Raises:
        TypeError: logits that are not floating point.
        ValueError: a k, grouping or router_grad out of range.

    Reference:
        Fedus, Zoph and Shazeer, Switch Transformers, 2021, arXiv:2101.03961; Jiang et al., Mixtral
        of Experts, 2024, arXiv:2401.04088; DeepSeek-AI, DeepSeek-V2, 2024, arXiv:2405.04434.

    Example:
        >>> index, weights, _ = softmax_top_k(torch.tensor([[2.0, 1.0, 0.0, -1.0]]), 2)
        >>> index, weights
        (tensor([[0, 1]]), tensor([[0.6439, 0.2369]]))
    """
    op = "softmax_top_k"
    g = _compute(op, logits, k)
    p = g.softmax(-1)
    allowed = _best_groups(op, p, groups, top_groups, k, members=1)
    chosen, index = top_k(p, k, mask=allowed)
    weights = scale * (chosen / chosen.sum(-1, keepdim=True) if renormalize else chosen)
    if router_grad not in ROUTER_GRADS:
        raise ValueError(
            f"{op}: router_grad must be one of {', '.join(ROUTER_GRADS)}, "
            f"got router_grad={router_grad!r}"
        )
    if router_grad == "exact":
        return Routing(index, weights, p)
    if router_grad == "ste":
        return Routing(index, weights.detach() + (chosen - chosen.detach()), p)
    every = torch.arange(p.shape[-1], device=p.device).expand(p.shape)
    dense = torch.zeros_like(p).scatter(-1, index, weights.detach())
    return Routing(every, dense + (p - p.detach()), p)


def top_k_softmax(logits: Tensor, k: int) -> Routing:
    """The k largest logits, softmax over them alone: `softmax_top_k` with renormalisation.

    ``w = softmax(top-k of logits)``

    Args:
        logits: (..., E), floating point.
        k: in [1, E].

    Returns:
        experts, weights (..., k); scores = softmax of all logits, for the losses.

    Raises:
        TypeError, ValueError: see :func:`softmax_top_k`.

    Reference:
        Shazeer et al., 2017, arXiv:1701.06538; OpenAI, gpt-oss model card, 2025, arXiv:2508.10925.

    Example:
        >>> top_k_softmax(torch.tensor([[2.0, 1.0, 0.0, -1.0]]), 2).weights
        tensor([[0.7311, 0.2689]])
    """
    g = _compute("top_k_softmax", logits, k)
    chosen, index = top_k(g, k)
    return Routing(index, chosen.softmax(-1), g.softmax(-1))


def sigmoid_top_k(
    logits: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    renormalize: bool = True,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
) -> Routing:
    """Auxiliary-loss-free routing of DeepSeek-V3: a bias steers the choice and not the weights.

    ``s = sigmoid(logits)``; the top k of ``s + bias``; ``w = scale s / (sum of chosen s + 1e-20)``

    Args:
        logits: (..., E), floating point.
        k: in [1, E].
        bias: (E,), without gradient, moved by :func:`update_router_bias`; or None.
        renormalize: whether the weights are divided by their sum.
        scale: factor of the weights (DeepSeek-V3: 2.5).
        groups: experts form this many equal groups, of which only the `top_groups` with the largest
            sum of their two best ``s + bias`` take part (DeepSeek-V3: 4 of 8).
        top_groups: in [1, groups].

    Returns:
        experts, weights (..., k); scores = s.

    Raises:
        TypeError, ValueError: see :func:`softmax_top_k`; a bias of another shape.

    Reference:
        DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, arXiv:2412.19437.

    Example:
        >>> bias = torch.tensor([-1.0, 0.0, 0.0])
        >>> sigmoid_top_k(torch.tensor([[2.0, 1.0, 0.0]]), 2, bias=bias).experts
        tensor([[1, 2]])
    """
    op = "sigmoid_top_k"
    s = _compute(op, logits, k).sigmoid()
    steered = s.detach()
    if bias is not None:
        require_shape(op, "bias", bias, s.shape[-1:])
        steered = steered + bias.detach()
    allowed = _best_groups(op, steered, groups, top_groups, k, members=2)
    index = top_k(steered, k, mask=allowed)[1]
    weights = s.gather(-1, index)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return Routing(index, scale * weights, s)


def noisy_top_k(
    logits: Tensor,
    noise_logits: Tensor,
    k: int,
    *,
    seed: Tensor | None = None,
    noise_eps: float = 0.0,
) -> tuple[Routing, Tensor]:
    """Noisy top-k gating.

    ``h = logits + eps (softplus(noise_logits) + noise_eps)``, ``eps ~ N(0, 1)``;
    ``w = softmax(top-k of h)``

    Args:
        logits: (..., E), floating point.
        noise_logits: of the same shape and dtype.
        k: in [1, E].
        seed: [seed, offset] (2,) int64 of the Philox noise; None, outside of training, for none.
        noise_eps: 0 (paper) or 1e-2 (tensor2tensor).

    Returns:
        The routing, its scores the softmax of h; and load (E,), the expected number of tokens of
        each expert: the sum of the probabilities that an expert stays among the k when its noise
        alone is drawn again. Without noise, or for k = E, the number of tokens it has.

    Raises:
        TypeError, ValueError: see :func:`softmax_top_k`.

    Reference:
        Shazeer et al., Outrageously Large Neural Networks, 2017, arXiv:1701.06538.

    Example:
        >>> noisy_top_k(torch.tensor([[2.0, 1.0, 0.0]]), torch.zeros(1, 3), 1)[1]
        tensor([1., 0., 0.])
    """
    op = "noisy_top_k"
    clean = _compute(op, logits, k)
    require_shape(op, "noise_logits", noise_logits, logits.shape)
    experts = clean.shape[-1]
    if seed is None:
        routing = top_k_softmax(clean, k)
        return routing, expert_counts(routing.experts, experts).to(clean.dtype)
    deviation = torch.nn.functional.softplus(noise_logits.to(clean.dtype)) + noise_eps
    noise = philox.normal(clean.numel(), seed).view(clean.shape).to(clean)
    h = clean + noise * deviation
    routing = top_k_softmax(h, k)
    if k == experts:
        return routing, expert_counts(routing.experts, experts).to(clean.dtype)
    # The k-th largest of the others: the (k + 1)-th of all for the chosen, else the k-th of all.
    best = top_k(h, k + 1)[0]
    inside = torch.zeros_like(h, dtype=torch.bool).scatter(-1, routing.experts, True)
    threshold = torch.where(inside, best[..., k:], best[..., k - 1 : k])
    stays = torch.special.ndtr((clean - threshold) / deviation)
    return routing, stays.flatten(0, -2).sum(0)


def expert_choice(logits: Tensor, capacity: int) -> Routing:
    """Every expert chooses its `capacity` most probable tokens.

    ``p = softmax(logits)`` over experts; expert e takes the top tokens of ``p[:, e]``, weight p

    Args:
        logits: (..., n, E), floating point; tokens compete within each group of n.
        capacity: tokens of each expert, in [0, n]; the paper: ``n cf / E`` rounded up, cf = 2.

    Returns:
        experts, weights (..., n, E): slot e of a token is expert e where that chose the token, so
        that a token may have none. scores = p.

    Raises:
        TypeError: logits that are not floating point.
        ValueError: a capacity out of range.

    Note:
        A token's experts depend on the other tokens, later ones included: not for causal decoding.

    Reference:
        Zhou et al., Mixture-of-Experts with Expert Choice Routing, 2022, arXiv:2202.09368.

    Example:
        >>> expert_choice(torch.tensor([[2.0, 0.0], [1.0, 0.0], [0.0, 0.0]]), 1).experts
        tensor([[ 0, -1],
                [-1, -1],
                [-1,  1]])
    """
    op = "expert_choice"
    require_float(op, "logits", logits)
    if logits.dim() < 2 or not 0 <= capacity <= logits.shape[-2]:
        raise ValueError(
            f"{op}: logits must have shape (..., n, E) with 0 <= capacity <= n, "
            f"got logits.shape={tuple(logits.shape)}, capacity={capacity}"
        )
    p = _widen(logits).softmax(-1)
    tokens = top_k(p.detach().mT.contiguous(), capacity)[1]
    chosen = torch.zeros_like(p, dtype=torch.bool).mT.scatter(-1, tokens, True).mT
    every = torch.arange(p.shape[-1], device=p.device).expand(p.shape)
    return Routing(every.masked_fill(~chosen, -1), p.masked_fill(~chosen, 0.0), p)


def router_jitter(x: Tensor, eps: float, seed: Tensor) -> Tensor:
    """The router's copy of the tokens, each element times U(1 - eps, 1 + eps); training only.

    Args:
        x: any shape, floating point.
        eps: in [0, 1); Switch uses 1e-2.
        seed: [seed, offset] (2,) int64 of the Philox noise.

    Returns:
        Of x's shape and dtype.

    Raises:
        ValueError: an eps out of range.

    Reference:
        Fedus, Zoph and Shazeer, Switch Transformers, 2021, arXiv:2101.03961.

    Example:
        >>> bool((router_jitter(torch.ones(99), 0.1, torch.tensor([1, 0])) - 1).abs().max() <= 0.1)
        True
    """
    if not 0 <= eps < 1:
        raise ValueError(f"router_jitter: eps must be in [0, 1), got eps={eps}")
    noise = philox.uniform(x.numel(), seed).view(x.shape).to(x.device)
    return (_widen(x) * (1 + eps * (2 * noise - 1))).to(x.dtype)


# capacity -----------------------------------------------------------------------------------------


def expert_capacity(tokens: int, experts: int, k: int, factor: float, least: int = 1) -> int:
    """Slots of each expert: ``ceil(factor k tokens / experts)``, within [`least`, `tokens`].

    Example:
        >>> expert_capacity(100, 8, 2, 1.25)
        32
    """
    if tokens < 0 or experts < 1 or k < 1 or least < 0 or not 0 <= factor < math.inf:
        raise ValueError(
            "expert_capacity: tokens, factor and least must be >= 0, experts and k >= 1, "
            f"got tokens={tokens}, experts={experts}, k={k}, factor={factor}, least={least}"
        )
    return min(tokens, max(least, math.ceil(factor * k * tokens / experts)))


def drop_over_capacity(
    routing: Routing, capacity: int, *, priority: Tensor | None = None
) -> tuple[Routing, Tensor]:
    """Drops assignments beyond the capacity of their expert; other weights stay as they are.

    Args:
        routing: of (..., n, k); each leading element (a sequence) has its own capacity.
        capacity: >= 0, assignments that an expert takes of a group of n tokens. All first choices
            come before all second ones, and earlier tokens before later ones.
        priority: (..., n): tokens with larger ones come first instead (V-MoE: the largest
            probability), at equal ones the earlier.

    Returns:
        The routing with index -1 and weight 0 for what was dropped; and how many were, () int64.

    Raises:
        ValueError: a negative capacity, a priority of another shape.

    Reference:
        Lepikhin et al., GShard, 2020, arXiv:2006.16668; Riquelme et al., Scaling Vision with Sparse
        Mixture of Experts, 2021, arXiv:2106.05974.

    Example:
        >>> routing = softmax_top_k(torch.tensor([[2.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), 1)
        >>> drop_over_capacity(routing, 1)[0].experts.flatten()
        tensor([ 0, -1,  1])
    """
    op = "drop_over_capacity"
    if capacity < 0:
        raise ValueError(f"{op}: capacity must be >= 0, got capacity={capacity}")
    *leading, n, k = routing.experts.shape
    experts = routing.scores.shape[-1]
    groups = math.prod(leading)
    index = routing.experts.reshape(groups, n, k)
    if priority is None:
        order = torch.arange(n, device=index.device).expand(groups, n)
    else:
        require_shape(op, "priority", priority, (*leading, n))
        order = priority.reshape(groups, n).argsort(dim=-1, descending=True, stable=True)
    # In order of priority; a stable sort by expert then gives each assignment its rank.
    by_priority = index.gather(1, order[..., None].expand(-1, -1, k)).mT.reshape(groups, k * n)
    bins = by_priority.masked_fill(by_priority < 0, experts)
    sorted_bins, places = bins.sort(dim=-1, stable=True)
    first = torch.searchsorted(sorted_bins, sorted_bins)
    rank = torch.arange(k * n, device=index.device) - first
    over = torch.zeros_like(bins, dtype=torch.bool).scatter(1, places, rank >= capacity)
    over = torch.zeros_like(index, dtype=torch.bool).scatter(
        1, order[..., None].expand(-1, -1, k), over.view(groups, k, n).mT
    )
    over = (over & (index >= 0)).view(routing.experts.shape)
    kept = routing._replace(
        experts=routing.experts.masked_fill(over, -1),
        weights=routing.weights.masked_fill(over, 0.0),
    )
    return kept, over.sum()


def drop_second_at_random(routing: Routing, seed: Tensor) -> Routing:
    """GShard: the second choice is kept with probability 2 w_2; training only.

    Args:
        routing: of (..., 2).
        seed: [seed, offset] (2,) int64 of the Philox noise.

    Returns:
        The routing with index -1 and weight 0 for what was dropped.

    Raises:
        ValueError: a routing of k != 2.

    Reference:
        Lepikhin et al., GShard, 2020, arXiv:2006.16668.

    Example:
        >>> routing = softmax_top_k(torch.tensor([[0.0, 0.0]]), 2)
        >>> drop_second_at_random(routing, torch.tensor([1, 0])).experts
        tensor([[0, 1]])
    """
    if routing.experts.shape[-1] != 2:
        raise ValueError(
            f"drop_second_at_random: routing must have k = 2, got k={routing.experts.shape[-1]}"
        )
    second = routing.weights[..., 1]
    u = philox.uniform(second.numel(), seed).view(second.shape).to(second.device)
    dropped = torch.stack([torch.zeros_like(u, dtype=torch.bool), u >= 2 * second.detach()], -1)
    return routing._replace(
        experts=routing.experts.masked_fill(dropped, -1),
        weights=routing.weights.masked_fill(dropped, 0.0),
    )


# balance ------------------------------------------------------------------------------------------


def expert_counts(index: Tensor, experts: int) -> Tensor:
    """Assignments of each expert, (E,) int64; index -1 counts for none.

    Example:
        >>> expert_counts(torch.tensor([[0, 2], [2, -1]]), 3)
        tensor([1, 0, 2])
    """
    flat = index.flatten()
    counts = torch.zeros(experts, dtype=torch.int64, device=index.device)
    return counts.scatter_add(0, flat.clamp(min=0), (flat >= 0).long())


def load_balance_loss(
    scores: Tensor,
    index: Tensor,
    *,
    kind: str = "switch",
    token_mask: Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
) -> Tensor:
    """Auxiliary loss that evens out the load, before its coefficient.

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
        () in the dtype of the scores. The gradient goes through P alone. 0 for no tokens.

    Raises:
        TypeError: scores that are not floating point.
        ValueError: a kind, grouping or shape that does not fit.

    Reference:
        Fedus et al., 2021, arXiv:2101.03961; Lepikhin et al., 2020, arXiv:2006.16668; DeepSeek-AI,
        2024, arXiv:2405.04434 and arXiv:2412.19437.

    Example:
        >>> routing = softmax_top_k(torch.zeros(4, 8), 2)
        >>> load_balance_loss(routing.scores, routing.experts)
        tensor(2.)
    """
    op = "load_balance_loss"
    require_float(op, "scores", scores)
    if kind not in BALANCE_LOSSES:
        raise ValueError(
            f"{op}: kind must be one of {', '.join(BALANCE_LOSSES)}, got kind={kind!r}"
        )
    if index.shape[:-1] != scores.shape[:-1]:
        raise ValueError(
            f"{op}: index must have the leading sizes of scores, "
            f"got index.shape={tuple(index.shape)}, scores.shape={tuple(scores.shape)}"
        )
    if token_mask is None:
        token_mask = torch.ones_like(index[..., 0], dtype=torch.bool)
    require_shape(op, "token_mask", token_mask, scores.shape[:-1])
    experts, k = scores.shape[-1], index.shape[-1]
    _check_groups(op, experts, groups, top_groups)
    if kind == "deepseek_v3":
        length = scores.shape[-2] if scores.dim() > 1 else 1
        shares = scores / scores.sum(-1, keepdim=True)
        parts = (t.reshape(-1, length, t.shape[-1]) for t in (shares, index, token_mask[..., None]))
        losses = [
            load_balance_loss(s, i, kind="deepseek_v2", token_mask=m[..., 0])
            for s, i, m in zip(*parts, strict=True)
        ]
        return torch.stack(losses).mean() if losses else scores.sum()
    n = token_mask.sum().clamp(min=1)
    mean = (scores * token_mask[..., None]).flatten(0, -2).sum(0) / n
    counted = index[..., :1] if kind == "gshard" else index
    fraction = expert_counts(counted, experts).to(scores.dtype) / n
    if kind in ("seed", "switch", "gshard"):
        factor = {"seed": 1.0, "switch": experts, "gshard": 1 / experts}[kind]
        return factor * (fraction * mean).sum()
    f = fraction * experts / k
    if kind == "deepseek_v2":
        return (f * mean).sum()
    in_groups = mean.view(groups, -1).sum(-1)
    if kind == "deepseek_v2_device":
        return (f.view(groups, -1).mean(-1) * in_groups).sum()
    group = torch.where(index < 0, groups, index // (experts // groups))
    visited = torch.zeros(*index.shape[:-1], groups + 1, device=index.device, dtype=scores.dtype)
    sent = visited.scatter(-1, group, 1.0)[..., :groups].flatten(0, -2).sum(0)
    return (sent * groups / (top_groups * n) * in_groups).sum()


def router_z_loss(logits: Tensor, *, token_mask: Tensor | None = None) -> Tensor:
    """Keeps the logits of a router small: ``mean of logsumexp(logits)^2`` over the tokens.

    Args:
        logits: (..., E), floating point; in fp32 for half ones.
        token_mask: (...) bool, False for tokens that do not count, or None.

    Returns:
        () in the compute dtype, before its coefficient (1e-3).

    Raises:
        TypeError: logits that are not floating point.
        ValueError: a token_mask of another shape.

    Reference:
        Zoph et al., ST-MoE, 2022, arXiv:2202.08906.

    Example:
        >>> router_z_loss(torch.tensor([[2.0, 1.0, 0.0, -1.0]]))
        tensor(5.954...)
    """
    require_float("router_z_loss", "logits", logits)
    square = _widen(logits).logsumexp(-1).square()
    if token_mask is None:
        return square.mean()
    require_shape("router_z_loss", "token_mask", token_mask, square.shape)
    return (square * token_mask).sum() / token_mask.sum().clamp(min=1)


def cv_squared(values: Tensor) -> Tensor:
    """Squared coefficient of variation, of the importance or the load of the experts.

    ``variance / (mean^2 + 1e-10)`` with the population's variance; importance is the sum of an
    expert's weights, load comes from :func:`noisy_top_k`.

    Example:
        >>> cv_squared(torch.tensor([1.0, 3.0]))
        tensor(0.2500)
    """
    require_float("cv_squared", "values", values)
    return values.var(correction=0) / (values.mean().square() + 1e-10)


@torch.no_grad()
def update_router_bias(bias: Tensor, counts: Tensor, rate: float = 1e-3) -> None:
    """Moves the bias of :func:`sigmoid_top_k` in place, after each step.

    ``bias_e += rate sign(mean of counts - counts_e)``

    Args:
        bias: (E,), floating point.
        counts: (E,), assignments of the step, summed over all ranks.
        rate: 1e-3; 0 at the end of training.

    Raises:
        ValueError: counts of another shape.

    Reference:
        Wang et al., Auxiliary-Loss-Free Load Balancing Strategy, 2024, arXiv:2408.15664.

    Example:
        >>> bias = torch.zeros(3)
        >>> update_router_bias(bias, torch.tensor([4, 1, 1]))
        >>> bias
        tensor([-0.0010,  0.0010,  0.0010])
    """
    require_shape("update_router_bias", "counts", counts, bias.shape)
    counts = counts.double()
    bias.add_(rate * (counts.mean() - counts).sign().to(bias.dtype))


# ---- helpers -------------------------------------------------------------------------------------


def _widen(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _compute(op: str, logits: Tensor, k: int) -> Tensor:
    require_float(op, "logits", logits)
    if logits.dim() == 0 or not 1 <= k <= logits.shape[-1]:
        raise ValueError(
            f"{op}: logits must have shape (..., E) with 1 <= k <= E, "
            f"got logits.shape={tuple(logits.shape)}, k={k}"
        )
    return _widen(logits)


def _check_groups(op: str, experts: int, groups: int, top_groups: int) -> None:
    if groups < 1 or experts % groups != 0 or not 1 <= top_groups <= groups:
        raise ValueError(
            f"{op}: groups must divide E, with 1 <= top_groups <= groups, "
            f"got E={experts}, groups={groups}, top_groups={top_groups}"
        )


def _best_groups(
    op: str, scores: Tensor, groups: int, top_groups: int, k: int, members: int
) -> Tensor | None:
    """Mask (..., E) of the groups with the largest sums of their `members` best scores."""
    experts = scores.shape[-1]
    _check_groups(op, experts, groups, top_groups)
    size = experts // groups
    if k > top_groups * size:
        raise ValueError(
            f"{op}: k must be at most the experts of top_groups groups, "
            f"got k={k}, E={experts}, groups={groups}, top_groups={top_groups}"
        )
    if top_groups == groups:
        return None
    each = scores.detach().unflatten(-1, (groups, size))
    best = top_k(each, min(members, size))[0].sum(-1)
    index = top_k(best, top_groups)[1]
    allowed = torch.zeros_like(best, dtype=torch.bool).scatter(-1, index, True)
    return allowed[..., None].expand(each.shape).flatten(-2)
