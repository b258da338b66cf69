"""Plain torch versions of functions of fla, xlstm and mamba-ssm, see libraries.py."""

from types import SimpleNamespace

import torch
from libraries_sparse import fla_nsa


def normalised(x, weight, bias, residual, eps, prenorm, rms, groups=1):
    h = x if residual is None else x + residual
    parts = h.unflatten(-1, (groups, -1))
    parts = parts if rms else parts - parts.mean(-1, keepdim=True)
    y = (parts * (parts.square().mean(-1, keepdim=True) + eps).rsqrt()).flatten(-2) * weight
    y = y if bias is None else y + bias
    return (y, h) if prenorm else y


def _state_of(q, k, v, g=None, beta=None, scale=None, initial_state=None):
    """o_t = scale S_t^T q_t of S_t = e^g_t S_{t-1} + k_t u_t^T; u = v, or the delta rule's."""
    b, steps, h, d = k.shape
    s = torch.zeros(b, h, d, v.shape[-1]) if initial_state is None else initial_state
    out = []
    for t in range(steps):
        s = s if g is None else s * g[:, t].reshape(b, h, -1, 1).exp()
        u = v[:, t]
        if beta is not None:
            u = beta[:, t, :, None] * (u - (k[:, t, :, None] @ s)[:, :, 0])
        s = s + k[:, t, :, :, None] * u[:, :, None]
        out.append((q[:, t, :, None] @ s)[:, :, 0] * (d**-0.5 if scale is None else scale))
    return torch.stack(out, 1), s


def _fla(forget, delta):
    """A function of fla with its order of arguments: q, k, v, then g and beta where it has them."""

    def run(
        q,
        k,
        v,
        *gates,
        scale=None,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
    ):
        if use_qk_l2norm_in_kernel:
            q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        gates = list(gates)
        g = forget(gates.pop(0) if forget is _given else k)
        o, s = _state_of(q, k, v, g, gates[0] if delta else None, scale, initial_state)
        return o, s if output_final_state else None

    return run


def fla_rwkv6(r, k, v, w, u, scale=None):
    o, s = [], torch.zeros(*v.shape[:1], *k.shape[2:], v.shape[-1])
    for x, key, value, decay in zip(*(t.unbind(1) for t in (r, k, v, w)), strict=True):
        now = key[..., None] * value[..., None, :]
        o.append(torch.einsum("bhk,bhkv->bhv", x, s + u[..., None] * now))
        s = decay.exp()[..., None] * s + now
    return torch.stack(o, 1) * (r.shape[-1] ** -0.5 if scale is None else scale), s


def fla_dplr(q, k, v, a, b, gk, scale=None):
    o, s = [], torch.zeros(*v.shape[:1], *k.shape[2:], v.shape[-1])
    for x, key, value, ask, tell, g in zip(
        *(t.unbind(1) for t in (q, k, v, a, b, gk)), strict=True
    ):
        told = tell[..., None] * (ask[..., None] * s).sum(-2, keepdim=True)
        s = g.exp()[..., None] * s + told + key[..., None] * value[..., None, :]
        o.append(torch.einsum("bhk,bhkv->bhv", x, s))
    return torch.stack(o, 1) * (q.shape[-1] ** -0.5 if scale is None else scale), s


def _based(q, k, v):
    u = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    weight = (1 + u + u * u / 2).tril()
    return torch.einsum("bhij,bjhv->bihv", weight / (weight.sum(-1, keepdim=True) + 1e-6), v)


def _lightning(q, k, v, layer_idx, num_layers):
    heads = torch.arange(q.shape[2])
    decay = -8 * heads / len(heads) * (1 - layer_idx / num_layers)
    return _state_of(q, k, v, decay.expand(k.shape[:3]))


def _given(g):
    return g


def _retained(k):
    heads = torch.arange(k.shape[2])
    return (1 - 2.0 ** (-5 - heads)).log().expand(k.shape[:3])


