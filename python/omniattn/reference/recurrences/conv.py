"""Causal depthwise convolution over time."""

import torch

from omniattn.reference.layers.activation import ACTIVATIONS
from omniattn.reference.precision import widen
from omniattn.reference.values import sequence_count


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    initial_state: torch.Tensor | None = None,
    return_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """y[t] = act(bias + sum_k weight[k] x[t + k - (K - 1)]), x (B, T, D), weight (D, K), bias (D,).

    The K - 1 inputs before x are initial_state (N, D, K - 1), or zeros; the final state is the last
    K - 1 inputs of both together. N is B, or the number of sequences if x is packed (B = 1).
    """
    taken, final = _taken("causal_conv1d", x, weight.shape[1], initial_state, cu_seqlens)
    y = (taken * widen(weight)[:, None]).sum(-1)
    if bias is not None:
        y = y + widen(bias)[:, None]
    y = ACTIVATIONS[activation or "identity"](y)
    y = y.transpose(1, 2).to(x.dtype)
    return (y, final.to(x.dtype)) if return_final_state else y


def dynamic_conv1d(
    x: torch.Tensor,
    taps: torch.Tensor,
    *,
    activation: str | None = None,
    residual: bool = False,
    initial_state: torch.Tensor | None = None,
    return_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """y[t] = act(sum_k taps[t, h, k] x[t + k - (K - 1)]) (+ x[t]) for the D / H channels of head h.

    States and sequences are as in causal_conv1d; taps (B, T, H, K).
    """
    heads, count = taps.shape[2:]
    taken, final = _taken("dynamic_conv1d", x, count, initial_state, cu_seqlens)
    filters = widen(taps).repeat_interleave(x.shape[2] // max(1, heads), 2)
    y = ACTIVATIONS[activation or "identity"]((taken.transpose(1, 2) * filters).sum(-1))
    y = (y + x if residual else y).to(x.dtype)
    return (y, final.to(x.dtype)) if return_final_state else y


def _taken(
    op: str,
    x: torch.Tensor,
    taps: int,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the K inputs of each step (B, D, T, K), and the final states (N, D, K - 1)."""
    steps, channels = x.shape[1:]
    count = sequence_count(op, x, cu_seqlens)
    inputs = widen(x).transpose(1, 2)
    if initial_state is None:
        before = inputs.new_zeros((count, channels, taps - 1))
    else:
        before = widen(initial_state)
    if cu_seqlens is None:
        inputs = torch.cat((before, inputs), -1)
        taken = torch.stack([inputs[..., k : k + steps] for k in range(taps)], -1)
        return taken, inputs[..., steps:]
    return _packed(inputs[0], before, cu_seqlens.long())


def _packed(
    x: torch.Tensor, before: torch.Tensor, cu_seqlens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the K inputs of each step (1, D, T, K) of packed x (D, T), and the final states."""
    count, _, width = before.shape
    inputs = torch.cat((before.transpose(0, 1).flatten(1), x), -1)

    def places(n: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        """Returns columns of `inputs` that hold steps of sequences n; steps < 0 lie before x."""
        x_column = count * width + cu_seqlens[n] + step
        return torch.where(step < 0, (n + 1) * width + step, x_column).clamp(0, inputs.shape[1] - 1)

    t = torch.arange(x.shape[1], device=x.device)
    n = (torch.searchsorted(cu_seqlens, t, right=True) - 1).clamp(0, max(count - 1, 0))
    back = torch.arange(-width, 1, device=x.device)
    taken = inputs[:, places(n[:, None], (t - cu_seqlens[n])[:, None] + back)]
    every = torch.arange(count, device=x.device)[:, None]
    final = inputs[:, places(every, cu_seqlens.diff()[:, None] + back[:-1])]
    return taken[None], final.transpose(0, 1)
