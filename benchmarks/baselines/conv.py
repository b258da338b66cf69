"""Convolution baselines: torch's depthwise conv1d with padding, and windows of the inputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from baselines._common import compiled, lacks


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_final_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    (_, steps, channels), taps = x.shape, weight.shape[1]
    lacks(cu_seqlens=cu_seqlens is not None, empty=x.numel() == 0)
    inputs = x.transpose(1, 2)
    if initial_state is None and not return_final_state:
        y = F.conv1d(inputs, weight[:, None], bias, padding=taps - 1, groups=channels)[..., :steps]
    else:
        inputs = (
            F.pad(inputs, (taps - 1, 0))
            if initial_state is None
            else torch.cat((initial_state, inputs), -1)
        )
        y = F.conv1d(inputs, weight[:, None], bias, groups=channels)
    y = (F.silu(y) if activation == "silu" else y).transpose(1, 2)
    return (y, inputs[..., steps:]) if return_final_state else y


def dynamic_conv1d(
    x: Tensor,
    taps: Tensor,
    *,
    activation: str | None = None,
    residual: bool = False,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_final_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    lacks(cu_seqlens=cu_seqlens is not None, empty=x.numel() == 0)
    steps, (heads, count) = x.shape[1], taps.shape[2:]
    inputs = (
        F.pad(x, (0, 0, count - 1, 0))
        if initial_state is None
        else torch.cat((initial_state.mT, x), 1)
    )
    windows = inputs.unfold(1, count, 1).unflatten(2, (heads, -1))
    y = torch.einsum("bthdk,bthk->bthd", windows, taps).flatten(2)
    y = F.silu(y) if activation == "silu" else y
    y = y + x if residual else y
    return (y, inputs[:, steps:].mT) if return_final_state else y


BASELINES = {
    "causal_conv1d": {"aten": causal_conv1d, "compiled": compiled(causal_conv1d)},
    "dynamic_conv1d": {"aten": dynamic_conv1d, "compiled": compiled(dynamic_conv1d)},
}
