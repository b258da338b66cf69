"""Causal depthwise convolution over time."""

import torch

from omniattn.reference.activation import ACTIVATIONS
from omniattn.reference.precision import widen


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    initial_state: torch.Tensor | None = None,
    return_final_state: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """y[t] = act(bias + sum_k weight[k] x[t + k - (K - 1)]), x (B, T, D), weight (D, K), bias (D,).

    The K - 1 inputs before x are initial_state (B, D, K - 1), or zeros; the final state is the
    last K - 1 of these and of x.
    """
    taps, steps = weight.shape[1], x.shape[1]
    inputs = widen(x).transpose(1, 2)
    if initial_state is None:
        before = inputs.new_zeros((*inputs.shape[:2], taps - 1))
    else:
        before = widen(initial_state)
    inputs = torch.cat((before, inputs), -1)
    taken = torch.stack([inputs[..., k : k + steps] for k in range(taps)], -1)
    y = (taken * widen(weight)[:, None]).sum(-1)
    if bias is not None:
        y = y + widen(bias)[:, None]
    y = ACTIVATIONS[activation or "identity"](y).transpose(1, 2).to(x.dtype)
    return (y, inputs[..., steps:].to(x.dtype)) if return_final_state else y
