"""Parts of GRPO's loss: `liger_kernel.chunked_loss.grpo_loss` and `ops.grpo_loss`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from omniattn import functional
from omniattn.checks.arguments import clamp, require_choice, require_integers
from omniattn.compat._errors import require_form, require_real
from omniattn.reference.precision import widen

#: Kinds of losses whose ratios are bounded on both sides, above, and not at all.
_BOUNDED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
_LOSSES = (*_BOUNDED, "cispo", "sapo", "vespo")


def k3_loss_fn(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Computes ``exp(d) - d - 1``, d = log_p - log_q, an estimate of KL(q, p) for samples of q."""
    require_real("k3_loss_fn", log_p=log_p, log_q=log_q)
    gap = log_p - log_q
    return gap.exp() - gap - 1.0


def sapo_loss_fn(importance_ratio: Tensor, temperature: float) -> Tensor:
    """Computes ``4 / t sigmoid(t (ratio - 1))`` with the temperature t (arXiv:2511.20347)."""
    require_real("sapo_loss_fn", importance_ratio=importance_ratio)
    if not temperature > 0:
        raise ValueError(f"sapo_loss_fn: temperature must be > 0, got {temperature=}")
    return (temperature * (importance_ratio - 1)).sigmoid() * 4 / temperature


def clip_coef_fn(
    coef: Tensor, epsilon_low: float, epsilon_high: float, loss_type: str
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Bounds ratios; returns them and where they were too small and too large.

    The bounds are 1 - epsilon_low and 1 + epsilon_high; for "cispo" epsilon_high alone, without a
    gradient; for "sapo" and "vespo" there are none, and None is returned.
    """
    op = "clip_coef_fn"
    require_real(op, coef=coef)
    require_choice(op, "loss_type", loss_type, _LOSSES)
    nowhere = torch.zeros_like(coef, dtype=torch.bool)
    if loss_type == "cispo":
        return clamp(coef, most=epsilon_high).detach(), nowhere, coef > epsilon_high
    if loss_type not in _BOUNDED:
        return None, nowhere, nowhere.clone()
    least, most = 1 - epsilon_low, 1 + epsilon_high
    return clamp(coef, least, most), coef < least, coef > most


@torch.no_grad()
def get_gamma_weights(
    advantages: Tensor,
    log_ratio_per_token: Tensor,
    mask: Tensor,
    importance_sampling_ratio: Tensor | None = None,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> Tensor:
    """Computes VESPO's weights ``exp(l) w^k exp(-l w)`` of completions, (B, 1), without gradient.

    Args:
        advantages: (B,); k and l are k_pos and lambda_pos where it is >= 0, else k_neg and
            lambda_neg.
        log_ratio_per_token: (B, T), each clamped to [-20, 20]; their sum where `mask` is 1 is
            ln w, clamped to [ln 1e-8, 20].
        mask: (B, T).
        importance_sampling_ratio: (B, T) or (B, 1), whose logarithms are added, or None.
        k_pos, lambda_pos, k_neg, lambda_neg: see advantages.
    """
    require_real("get_gamma_weights", log_ratio_per_token=log_ratio_per_token)
    least = math.log(1e-8)
    log_w = (log_ratio_per_token.clamp(-20, 20) * mask).sum(-1, keepdim=True)
    if importance_sampling_ratio is not None:
        added = importance_sampling_ratio.log().clamp(least, 20)
        log_w = log_w + added.sum(-1, keepdim=True)
    log_w = log_w.clamp(least, 20)
    gains = advantages[:, None] >= 0
    k = torch.where(gains, k_pos, k_neg)
    rate = torch.where(gains, lambda_pos, lambda_neg).clamp(min=1e-4)
    weights = (rate + k * log_w - rate * log_w.exp()).exp()
    return weights.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


@torch.no_grad()
def fused_selective_log_softmax(
    logits: Tensor, input_ids: Tensor, temperature: float = 0.9, mask: Tensor | None = None
) -> Tensor:
    """Computes log-probabilities (B, L) of the last L tokens, in float32 and without gradient.

    Args:
        logits: (B, L + 1, V); logits at t are for token t of the last L.
        input_ids: (B, T) with T >= L.
        temperature: divisor of the logits.
        mask: (B, T), 0 for tokens whose log-probability is given as 0, or None.
    """
    op = "fused_selective_log_softmax"
    require_real(op, logits=logits)
    require_form(op, "logits", logits, "B, L + 1, V")
    require_integers(op, "input_ids", input_ids)
    steps = logits.shape[1] - 1
    tokens = input_ids[:, input_ids.shape[1] - steps :]
    if tokens.shape != (logits.shape[0], steps):
        raise ValueError(
            f"{op}: input_ids must have shape (B, T) with T >= {steps}, "
            f"got input_ids.shape={tuple(input_ids.shape)}"
        )
    rows = widen(logits[:, :-1]).flatten(0, 1) / temperature
    losses = functional.cross_entropy(rows, tokens.flatten(), reduction="none")
    found = -losses.float().view(tokens.shape)
    return found if mask is None else found.masked_fill(mask[:, -steps:] == 0, 0.0)
