"""Preference losses, from the log-probabilities of completions.

:func:`omniattn.functional.linear_log_prob` computes log-probabilities without storing all logits,
:func:`sequence_log_prob` sums them. The losses here are plain torch on a few numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as nnf
from torch import Tensor

from omniattn.checks.arguments import (
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

__all__ = [
    "DPO_LOSSES",
    "cpo_loss",
    "dpo_loss",
    "kto_loss",
    "orpo_loss",
    "sequence_log_prob",
    "simpo_loss",
]


def sequence_log_prob(
    log_prob: Tensor, target: Tensor, *, ignore_index: int = -100, average: bool = False
) -> Tensor:
    """Returns the sum or mean of log-probabilities over the kept tokens of each sequence.

    Args:
        log_prob: (..., T), of any floating dtype, of :func:`omniattn.functional.linear_log_prob`.
        target: (..., T) integers.
        ignore_index: tokens with this target do not count.
        average: divide by the number of kept tokens (0 if there are none).

    Returns:
        (...), of log_prob's dtype.

    Raises:
        TypeError: a log_prob that is not floating point.
        ValueError: a shape that does not fit.

    Example:
        >>> sequence_log_prob(torch.tensor([-1.0, -3.0, -9.0]), torch.tensor([4, 0, -100]))
        tensor(-4.)
    """
    op = "sequence_log_prob"
    require_float(op, "log_prob", log_prob)
    require_tensor(op, "target", target)
    require_shape(op, "target", target, log_prob.shape)
    require_int(op, "ignore_index", ignore_index)
    require_bool(op, "average", average)
    kept = target != ignore_index
    total = log_prob.masked_fill(~kept, 0).sum(-1)
    return total / kept.sum(-1).clamp(min=1) if average else total


def _exo(margin: Tensor, chosen: Tensor, rejected: Tensor, beta: float, e: float) -> Tensor:
    better, worse = nnf.logsigmoid(margin), nnf.logsigmoid(-margin)
    return better.exp() * (better - math.log1p(-e)) + worse.exp() * (worse - math.log(e))


def _discopop(margin: Tensor, tau: float) -> Tensor:
    share = (margin / tau).sigmoid()
    return -nnf.logsigmoid(margin) * (1 - share) + (-margin).exp() * share


_ln = nnf.logsigmoid
#: Losses as functions of the margin beta (chosen - rejected), beta times the chosen and the
#: rejected log-ratio, beta and label_smoothing.
_DPO: dict[str, Callable[[Tensor, Tensor, Tensor, float, float], Tensor]] = {
    "sigmoid": lambda m, c, r, b, e: -(1 - e) * _ln(m) - e * _ln(-m),
    "robust": lambda m, c, r, b, e: (-(1 - e) * _ln(m) + e * _ln(-m)) / (1 - 2 * e),
    "hinge": lambda m, c, r, b, e: (1 - m).relu(),
    "ipo": lambda m, c, r, b, e: (m / b - 0.5 / b).square(),
    "exo_pair": _exo,
    "nca_pair": lambda m, c, r, b, e: -_ln(c) - 0.5 * _ln(-c) - 0.5 * _ln(-r),
    "bco_pair": lambda m, c, r, b, e: -_ln(c) - _ln(-r),
    "sppo_hard": lambda m, c, r, b, e: ((c - 0.5) / b).square() + ((r + 0.5) / b).square(),
    "apo_zero": lambda m, c, r, b, e: 1 - c.sigmoid() + r.sigmoid(),
    "apo_down": lambda m, c, r, b, e: c.sigmoid() + 1 - m.sigmoid(),
}
#: Values of `loss_type` of :func:`dpo_loss`.
DPO_LOSSES = (*_DPO, "discopop")


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor | None = None,
    ref_rejected: Tensor | None = None,
    *,
    beta: float = 0.1,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
    discopop_tau: float = 0.05,
) -> Tensor:
    """Direct preference optimisation and related losses, per pair.

    With ``c = beta (chosen - ref_chosen)``, ``r = beta (rejected - ref_rejected)``, ``m = c - r``,
    s the sigmoid and e = label_smoothing:

    ==========  ========================================================================
    sigmoid     ``-(1 - e) ln s(m) - e ln s(-m)`` (e > 0: conservative DPO)
    robust      ``(-(1 - e) ln s(m) + e ln s(-m)) / (1 - 2 e)``, e < 1/2
    hinge       ``max(0, 1 - m)``
    ipo         ``(m / beta - 1 / (2 beta))^2``, of averaged log-probabilities
    exo_pair    ``KL((s(m), s(-m)) || (1 - e, e))``, e > 0
    nca_pair    ``-ln s(c) - ln s(-c) / 2 - ln s(-r) / 2``
    bco_pair    ``-ln s(c) - ln s(-r)``
    sppo_hard   ``((c - 1/2) / beta)^2 + ((r + 1/2) / beta)^2``
    apo_zero    ``1 - s(c) + s(r)``
    apo_down    ``s(c) + 1 - s(m)``
    discopop    ``-ln s(m) (1 - s(m / tau)) + exp(-m) s(m / tau)``, tau = discopop_tau
    ==========  ========================================================================

    Args:
        chosen: (...) log-probabilities of the preferred completions, of any floating dtype.
        rejected: (...) of the rejected completions.
        ref_chosen, ref_rejected: (...) of the reference model, or None for 0.
        beta: above 0.
        loss_type: one of `DPO_LOSSES`.
        label_smoothing: e in [0, 1].
        discopop_tau: above 0.

    Returns:
        (...): a loss per pair.

    Raises:
        TypeError: log-probabilities that are not floating point.
        ValueError: a shape or option is invalid.

    Reference:
        Rafailov et al., 2023, arXiv:2305.18290 (sigmoid); Mitchell, 2023 (conservative); Chowdhury
        et al., 2024, arXiv:2403.00409 (robust); Zhao et al., 2023, arXiv:2305.10425 (hinge); Azar
        et al., 2023, arXiv:2310.12036 (ipo); Ji et al., 2024, arXiv:2402.00856 (exo_pair); Chen et
        al., 2024, arXiv:2402.05369 (nca_pair); Jung et al., 2024, arXiv:2404.04656 (bco_pair); Wu
        et al., 2024, arXiv:2405.00675 (sppo_hard); D'Oosterlinck et al., 2024, arXiv:2408.06266
        (apo_zero, apo_down); Lu et al., 2024, arXiv:2406.08414 (discopop).

    Example:
        >>> dpo_loss(torch.tensor([-1.0]), torch.tensor([-1.0]))
        tensor([0.6931])
    """
    op = "dpo_loss"
    _check_pair(op, chosen, rejected, beta)
    check_dpo(op, loss_type, label_smoothing, discopop_tau)
    c, r = (
        beta * _against(op, name, log_prob, ref)
        for name, log_prob, ref in (
            ("ref_chosen", chosen, ref_chosen),
            ("ref_rejected", rejected, ref_rejected),
        )
    )
    if loss_type == "discopop":
        return _discopop(c - r, discopop_tau)
    return _DPO[loss_type](c - r, c, r, beta, label_smoothing)


def check_dpo(op: str, loss_type: str, label_smoothing: float, discopop_tau: float) -> None:
    require_choice(op, "loss_type", loss_type, DPO_LOSSES)
    require_number(op, "label_smoothing", label_smoothing, 0, 1)
    require_number(op, "discopop_tau", discopop_tau, above=0)
    if (loss_type == "exo_pair" and not 0 < label_smoothing < 1) or (
        loss_type == "robust" and label_smoothing >= 0.5
    ):
        limits = "> 0 and < 1" if loss_type == "exo_pair" else "< 0.5"
        raise ValueError(
            f"{op}: label_smoothing must be {limits} for {loss_type}, "
            f"got label_smoothing={shown(label_smoothing)}"
        )


def cpo_loss(
    chosen: Tensor, rejected: Tensor, *, beta: float = 0.1, label_smoothing: float = 0.0
) -> Tensor:
    """Contrastive preference optimisation per pair: ``-(1 - e) ln s(m) - e ln s(-m)`` with
    ``m = beta (chosen - rejected)``: :func:`dpo_loss` without a reference model.

    Args:
        chosen, rejected, beta, label_smoothing: see :func:`dpo_loss`.

    Returns:
        (...): a loss per pair, to which the paper adds the cross entropy of the chosen.

    Raises:
        TypeError, ValueError: see :func:`dpo_loss`.

    Reference:
        Xu et al., 2024, arXiv:2401.08417.

    Example:
        >>> cpo_loss(torch.tensor([-1.0]), torch.tensor([-1.0]))
        tensor([0.6931])
    """
    return simpo_loss(chosen, rejected, beta=beta, gamma=0.0, label_smoothing=label_smoothing)


def simpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    *,
    beta: float = 0.1,
    gamma: float = 0.5,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Simple preference optimisation per pair: ``-(1 - e) ln s(m) - e ln s(-m)`` with
    ``m = beta (chosen - rejected) - gamma``.

    Args:
        chosen, rejected: (...) log-probabilities averaged over the tokens.
        beta: above 0.
        gamma: target margin.
        label_smoothing: e in [0, 1].

    Returns:
        (...): a loss per pair.

    Raises:
        TypeError, ValueError: see :func:`dpo_loss`.

    Reference:
        Meng et al., 2024, arXiv:2405.14734.

    Example:
        >>> simpo_loss(torch.tensor([-1.0]), torch.tensor([-1.0]), gamma=0.0)
        tensor([0.6931])
    """
    op = "simpo_loss"
    _check_pair(op, chosen, rejected, beta)
    require_number(op, "gamma", gamma)
    require_number(op, "label_smoothing", label_smoothing, 0, 1)
    margin = beta * (chosen - rejected) - gamma
    return _DPO["sigmoid"](margin, chosen, rejected, beta, label_smoothing)


