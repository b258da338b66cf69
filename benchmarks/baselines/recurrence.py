"""Baselines of recurrences in chunk form: products within chunks, and a loop over chunks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from baselines._common import Function, compiled, lacks

CHUNK = 64
#: Chunk size with decays per channel, where the weights of a chunk have CHUNK^2 K elements.
SMALL_CHUNK = 16


def _chunks(t: Tensor, size: int) -> Tensor:
    """Pads (B, T, H, ...) and splits it into chunks (chunks, B, H, size, ...)."""
    pad = -t.shape[1] % size
    t = F.pad(t, (0, 0) * (t.ndim - 2) + (0, pad)).reshape(t.shape[0], -1, size, *t.shape[2:])
    return t.movedim(1, 0).movedim(3, 2)


def gated(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    *,
    gv: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes linear attention, with decays per head or channel or none, in chunks of 64 or 16."""
    lacks(cu_seqlens=cu_seqlens is not None, grouped=q.shape[2] != v.shape[2], empty=v.numel() == 0)
    lacks(gv=gv is not None)
    (b, steps, h, d), dtype = q.shape, v.dtype
    size = chunk or (SMALL_CHUNK if g is not None and g.ndim == 4 else CHUNK)
    q, k, v = (_chunks(t.float() if dtype != torch.float64 else t, size) for t in (q, k, v))
    q = q * (d**-0.5 if scale is None else scale)
    state = q.new_zeros(b, h, d, v.shape[-1]) if initial_state is None else initial_state.to(q)
    seen = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    if g is None:
        weight = (q @ k.mT) * seen
        read, kept, end = q, k, None
    else:
        total = _chunks(g.to(q), size).cumsum(3)
        if g.ndim == 4:
            gap = total[..., :, None, :] - total[..., None, :, :]
            decay = gap.masked_fill(~seen[..., None], -torch.inf).exp()
            weight = torch.einsum("nbhid,nbhjd,nbhijd->nbhij", q, k, decay)
        else:
            total = total[..., None]
            decay = (total - total.mT).masked_fill(~seen, -torch.inf).exp()
            weight = (q @ k.mT) * decay
        last = total[..., -1:, :]
        read, kept, end = q * total.exp(), k * (last - total).exp(), last.mT.exp()
    inside, added, out = weight @ v, kept.mT @ v, []
    for n in range(len(q)):
        out.append(inside[n] + read[n] @ state)
        state = (state if end is None else state * end[n]) + added[n]
    if not out:
        return v.new_zeros(b, 0, h, v.shape[-1]).to(dtype), state
    o = torch.stack(out, 1).movedim(2, 3).flatten(1, 2)[:, :steps]
    return o.to(dtype), state


def retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    gamma: Tensor | None = None,
    normalize: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    if normalize:
        raise NotImplementedError("it has no running sum")
    if gamma is None:
        gamma = 1 - torch.exp2(-5 - torch.arange(v.shape[2], device=v.device).double())
    return gated(q, k, v, gamma.log().expand(v.shape[:3]), **options)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: str = "elu1",
    causal: bool = True,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk: int | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Computes normalised linear attention with features elu(x) + 1."""
    lacks(feature_map=feature_map != "elu1", causal=not causal, options=bool(options))
    ones, dtype = v.new_ones(*v.shape[:3], 1), v.dtype
    q, k = F.elu(q) + 1, F.elu(k) + 1
    o, state = gated(
        q,
        k,
        torch.cat((v, ones), -1),
        scale=1.0,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        chunk=chunk,
    )
    return (o[..., :-1] / o[..., -1:]).to(dtype), state


def random_feature_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    *,
    S: Tensor | None = None,
    M: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, ...]:
    """Uses positive features with one maximum over all keys, as performer-pytorch, in chunks."""
    lacks(initial_state=S is not None, options=bool(options), empty=v.numel() == 0)
    lacks(cu_seqlens=cu_seqlens is not None)
    dtype, ones = v.dtype, v.new_ones(*v.shape[:3], 1)
    q, k = ((t.float() if dtype != torch.float64 else t) * q.shape[-1] ** -0.25 for t in (q, k))
    w = weight.to(q.dtype).T
    a_q, a_k = (t @ w - t.square().sum(-1, keepdim=True) / 2 for t in (q, k))
    top = a_k.detach().amax(1, keepdim=True)
    phi_q = (a_q + top - (a_q + top).detach().amax(-1, keepdim=True)).exp()
    o, state = gated(phi_q, (a_k - top).exp(), torch.cat((v, ones), -1), scale=1.0)
    return (o[..., :-1] / o[..., -1:]).to(dtype), state * top[:, 0].exp()[..., None]


def rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes gated linear attention with queries one token early, plus the token's own term."""
    lacks(initial_state=initial_state is not None, constant=w.ndim == 2)
    early = F.pad(r[:, 1:], (0, 0, 0, 0, 0, 1))
    past, state = gated(early, k, v, w, scale=scale, cu_seqlens=cu_seqlens)
    own = (r * k * u).sum(-1, keepdim=True) * v * scale
    return (F.pad(past[:, :-1], (0, 0, 0, 0, 1, 0)) + own).to(v.dtype), state


def dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes the scores of all chunks at once, then solves a triangular system per chunk."""
    lacks(
        cu_seqlens=cu_seqlens is not None,
        grouped=q.shape[2] != v.shape[2],
        empty=v.numel() == 0,
        heads=g.ndim == 3,
    )
    (batch, steps, h, d), dtype = q.shape, v.dtype
    rows = (t.float() if dtype != torch.float64 else t for t in (q, k, v, a, b, g))
    q, k, v, a, b, g = (_chunks(t, SMALL_CHUNK) for t in rows)
    q = q * (d**-0.5 if scale is None else scale)
    total = g.cumsum(3)
    seen = torch.ones(SMALL_CHUNK, SMALL_CHUNK, dtype=torch.bool, device=q.device).tril()

    def scores(rows: Tensor, reach: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        gap = reach[..., :, None, :] - total[..., None, :, :]
        weights = rows[..., :, None, :] * gap.masked_fill(~seen[..., None], -torch.inf).exp()
        of_k, of_b = (torch.einsum("nbhijd,nbhjd->nbhij", weights, key) for key in (k, b))
        return of_k, of_b

    reads_k, reads_b = scores(q, total, seen)
    asks_k, asks_b = scores(a, total - g, seen.tril(-1))
    last = total[..., -1:, :]
    read, ask, end = q * total.exp(), a * (total - g).exp(), last.mT.exp()
    kept_k, kept_b = ((t * (last - total).exp()).mT for t in (k, b))
    known, system = asks_k @ v, torch.eye(SMALL_CHUNK).to(q) - asks_b
    state = q.new_zeros(batch, h, d, v.shape[-1]) if initial_state is None else initial_state.to(q)
    out = []
    for n in range(len(q)):
        c = torch.linalg.solve_triangular(
            system[n], known[n] + ask[n] @ state, upper=False, unitriangular=True
        )
        out.append(read[n] @ state + reads_k[n] @ v[n] + reads_b[n] @ c)
        state = state * end[n] + kept_k[n] @ v[n] + kept_b[n] @ c
    o = torch.stack(out, 1).movedim(2, 3).flatten(1, 2)[:, :steps]
    return o.to(dtype), state


def rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    scale: float = 1.0,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    return dplr_delta_rule(r, k, v, a, b, w, scale=scale, **options)


def _transformers(model: str, name: str, step: str) -> Function:
    """Returns the chunk form of a transformers model, with its step form for single tokens."""

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        l2norm: bool = False,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        from importlib import import_module

        lacks(
            scale=scale is not None,
            cu_seqlens=cu_seqlens is not None,
            grouped=q.shape[2] != v.shape[2],
            empty=v.numel() == 0,
            float64=v.dtype == torch.float64,
        )
        module = import_module(f"transformers.models.{model}.modeling_{model}")
        o, state = getattr(module, step if v.shape[1] == 1 else name)(
            q,
            k,
            v,
            g=g,
            beta=beta.to(q),
            initial_state=initial_state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=l2norm,
        )
        return o, state

    return run


GATED_DELTA_RULE = _transformers(
    "qwen3_next", "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"
)
KIMI_DELTA_ATTENTION = _transformers(
    "kimi_linear", "chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"
)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    return GATED_DELTA_RULE(q, k, v, torch.zeros_like(beta), beta, **options)


def gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Computes the gated delta rule of transformers, with a token for each update."""
    lacks(cu_seqlens=cu_seqlens is not None, decays=g is None or g.ndim == 4)
    assert g is not None
    n = k.shape[2]
    q, g = F.pad(q[:, :, None], (0, 0, 0, 0, n - 1, 0)), F.pad(g[:, :, None], (0, 0, 0, n - 1))
    o, state = GATED_DELTA_RULE(*(t.flatten(1, 2) for t in (q, k, v, g, beta)), **options)
    return o[:, n - 1 :: n], state