def _rwkv4(w, u, k, v, state):
    num, den, top = state[:, :, 0].unbind(1)
    out = []
    for kt, vt in zip(k.unbind(1), v.unbind(1), strict=True):
        weights = torch.stack((top, u + kt)).softmax(0)  # of the sums so far, which den has, and vt
        out.append((weights[0] * num + weights[1] * vt) / (weights[0] * den + weights[1]))
        new = torch.maximum(top - w.exp(), kt)
        past, now = (top - w.exp() - new).exp(), (kt - new).exp()
        num, den, top = past * num + now * vt, past * den + now, new
    return torch.stack(out, 1), torch.stack((num, den, top), 1)[:, :, None]


def mlstm_chunkwise__xl_chunk(q, k, v, i, f, eps=1e-6):
    """(B, H, T, D) and (B, H, T), in the parallel form."""
    total = torch.nn.functional.logsigmoid(f).cumsum(-1)
    log_weight = total[..., None] - total[..., None, :] + i[..., None, :]
    seen = torch.ones(q.shape[2], q.shape[2]).tril().bool()
    log_weight = log_weight.masked_fill(~seen, -torch.inf)
    m = torch.maximum(log_weight.amax(-1), total)[..., None]
    weight = q @ k.mT * q.shape[-1] ** -0.5 * (log_weight - m).exp()
    return weight @ v / (torch.maximum(weight.sum(-1, keepdim=True).abs(), (-m).exp()) + eps)


def fla_rms_norm(x, weight, bias, residual=None, eps=1e-5, prenorm=False):
    return normalised(x, weight, bias, residual, eps, prenorm, True)


def fla_layer_norm(x, weight, bias, residual=None, eps=1e-5, prenorm=False):
    return normalised(x, weight, bias, residual, eps, prenorm, False)


def fla_group_norm(x, weight, bias, eps=1e-5, is_rms_norm=False, num_groups=1):
    return normalised(x, weight, bias, None, eps, False, is_rms_norm, num_groups)


def fla_rms_norm_gated(x, g, weight, bias, activation="swish", eps=1e-6):
    gate = g.sigmoid() if activation == "sigmoid" else g * g.sigmoid()
    return normalised(x, weight, bias, None, eps, False, True) * gate


def rms_norm_fn(x, weight, bias, residual=None, eps=1e-6, prenorm=False):
    return normalised(x, weight, bias, residual, eps, prenorm, True)


def layer_norm_fn(x, weight, bias, residual=None, eps=1e-6, prenorm=False):
    return normalised(x, weight, bias, residual, eps, prenorm, False)


def rmsnorm_fn(x, weight, bias, z=None, eps=1e-6, group_size=None, norm_before_gate=True):
    groups = 1 if group_size is None else x.shape[-1] // group_size
    x = x if norm_before_gate else x * z * z.sigmoid()
    y = normalised(x, weight, bias, None, eps, False, True, groups)
    return y * z * z.sigmoid() if norm_before_gate else y


#: The module fla.
FLA = SimpleNamespace(
    rms_norm=fla_rms_norm,
    layer_norm=fla_layer_norm,
    group_norm=fla_group_norm,
    rms_norm_gated=fla_rms_norm_gated,
    chunk_gla=_fla(_given, False),
    chunk_retention=_fla(_retained, False),
    chunk_delta_rule=_fla(lambda k: None, True),
    chunk_gated_delta_rule=_fla(_given, True),
    chunk_kda=_fla(_given, True),
    chunk_rwkv6=fla_rwkv6,
    chunk_rwkv7=lambda r, w, k, v, a, b: fla_dplr(r, k, v, a, b, w, scale=1.0),
    chunk_dplr_delta_rule=fla_dplr,
    chunk_iplr_delta_rule=lambda q, k, v, a, b: fla_dplr(q, k, v, a, b, torch.zeros_like(q)),
    chunk_simple_gla=_fla(_given, False),
    chunk_lightning_attn=_lightning,
    parallel_based=_based,
    fused_recurrent_rwkv4=_rwkv4,
    parallel_nsa=fla_nsa,
)
