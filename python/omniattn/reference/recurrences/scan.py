"""Scans with a few state values per channel, token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as nnf
from typing_extensions import Unpack

from omniattn.encoding.sequences import StateOptions, sequences_of, spelled_out
from omniattn.reference.empty import nothing_of
from omniattn.reference.layers.activation import log_sigmoid
from omniattn.reference.limits import clamp
from omniattn.reference.precision import complex_dtype, compute_dtype
from omniattn.reference.values import require_all_rows, sequence_count

State = tuple[Tensor, ...]
#: Numerator, denominator and maximum before the first token.
WKV_EMPTY = (0.0, 0.0, -1e38)


def over_time(
    step: Callable[..., tuple[State, State]],
    inputs: Sequence[Tensor],
    state: State,
    cu_seqlens: Tensor | None,
    others: Sequence[Tensor] = (),
) -> tuple[State, State]:
    """Runs (outputs, state) = step(state, *inputs of a token) over all tokens.

    Returns the outputs (B, T, ..) and the last state. Inputs are (B, T, ..), states (N, ..). With
    cu_seqlens B is 1, and the row holds N sequences, each with its own state. Without tokens there
    are no outputs, and the state has gradients of zeros to the inputs and `others`.
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
    if not found:  # gradients are zeros and not None
        return (), tuple(x + nothing_of(*inputs, *others) for x in state)
    return tuple(torch.stack(each, 1) for each in zip(*found, strict=True)), state


def _like(flags: Tensor, x: Tensor) -> Tensor:
    return flags.view(-1, *[1] * (x.dim() - 1))


def _newest_maximum(past: Tensor, now: Tensor) -> Tensor:
    """The maximum, whose gradient goes to `now` alone where both are equal, as in the kernels."""
    return torch.where(past > now, past, now)


