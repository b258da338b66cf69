"""Fused linear losses of single completions, with Liger Kernel's names.

They combine `functional.linear_log_prob`, `functional.kto_loss` and `functional.grpo_loss`.
`compiled` and `chunk_size` have no effect.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from omniattn import functional
from omniattn.compat.liger.divergence import detached
from omniattn.compat.liger.preference import Logged, log_probs, mean_logits, required
from omniattn.functional.losses.policy import check_choices

__all__ = ["LigerFusedLinearGRPOLoss", "LigerFusedLinearKTOLoss"]


class LigerFusedLinearKTOLoss(nn.Module):
    """Computes the mean over completions of :func:`omniattn.functional.kto_loss`.

    Args:
        ignore_index: tokens with this target do not count.
        beta: see the function.
        compiled, chunk_size: have no effect.
        use_ref_model: True if `ref_input` and `ref_weight` are given.
        average_log_prob: average, not sum, the log-probabilities of a sequence.

    Shape:
        _input (B, T, K), lin_weight (V, K), target (B, T), bias (V,), preference_labels (B,) bool,
        ref_input (B, T, K'), ref_weight (V, K'), ref_bias (V,), kl () or (B,) -> loss,
        (chosen_logps_sum, rejected_logps_sum, chosen_logits_sum, rejected_logits_sum,
        chosen_rewards_sum, rejected_rewards_sum).

    Example:
        >>> x, head, target = torch.zeros(1, 1, 2), torch.zeros(2, 2), torch.zeros(1, 1).long()
        >>> loss = LigerFusedLinearKTOLoss(use_ref_model=True)
        >>> loss(x, head, target, None, torch.tensor([True]), x, head)[0]
        tensor(0.5000)
    """

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        compiled: bool = True,
        use_ref_model: bool = False,
        average_log_prob: bool = False,
        chunk_size: int = 1,
    ) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.beta = beta
        self.use_ref_model = use_ref_model
        self.average_log_prob = average_log_prob

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        preference_labels: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        kl: Tensor | None = None,
    ) -> tuple[Tensor, Logged]:
        """Computes the loss; see Shape of the class."""
        if preference_labels is None:
            raise ValueError(
                "LigerFusedLinearKTOLoss: preference_labels must be given, "
                "got preference_labels=None"
            )
        options = (self.ignore_index, self.average_log_prob)
        _, log_prob = log_probs(_input, lin_weight, target, bias, *options)
        ref, rewards = None, log_prob.detach()
        if self.use_ref_model:
            ref_input, ref_weight = required(self, ref_input=ref_input, ref_weight=ref_weight)
            with torch.no_grad():
                _, ref = log_probs(ref_input, ref_weight, target, ref_bias, *options)
            rewards = rewards - ref
        losses = functional.kto_loss(log_prob, preference_labels, ref, beta=self.beta, kl=kl)
        logits = mean_logits(_input, lin_weight, bias) * (target.shape[1] * len(lin_weight))
        logged = [
            t[part].sum()
            for t in (log_prob.detach(), logits, self.beta * rewards)
            for part in (preference_labels, ~preference_labels)
        ]
        return losses.mean(), tuple(logged)


class LigerFusedLinearGRPOLoss(nn.Module):
    """Computes :func:`omniattn.functional.grpo_loss` of a linear layer.

    Args:
        use_ref_model: True if `ref_per_token_logps`, or `ref_input` and `ref_weight`, are given.
        compiled, chunk_size: have no effect.
        temperature: divisor of the logits.
        vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg: VESPO's (k, lambda).
        beta, epsilon_low, epsilon_high, loss_type, max_completion_length: see the function.
        importance_sampling_level, delta, use_bias_correction_kl: see the function.
        sapo_temperature_pos, sapo_temperature_neg: see the function.

    Shape:
        _input (B, T, K), lin_weight (V, K), selected_token_ids (B, T), attention_mask (B, T),
        advantages (B,), bias (V,), ref_per_token_logps (B, T), old_per_token_logps (B, T),
        ref_input (B, T, K'), ref_weight (V, K'), ref_bias (V,), vllm_is_ratio (B,), (B, 1) or
        (B, T), num_items_in_batch () or a number: tokens of all processes, by default those of
        the mask -> loss, (kl where beta is not 0, clipped).

    Example:
        >>> head, x, ids = torch.eye(2), torch.zeros(1, 3, 2), torch.zeros(1, 3).long()
        >>> loss = LigerFusedLinearGRPOLoss(use_ref_model=False)
        >>> loss(x, head, ids, torch.ones(1, 3), torch.tensor([2.0]))[0]
        tensor(-2.)
    """

    def __init__(
        self,
        beta: float = 0.04,
        compiled: bool = True,
        use_ref_model: bool = True,
        chunk_size: int = 1,
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
        loss_type: str = "dapo",
        max_completion_length: int | None = None,
        importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        temperature: float = 1.0,
        delta: float | None = None,
        use_bias_correction_kl: bool = False,
        vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0,
        vespo_k_neg: float = 3.0,
        vespo_lambda_neg: float = 2.0,
    ) -> None:
        super().__init__()
        check_choices(type(self).__name__, loss_type, importance_sampling_level)
        self.use_ref_model = use_ref_model
        self.temperature = temperature
        self.options: dict[str, Any] = {
            "beta": beta,
            "epsilon_low": epsilon_low,
            "epsilon_high": epsilon_high,
            "loss_type": loss_type,
            "max_completion_length": max_completion_length,
            "importance_sampling_level": importance_sampling_level,
            "sapo_temperature_pos": sapo_temperature_pos,
            "sapo_temperature_neg": sapo_temperature_neg,
            "delta": delta,
            "use_bias_correction_kl": use_bias_correction_kl,
            "vespo_pos": (vespo_k_pos, vespo_lambda_pos),
            "vespo_neg": (vespo_k_neg, vespo_lambda_neg),
        }

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        selected_token_ids: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        bias: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        vllm_is_ratio: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
    ) -> tuple[Tensor, Logged]:
        """Computes the loss; see Shape of the class."""
        log_prob = functional.linear_log_prob(
            *(_input, lin_weight, selected_token_ids), bias=bias, temperature=self.temperature
        )
        if not self.use_ref_model:
            ref_per_token_logps = None
        elif ref_per_token_logps is None:
            ref_input, ref_weight = required(self, ref_input=ref_input, ref_weight=ref_weight)
            with torch.no_grad():
                ref_per_token_logps = functional.linear_log_prob(
                    *(ref_input, ref_weight, selected_token_ids),
                    bias=detached(ref_bias),
                    temperature=self.temperature,
                )
        loss, kl, clipped = functional.grpo_loss(
            *(log_prob, advantages, attention_mask),
            old_log_prob=old_per_token_logps,
            ref_log_prob=ref_per_token_logps,
            importance_ratio=vllm_is_ratio,
            normalizer=_tokens_per_process(attention_mask, num_items_in_batch),
            **self.options,
        )
        return loss, (kl, clipped) if self.options["beta"] != 0 else (clipped,)


def _tokens_per_process(mask: Tensor, tokens: Tensor | float | None) -> Tensor | float | None:
    """Returns the tokens per process, at least 1, or None if there is only one process."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    processes = torch.distributed.get_world_size() if distributed else 1
    if tokens is None:
        if not distributed:
            return None
        tokens = mask.sum(dtype=torch.float32)
        torch.distributed.all_reduce(tokens)
    return torch.as_tensor(tokens, dtype=torch.float32, device=mask.device).div(processes).clamp(1)
