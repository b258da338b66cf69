"""Plain torch versions of functions of causal-conv1d, mamba-ssm and state-spaces/s4, see
libraries.py."""

import itertools

import torch
from torch.nn import functional as nnf


def selective_scan_fn(
    u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, **options
):
    """u, delta, z (B, D, T), B, C (B, N, T)."""
    dt = delta if delta_bias is None else delta + delta_bias[:, None]
    dt = nnf.softplus(dt) if delta_softplus else dt
    h, out = torch.zeros(len(u), *A.shape, dtype=A.dtype), []
    for t in range(u.shape[2]):
        h = (dt[..., t, None] * A).exp() * h + (dt * u)[..., t, None] * B[:, None, :, t]
        y = (h * C[:, None, :, t]).sum(-1)
        out.append(2 * y.real if y.is_complex() else y)
    y = torch.stack(out, 2) + (0 if D is None else D[:, None] * u)
    y = y if z is None else y * nnf.silu(z)
    return (y, h) if options.get("return_last_state") else y


def mamba_chunk_scan_combined(
    x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, *, dt_softplus=False
):
    """x, z (B, T, H, P), dt (B, T, H), B, C (B, T, G, N)."""
    dt = dt if dt_bias is None else dt + dt_bias
    dt = nnf.softplus(dt) if dt_softplus else dt
    B, C = (w.repeat_interleave(x.shape[2] // w.shape[2], 2) for w in (B, C))
    h, out = torch.zeros(len(x), *x.shape[2:], B.shape[3]), []
    for t in range(x.shape[1]):
        drive = (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        h = (dt[:, t] * A).exp()[..., None, None] * h + drive
        out.append((h * C[:, t, :, None]).sum(-1))
    y = torch.stack(out, 1) + (0 if D is None else D[:, None] * x)
    return y if z is None else y * nnf.silu(z)


def _silu_of_taps(x, weight, bias):
    """x (B, D, T)."""
    past = nnf.pad(x, (weight.shape[1] - 1, 0))
    return nnf.silu(nnf.conv1d(past, weight[:, None], bias, groups=len(weight)))


def causal_conv1d_varlen_states(x, cu_seqlens, state_len):
    """x (total, D)."""
    rows = [x[i:j].T for i, j in itertools.pairwise(cu_seqlens.tolist())]
    return torch.stack([nnf.pad(t, (state_len, 0))[:, -state_len:] for t in rows])


def mamba_inner_fn(
    xz,
    conv1d_weight,
    conv1d_bias,
    x_proj_weight,
    delta_proj_weight,
    out_proj_weight,
    out_proj_bias,
    A,
    D=None,
    delta_bias=None,
):
    """xz (B, 2 D, T)."""
    x, z = xz.chunk(2, 1)
    u = _silu_of_taps(x, conv1d_weight[:, 0], conv1d_bias)
    parts = x_proj_weight @ u
    r, B, C = parts.split([len(parts[0]) - 2 * A.shape[1], A.shape[1], A.shape[1]], 1)
    y = selective_scan_fn(u, delta_proj_weight @ r, A, B, C, D, z, delta_bias, True)
    return nnf.linear(y.mT, out_proj_weight, out_proj_bias)


def mamba_split_conv1d_scan_combined(
    zxbcdt,
    conv1d_weight,
    conv1d_bias,
    dt_bias,
    A,
    D,
    chunk_size,
    *,
    rmsnorm_weight,
    outproj_weight,
    headdim,
    norm_before_gate=True,
):
    """zxbcdt (B, T, 2 H P + 2 N + H), one group."""
    inner = len(D) * headdim
    states = (len(conv1d_weight) - inner) // 2
    z, xBC, dt = zxbcdt.split([inner, inner + 2 * states, len(D)], -1)
    xBC = _silu_of_taps(xBC.mT, conv1d_weight, conv1d_bias).mT
    x, B, C = xBC.split([inner, states, states], -1)
    x, B, C = (t.unflatten(-1, (-1, size)) for t, size in ((x, headdim), (B, states), (C, states)))
    options = {"dt_bias": dt_bias, "dt_softplus": True}
    y = mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, D, **options).flatten(2)
    y = y if norm_before_gate else y * nnf.silu(z)
    y = nnf.rms_norm(y, (inner,), rmsnorm_weight, 1e-6)
    return (y * nnf.silu(z) if norm_before_gate else y) @ outproj_weight.T


def log_vandermonde_naive(v, x, L):
    return 2 * (v[..., None] * (x[..., None] * torch.arange(L)).exp()).sum(-2).real


def cauchy_naive(v, z, w):
    v, w = (torch.cat((t, t.conj()), -1) for t in (v, w))
    return (v[..., None] / (z - w[..., None])).sum(-2)
