"""Scans: a few numbers for each channel, one token after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from omniattn.reference.precision import compute_dtype

State = tuple[Tensor, ...]
#: The numerator, denominator and maximum of no tokens.
WKV_EMPTY = (0.0, 0.0, -1e38)


def over_time(
    step: Callable[..., tuple[State, State]],
    inputs: Sequence[Tensor],
    state: State,
    cu_seqlens: Tensor | None,
    others: Sequence[Tensor] = (),
) -> tuple[State, State]:
    """The outputs (B, T, ..) of (outputs, state) = step(state, *inputs of a token), and the state.

    Inputs are (B, T, ..), states (N, ..). With cu_seqlens the one row holds N sequences, each with
    a state of its own. Where there are no tokens the outputs are made from the inputs and `others`.
    """
    found: list[State] = []
    for t in range(inputs[0].shape[1]):
        outputs, new = step(state, *(x[:, t] for x in inputs))
        if cu_seqlens is None:
            state = new
        else:
            inside = (cu_seqlens[:-1] <= t) & (t < cu_seqlens[1:])
            state = tuple(
                torch.where(_like(inside, a), a, b) for a, b in zip(new, state, strict=True)
            )
            outputs = tuple(
                torch.where(_like(inside, o), o, 0).sum(0, keepdim=True) for o in outputs
            )
        found.append(outputs)
    if not found:  # gradients are zeros, not absent
        nothing = sum((x.sum() * 0 for x in (*inputs, *others)), torch.zeros(()).to(state[0]))
        state = tuple(x + nothing for x in state)
        return (), state
    return tuple(torch.stack(each, 1) for each in zip(*found, strict=True)), state


def _like(flags: Tensor, x: Tensor) -> Tensor:
    return flags.view(-1, *[1] * (x.dim() - 1))


def _count(x: Tensor, cu_seqlens: Tensor | None) -> int:
    return len(x) if cu_seqlens is None else len(cu_seqlens) - 1


def rwkv4(
    w: Tensor,
    u: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """y_t = (sum_{i<t} e^(k_i - (t-1-i) w) v_i + e^(u + k_t) v_t) / (the same without v).

    w, u (C,), k, v (B, T, C). A state (N, 3, C) is the numerator and the denominator times e^-max,
    and max.
    """
    dtype = compute_dtype(k)
    w, u, wide_k, wide_v = (x.to(dtype) for x in (w, u, k, v))
    count = _count(k, cu_seqlens)
    if initial_state is None:
        empty = k.new_tensor(WKV_EMPTY, dtype=dtype)[:, None].expand(-1, k.shape[2])
        initial_state = empty.expand(count, -1, -1)

    def step(state: State, k: Tensor, v: Tensor) -> tuple[State, State]:
        num, den, top = state
        most = torch.maximum(top, u + k)
        past, now = (top - most).exp(), (u + k - most).exp()
        y = (past * num + now * v) / (past * den + now)
        most = torch.maximum(top - w, k)
        past, now = (top - w - most).exp(), (k - most).exp()
        return (y,), (past * num + now * v, past * den + now, most)

    start = initial_state.to(dtype).unbind(1)
    outputs, state = over_time(step, (wide_k, wide_v), start, cu_seqlens, (w, u))
    final = torch.stack(state, 1)
    if not outputs:
        return (wide_k + wide_v + (w + u).sum() * 0).to(k.dtype), final
    return outputs[0].to(k.dtype), final
