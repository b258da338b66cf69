"""Losses of `liger_kernel.transformers.functional` and `liger_kernel.chunked_loss.functional`.

Each calls the module of its name, whose docstring has the formula. `accum_dtype`, `compiled` and
`chunk_size` have no effect, and neither have `size_average` and `reduce`, as in Liger.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from omniattn.compat.liger import cross_entropy, divergence, preference, unpaired

#: A loss and what its module logs.
Logged = tuple[Tensor, Any]


def liger_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> Tensor | cross_entropy.CrossEntropyOutput:
    """Computes :class:`LigerCrossEntropyLoss` of logits (N, V) and targets (N,)."""
    options = weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap
    shown = return_z_loss, return_token_accuracy, return_predicted_tokens
    return cross_entropy.LigerCrossEntropyLoss(*options, *shown)(input, target)


def liger_fused_linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> Tensor | cross_entropy.CrossEntropyOutput:
    """Computes :class:`LigerFusedLinearCrossEntropyLoss` of input (N, K) and weight (V, K)."""
    options = ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap
    shown = return_z_loss, accum_dtype, use_token_scaling
    module = cross_entropy.LigerFusedLinearCrossEntropyLoss(
        *options, *shown, return_token_accuracy, return_predicted_tokens
    )
    return module(weight, input, target, bias)


def liger_jsd(
    input: Tensor,
    target: Tensor,
    shift_labels: Tensor | None = None,
    beta: float = 0.5,
    ignore_index: int = -100,
) -> Tensor:
    """Computes :class:`LigerJSD` of log-probabilities (N, V) of a student and a teacher."""
    return divergence.LigerJSD(beta, ignore_index)(input, target, shift_labels)


def liger_kl_div(
    input: Tensor,
    target: Tensor,
    size_average: bool = True,
    reduce: bool = True,
    reduction: str = "mean",
    log_target: bool = False,
    eps: float = 1e-10,
) -> Tensor:
    """Computes :class:`LigerKLDIVLoss` of log-probabilities (N, V) and probabilities (N, V)."""
    options = {"reduction": reduction, "log_target": log_target}
    return divergence.LigerKLDIVLoss(eps, **options)(input, target)


def liger_fused_linear_jsd(
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    shift_labels: Tensor | None = None,
    jsd_beta: float = 0.5,
    ignore_index: int = -100,
    temperature: float = 1.0,
    accum_dtype: torch.dtype | None = None,
) -> Tensor:
    """Computes :class:`LigerFusedLinearJSD`."""
    module = divergence.LigerFusedLinearJSD(jsd_beta, ignore_index, temperature)
    tensors = student_input, student_weight, teacher_input, teacher_weight
    return module(*tensors, shift_labels)


def chunked_liger_fused_linear_jsd(
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    true_labels: Tensor,
    student_bias: Tensor | None,
    teacher_bias: Tensor | None,
    weight_hard_loss: float = 0.5,
    weight_soft_loss: float = 0.5,
    beta: float = 0.5,
    ignore_index: int = -100,
    temperature: float = 1.0,
    compiled: bool = True,
    chunk_size: int = 1024,
    return_soft_hard_loss: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Computes :class:`LigerFusedLinearJSDLoss`, `chunked_loss.functional`'s function."""
    module = divergence.LigerFusedLinearJSDLoss(
        *(weight_hard_loss, weight_soft_loss, beta, ignore_index, temperature),
        return_soft_hard_loss=return_soft_hard_loss,
    )
    tensors = student_input, student_weight, teacher_input, teacher_weight
    return module(*tensors, true_labels, student_bias, teacher_bias)


