"""Rows of routers and balancing losses, against formulas of papers and models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as torch_F
from torch import Tensor

from omniattn import functional as F
from system_rows.system import Provider, System, functions, normal

M, E, K = 4096, 64, 6


def _routers(
    ours: Callable[..., Any], eager: Callable[..., Any]
) -> Callable[[], dict[str, Provider]]:
    """Makes providers of the chosen experts' weights, from the logits."""
    return lambda: functions([normal(M, E)], ours=lambda x: ours(x).weights, eager=eager)


def _softmax_first(x: Tensor) -> Tensor:
    top = x.softmax(-1).topk(K, -1).values
    return top / top.sum(-1, keepdim=True)


def _switch() -> dict[str, Provider]:
    """The Switch router, and the mask of the tokens within the capacity of their expert."""
    capacity = F.expert_capacity(M, E, 1, 1.0)

    def ours(x: Tensor) -> Tensor:
        routing = F.softmax_top_k(x, 1)
        return F.drop_over_capacity(routing, capacity)[0].weights

    def eager(x: Tensor) -> Tensor:
        weight, index = x.softmax(-1).max(-1)
        chosen = torch_F.one_hot(index, E)
        place = (chosen.cumsum(0) * chosen).sum(-1)
        return (weight * (place <= capacity))[:, None]

    return functions([normal(M, E)], ours=ours, eager=eager)


def _sigmoid(x: Tensor) -> Tensor:
    scores = x.sigmoid()
    chosen = scores.gather(-1, (scores + BIAS).topk(K, -1).indices)
    return chosen / (chosen.sum(-1, keepdim=True) + 1e-20)


BIAS = torch.linspace(-0.1, 0.1, E)


def _groups(x: Tensor) -> Tensor:
    scores = x.softmax(-1)
    groups = scores.view(M, 8, -1)
    best = groups.amax(-1).topk(3, -1).indices
    kept = torch.zeros(M, 8).scatter(1, best, 1.0)[..., None].expand_as(groups).flatten(1)
    return scores.masked_fill(kept == 0, 0.0).topk(K, -1).values


def _expert_choice(x: Tensor) -> Tensor:
    p = x.softmax(-1)
    chosen = torch.zeros(E, M).scatter(1, p.T.topk(M * K // E, -1).indices, 1.0)
    return p * chosen.T


def _noisy(x: Tensor, noise: Tensor) -> Tensor:
    top = x.topk(K, -1).values  # without noise, as in evaluation
    return top.softmax(-1)


def _balance() -> dict[str, Provider]:
    logits = normal(M, E)
    index = logits.detach().topk(K, -1).indices

    def ours(x: Tensor) -> Tensor:
        return F.load_balance_loss(x.softmax(-1), index) + F.router_z_loss(x)

    def eager(x: Tensor) -> Tensor:
        share = torch_F.one_hot(index, E).float().sum(1).mean(0)
        balance = E * (share / K * x.softmax(-1).mean(0)).sum() * K
        return balance + x.logsumexp(-1).square().mean()

    return functions([logits], ours=ours, eager=eager)


ROUTERS: dict[str, tuple[System, ...]] = {
    "routers: softmax before or after top-k, Switch, group-limited": (
        System(
            f"softmaxfirst-M{M}E{E}K{K}",
            _routers(lambda x: F.softmax_top_k(x, K, renormalize=True), _softmax_first),
        ),
        System(
            f"topkfirst-M{M}E{E}K{K}",
            _routers(lambda x: F.top_k_softmax(x, K), lambda x: x.topk(K, -1).values.softmax(-1)),
        ),
        System(
            f"groups-M{M}E{E}K{K}",
            _routers(lambda x: F.softmax_top_k(x, K, groups=8, top_groups=3), _groups),
        ),
        System(f"switch-M{M}E{E}K1", _switch),
    ),
    "router: sigmoid with bias-based balancing": (
        System(
            f"sigmoid-M{M}E{E}K{K}", _routers(lambda x: F.sigmoid_top_k(x, K, bias=BIAS), _sigmoid)
        ),
    ),
    "router: sigmoid scaling of expert inputs": (
        System(
            f"llama4-M{M}E{E}K1",
            _routers(lambda x: F.llama4_top_k(x), lambda x: x.topk(1, -1).values.sigmoid()),
        ),
    ),
    "router: noisy top-k": (
        System(
            f"noisy-M{M}E{E}K{K}",
            lambda: functions(
                [normal(M, E), normal(M, E, seed=1)],
                ours=lambda x, noise: F.noisy_top_k(x, noise, K)[0].weights,
                eager=_noisy,
            ),
        ),
    ),
    "router: expert choice": (
        System(
            f"expertchoice-M{M}E{E}",
            _routers(lambda x: F.expert_choice(x, M * K // E), _expert_choice),
        ),
    ),
    "router gradients: exact, straight-through, dense, default vectors": (
        System(
            f"dense-M{M}E{E}K{K}",
            _routers(
                lambda x: F.softmax_top_k(x, K, router_grad="exact"),
                lambda x: x.softmax(-1).topk(K, -1).values,
            ),
        ),
    ),
    "router losses: load balancing, z-loss": (System(f"balance-M{M}E{E}K{K}", _balance),),
}
