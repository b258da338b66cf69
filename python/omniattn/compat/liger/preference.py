"""Fused linear losses of pairs of completions, with Liger Kernel's names.

They combine `functional.linear_log_prob` and `functional.preference`. Inputs are hidden states
(2 B, T, K) with targets (2 B, T), the chosen completions first. `compiled` and `chunk_size` have no
effect. Each loss also returns detached statistics for logging.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from omniattn import functional
from omniattn.functional.losses.preference import check_dpo, log_odds

__all__ = [
    "LigerFusedLinearCPOLoss",
    "LigerFusedLinearDPOLoss",
    "LigerFusedLinearORPOLoss",
    "LigerFusedLinearSimPOLoss",
]

Logged = tuple[Tensor, ...]


def log_probs(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    average: bool,
) -> tuple[Tensor, Tensor]:
    """Returns the log-probabilities of the tokens (B, T) and of the sequences (B,)."""
    tokens = functional.linear_log_prob(x, weight, target, bias=bias, ignore_index=ignore_index)
    return tokens, functional.sequence_log_prob(
        tokens, target, ignore_index=ignore_index, average=average
    )


@torch.no_grad()
def mean_logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns each sequence's mean logit over the vocabulary, (B,), without computing logits."""
    mean = x.mean(1, dtype=torch.float32) @ weight.mean(0, dtype=torch.float32)
    return mean if bias is None else mean + bias.float().mean()


class _Paired(nn.Module):
    """Base class: alpha times the cross entropy of the chosen tokens + the preference loss.

    Shape:
        lin_weight (V, K), _input (2 B, T, K), target (2 B, T), bias (V,) ->
        loss, (chosen_logps (B,), rejected_logps (B,), chosen_logits_mean, rejected_logits_mean,
        nll_loss, and statistics of the class).
    """

    def __init__(
        self,
        ignore_index: int,
        beta: float,
        alpha: float,
        compute_nll_loss: bool,
        average_log_prob: bool,
    ) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.beta = beta
        self.alpha = alpha
        self.compute_nll_loss = compute_nll_loss
        self.average_log_prob = average_log_prob

    def _pairs(
        self, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns log-probabilities of the tokens, the chosen and the rejected sequences."""
        if len(target) % 2:
            raise ValueError(
                f"{type(self).__name__}: target must have an even batch, the chosen completions "
                f"first, got target.shape={tuple(target.shape)}"
            )
        tokens, sequences = log_probs(
            x, weight, target, bias, self.ignore_index, self.average_log_prob
        )
        chosen, rejected = sequences.chunk(2)
        return tokens, chosen, rejected

    def _total(
        self,
        losses: Tensor,
        pairs: tuple[Tensor, Tensor, Tensor],
        arguments: tuple[Tensor, Tensor, Tensor, Tensor | None],
        nll: Tensor | None = None,
    ) -> tuple[Tensor, Logged]:
        """Returns the loss of (lin_weight, _input, target, bias), and Liger's statistics."""
        weight, x, target, bias = arguments
        tokens, chosen, rejected = pairs
        if nll is None:
            nll = tokens.new_zeros(())
            if self.compute_nll_loss:
                kept = (target[: len(chosen)] != self.ignore_index).sum().clamp(min=1)
                nll = -tokens[: len(chosen)].sum() / kept
        better, worse = mean_logits(x, weight, bias).chunk(2)
        logged = (chosen, rejected, better.mean(), worse.mean(), nll)
        return self.alpha * nll + losses.mean(), tuple(t.detach() for t in logged)

    def _rewards(self, chosen: Tensor, rejected: Tensor) -> Logged:
        return self.beta * chosen.detach(), self.beta * rejected.detach()


class LigerFusedLinearDPOLoss(_Paired):
    """Computes :func:`omniattn.functional.dpo_loss` of a linear layer.

    Args:
        ignore_index: tokens with this target do not count.
        beta, loss_type, label_smoothing, discopop_tau: see the function.
        alpha: weight of the cross entropy.
        compute_nll_loss: add the cross entropy.
        compiled, chunk_size: have no effect.
        use_ref_model: True if `ref_input` and `ref_weight` are given.
        average_log_prob: average, not sum, the log-probabilities of a sequence; for
            loss_type="ipo".

    Shape:
        lin_weight (V, K), _input (2 B, T, K), target (2 B, T), bias (V,), ref_input (2 B, T, K'),
        ref_weight (V, K'), ref_bias (V,) -> loss, (chosen_logps, rejected_logps,
        chosen_logits_mean, rejected_logits_mean, nll_loss, chosen_rewards, rejected_rewards).

    Example:
        >>> head, x, target = torch.eye(2), torch.zeros(2, 1, 2), torch.zeros(2, 1).long()
        >>> LigerFusedLinearDPOLoss(use_ref_model=False)(head, x, target)[0]
        tensor(0.6931)
    """

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        compute_nll_loss: bool = False,
        compiled: bool = True,
        use_ref_model: bool = True,
        average_log_prob: bool = False,
        chunk_size: int = 1,
        loss_type: str = "sigmoid",
        label_smoothing: float = 0.0,
        discopop_tau: float = 0.05,
    ) -> None:
        super().__init__(ignore_index, beta, alpha, compute_nll_loss, average_log_prob)
        check_dpo(type(self).__name__, loss_type, label_smoothing, discopop_tau)
        self.use_ref_model = use_ref_model
        self.loss_type = loss_type
        self.label_smoothing = label_smoothing
        self.discopop_tau = discopop_tau

    def forward(
        self,
        lin_weight: Tensor,
        _input: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
    ) -> tuple[Tensor, Logged]:
        """Computes the loss; see Shape of the class."""
        pairs = _, chosen, rejected = self._pairs(_input, lin_weight, target, bias)
        references: tuple[Tensor | None, Tensor | None] = (None, None)
        rewards = (chosen, rejected)
        if self.use_ref_model:
            ref_input, ref_weight = required(self, ref_input=ref_input, ref_weight=ref_weight)
            with torch.no_grad():
                _, *found = self._pairs(ref_input, ref_weight, target, ref_bias)
            references = (found[0], found[1])
            rewards = (chosen - found[0], rejected - found[1])
        losses = functional.dpo_loss(
            *(chosen, rejected, *references),
            beta=self.beta,
            loss_type=self.loss_type,
            label_smoothing=self.label_smoothing,
            discopop_tau=self.discopop_tau,
        )
        loss, logged = self._total(losses, pairs, (lin_weight, _input, target, bias))
        return loss, (*logged, *self._rewards(*rewards))


