"""Baselines of norms: torch's, and the gated norm of Mamba-2 and Qwen3-Next."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from baselines._common import compiled, lacks


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "fp32",
    residual: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    lacks(casting=casting != "fp32")
    h = x if residual is None else x + residual
    scale = weight + offset if weight is not None and offset else weight
    scale = None if scale is None else scale.to(h.dtype)
    y = F.rms_norm(h, x.shape[-1:], scale, eps).to(x.dtype)
    return y if residual is None else (y, h)


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    residual: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    h = x if residual is None else x + residual
    y = F.layer_norm(h, x.shape[-1:], weight, bias, eps)
    return y if residual is None else (y, h)


def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    center: bool = True,
) -> Tensor:
    lacks(rms=not center, no_channels=x.shape[1] == 0)  # torch 2.14 refuses x without channels
    return F.group_norm(x, num_groups, weight, bias, eps)


def rms_norm_gated(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    norm_before_gate: bool = True,
    activation: str = "silu",
    num_groups: int = 1,
    casting: str = "fp32",
) -> Tensor:
    """Computes Mamba-2's and Qwen3-Next's gated norms, with all steps in fp32."""
    lacks(casting=casting != "fp32")
    factor = (F.silu if activation == "silu" else torch.sigmoid)(gate.float())
    v = x.float() if norm_before_gate else x.float() * factor
    parts = v.view(*v.shape[:-1], num_groups, v.shape[-1] // num_groups)
    y = F.rms_norm(parts, parts.shape[-1:], None, eps).flatten(-2)
    y = y if weight is None else y * weight.float()
    return (y * factor if norm_before_gate else y).to(x.dtype)


BASELINES = {
    "rms_norm": {"aten": rms_norm, "compiled": compiled(rms_norm)},
    "layer_norm": {"aten": layer_norm, "compiled": compiled(layer_norm)},
    "group_norm": {"aten": group_norm, "compiled": compiled(group_norm)},
    "rms_norm_gated": {"hf": rms_norm_gated, "compiled": compiled(rms_norm_gated)},
}
