"""fla's activations, MLP and losses."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as nnf

from omniattn import functional
from omniattn.checks.arguments import require_choice, require_int, require_number
from omniattn.compat._errors import errors_of, require_flags, require_real
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