def liger_fused_linear_cosine(
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    true_labels: Tensor,
    student_bias: Tensor | None,
    teacher_bias: Tensor | None,
    weight_hard_loss: float = 0.5,
    weight_soft_loss: float = 0.5,
    beta: float = 0.5,
    ignore_index: int = -100,
    temperature: float = 1.0,
    compiled: bool = True,
    chunk_size: int = 1024,
    return_soft_hard_loss: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Computes :class:`LigerFusedLinearCosineSimilarityLoss`."""
    module = divergence.LigerFusedLinearCosineSimilarityLoss(
        *(weight_hard_loss, weight_soft_loss, beta, ignore_index, temperature),
        chunk_size=chunk_size,
        return_soft_hard_loss=return_soft_hard_loss,
    )
    tensors = student_input, student_weight, teacher_input, teacher_weight
    return module(*tensors, true_labels, student_bias, teacher_bias)


def liger_fused_linear_dpo(
    _input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ref_input: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    ignore_index: int = -100,
    beta: float = 0.1,
    compute_nll_loss: bool = False,
    compiled: bool = True,
    use_ref_model: bool = True,
    average_log_prob: bool = False,
    chunk_size: int = 1,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
    discopop_tau: float = 0.05,
    alpha: float = 1.0,
) -> Logged:
    """Computes :class:`LigerFusedLinearDPOLoss`."""
    module = preference.LigerFusedLinearDPOLoss(
        *(ignore_index, beta, alpha, compute_nll_loss),
        use_ref_model=use_ref_model,
        average_log_prob=average_log_prob,
        loss_type=loss_type,
        label_smoothing=label_smoothing,
        discopop_tau=discopop_tau,
    )
    reference = ref_input, ref_weight, ref_bias
    return module(weight, _input, target, bias, *reference)


def liger_fused_linear_cpo(
    _input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    beta: float = 0.1,
    alpha: float = 1.0,
    label_smoothing: float = 0.0,
    compute_nll_loss: bool = True,
    compiled: bool = True,
    average_log_prob: bool = False,
    chunk_size: int = 1,
) -> Logged:
    """Computes :class:`LigerFusedLinearCPOLoss`."""
    module = preference.LigerFusedLinearCPOLoss(
        *(ignore_index, beta, alpha, label_smoothing, compute_nll_loss),
        average_log_prob=average_log_prob,
    )
    return module(weight, _input, target, bias)


def liger_fused_linear_simpo(
    _input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    beta: float = 0.1,
    alpha: float = 1.0,
    label_smoothing: float = 0.0,
    compute_nll_loss: bool = False,
    compiled: bool = True,
    gamma: float = 0.5,
    chunk_size: int = 1,
) -> Logged:
    """Computes :class:`LigerFusedLinearSimPOLoss`."""
    options = ignore_index, beta, alpha, label_smoothing, compute_nll_loss
    module = preference.LigerFusedLinearSimPOLoss(*options, gamma=gamma)
    return module(weight, _input, target, bias)


def liger_fused_linear_orpo(
    _input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    beta: float = 0.1,
    compute_nll_loss: bool = True,
    nll_target: Tensor | None = None,
    compiled: bool = True,
    chunk_size: int = 1,
) -> Logged:
    """Computes :class:`LigerFusedLinearORPOLoss`."""
    module = preference.LigerFusedLinearORPOLoss(ignore_index, beta, compute_nll_loss)
    return module(weight, _input, target, bias, nll_target)


def liger_fused_linear_kto(
    _input: Tensor,
    weight: Tensor,
    target: Tensor,
    preference_labels: Tensor,
    bias: Tensor | None = None,
    ref_input: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    kl: Tensor | None = None,
    ignore_index: int = -100,
    beta: float = 0.1,
    compiled: bool = True,
    use_ref_model: bool = True,
    average_log_prob: bool = False,
    chunk_size: int = 1,
) -> Logged:
    """Computes :class:`LigerFusedLinearKTOLoss`."""
    module = unpaired.LigerFusedLinearKTOLoss(
        ignore_index, beta, use_ref_model=use_ref_model, average_log_prob=average_log_prob
    )
    reference = ref_input, ref_weight, ref_bias, kl
    return module(_input, weight, target, bias, preference_labels, *reference)


def liger_fused_linear_grpo(
    _input: Tensor,
    weight: Tensor,
    selected_token_ids: Tensor,
    attention_mask: Tensor,
    advantages: Tensor,
    bias: Tensor | None = None,
    ref_per_token_logps: Tensor | None = None,
    old_per_token_logps: Tensor | None = None,
    ref_input: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    beta: float = 0.04,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    loss_type: str = "dapo",
    max_completion_length: int | None = None,
    importance_sampling_level: str = "token",
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    temperature: float = 1.0,
    compiled: bool = True,
    use_ref_model: bool = True,
    chunk_size: int = 1,
    vllm_is_ratio: Tensor | None = None,
    delta: float | None = None,
    use_bias_correction_kl: bool = False,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
    num_items_in_batch: Tensor | float | None = None,
) -> Logged:
    """Computes :class:`LigerFusedLinearGRPOLoss`."""
    module = unpaired.LigerFusedLinearGRPOLoss(
        beta,
        use_ref_model=use_ref_model,
        epsilon_low=epsilon_low,
        epsilon_high=epsilon_high,
        loss_type=loss_type,
        max_completion_length=max_completion_length,
        importance_sampling_level=importance_sampling_level,
        sapo_temperature_pos=sapo_temperature_pos,
        sapo_temperature_neg=sapo_temperature_neg,
        temperature=temperature,
        delta=delta,
        use_bias_correction_kl=use_bias_correction_kl,
        vespo_k_pos=vespo_k_pos,
        vespo_lambda_pos=vespo_lambda_pos,
        vespo_k_neg=vespo_k_neg,
        vespo_lambda_neg=vespo_lambda_neg,
    )
    tensors = _input, weight, selected_token_ids, attention_mask, advantages, bias
    reference = ref_per_token_logps, old_per_token_logps, ref_input, ref_weight, ref_bias
    return module(*tensors, *reference, vllm_is_ratio, num_items_in_batch)
