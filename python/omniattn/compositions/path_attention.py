"""Attention with products of Householder-like matrices between keys and queries (PaTH)."""

from __future__ import annotations

import torch
from torch import Tensor

from omniattn.compositions.halving import (
    Blocks,
    Carry,
    Tokens,
    attend,
    before,
    blocks_of,
    join_all,
)
from omniattn.ops.recurrence import recurrence
from omniattn.reference.forgetting import LEAST_LOG_GATE
from omniattn.reference.limits import clamp
from omniattn.reference.precision import compute_dtype

__all__ = ["path_attention"]

#: Number of tokens of the smallest blocks, whose logits are a tensor.
_BLOCK = 64


def _queries(q: Tensor, through: Tensor) -> Tensor:
    grouped = q.unflatten(3, (through.shape[2], -1))
    return torch.einsum("bnshgd,bnhde->bnshge", grouped, through).flatten(3, 4)


def _keys(k: Tensor, through: Tensor) -> Tensor:
    return torch.einsum("bnshe,bnhde->bnshd", k, through)


#: `through` is (B, n, Hkv, D, D).
CARRY = Carry(_queries, _keys, torch.matmul)


def path_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    g: Tensor | None,
    ids: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Computes path attention of the last T of Tk tokens; returns out and the carried keys.

    Args:
        q: (B, T, Hq, D).
        k, v: (B, Tk, Hkv, D), (B, Tk, Hkv, Dv); the keys before the T tokens are carried to them.
        w, beta: (B, T, Hkv, D), (B, T, Hkv).
        g: log gates (B, Tk, Hq).
        ids: numbers of the tokens' sequences (B, T), if Tk = T.
        scale: factor of the products.
    """
    dtype, steps = v.dtype, q.shape[1]
    q, k, v, w, beta = (t.to(compute_dtype(v)) for t in (q, k, v, w, beta))
    past = k.shape[1] - steps
    if steps == 0:
        return attend(q[:, None], k[:, None], v[:, None], scale)[0][:, 0].to(dtype), k.to(dtype)
    gates = None if g is None else clamp(g.double(), LEAST_LOG_GATE).cumsum(1)
    new = Tokens(v, ids, gates).map(lambda t: t[:, past:])
    size = min(_BLOCK, steps)

    def in_blocks(t: Tensor) -> Tensor:
        pad = (*(0, 0) * (t.dim() - 2), 0, -steps % size)
        return blocks_of(torch.nn.functional.pad(t, pad), size)

    rows = (in_blocks(t) for t in (q, k[:, past:], w, beta))
    whole = join_all(_within(*rows, new.map(in_blocks), scale), CARRY, scale)
    keys = k[:, None, :past]
    out = whole.out
    if past > 0:
        old = Tokens(v, ids, gates).map(lambda t: t[:, None, :past])
        out = before(whole, keys, old, scale)[0]
        # One token costs less by its vector than by its matrix.
        keys = _keys(keys, whole.through) if steps > 1 else _reflected(keys, w, beta)
    keys = torch.cat([keys[:, 0], whole.k[:, 0, :steps]], 1)
    return out[:, 0, :steps].to(dtype), keys.to(dtype)


def _reflected(k: Tensor, w: Tensor, beta: Tensor) -> Tensor:
    """Applies the matrix of one token to keys (B, 1, S, H, D)."""
    w, beta = w[:, None], beta[:, None, ..., None]
    return k - (k * w).sum(-1, keepdim=True) * (beta * w)


def _within(q: Tensor, k: Tensor, w: Tensor, beta: Tensor, tokens: Tokens, scale: float) -> Blocks:
    """Computes blocks of S tokens by a delta rule whose values have S + D columns.

    With keys w, a state that starts from 0 and I, and the products w_t k_j for j < t as values,
    the outputs are ``q_i (1 - M_i ... M_(j+1)) k_j`` and the carried queries. The final state holds
    the differences of the carried keys from the keys, and the product of all matrices.
    """
    rows, blocks, size, heads, dim = q.shape
    group = heads // k.shape[3]
    before_key = torch.ones(size, size, dtype=torch.bool, device=q.device).tril(-1)
    products = torch.einsum("bnthd,bnjhd->bnthj", w, k)
    products = products.masked_fill(~before_key[:, None], 0)
    values = torch.cat([products, torch.zeros_like(w)], -1)
    eye = torch.eye(dim, dtype=q.dtype, device=q.device)
    start = torch.nn.functional.pad(eye, (size, 0))
    start = start.expand(rows * blocks, heads, dim, size + dim)
    key, values, beta = (_repeated(t, group).flatten(0, 1) for t in (w, values, beta))
    nothing = (None,) * 5
    o, state = recurrence(
        *(q.flatten(0, 1), key, values, None, beta, *nothing),
        *(start, None, 1.0, True, 0, False, 0.0, False),
    )
    bias = -scale * o[..., :size].transpose(1, 2)
    if tokens.gates is not None:
        c = tokens.gates.flatten(0, 1).transpose(1, 2)
        bias = bias + (c[..., None] - c[..., None, :]).to(bias.dtype)
    out, lse = attend(q, k, tokens.v, scale, causal=True, bias=bias, ids=(tokens.ids, tokens.ids))
    state = state[:, ::group].unflatten(0, (rows, blocks))
    carried = k - state[..., :size].movedim(-1, 2)
    queries = o[..., size:].unflatten(0, (rows, blocks))
    return Blocks(tokens, queries, carried, state[..., size:], out, lse)


def _repeated(t: Tensor, group: int) -> Tensor:
    """Repeats the heads of (B, n, S, H, ...) for the query heads of their group."""
    return t if group == 1 else t.repeat_interleave(group, 3)
