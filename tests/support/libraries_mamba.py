"""What functions of mamba-ssm and state-spaces/s4 compute, see libraries.py."""

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


def log_vandermonde_naive(v, x, L):
    return 2 * (v[..., None] * (x[..., None] * torch.arange(L)).exp()).sum(-2).real


def cauchy_naive(v, z, w):
    v, w = (torch.cat((t, t.conj()), -1) for t in (v, w))
    return (v[..., None] / (z - w[..., None])).sum(-2)
