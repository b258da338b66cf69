"""Checks shared by the losses."""

from __future__ import annotations

import torch
from torch import Tensor

from omniattn.checks.arguments import (
    require_choice,
    require_device,
    require_float,
    require_int,
    require_integers,
    require_like,
    require_number,
    require_shape,
)
from omniattn.encoding.losses import CrossEntropy, Divergence
from omniattn.ops.dispatch.plain import may_need_gradient
from omniattn.ops.loss import REDUCTIONS as REDUCTIONS
from omniattn.reference.precision import compute_dtype


def check_linear(op: str, x: Tensor, weight: Tensor, bias: Tensor | None, prefix: str = "") -> None:
    require_float(op, f"{prefix}x", x)
    require_like(op, f"{prefix}weight", weight, x, f"{prefix}x")
    if x.dim() == 0 or weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"{op}: {prefix}x must have shape (..., K) and {prefix}weight (V, K), "
            f"got {prefix}x.shape={tuple(x.shape)}, {prefix}weight.shape={tuple(weight.shape)}"
        )
    if bias is not None:
        require_like(op, f"{prefix}bias", bias, x, f"{prefix}x")
        require_shape(op, f"{prefix}bias", bias, weight.shape[:1])


def wanted_gradients(reduction: str, *tensors: Tensor | None) -> list[bool]:
    """Returns for each tensor True if the forward computes its gradient with the loss."""
    now = reduction != "none" and torch.is_grad_enabled()
    return [now and t is not None and may_need_gradient(t) for t in tensors]


def refuse_gradient(op: str, name: str, t: Tensor) -> None:
    if t.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{op}: {name} gets no gradient; detach it, got {name}.requires_grad=True")


def check_class_weight(
    op: str, class_weight: Tensor | None, x: Tensor, classes: int
) -> Tensor | None:
    """Checks the class weights; returns them in the compute dtype."""
    if class_weight is None:
        return None
    require_float(op, "class_weight", class_weight)
    require_device(op, "class_weight", class_weight, x)
    require_shape(op, "class_weight", class_weight, (classes,))
    refuse_gradient(op, "class_weight", class_weight)
    return class_weight.to(compute_dtype(x)).contiguous()


def check_target(op: str, target: Tensor, x: Tensor) -> Tensor:
    """Checks the target; returns it as int64. Kernels check its range."""
    require_integers(op, "target", target)
    if target.device != x.device:
        raise ValueError(
            f"{op}: target must be on the device of the logits, got target.device={target.device}, "
            f"device={x.device}"
        )
    require_shape(op, "target", target, x.shape[:-1])
    return target.long()


def check_probabilities(op: str, target: Tensor, x: Tensor, ignore_index: int) -> None:
    require_device(op, "target", target, x)
    require_shape(op, "target", target, x.shape)
    if ignore_index != -100:
        raise ValueError(
            f"{op}: ignore_index is for targets that are classes, got ignore_index={ignore_index} "
            "and probabilities"
        )


def check_cross_entropy(op: str, options: CrossEntropy) -> int:
    """Checks the options except for the class weights; returns the number of the reduction."""
    require_int(op, "ignore_index", options.ignore_index)
    require_number(op, "label_smoothing", options.label_smoothing, 0, 1)
    require_number(op, "z_loss", options.z_loss, 0)
    require_number(op, "softcap", options.softcap, 0)
    require_number(op, "temperature", options.temperature, above=0)
    require_choice(op, "reduction", options.reduction, REDUCTIONS)
    return REDUCTIONS[options.reduction]


def check_divergence(op: str, options: Divergence, reduction: str) -> int:
    """Checks the options; returns the number of the reduction."""
    require_int(op, "ignore_index", options.ignore_index)
    require_number(op, "beta", options.beta, 0, 1)
    require_number(op, "temperature", options.temperature, above=0)
    require_choice(op, "reduction", reduction, REDUCTIONS)
    return REDUCTIONS[reduction]