def required(module: nn.Module, **tensors: Tensor | None) -> list[Tensor]:
    for name, t in tensors.items():
        if t is None:
            raise ValueError(
                f"{type(module).__name__}: {name} must be given with use_ref_model=True, "
                f"got {name}=None"
            )
    return [t.detach() for t in tensors.values() if t is not None]


class LigerFusedLinearCPOLoss(_Paired):
    """Computes :func:`omniattn.functional.cpo_loss` of a linear layer, and a cross entropy.

    Args:
        ignore_index, alpha, compute_nll_loss, compiled, average_log_prob, chunk_size: see
            :class:`LigerFusedLinearDPOLoss`.
        beta, label_smoothing: see the function.

    Shape:
        lin_weight (V, K), _input (2 B, T, K), target (2 B, T), bias (V,) -> as
        :class:`LigerFusedLinearDPOLoss`.

    Example:
        >>> head, x, target = torch.eye(2), torch.zeros(2, 1, 2), torch.zeros(2, 1).long()
        >>> LigerFusedLinearCPOLoss(compute_nll_loss=False)(head, x, target)[0]
        tensor(0.6931)
    """

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        label_smoothing: float = 0.0,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        average_log_prob: bool = False,
        chunk_size: int = 1,
    ) -> None:
        super().__init__(ignore_index, beta, alpha, compute_nll_loss, average_log_prob)
        self.label_smoothing = label_smoothing

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Logged]:
        """Computes the loss; see Shape of the class."""
        pairs = _, chosen, rejected = self._pairs(_input, lin_weight, target, bias)
        losses = functional.cpo_loss(
            chosen, rejected, beta=self.beta, label_smoothing=self.label_smoothing
        )
        loss, logged = self._total(losses, pairs, (lin_weight, _input, target, bias))
        return loss, (*logged, *self._rewards(chosen, rejected))


