"""Routers: functions from logits (..., E) to a :class:`Routing`."""

from __future__ import annotations

import torch
from torch import Tensor

from omniattn.checks.arguments import (
    require_bool,
    require_choice,
    require_float,
    require_int,
    require_number,
    require_shape,
)
from omniattn.functional.layers.topk import top_k
from omniattn.functional.routing._checks import (
    require_float_on,
    require_integers_on,
    require_mask,
)
from omniattn.functional.routing.routing import (
    Routing,
    widen,
)

ROUTER_GRADS = ("exact", "ste", "ste_dense", "default_vector")


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
    """Selects the k most probable experts, with their probabilities as weights.

    ``p = softmax(logits)``; ``w = scale p`` of the chosen, or ``scale p / (sum of chosen p)`` to
    `renormalize`

    Args:
        logits: (..., E), floating point.
        k: in [1, E]. With k = 1 and `renormalize` the weight is 1 and the router learns nothing.
        renormalize: False for Switch (k = 1), Jamba and DeepSeek-V2; True for Mixtral, Qwen3-MoE.
        scale: factor of the weights (DeepSeek-V2: 16).
        groups: experts form this many equal groups, of which only the `top_groups` with the largest
            single probability take part (DeepSeek-V2: 3 of 8).
        top_groups: in [1, groups].
        router_grad: "exact" for the derivative of the formula; "ste" to treat the weights of the
            chosen as ``scale p`` in the backward; "ste_dense" to let every expert's output reach
            its p: all E are evaluated, with weight 0 where not chosen, and only their p sees a
            gradient; "default_vector" is "ste" here, and :func:`default_vector_gradient` adds the
            rest.

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
    g = checked_logits(op, logits, k)
    require_number(op, "scale", scale)
    require_bool(op, "renormalize", renormalize)
    require_choice(op, "router_grad", router_grad, ROUTER_GRADS)
    p = g.softmax(-1)
    allowed = _best_groups(op, p, groups, top_groups, k, members=1)
    chosen, index = top_k(p, k, mask=allowed)
    weights = chosen / chosen.sum(-1, keepdim=True) if renormalize else chosen
    if router_grad == "exact":
        return Routing(index, scale * weights, p)
    if router_grad in ("ste", "default_vector"):
        return Routing(index, scale * (weights.detach() + (chosen - chosen.detach())), p)
    every = torch.arange(p.shape[-1], device=p.device).expand(p.shape)
    dense = torch.zeros_like(p).scatter(-1, index, weights.detach())
    return Routing(every, scale * (dense + (p - p.detach())), p)


def top_k_softmax(logits: Tensor, k: int) -> Routing:
    """Selects the k largest logits, with softmax over them: `softmax_top_k`, renormalised.

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
    g = checked_logits("top_k_softmax", logits, k)
    chosen, index = top_k(g, k)
    return Routing(index, chosen.softmax(-1), g.softmax(-1))


