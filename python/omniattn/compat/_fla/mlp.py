"""fla's activations, MLP and losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from omniattn import functional
from omniattn.checks.arguments import (
    clamp,
    require_choice,
    require_int,
    require_number,
    require_shape,
    widen,
)
from omniattn.compat._errors import errors_of, require_flags, require_form, require_real
from omniattn.compat.flash_attn import losses


def swish(x: Tensor) -> Tensor:
    """Computes ``x sigmoid(x)``."""
    require_real("swish", x=x)
    return nnf.silu(x)


def sigmoid(x: Tensor) -> Tensor:
    """Computes the logistic function."""
    require_real("sigmoid", x=x)
    return x.sigmoid()


def logsigmoid(x: Tensor, temperature: float = 1.0) -> Tensor:
    """Computes ``ln sigmoid(x) / temperature``."""
    require_real("logsigmoid", x=x)
    require_number("logsigmoid", "temperature", temperature, above=0.0)
    return nnf.logsigmoid(x) / temperature


def sqrelu(x: Tensor) -> Tensor:
    """Computes ``max(x, 0)^2``."""
    require_real("sqrelu", x=x)
    return x.relu().square()


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    """Computes ``x sigmoid(x) y``."""
    with errors_of("swiglu", gate="x", up="y"):
        return functional.swiglu(x, y)


def swiglu_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes ``swiglu(x, y) weight^T + bias``."""
    with errors_of("swiglu_linear", gate="x", up="y"):
        return functional.linear(functional.swiglu(x, y), weight, bias)


def sigmoidglu(x: Tensor, y: Tensor) -> Tensor:
    """Computes ``sigmoid(x) y``."""
    with errors_of("sigmoidglu", gate="x", up="y"):
        return functional.glu(x, y)