class LigerFusedLinearSimPOLoss(_Paired):
    """Computes :func:`omniattn.functional.simpo_loss` of a linear layer, and a cross entropy.

    Args:
        ignore_index, alpha, compute_nll_loss, compiled, chunk_size: see
            :class:`LigerFusedLinearDPOLoss`.
        beta, label_smoothing, gamma: see the function.

    Shape:
        lin_weight (V, K), _input (2 B, T, K), target (2 B, T), bias (V,) -> as
        :class:`LigerFusedLinearDPOLoss`.

    Example:
        >>> head, x, target = torch.eye(2), torch.zeros(2, 1, 2), torch.zeros(2, 1).long()
        >>> LigerFusedLinearSimPOLoss(compute_nll_loss=False, gamma=0.0)(head, x, target)[0]
        tensor(0.6931)
    """

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        label_smoothing: float = 0.0,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        gamma: float = 0.5,
        chunk_size: int = 1,
    ) -> None:
        super().__init__(ignore_index, beta, alpha, compute_nll_loss, average_log_prob=True)
        self.label_smoothing = label_smoothing
        self.gamma = gamma

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Logged]:
        """Computes the loss; see Shape of the class."""
        pairs = _, chosen, rejected = self._pairs(_input, lin_weight, target, bias)
        losses = functional.simpo_loss(
            *(chosen, rejected),
            beta=self.beta,
            gamma=self.gamma,
            label_smoothing=self.label_smoothing,
        )
        loss, logged = self._total(losses, pairs, (lin_weight, _input, target, bias))
        return loss, (*logged, *self._rewards(chosen, rejected))


class LigerFusedLinearORPOLoss(_Paired):
    """Computes :func:`omniattn.functional.orpo_loss` of a linear layer, and a cross entropy.

    Args:
        ignore_index, compute_nll_loss, compiled, chunk_size: see :class:`LigerFusedLinearDPOLoss`.
        beta: see the function.

    Shape:
        lin_weight (V, K), _input (2 B, T, K), target (2 B, T), bias (V,), nll_target (2 B, T) for
        the cross entropy or None for target -> as :class:`LigerFusedLinearDPOLoss`, and the means
        of the logarithms of the odds ratio's sigmoid and of the odds ratio.

    Example:
        >>> head, x, target = torch.eye(2), torch.zeros(2, 1, 2), torch.zeros(2, 1).long()
        >>> LigerFusedLinearORPOLoss(compute_nll_loss=False, beta=1.0)(head, x, target)[0]
        tensor(0.6931)
    """

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        chunk_size: int = 1,
    ) -> None:
        super().__init__(ignore_index, beta, 1.0, compute_nll_loss, average_log_prob=True)

    def forward(
        self,
        lin_weight: Tensor,
        _input: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        nll_target: Tensor | None = None,
    ) -> tuple[Tensor, Logged]:
        """Computes the loss; see Shape of the class."""
        pairs = _, chosen, rejected = self._pairs(_input, lin_weight, target, bias)
        nll = None
        if nll_target is not None and self.compute_nll_loss:
            nll = functional.linear_cross_entropy(
                *(_input[: len(chosen)], lin_weight, nll_target[: len(chosen)]),
                bias=bias,
                ignore_index=self.ignore_index,
            )
        losses = functional.orpo_loss(chosen, rejected, beta=self.beta)
        loss, logged = self._total(losses, pairs, (lin_weight, _input, target, bias), nll)
        odds = (log_odds(chosen) - log_odds(rejected)).detach().mean()
        ratios = (-losses / self.beta).detach().mean()
        return loss, (*logged, *self._rewards(chosen, rejected), ratios, odds)