def linear_scan(
    x: Tensor,
    g: Tensor,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """h_t = e^(g_t) h_{t-1} + x_t with x, g (B, T, C) and states (N, C)."""
    dtype = compute_dtype(x)
    wide, decay = x.to(dtype), g.to(dtype).exp()
    if initial_state is None:
        count = sequence_count("linear_scan", x, cu_seqlens)
        initial_state = wide.new_zeros(count, x.shape[2])

    def step(state: State, x: Tensor, decay: Tensor) -> tuple[State, State]:
        h = decay * state[0] + x
        return (h,), (h,)

    outputs, state = over_time(step, (wide, decay), (initial_state.to(dtype),), cu_seqlens)
    return (outputs[0] if outputs else wide + 0 * decay).to(x.dtype), state[0]


def rwkv4(
    w: Tensor,
    u: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """y_t = (sum_{i<t} e^(k_i - (t-1-i) w) v_i + e^(u + k_t) v_t) / (the same without v).

    w, u (C,), k, v (B, T, C). A state (N, 3, C) holds numerator and denominator times e^-max, and
    max.
    """
    dtype = compute_dtype(k)
    w, u, wide_k, wide_v = (x.to(dtype) for x in (w, u, k, v))
    count = sequence_count("rwkv4", k, cu_seqlens)
    if initial_state is None:
        empty = k.new_tensor(WKV_EMPTY, dtype=dtype)[:, None].expand(-1, k.shape[2])
        initial_state = empty.expand(count, -1, -1)

    def step(state: State, k: Tensor, v: Tensor) -> tuple[State, State]:
        num, den, top = state
        most = torch.maximum(top, u + k)
        past, now = (top - most).exp(), (u + k - most).exp()
        y = (past * num + now * v) / (past * den + now)
        most = _newest_maximum(top - w, k)
        past, now = (top - w - most).exp(), (k - most).exp()
        return (y,), (past * num + now * v, past * den + now, most)

    start = initial_state.to(dtype).unbind(1)
    outputs, state = over_time(step, (wide_k, wide_v), start, cu_seqlens, (w, u))
    final = torch.stack(state, 1)
    if not outputs:
        return (wide_k + wide_v + (w + u).sum() * 0).to(k.dtype), final
    return outputs[0].to(k.dtype), final


def rwkv_quadratic(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, *, cu_seqlens: Tensor | None = None
) -> Tensor:
    """y_i = sum_{j<=i} e^(r_i . k_j - (i - j) w) v_j / (the same without v).

    r, k (B, T, H, K), v (B, T, Hv, V), w (Hv) or (Hv, V).
    """
    dtype, steps, heads = compute_dtype(v), r.shape[1], v.shape[2]
    r, k = _of_value_heads(r, heads), _of_value_heads(k, heads)
    at = torch.arange(steps, device=v.device)
    seen = at[:, None] >= at
    if cu_seqlens is not None:
        require_all_rows("rwkv_quadratic", cu_seqlens, steps)
        sequence = torch.searchsorted(cu_seqlens.long(), at, right=True)
        seen = seen & (sequence[:, None] == sequence)
    age = (at[:, None] - at).to(dtype)
    decay = w.to(dtype).view(heads, -1, 1, 1) * age  # (H, 1 or V, T, T)
    score = torch.einsum("bihk,bjhk->bhij", r, k)[:, :, None] - decay
    weight = score.masked_fill(~seen, -torch.inf).softmax(-1)
    weight = weight.expand(-1, -1, v.shape[3], -1, -1)
    return torch.einsum("bhcij,bjhc->bihc", weight, v.to(dtype)).to(v.dtype)


@spelled_out(StateOptions)
def rwkv_recurrent(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    **options: Unpack[StateOptions],
) -> tuple[Tensor, Tensor]:
    """y_t = s_t / n_t, s_t = e^-w s_{t-1} + e^(r_t . k_t) v_t, n_t = e^-w n_{t-1} + e^(r_t . k_t).

    A state (N, 3, Hv, V) holds s and n times e^-max, and max.
    """
    initial_state, cu_seqlens, _ = sequences_of("rwkv_recurrent", options, StateOptions)
    count = sequence_count("rwkv_recurrent", v, cu_seqlens)
    dtype, heads = compute_dtype(v), v.shape[2]
    r, k, wide = _of_value_heads(r, heads), _of_value_heads(k, heads), v.to(dtype)
    score = (r * k).sum(-1, keepdim=True).expand(v.shape)
    w = w.to(dtype).view(heads, -1)
    if initial_state is None:
        empty = v.new_tensor(WKV_EMPTY, dtype=dtype)[:, None, None]
        initial_state = empty.expand(count, 3, *v.shape[2:])

    def step(state: State, score: Tensor, v: Tensor) -> tuple[State, State]:
        s, n, top = state
        most = _newest_maximum(top - w, score)
        past, now = (top - w - most).exp(), (score - most).exp()
        s, n = past * s + now * v, past * n + now
        return (s / n,), (s, n, most)

    start = initial_state.to(dtype).unbind(1)
    outputs, state = over_time(step, (score, wide), start, cu_seqlens, (w,))
    y = outputs[0] if outputs else wide + (score.sum() + w.sum()) * 0
    return y.to(v.dtype), torch.stack(state, 1)


def _of_value_heads(x: Tensor, heads: int) -> Tensor:
    """Converts x (B, T, H, K) to the dtype of sums and repeats its heads to `heads`."""
    x = x.to(compute_dtype(x))
    return x.repeat_interleave(heads // max(1, x.shape[2]), 2)


def exponential_gates(
    g: Tensor,
    i: Tensor,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """decay_t = g_t + m_{t-1} - m_t <= 0, factor_t = e^(i_t - m_t) <= 1,
    m_t = max(g_t + m_{t-1}, i_t).

    Returns decay, factor, m and the last m. g and i (B, T, H), states (N, H).
    """

    def step(state: State, g: Tensor, i: Tensor) -> tuple[State, State]:
        kept = g + state[0]
        m = torch.maximum(kept, i)
        return (kept - m, (i - m).exp(), m), (m,)

    count, start = sequence_count("mlstm", g, cu_seqlens), initial_state
    if start is None:
        start = g.new_zeros(count, g.shape[2])
    outputs, (final,) = over_time(step, (g, i), (start,), cu_seqlens)
    if not outputs:
        return g + i, g + i, g + i, final
    return *outputs, final  # type: ignore[return-value]


def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    delta_softplus: bool = False,
) -> tuple[Tensor, Tensor]:
    """h_t = e^(dt A) h_{t-1} + dt B_t u_t, y_t = (C_t . h_t + D u_t) silu(z_t); returns y and the
    last h.

    u, delta, z (B, T, D), A (D, N), B, C (B, T, N), (B, T, G, N) or (D, N), states (N, D, N). dt =
    delta + delta_bias, or softplus(delta + delta_bias). If h is complex, 2 Re(C . h) replaces
    C . h.
    """
    count, dtype = sequence_count("selective_scan", u, cu_seqlens), compute_dtype(u)
    wide = complex_dtype(u) if A.is_complex() else dtype
    A, wide_u, dt = A.to(wide), u.to(dtype), delta.to(dtype)
    if delta_bias is not None:
        dt = dt + delta_bias.to(dtype)
    if delta_softplus:
        dt = nnf.softplus(dt)
    if initial_state is None:
        initial_state = A.new_zeros(count, *A.shape, dtype=wide)

    def of_channels(x: Tensor) -> Tensor:
        """Repeats groups (N, G, N) to all D channels; returns (D, N) unchanged."""
        return x if x.dim() == 2 else x.repeat_interleave(A.shape[0] // max(1, x.shape[1]), 1)

    def step(state: State, u: Tensor, dt: Tensor, *varying: Tensor) -> tuple[State, State]:
        rest = list(varying)
        b, c = (of_channels(rest.pop(0) if x.dim() == 4 else x) for x in (wide_b, wide_c))
        h = (dt[..., None] * A).exp() * state[0] + (dt * u)[..., None] * b
        y = (h * c).sum(-1)
        return (2 * y.real if y.is_complex() else y,), (h,)

    wide_b, wide_c = (x.unsqueeze(2) if x.dim() == 3 else x for x in (B, C))
    wide_b, wide_c = (x if x.is_complex() else x.to(dtype) for x in (wide_b, wide_c))
    steps = [x for x in (wide_b, wide_c) if x.dim() == 4]
    constants = (A, *(x for x in (wide_b, wide_c) if x.dim() == 2))
    inputs = (wide_u, dt, *steps)
    outputs, (final,) = over_time(step, inputs, (initial_state.to(wide),), cu_seqlens, constants)
    y = outputs[0] if outputs else wide_u + dt + sum(x.sum() * 0 for x in constants).real
    if D is not None:
        y = y + D.to(dtype) * wide_u
    if z is not None:
        y = y * nnf.silu(z.to(dtype))
    return y.to(u.dtype), final


def longhorn_scan(
    u: Tensor,
    delta: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """h_t = (1 - dt B_t^2) h_{t-1} + dt B_t u_t, y_t = (C_t . h_t + D u_t) silu(z_t); returns y and
    the last h. ``dt = b / (1 + b |B_t|^2)`` with b = sigmoid(delta + delta_bias).

    u, delta, z (B, T, D), B, C (B, T, N) or (B, T, G, N), states (N, D, N).
    """
    count, dtype = sequence_count("longhorn_scan", u, cu_seqlens), compute_dtype(u)
    channels, states = u.shape[2], B.shape[-1]
    wide_u, rate = u.to(dtype), delta.to(dtype)
    if delta_bias is not None:
        rate = rate + delta_bias.to(dtype)
    if initial_state is None:
        initial_state = u.new_zeros(count, channels, states, dtype=dtype)

    def of_channels(x: Tensor) -> Tensor:
        """Repeats (B, T, G, N) or (B, T, N) to all channels, (B, T, D, N)."""
        x = x.to(dtype) if x.dim() == 4 else x.to(dtype).unsqueeze(2)
        return x.repeat_interleave(channels // max(1, x.shape[2]), 2)

    def step(state: State, u: Tensor, rate: Tensor, b: Tensor, c: Tensor) -> tuple[State, State]:
        gain = torch.sigmoid(rate)
        dt = (gain / (1 + gain * b.square().sum(-1)))[..., None]
        h = (1 - dt * b.square()) * state[0] + dt * b * u[..., None]
        return ((h * c).sum(-1),), (h,)

    inputs = (wide_u, rate, of_channels(B), of_channels(C))
    outputs, (final,) = over_time(step, inputs, (initial_state.to(dtype),), cu_seqlens)
    y = outputs[0] if outputs else wide_u + rate + (B.sum() + C.sum()).to(dtype) * 0
    if D is not None:
        y = y + D.to(dtype) * wide_u
    if z is not None:
        y = y * nnf.silu(z.to(dtype))
    return y.to(u.dtype), final


#: Logarithm of each kind of forget gate.
FORGET_GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": log_sigmoid,
    "exp": lambda f: f,
}


def inverse_exp(m: Tensor) -> Tensor:
    """Computes e^-m, limited to e^80 (e^700 in fp64), since infinity would make gradients NaN."""
    return torch.exp(-clamp(m, -700 if m.dtype == torch.float64 else -80))


def mlstm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    scale: float | None = None,
    eps: float = 1e-6,
    forget_gate: str = "sigmoid",
    initial_state: tuple[Tensor, Tensor, Tensor] | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """``h_t = C_t^T q_t / (max(|n_t . q_t|, e^-m_t) + eps)``; returns h and the last C, n and m.

    C_t = f' C_{t-1} + i' k'_t v_t^T, n_t = f' n_{t-1} + i' k'_t, k' = scale k, with
    m_t = max(ln f_t + m_{t-1}, i_t), f' = e^(ln f_t + m_{t-1} - m_t), i' = e^(i_t - m_t).
    C (N, H, K, V), n (N, H, K), m (N, H).
    """
    count = sequence_count("mlstm", q, cu_seqlens)
    dtype, (_, _, heads, size) = compute_dtype(q), q.shape
    factor = max(1, size) ** -0.5 if scale is None else scale
    wide = [x.to(dtype) for x in (q, k, v, i, FORGET_GATES[forget_gate](f.to(dtype)))]
    if initial_state is None:
        shapes = ((size, v.shape[3]), (size,), ())
        initial_state = tuple(q.new_zeros(count, heads, *s, dtype=dtype) for s in shapes)  # type: ignore[assignment]
    assert initial_state is not None

    def step(state: State, q: Tensor, k: Tensor, v: Tensor, i: Tensor, g: Tensor) -> Any:
        c, n, m = state
        kept = g + m
        m = torch.maximum(kept, i)
        forget, take = (kept - m).exp()[..., None], (i - m).exp()[..., None]
        taken = take * k * factor
        c = forget[..., None] * c + taken[..., None] * v[..., None, :]
        n = forget * n + taken
        den = torch.maximum((n * q).sum(-1).abs(), inverse_exp(m)) + eps
        return ((c * q[..., None]).sum(-2) / den[..., None],), (c, n, m)

    start = tuple(x.to(dtype) for x in initial_state)
    outputs, state = over_time(step, wide, start, cu_seqlens)
    final = (state[0], state[1], state[2])
    if not outputs:
        nothing = sum(x.sum() for x in wide)
        return (wide[2] + nothing).to(v.dtype), final
    return outputs[0].to(v.dtype), final


@spelled_out(StateOptions)
def slstm(
    x: Tensor,
    r: Tensor,
    *,
    forget_gate: str = "sigmoid",
    **options: Unpack[StateOptions],
) -> tuple[Tensor, Tensor]:
    """h_t = sigmoid(o) c_t / n_t, with gates (i, f, z, o) = x_t + R h_{t-1} before activation.

    x (B, T, 4, H, D), r (4, H, D, D). Returns h and the final state (N, 4, H, D): h, c, n and m.
    m_t = max(ln f + m_{t-1}, i), or i where n = 0; f' = e^(ln f + m_{t-1} - m_t), or 0 where n = 0;
    i' = e^(i - m_t); c_t = f' c_{t-1} + i' tanh(z); n_t = f' n_{t-1} + i'.
    """
    initial_state, cu_seqlens, _ = sequences_of("slstm", options, StateOptions)
    count = sequence_count("slstm", x, cu_seqlens)
    dtype, heads, size = compute_dtype(x), x.shape[3], x.shape[4]
    wide, matrix = x.to(dtype), r.to(dtype)
    if initial_state is None:
        initial_state = x.new_zeros(count, 4, heads, size, dtype=dtype)

    def step(state: State, x: Tensor) -> tuple[State, State]:
        h, c, n, m = state
        i, f, z, o = (x + torch.einsum("nhi,ghij->nghj", h, matrix)).unbind(1)
        kept = FORGET_GATES[forget_gate](f) + m
        empty = n == 0
        m = torch.where(empty, i, torch.maximum(kept, i))
        forget = torch.where(empty, -torch.inf, kept - m).exp()
        take = (i - m).exp()
        c, n = forget * c + take * z.tanh(), forget * n + take
        h = o.sigmoid() * (c / n)
        return (h,), (h, c, n, m)

    start = initial_state.to(dtype).unbind(1)
    outputs, state = over_time(step, (wide,), start, cu_seqlens, (matrix,))
    final = torch.stack(state, 1)
    if not outputs:
        return (wide[:, :, 0] + matrix.sum() * 0).to(x.dtype), final
    return outputs[0].to(x.dtype), final
