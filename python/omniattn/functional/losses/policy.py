"""Group relative policy optimisation and related losses."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from omniattn.checks.arguments import (
    clamp,
    is_one_of,
    require_bool,
    require_choice,
    require_float,
    require_int,
    require_number,
    require_shape,
    require_tensor,
    shown,
)

__all__ = ["GRPO_LOSSES", "PolicyLoss", "grpo_loss"]

#: Values of `loss_type` of :func:`grpo_loss`.
GRPO_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")


class PolicyLoss(NamedTuple):
    """A loss and its statistics for logging."""

    loss: Tensor
    kl: Tensor  # mean over the tokens of the penalty's estimate; 0 without a penalty
    clipped: Tensor  # share of the tokens whose ratio was clipped


def grpo_loss(
    log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    old_log_prob: Tensor | None = None,
    ref_log_prob: Tensor | None = None,
    beta: float = 0.04,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    loss_type: str = "dapo",
    max_completion_length: int | None = None,
    importance_sampling_level: str = "token",
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    delta: float | None = None,
    use_bias_correction_kl: bool = False,
    importance_ratio: Tensor | None = None,
    normalizer: Tensor | float | None = None,
    vespo_pos: tuple[float, float] = (2.0, 3.0),
    vespo_neg: tuple[float, float] = (3.0, 2.0),
) -> PolicyLoss:
    """Clipped policy gradient loss with group advantages and a KL penalty to a reference.

    With ``r = exp(log_prob - old_log_prob)``, of tokens or as the geometric mean of a sequence
    (GSPO), and the advantage A of a sequence, a token's loss is

    ``-min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A) + beta k``,
    ``k = exp(d) - d - 1``, ``d = ref_log_prob - log_prob``,

    with r at most `delta` in the first term. cispo has ``-min(r, epsilon_high) A log_prob`` whose
    factor gets no gradient, sapo ``-A 4 s(t (r - 1)) / t`` with s the sigmoid and t the temperature
    of A's sign, vespo ``-w^k exp(l (1 - w)) A log_prob`` with w the product of a sequence's ratios
    and (k, l) of A's sign, whose factor gets no gradient. They are reduced over the kept tokens:

    ===================  ===================================================================
    grpo, sapo           mean over the sequences of the mean over their tokens
    bnpo                 sum over all tokens / their number
    dapo, cispo, vespo   sum over all tokens / `normalizer`, by default their number
    dr_grpo              sum over all tokens / (B max_completion_length)
    luspo                mean over (B, T), padding too as in TRL, of the token's loss times the
                         length of its sequence
    ===================  ===================================================================

    Args:
        log_prob: (B, T) log-probabilities of the sampled tokens, floating point.
        advantages: (B,).
        mask: (B, T), bool or numbers: tokens that count.
        old_log_prob: (B, T) under the policy that sampled them, or None for log_prob, detached.
        ref_log_prob: (B, T) under the reference, or None for log_prob, detached.
        beta: weight of the penalty k, at least 0.
        epsilon_low, epsilon_high: clipping range of r around 1; at least 0.
        loss_type: one of `GRPO_LOSSES`.
        max_completion_length: for dr_grpo.
        importance_sampling_level: "token" or "sequence"; cispo, sapo and vespo have only "token".
        sapo_temperature_pos, sapo_temperature_neg: above 0.
        delta: above 0, or None.
        use_bias_correction_kl: multiplies k by r.
        importance_ratio: (B,), (B, 1) or (B, T), of the sampler's policy, multiplies the losses
            before the penalty; or None.
        normalizer: see the table; above 0.
        vespo_pos, vespo_neg: (k, l) for advantages of at least 0, and below.

    Returns:
        PolicyLoss of scalars in log_prob's dtype.

    Raises:
        TypeError: log-probabilities that are not floating point.
        ValueError: a shape or option is invalid.

    Reference:
        Shao et al., 2024, arXiv:2402.03300 (grpo); Liu et al., 2025, arXiv:2503.20783 (dr_grpo); Yu
        et al., 2025, arXiv:2503.14476 (dapo); MiniMax, 2025, arXiv:2506.13585 (cispo); Zheng et
        al., 2025, arXiv:2507.18071 (sequence level); Gao et al., 2025, arXiv:2511.20347 (sapo).

    Example:
        >>> one = torch.zeros(1, 2)
        >>> grpo_loss(one, torch.tensor([2.0]), torch.ones(1, 2)).loss
        tensor(-2.)
    """
    op = "grpo_loss"
    _check_tensors(op, log_prob, advantages, mask, old_log_prob, ref_log_prob)
    least_zero = {"beta": beta, "epsilon_low": epsilon_low, "epsilon_high": epsilon_high}
    temperatures = (sapo_temperature_pos, sapo_temperature_neg)
    _check_numbers(op, least_zero, temperatures, delta)
    check_choices(op, loss_type, importance_sampling_level)
    require_bool(op, "use_bias_correction_kl", use_bias_correction_kl)
    kept, advantage = mask.to(log_prob.dtype), advantages.unsqueeze(1)
    if importance_ratio is not None:
        importance_ratio = _per_token(op, importance_ratio, log_prob)
    log_ratio = log_prob - (log_prob.detach() if old_log_prob is None else old_log_prob)
    if importance_sampling_level == "sequence":
        log_ratio = _mean_of_sequences(log_ratio, kept)
    ratio, low, high = log_ratio.exp(), -torch.inf, torch.inf
    if loss_type == "cispo":
        high = epsilon_high
        loss = -ratio.clamp(max=high).detach() * advantage * log_prob
    elif loss_type == "sapo":
        rising, falling = (_soft_gate(ratio, t) for t in temperatures)
        loss = -torch.where(advantage > 0, rising, falling) * advantage
    elif loss_type == "vespo":
        positive, negative = (log_prob.new_tensor(pair) for pair in (vespo_pos, vespo_neg))
        shapes = torch.where(advantage >= 0, positive, negative)
        loss = -_gamma_weight(log_ratio, kept, importance_ratio, shapes) * advantage * log_prob
        importance_ratio = None  # is in the weight
    else:
        low, high = 1 - epsilon_low, 1 + epsilon_high
        first = ratio if delta is None else clamp(ratio, most=delta)
        loss = -torch.min(first * advantage, clamp(ratio, low, high) * advantage)
    if importance_ratio is not None:
        loss = loss * importance_ratio
    tokens, penalty = kept.sum().clamp(min=1), log_prob.new_zeros(())
    if beta != 0:
        k = _divergence(log_prob, ref_log_prob) * (ratio if use_bias_correction_kl else 1)
        loss = loss + beta * k
        penalty = (k.detach() * kept).sum() / tokens
    clipped = ((ratio < low) & (advantage < 0)) | ((ratio > high) & (advantage > 0))
    total = _reduced(op, loss, kept, loss_type, max_completion_length, normalizer)
    return PolicyLoss(total, penalty, (clipped * kept).sum() / tokens)


def _divergence(log_prob: Tensor, ref_log_prob: Tensor | None) -> Tensor:
    d = (log_prob.detach() if ref_log_prob is None else ref_log_prob) - log_prob
    return d.exp() - d - 1


def _mean_of_sequences(x: Tensor, kept: Tensor) -> Tensor:
    length = kept.sum(-1, keepdim=True).clamp(min=1)
    return (x * kept).sum(-1, keepdim=True) / length


def _gamma_weight(
    log_ratio: Tensor, kept: Tensor, importance_ratio: Tensor | None, shapes: Tensor
) -> Tensor:
    """Computes w^k exp(l (1 - w)) of each sequence (B, 1), for (k, l) in a tensor (B, 2)."""
    lowest = math.log(1e-8)
    with torch.no_grad():
        log_w = (log_ratio.clamp(-20, 20) * kept).sum(-1, keepdim=True)
        if importance_ratio is not None:
            log_w = log_w + importance_ratio.log().clamp(lowest, 20).sum(-1, keepdim=True)
        log_w = log_w.clamp(lowest, 20)
        k, rate = shapes[:, :1], shapes[:, 1:].clamp(min=1e-4)
        return torch.exp(rate + k * log_w - rate * log_w.exp())


def _soft_gate(ratio: Tensor, temperature: float) -> Tensor:
    return torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature


def _reduced(
    op: str,
    loss: Tensor,
    kept: Tensor,
    loss_type: str,
    max_completion_length: int | None,
    normalizer: Tensor | float | None,
) -> Tensor:
    batch, length = kept.shape
    lengths = kept.sum(-1)
    if loss_type in ("grpo", "sapo"):
        return ((loss * kept).sum(-1) / lengths.clamp(min=1)).sum() / batch
    if loss_type == "luspo":
        return (loss * lengths.unsqueeze(1)).expand(batch, length).mean()
    total = (loss * kept).sum()
    if loss_type == "dr_grpo":
        require_int(op, "max_completion_length", max_completion_length, 1)
        assert max_completion_length is not None
        return total / (batch * max_completion_length)
    if loss_type == "bnpo" or normalizer is None:
        return total / kept.sum().clamp(min=1)
    require_number(op, "normalizer", normalizer, above=0)
    return total / normalizer


def _per_token(op: str, importance_ratio: Tensor, log_prob: Tensor) -> Tensor:
    require_float(op, "importance_ratio", importance_ratio)
    batch, length = log_prob.shape
    if importance_ratio.shape == (batch,):
        importance_ratio = importance_ratio.unsqueeze(1)
    if not is_one_of(importance_ratio.shape, (batch, 1), (batch, length)):
        raise ValueError(
            f"{op}: importance_ratio must have shape (B,), (B, 1) or (B, T), "
            f"got importance_ratio.shape={tuple(importance_ratio.shape)}, B={batch}, T={length}"
        )
    return importance_ratio


def _check_tensors(
    op: str,
    log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    old_log_prob: Tensor | None,
    ref_log_prob: Tensor | None,
) -> None:
    require_float(op, "log_prob", log_prob)
    if log_prob.dim() != 2:
        raise ValueError(
            f"{op}: log_prob must have shape (B, T), got log_prob.shape={tuple(log_prob.shape)}"
        )
    require_float(op, "advantages", advantages)
    require_shape(op, "advantages", advantages, log_prob.shape[:1])
    require_tensor(op, "mask", mask)
    require_shape(op, "mask", mask, log_prob.shape)
    for name, t in (("old_log_prob", old_log_prob), ("ref_log_prob", ref_log_prob)):
        if t is not None:
            require_float(op, name, t)
            require_shape(op, name, t, log_prob.shape)


def _check_numbers(
    op: str,
    least_zero: dict[str, float],
    temperatures: tuple[float, float],
    delta: float | None,
) -> None:
    for name, value in least_zero.items():
        require_number(op, name, value, 0)
    for sign, temperature in zip(("pos", "neg"), temperatures, strict=True):
        require_number(op, f"sapo_temperature_{sign}", temperature, above=0)
    if delta is not None:
        require_number(op, "delta", delta, above=0)


def check_choices(op: str, loss_type: str, level: str) -> None:
    require_choice(op, "loss_type", loss_type, GRPO_LOSSES)
    require_choice(op, "importance_sampling_level", level, ("token", "sequence"))
    if level == "sequence" and loss_type in ("cispo", "sapo", "vespo"):
        raise ValueError(
            f'{op}: importance_sampling_level must be "token" for {loss_type}, '
            f"got importance_sampling_level={shown(level)}"
        )