def llama4_top_k(logits: Tensor, k: int = 1) -> Routing:
    """Llama 4's routing, whose weights multiply the inputs of the experts, not the outputs.

    ``w = sigmoid(top-k of logits)``; run it with ``moe_experts(..., weigh_inputs=True)``

    Args:
        logits: (..., E), floating point.
        k: in [1, E]; the released models have 1.

    Returns:
        experts, weights (..., k); scores = softmax of all logits, for the losses.

    Raises:
        TypeError, ValueError: see :func:`softmax_top_k`.

    Reference:
        Meta AI, The Llama 4 herd, 2025; as transformers' Llama4TextMoe computes it.

    Example:
        >>> index, weights, _ = llama4_top_k(torch.tensor([[2.0, 1.0, 0.0]]))
        >>> index, weights
        (tensor([[0]]), tensor([[0.8808]]))
    """
    g = checked_logits("llama4_top_k", logits, k)
    chosen, index = top_k(g, k)
    return Routing(index, chosen.sigmoid(), g.softmax(-1))


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
    """DeepSeek-V3's auxiliary-loss-free routing: a bias affects the selection, not the weights.

    ``s = sigmoid(logits)``; the top k of ``s + bias``; ``w = scale s / (sum of chosen s + 1e-20)``

    Args:
        logits: (..., E), floating point.
        k: in [1, E].
        bias: (E,), without gradient, updated by :func:`update_router_bias`; or None.
        renormalize: divide the weights by their sum.
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
    s = checked_logits(op, logits, k).sigmoid()
    require_number(op, "scale", scale)
    require_bool(op, "renormalize", renormalize)
    steered = s.detach()
    if bias is not None:
        require_float_on(op, "bias", bias, logits, "logits")
        require_shape(op, "bias", bias, s.shape[-1:])
        steered = steered + bias.detach()
    allowed = _best_groups(op, steered, groups, top_groups, k, members=2)
    index = top_k(steered, k, mask=allowed)[1]
    weights = s.gather(-1, index)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return Routing(index, scale * weights, s)


def expert_choice(
    logits: Tensor, capacity: int | Tensor, *, token_mask: Tensor | None = None
) -> Routing:
    """Lets each expert select its `capacity` most probable tokens.

    ``p = softmax(logits)`` over experts; expert e takes the top tokens of ``p[:, e]``, weight p

    Args:
        logits: (..., n, E), floating point; tokens compete within each group of n.
        capacity: tokens of each expert, in [0, n], or an integer tensor (...) with one for each
            group; the paper: ``n cf / E`` rounded up, cf = 2.
        token_mask: (..., n) bool, False for tokens (padding) that no expert takes; or None.

    Returns:
        experts, weights (..., n, E): slot e of a token is expert e if it selected the token; a
        token may have no expert. scores = p.

    Raises:
        TypeError: logits that are not floating point, a token_mask that is not bool.
        ValueError: a capacity out of range, a token_mask of another shape.

    Note:
        A token's experts depend on other tokens, including later ones: unsuitable for causal
        decoding.

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
    n = logits.shape[-2] if logits.dim() > 1 else 0
    most = n if isinstance(capacity, Tensor) else capacity
    require_int(op, "capacity", most)
    if logits.dim() < 2 or not 0 <= most <= n:
        raise ValueError(
            f"{op}: logits must have shape (..., n, E) with 0 <= capacity <= n, "
            f"got logits.shape={tuple(logits.shape)}, capacity={capacity}"
        )
    p = widen(logits).softmax(-1)
    allowed = None
    if token_mask is not None:
        require_mask(op, token_mask, logits, "logits")
        allowed = token_mask[..., None, :].expand(p.mT.shape)
    tokens = top_k(p.detach().mT.contiguous(), most, mask=allowed)[1]
    if isinstance(capacity, Tensor):
        require_integers_on(op, "capacity", capacity, logits, "logits")
        require_shape(op, "capacity", capacity, logits.shape[:-2])
        rank = torch.arange(n, device=p.device)
        tokens = tokens.masked_fill(rank >= capacity[..., None, None], -1)
    # One more column takes the slots of experts that found too few tokens.
    chosen = p.new_zeros((*p.mT.shape[:-1], n + 1), dtype=torch.bool)
    chosen = chosen.scatter(-1, tokens.masked_fill(tokens < 0, n), 1)[..., :n].mT
    every = torch.arange(p.shape[-1], device=p.device).expand(p.shape)
    return Routing(every.masked_fill(~chosen, -1), p.masked_fill(~chosen, 0.0), p)


def check_groups(op: str, experts: int, groups: int, top_groups: int, k: int = 0) -> None:
    require_int(op, "groups", groups)
    require_int(op, "top_groups", top_groups)
    if groups < 1 or experts % groups != 0 or not 1 <= top_groups <= groups:
        raise ValueError(
            f"{op}: groups must divide E, with 1 <= top_groups <= groups, "
            f"got E={experts}, groups={groups}, top_groups={top_groups}"
        )
    if k > top_groups * (experts // groups):
        raise ValueError(
            f"{op}: k must be at most the experts of top_groups groups, "
            f"got k={k}, E={experts}, groups={groups}, top_groups={top_groups}"
        )


def checked_logits(op: str, logits: Tensor, k: int) -> Tensor:
    """Checks logits and k; returns the logits in fp32 (fp64 for fp64)."""
    require_float(op, "logits", logits)
    require_int(op, "k", k)
    if logits.dim() == 0 or not 1 <= k <= logits.shape[-1]:
        raise ValueError(
            f"{op}: logits must have shape (..., E) with 1 <= k <= E, "
            f"got logits.shape={tuple(logits.shape)}, k={k}"
        )
    return widen(logits)


def _best_groups(
    op: str, scores: Tensor, groups: int, top_groups: int, k: int, members: int
) -> Tensor | None:
    """Returns a mask (..., E) of the groups with the largest sums of `members` best scores."""
    experts = scores.shape[-1]
    check_groups(op, experts, groups, top_groups, k)
    size = experts // groups
    if top_groups == groups:
        return None
    each = scores.detach().unflatten(-1, (groups, size))
    best = top_k(each, min(members, size))[0].sum(-1)
    index = top_k(best, top_groups)[1]
    allowed = torch.zeros_like(best, dtype=torch.bool).scatter(-1, index, 1)
    return allowed[..., None].expand(each.shape).flatten(-2)