def orpo_loss(chosen: Tensor, rejected: Tensor, *, beta: float = 0.1) -> Tensor:
    """Odds ratio preference optimisation per pair: ``-beta ln s(ln odds(chosen) - ln
    odds(rejected))`` with ``odds(l) = e^l / (1 - e^l)``.

    Args:
        chosen, rejected: (...) log-probabilities averaged over the tokens, below 0.
        beta: above 0.

    Returns:
        (...): a loss per pair, to which the paper adds the cross entropy of the chosen.

    Raises:
        TypeError, ValueError: see :func:`dpo_loss`.

    Reference:
        Hong et al., 2024, arXiv:2403.07691.

    Example:
        >>> orpo_loss(torch.tensor([-1.0]), torch.tensor([-1.0]), beta=1.0)
        tensor([0.6931])
    """
    _check_pair("orpo_loss", chosen, rejected, beta)
    return -beta * nnf.logsigmoid(log_odds(chosen) - log_odds(rejected))


def log_odds(log_prob: Tensor) -> Tensor:
    """Computes ln (p / (1 - p)) from ln p."""
    return log_prob - torch.log(-torch.expm1(log_prob))


def kto_loss(
    log_prob: Tensor,
    preferred: Tensor,
    ref_log_prob: Tensor | None = None,
    *,
    beta: float = 0.1,
    kl: Tensor | float | None = None,
) -> Tensor:
    """Kahneman-Tversky optimisation per completion: ``1 - s(z)`` for a preferred one, ``1 - s(-z)``
    for another, with ``z = beta (log_prob - ref_log_prob - kl)``.

    Args:
        log_prob: (B,) log-probabilities of completions, of any floating dtype.
        preferred: (B,) bool.
        ref_log_prob: (B,) of the reference model, or None for 0.
        beta: above 0.
        kl: an estimate of KL(policy || reference), a number or a tensor (), (1,) or (B,) of any
            floating dtype, or None for 0; it should have no gradient.

    Returns:
        (B,).

    Raises:
        TypeError: log-probabilities that are not floating point, preferences that are not bool.
        ValueError: a shape or option is invalid.

    Reference:
        Ethayarajh et al., 2024, arXiv:2402.01306.

    Example:
        >>> kto_loss(torch.tensor([-1.0]), torch.tensor([True]), torch.tensor([-1.0]))
        tensor([0.5000])
    """
    op = "kto_loss"
    require_float(op, "log_prob", log_prob)
    require_number(op, "beta", beta, above=0)
    require_tensor(op, "preferred", preferred)
    if preferred.dtype != torch.bool:
        raise TypeError(f"{op}: preferred must be bool, got preferred.dtype={preferred.dtype}")
    require_shape(op, "preferred", preferred, log_prob.shape)
    gain = _against(op, "ref_log_prob", log_prob, ref_log_prob)
    if kl is not None:
        _check_divergence(op, kl, log_prob)
        gain = gain - kl
    return 1 - torch.sigmoid(torch.where(preferred, beta * gain, -beta * gain))


def _check_divergence(op: str, kl: Tensor | float, log_prob: Tensor) -> None:
    if not isinstance(kl, Tensor):
        return require_number(op, "kl", kl)
    require_float(op, "kl", kl)
    if not is_one_of(kl.shape, (), (1,), log_prob.shape):
        raise ValueError(
            f"{op}: kl must have shape (), (1,) or {tuple(log_prob.shape)}, "
            f"got kl.shape={tuple(kl.shape)}"
        )


def _check_pair(op: str, chosen: Tensor, rejected: Tensor, beta: float) -> None:
    require_float(op, "chosen", chosen)
    require_float(op, "rejected", rejected)
    require_shape(op, "rejected", rejected, chosen.shape)
    require_number(op, "beta", beta, above=0)


def _against(op: str, name: str, log_prob: Tensor, ref: Tensor | None) -> Tensor:
    """Returns the log-ratio to the reference model."""
    if ref is None:
        return log_prob
    require_float(op, name, ref)
    require_shape(op, name, ref, log_prob.shape)
    return log_prob - ref