def comba(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    l2norm: bool = False,
    erase_decayed: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    lacks(l2norm=l2norm, heads=g.ndim == 3, erase_decayed=erase_decayed)
    lacks(grouped=q.shape[2] != v.shape[2])
    beta = beta[..., None]
    return dplr_delta_rule(q, k, beta * v, beta * p, -k, g, **options)


def gated_delta_rule_2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    *,
    l2norm: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    lacks(l2norm=l2norm, heads=g.ndim == 3, grouped=q.shape[2] != v.shape[2])
    return dplr_delta_rule(q, k, w * v, g.exp() * b * k, -k, g, **options)


def preconditioned_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    g_atk: Tensor,
    beta_atk: Tensor,
    log_atk_scale: Tensor,
    *,
    l2norm: bool = False,
    x: float = 1.5,
    eps: float = 1e-6,
    scale: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the mean squares of keys as a linear attention with one key, and a DPLR rule."""
    lacks(**options, l2norm=l2norm, heads=g.ndim == 3, grouped=q.shape[2] != v.shape[2])
    one = torch.ones_like(k[..., :1])
    squares, last = gated(one, one, beta_atk[..., None] * k.square(), g_atk, scale=1.0)
    r = (squares + eps).log() - log_atk_scale[:, None]
    written = k * x ** (-r / (1 + r.abs()))
    beta = beta[..., None]
    o, state = dplr_delta_rule(q, written, beta * v, g.exp() * beta * k, -written, g, scale=scale)
    return o, state, last[:, :, 0]


BASELINES = {
    "linear_attention": {"aten": linear_attention, "compiled": compiled(linear_attention)},
    "gated_linear_attention": {"aten": gated, "compiled": compiled(gated)},
    "random_feature_attention": {"aten": random_feature_attention},
    "retention": {"aten": retention, "compiled": compiled(retention)},
    "delta_rule": {"hf": delta_rule},
    "dplr_delta_rule": {"aten": dplr_delta_rule, "compiled": compiled(dplr_delta_rule)},
    "rwkv6": {"aten": rwkv6, "compiled": compiled(rwkv6)},
    "rwkv7": {"aten": rwkv7, "compiled": compiled(rwkv7)},
    "gated_delta_rule": {"hf": GATED_DELTA_RULE},
    "comba": {"aten": comba},
    "gated_delta_rule_2": {"aten": gated_delta_rule_2},
    "preconditioned_delta_rule": {"aten": preconditioned_delta_rule},
    "gated_delta_product": {"hf": gated_delta_product},
    "kimi_delta_attention": {"hf": KIMI_DELTA_ATTENTION},
}
