"""Baselines of scans: loops over tokens in eager torch, and transformers' mLSTM chunk form and
selective scan."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from baselines._common import lacks


def linear_scan(
    x: Tensor,
    g: Tensor,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Takes a step of elementwise torch for each token, as fla's naive form does."""
    lacks(cu_seqlens=cu_seqlens is not None, empty=x.shape[1] == 0)
    decay, wide = g.exp(), x.to(g.dtype)
    h = wide.new_zeros(x.shape[0], x.shape[2]) if initial_state is None else initial_state
    found = []
    for t in range(x.shape[1]):
        h = decay[:, t] * h + wide[:, t]
        found.append(h)
    return torch.stack(found, 1).to(x.dtype), h


def rwkv4(
    w: Tensor,
    u: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    from transformers.models.rwkv.modeling_rwkv import rwkv_linear_attention_cpu

    lacks(cu_seqlens=cu_seqlens is not None, float64=k.dtype == torch.float64)
    lacks(empty=k.shape[1] == 0)
    state = None if initial_state is None else initial_state.unbind(1)
    y, final = rwkv_linear_attention_cpu(w.log(), u, k, v, state=state, return_state=True)
    return y, torch.stack(tuple(final), 1)


def rwkv_quadratic(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, *, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Uses torch's attention with a bias of decays, computed in the call."""
    lacks(cu_seqlens=cu_seqlens is not None, channels=w.dim() == 2, empty=v.numel() == 0)
    copies, at = v.shape[2] // r.shape[2], torch.arange(r.shape[1], device=r.device)
    age = (at[:, None] - at).to(w.dtype)
    bias = (-w[:, None, None] * age).masked_fill(age < 0, -torch.inf)
    r, k = (t.repeat_interleave(copies, 2) for t in (r, k))
    rows = (t.transpose(1, 2) for t in (r, k, v))
    y = F.scaled_dot_product_attention(*rows, attn_mask=bias[None].to(v.dtype), scale=1.0)
    return y.transpose(1, 2)


def rwkv_recurrent(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Runs transformers' loop of RWKV-4 on the products r . k."""
    heads, width = v.shape[2:]
    lacks(empty=v.numel() == 0)
    score = (r.float() * k.float()).sum(-1, keepdim=True).repeat_interleave(heads // r.shape[2], 2)
    w = (w if w.dim() == 2 else w[:, None]).expand(heads, width).flatten()
    state = None if initial_state is None else initial_state.flatten(2)
    rows = (score.expand(v.shape).flatten(2), v.float().flatten(2))
    y, final = rwkv4(w, w, *rows, initial_state=state, cu_seqlens=cu_seqlens)
    return y.view(v.shape).to(v.dtype), final.view(*final.shape[:2], heads, width)


def slstm(
    x: Tensor,
    r: Tensor,
    *,
    forget_gate: str = "sigmoid",
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes a product with R and pointwise ops for each token."""
    lacks(cu_seqlens=cu_seqlens is not None, initial_state=initial_state is not None)
    lacks(forget_gate=forget_gate != "sigmoid", empty=x.numel() == 0)
    batch, _, _, heads, size = x.shape
    matrix = r.permute(1, 2, 0, 3).flatten(2)  # (H, D, 4 D)
    h = c = n = m = x.new_zeros(batch, heads, size)
    out = []
    for t, raw in enumerate(x.unbind(1)):
        recurrent = (h.transpose(0, 1) @ matrix).view(heads, batch, 4, size).permute(1, 2, 0, 3)
        i, f, z, o = (raw + recurrent).unbind(1)
        kept = F.logsigmoid(f) + m
        m = i if t == 0 else torch.maximum(i, kept)
        take, forget = (i - m).exp(), (kept - m).exp()
        c, n = forget * c + take * z.tanh(), forget * n + take
        h = o.sigmoid() * c / n
        out.append(h)
    return torch.stack(out, 1), torch.stack((h, c, n, m), 1)


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
    C: Tensor | None = None,
    n: Tensor | None = None,
    m: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Computes mLSTM with the state tensors C, n and m by name, as in the OpSpec."""
    from transformers.models.xlstm import modeling_xlstm as xlstm

    chunk, root = 64, q.shape[-1] ** 0.5
    lacks(cu_seqlens=cu_seqlens is not None, initial_state=C is not None)
    lacks(forget_gate=forget_gate != "sigmoid", scale=scale is not None)
    lacks(chunks=q.shape[1] % chunk != 0, empty=v.numel() == 0, float64=q.dtype == torch.float64)
    q, k, v, i, f = (t.transpose(1, 2) for t in (q, k, v, i, f))
    h, (C, n, m) = xlstm.mlstm_chunkwise_native_autograd(
        q, k, v, i, f, return_last_states=True, eps=eps, chunk_size=chunk
    )
    return h.transpose(1, 2), C / root, n / root, m[..., 0]


def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    **imaginary: Tensor,
) -> tuple[Tensor, Tensor]:
    """Loops over tokens with one multiply-add of precomputed factors.

    All views are made at once by unbind; the gradient of each indexing would have all tokens.
    """
    lacks(cu_seqlens=cu_seqlens is not None, groups=B.dim() == 4 or C.dim() == 4)
    lacks(empty=u.shape[1] == 0, complex_numbers=bool(imaginary))
    dt = delta.float() if delta_bias is None else delta + delta_bias
    if delta_softplus:
        dt = F.softplus(dt)
    h = A.new_zeros(len(u), *A.shape) if initial_state is None else initial_state
    b = B if B.dim() == 2 else B[:, :, None]
    return _scanned(torch.exp(dt[..., None] * A), (dt * u)[..., None] * b, h, u, C, D, z)


def longhorn_scan(
    u: Tensor,
    delta: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes the loop of selective_scan with Longhorn's step sizes and decays."""
    lacks(cu_seqlens=cu_seqlens is not None, groups=B.dim() == 4, empty=u.shape[1] == 0)
    share = torch.sigmoid(delta.float() if delta_bias is None else delta + delta_bias)
    dt = (share / (1 + share * B.square().sum(-1, keepdim=True)))[..., None]
    b = B[:, :, None]
    h = u.new_zeros(len(u), u.shape[2], B.shape[2], dtype=dt.dtype)
    h = h if initial_state is None else initial_state
    return _scanned(1 - dt * b.square(), dt * u[..., None] * b, h, u, C, D, z)


def _scanned(
    factors: Tensor,
    drives: Tensor,
    h: Tensor,
    u: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Runs ``h = factor h + drive`` over the tokens (B, T, D, N) and reads the states."""
    states = []
    for factor, drive in zip(factors.unbind(1), drives.unbind(1), strict=True):
        h = torch.addcmul(drive, factor, h)
        states.append(h)
    all_states = torch.stack(states, 1)
    if C.dim() == 2:
        y = (all_states * C).sum(-1)
    else:
        y = (all_states @ C[..., None].to(h.dtype))[..., 0]
    if D is not None:
        y = y + D * u
    return (y if z is None else y * F.silu(z)).to(u.dtype), h


def mamba(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    **imaginary: Tensor,
) -> tuple[Tensor, Tensor]:
    """Computes MambaMixer's scan as transformers does without the kernels of mamba-ssm."""
    from transformers.models.mamba import modeling_mamba

    lacks(cu_seqlens=cu_seqlens is not None, complex_numbers=bool(imaginary))
    lacks(groups=B.dim() == 4 or C.dim() == 4, constants=B.dim() == 2 or C.dim() == 2)
    lacks(empty=u.shape[1] == 0, other_dtypes=u.dtype != torch.float32)
    if initial_state is not None:
        lacks(prefix=u.shape[1] > 1)
        state = initial_state.clone()
        rows = (t[:, 0] for t in (u, delta))
        keys = (t[:, 0] for t in (B, C))
        gate = None if z is None else z[:, 0]
        y = modeling_mamba.mamba_selective_state_update(
            state, *rows, A, *keys, D, delta_bias, delta_softplus, gate
        )
        return y[:, None], state
    u, delta, B, C = (t.transpose(1, 2) for t in (u, delta, B, C))
    y, state = modeling_mamba.mamba_selective_scan(
        u,
        delta,
        A,
        B,
        C,
        D,
        None if z is None else z.transpose(1, 2),
        delta_bias,
        delta_softplus,
        return_last_state=True,
    )
    return y.transpose(1, 2), state


BASELINES = {
    "linear_scan": {"aten": linear_scan},
    "rwkv4": {"hf": rwkv4},
    "rwkv_quadratic": {"aten": rwkv_quadratic},
    "rwkv_recurrent": {"hf": rwkv_recurrent},
    "slstm": {"aten": slstm},
    "mlstm": {"hf": mlstm},
    "selective_scan": {"aten": selective_scan, "hf": mamba},
    "longhorn_scan": {"aten": longhorn_scan},
}