class GatedMLP(nn.Module):
    """SwiGLU layer.

    Args:
        hidden_size: width d.
        hidden_ratio: F is 2 / 3 of hidden_ratio d, rounded up to a multiple of 256; None is 4.
        intermediate_size: F, or None.
        hidden_act: "swish".
        fuse_swiglu: has no effect.
        powglu_power: has no effect with "swish".
    """

    def __init__(
        self,
        hidden_size: int,
        hidden_ratio: int | None = None,
        intermediate_size: int | None = None,
        hidden_act: str = "swish",
        fuse_swiglu: bool = True,
        powglu_power: float = 3.0,
    ) -> None:
        super().__init__()
        require_int("GatedMLP", "hidden_size", hidden_size, 1)
        if hidden_act != "swish":
            raise NotImplementedError(f"GatedMLP: hidden_act must be swish, got {hidden_act=}")
        if hidden_ratio is None:
            hidden_ratio = 4
        if intermediate_size is None:
            intermediate_size = 256 * -(-int(hidden_size * hidden_ratio * 2 / 3) // 256)
        self.hidden_size, self.hidden_ratio = hidden_size, hidden_ratio
        self.intermediate_size, self.hidden_act = intermediate_size, hidden_act
        self.fuse_swiglu, self.powglu_power = fuse_swiglu, powglu_power
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight
        with errors_of("GatedMLP"):
            return functional.glu_mlp(x, *weights)


class FusedCrossEntropyLoss(losses.CrossEntropyLoss):
    """Cross entropy of logits, see :class:`flash_attn.CrossEntropyLoss`.

    Args:
        ignore_index, reduction, label_smoothing, logit_scale, lse_square_scale: see there.
        logit_softcapping: None.
        inplace_backward, process_group, return_z_loss: see there.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        logit_scale: float = 1.0,
        lse_square_scale: float = 0.0,
        logit_softcapping: float | None = None,
        inplace_backward: bool = False,
        process_group: Any = None,
        return_z_loss: bool = False,
    ) -> None:
        if logit_softcapping:
            raise NotImplementedError(
                f"FusedCrossEntropyLoss: logit_softcapping is not supported, got "
                f"{logit_softcapping=}"
            )
        super().__init__(
            ignore_index,
            reduction,
            label_smoothing,
            logit_scale,
            lse_square_scale,
            inplace_backward,
            process_group,
            return_z_loss,
        )

    def forward(  # type: ignore[override]
        self, input: Tensor, target: Tensor
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Returns the loss of logits (N, V) and labels (N,), or (loss, z loss)."""
        return super().forward(input, target)


def cross_entropy_loss(
    logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    logit_softcapping: float | None = None,
    ignore_index: int = -100,
    inplace_backward: bool = False,
    process_group: Any = None,
) -> tuple[Tensor, Tensor]:
    """Computes :func:`flash_attn.cross_entropy_loss`, of ``c tanh(scale logits / c)`` with a cap c.

    Arguments are those of that function, and the cap `logit_softcapping`, None or 0 for none.
    """
    if logit_softcapping:
        require_real("cross_entropy_loss", logits=logits)
        scaled = widen(logits) * (logit_scale / logit_softcapping)
        logits, logit_scale = scaled.tanh() * logit_softcapping, 1.0
    return losses.cross_entropy_loss(
        *(logits, target, None, label_smoothing, logit_scale, lse_square_scale),
        *(ignore_index, inplace_backward, process_group),
    )


def fused_linear_cross_entropy_loss(
    x: Tensor,
    target: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    logit_softcapping: float | None = None,
    num_chunks: int = 8,
    reduction: str = "mean",
    use_l2warp: bool = False,
    l2_penalty_factor: float = 1e-4,
    accumulate_grad_in_fp32: bool = True,
) -> Tensor:
    """Computes :func:`functional.linear_cross_entropy`.

    Args:
        x: (N, d).
        target: (N,) int.
        weight: (V, d).
        bias: (V,), or None.
        ignore_index: label of rows that do not count.
        label_smoothing: share of the uniform distribution.
        logit_scale: factor of the logits.
        logit_softcapping: limit of the scaled logits; None or 0 is off.
        num_chunks: has no effect.
        reduction: "mean" or "sum".
        use_l2warp: not supported.
        l2_penalty_factor: has no effect without `use_l2warp`.
        accumulate_grad_in_fp32: has no effect; gradients are sums in fp32, rounded once.
    """
    op = "fused_linear_cross_entropy_loss"
    require_choice(op, "reduction", reduction, ("mean", "sum"))
    require_number(op, "logit_scale", logit_scale)
    require_flags(op, use_l2warp=use_l2warp)
    if use_l2warp:
        raise NotImplementedError(f"{op}: use_l2warp is not supported, got use_l2warp=True")
    require_real(op, x=x)
    if logit_scale != 1.0:
        x, bias = x * logit_scale, None if bias is None else bias * logit_scale
    with errors_of(op, softcap="logit_softcapping"):
        return functional.linear_cross_entropy(
            x,
            weight,
            target,
            bias=bias,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            softcap=logit_softcapping or 0.0,
            reduction=reduction,
        )


class FusedLinearCrossEntropyLoss(nn.Module):
    """Cross entropy of a linear layer, see :func:`fused_linear_cross_entropy_loss`.

    Args:
        ignore_index, label_smoothing, logit_scale, logit_softcapping, num_chunks: see there.
        reduction, use_l2warp, l2_penalty_factor, accumulate_grad_in_fp32: see there.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        logit_scale: float = 1.0,
        logit_softcapping: float | None = None,
        num_chunks: int = 8,
        reduction: str = "mean",
        use_l2warp: bool = False,
        l2_penalty_factor: float = 1e-4,
        accumulate_grad_in_fp32: bool = True,
    ) -> None:
        super().__init__()
        op = "FusedLinearCrossEntropyLoss"
        require_choice(op, "reduction", reduction, ("mean", "sum"))
        if use_l2warp:
            raise NotImplementedError(f"{op}: use_l2warp is not supported, got use_l2warp=True")
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing
        self.logit_scale, self.logit_softcapping = logit_scale, logit_softcapping
        self.num_chunks, self.reduction = num_chunks, reduction
        self.use_l2warp, self.l2_penalty_factor = use_l2warp, l2_penalty_factor
        self.accumulate_grad_in_fp32 = accumulate_grad_in_fp32

    def forward(
        self, x: Tensor, target: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Returns the loss of x (B, T, d), target (B, T) and weight (V, d)."""
        return fused_linear_cross_entropy_loss(
            x.flatten(0, -2),
            target.flatten(),
            weight,
            bias,
            self.ignore_index,
            self.label_smoothing,
            self.logit_scale,
            self.logit_softcapping,
            self.num_chunks,
            self.reduction,
        )


def fused_kl_div_loss(
    x: Tensor,
    target_x: Tensor,
    weight: Tensor,
    target_weight: Tensor,
    reduction: str = "batchmean",
    accumulate_grad_in_fp32: bool = True,
) -> Tensor:
    """Computes the mean of KL(P || Q), P of the teacher and Q of the student.

    Args:
        x: (N, d) of the student.
        target_x: (N, d') of the teacher, without gradient.
        weight: (V, d) of the student.
        target_weight: (V, d') of the teacher, without gradient.
        reduction: "batchmean".
        accumulate_grad_in_fp32: has no effect.
    """
    op = "fused_kl_div_loss"
    require_choice(op, "reduction", reduction, ("batchmean",))
    with errors_of(op, teacher_x="target_x", teacher_weight="target_weight"):
        return functional.linear_jsd(x, weight, target_x, target_weight, beta=0.0)


class FusedKLDivLoss(nn.Module):
    """Divergence of two linear layers, see :func:`fused_kl_div_loss`."""

    def __init__(self, reduction: str = "batchmean", accumulate_grad_in_fp32: bool = True) -> None:
        super().__init__()
        require_choice("FusedKLDivLoss", "reduction", reduction, ("batchmean",))
        self.reduction, self.accumulate_grad_in_fp32 = reduction, accumulate_grad_in_fp32

    def forward(self, x: Tensor, target_x: Tensor, weight: Tensor, target_weight: Tensor) -> Tensor:
        return fused_kl_div_loss(x, target_x, weight, target_weight, self.reduction)


class SwiGLULinear(nn.Module):
    """Layer of :func:`swiglu_linear`."""

    def forward(self, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return swiglu_linear(x, y, weight, bias)


def fused_grpo_loss(
    logits: Tensor,
    ref_logp: Tensor,
    input_ids: Tensor,
    advantages: Tensor,
    beta: float = 0.1,
    completion_mask: Tensor | None = None,
    save_kl: bool = False,
    inplace: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes ``beta kl - advantage exp(p - p')`` of each token, p' being p without its gradient.

    ``kl = exp(r - p) - (r - p) - 1`` with the log-probabilities p of the tokens and r = ref_logp.

    Args:
        logits: (B, L + 1, V); those at t are for token t of the last L.
        ref_logp: (B, L).
        input_ids: (B, T) with T >= L.
        advantages: (B,).
        beta: factor of kl.
        completion_mask: (B, L), 0 for tokens without a loss, or None.
        save_kl: if True, also returns kl.
        inplace: has no effect.

    Returns:
        The losses (B, L) in float32 (float64 for float64), and with `save_kl` kl like them.
    """
    op = "fused_grpo_loss"
    require_real(op, logits=logits, ref_logp=ref_logp, advantages=advantages)
    require_form(op, "logits", logits, "B, L + 1, V")
    batch, steps = logits.shape[0], logits.shape[1] - 1
    require_shape(op, "ref_logp", ref_logp, (batch, steps))
    tokens = input_ids[:, input_ids.shape[1] - steps :]
    require_shape(op, "input_ids", tokens, (batch, steps))
    losses = functional.cross_entropy(
        widen(logits[:, :-1]).flatten(0, 1), tokens.flatten(), reduction="none"
    )
    p = -losses.view(batch, steps)
    gap = ref_logp - p
    kl = gap.exp() - gap - 1
    loss = beta * kl - advantages[:, None] * (p - p.detach()).exp()
    if completion_mask is not None:
        loss, kl = (t.masked_fill(completion_mask == 0, 0.0) for t in (loss, kl))
    return (loss, kl.detach()) if save_kl else loss


def grpo_loss_with_old_logps(
    logps: Tensor,
    ref_logps: Tensor,
    old_logps: Tensor,
    pad_mask: Tensor,
    logits_to_keep: int,
    rewards: Tensor,
    beta: float = 0.2,
    epsilon: float = 0.2,
) -> Tensor:
    """Computes GRPO's loss with bounded ratios, a mean over the tokens in `pad_mask`.

    ``beta kl - min(a r, a clamp(r, 1 - epsilon, 1 + epsilon))`` with the ratios ``r = exp(logps -
    old_logps)``, kl as in :func:`fused_grpo_loss`, and the rewards a of the batch, less their mean
    and divided by their standard deviation + 1e-8.

    Args:
        logps, ref_logps, old_logps: (B, L), log-probabilities of the model, of the reference and of
            the model that drew the tokens.
        pad_mask: (B, L) bool.
        logits_to_keep: L.
        rewards: (B,), with B > 1.
        beta, epsilon: see above.
    """
    op = "grpo_loss_with_old_logps"
    require_real(op, logps=logps, ref_logps=ref_logps, old_logps=old_logps, rewards=rewards)
    require_form(op, "logps", logps, "B, L")
    if len(logps) < 2:
        raise ValueError(f"{op}: logps must have two rows at least, got {tuple(logps.shape)}")
    for name, t in (("ref_logps", ref_logps), ("old_logps", old_logps), ("pad_mask", pad_mask)):
        require_shape(op, name, t, (len(logps), logits_to_keep))
    require_shape(op, "rewards", rewards, (len(logps),))
    gains = ((rewards - rewards.mean()) / (rewards.std() + 1e-8))[:, None]
    gap, ratio = ref_logps - logps, (logps - old_logps).exp()
    bounded = clamp(ratio, 1 - epsilon, 1 + epsilon)
    loss = beta * (gap.exp() - gap - 1) - torch.minimum(gains * ratio, gains * bounded)
    return (loss * pad_mask).sum() / pad_mask.sum()
