"""Losses over a vocabulary, computed in fp32 (fp64 for fp64 logits)."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from typing_extensions import Unpack

from omniattn.encoding.losses import (
    CrossEntropy,
    CrossEntropyOptions,
    Divergence,
    DivergenceOptions,
)
from omniattn.encoding.records import packed, spelled_out
from omniattn.reference.layers.gemm import linear
from omniattn.reference.precision import widen


@spelled_out(CrossEntropyOptions, CrossEntropy)
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    **options: Unpack[CrossEntropyOptions],
) -> Tensor:
    """-(1 - e) w_y ln p_y - e/V sum_v w_v ln p_v + z_loss w_y lse^2, e = label_smoothing,
    w = class_weight (1 without) and p the softmax of x / temperature, where x is
    softcap tanh(logits / softcap) for a softcap > 0, else the logits.

    logits (..., V), target (...), class_weight (V,). Rows whose target is `ignore_index` give 0.
    "mean" divides by the sum of w_y over the other rows; if this sum is 0, it gives 0 (torch: NaN).
    """
    record = packed("cross_entropy", CrossEntropy, options)
    return reduced(*cross_entropy_of_rows(logits, target, record), record.reduction)


def cross_entropy_of_rows(
    logits: Tensor, target: Tensor, options: CrossEntropy
) -> tuple[Tensor, Tensor]:
    """Computes the losses (...) and w_y, 0 for ignored rows."""
    class_weight, ignore_index, label_smoothing, z_loss, softcap, temperature, _ = options
    logits = widen(logits)
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / temperature
    kept = target != ignore_index
    if logits.shape[-1] == 0:  # no row has a class
        return logits.sum(-1), torch.zeros_like(target, dtype=logits.dtype)
    log_p, index = logits.log_softmax(-1), target.masked_fill(~kept, 0)
    weights = torch.ones_like(index, dtype=log_p.dtype)
    if class_weight is not None:
        class_weight = class_weight.to(log_p.dtype)
        weights = class_weight[index]
    hit = log_p.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    loss = -(1 - label_smoothing) * weights * hit
    if z_loss > 0:
        loss = loss + z_loss * weights * logits.logsumexp(-1).square()
    if label_smoothing > 0:
        all_classes = log_p if class_weight is None else log_p * class_weight
        loss = loss - label_smoothing * all_classes.mean(-1)
    return loss.masked_fill(~kept, 0), weights.masked_fill(~kept, 0)


def reduced(loss: Tensor, weights: Tensor, reduction: str) -> Tensor:
    """Returns the losses, their sum, or the sum divided by that of the weights, 0 without any."""
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    total = weights.sum()
    return loss.sum() / torch.where(total != 0, total, torch.ones_like(total))


@spelled_out(CrossEntropyOptions, CrossEntropy)
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    **options: Unpack[CrossEntropyOptions],
) -> Tensor:
    """cross_entropy(x W^T + b, target), with logits not rounded to a half dtype.

    x (..., K), weight (V, K), bias (V,), target (...).
    """
    packed("linear_cross_entropy", CrossEntropy, options)
    return cross_entropy(linear(widen(x), weight, bias), target, **options)


def linear_log_prob(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float = 0.0,
    temperature: float = 1.0,
) -> Tensor:
    """Computes ln p_y of each token, which is -linear_cross_entropy."""
    return -linear_cross_entropy(
        x,
        weight,
        target,
        bias=bias,
        ignore_index=ignore_index,
        softcap=softcap,
        temperature=temperature,
        reduction="none",
    )


@spelled_out(DivergenceOptions, Divergence, last=("log_probs", "reduction"))
def jsd(
    student: Tensor,
    teacher: Tensor,
    target: Tensor | None = None,
    *,
    log_probs: bool = False,
    reduction: str = "mean",
    **options: Unpack[DivergenceOptions],
) -> Tensor:
    """beta KL(P || M) + (1 - beta) KL(Q || M), M = beta P + (1 - beta) Q; KL(P || Q) at beta = 0,
    KL(Q || P) at beta = 1.

    Q and P are the softmaxes of student / temperature and teacher / temperature. student and
    teacher (..., V) are logits, or ln Q and ln P with `log_probs`; target (...). Rows whose target
    is `ignore_index` give 0. "mean" divides by the number of other rows.
    """
    record = packed("jsd", Divergence, options)
    return reduced(*jsd_of_rows(student, teacher, target, record, log_probs), reduction)


def jsd_of_rows(
    student: Tensor, teacher: Tensor, target: Tensor | None, options: Divergence, log_probs: bool
) -> tuple[Tensor, Tensor]:
    """Computes the losses (...) and 1 for rows that are not ignored, else 0."""
    beta, temperature, ignore_index = options
    x, y = widen(student), widen(teacher)
    if not log_probs:
        x, y = ((t / temperature).log_softmax(-1) for t in (x, y))
    if beta == 0:
        loss = _kl(y, x)
    elif beta == 1:
        loss = _kl(x, y)
    else:
        mixture = torch.logaddexp(y + math.log(beta), x + math.log(1 - beta))
        loss = beta * _kl(y, mixture) + (1 - beta) * _kl(x, mixture)
    if target is None:
        return loss, torch.ones_like(loss)
    kept = target != ignore_index
    return loss.masked_fill(~kept, 0), kept.to(loss.dtype)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """Computes sum_v P (ln P - ln Q) from p = ln P and q = ln Q; classes with P = 0 add 0."""
    return (p.exp() * (p - q).masked_fill(p.exp() == 0, 0)).sum(-1)


@spelled_out(DivergenceOptions, Divergence, last=("reduction",))
def linear_jsd(
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    reduction: str = "mean",
    **options: Unpack[DivergenceOptions],
) -> Tensor:
    """jsd of student logits x W^T + b and teacher logits, neither rounded to a half dtype.

    x (..., K), weight (V, K), bias (V,); teacher_x (..., K'), teacher_weight (V, K'); target (...).
    """
    packed("linear_jsd", Divergence, options)
    student = linear(widen(x), weight, bias)
    teacher = linear(widen(teacher_x), teacher_weight, teacher_bias)
    return jsd(student, teacher, target, reduction=reduction, **options)
