"""Attention with products of Householder-like matrices between keys and queries (PaTH)."""

from __future__ import annotations

import torch
from torch import Tensor

from omniattn.compositions.attention.halving import (
    Blocks,
    Carry,
    Tokens,
    attend,
    before,
    blocks_of,
    join_all,
)
from omniattn.ops.recurrence import recurrence
from omniattn.reference.attention.forgetting import LEAST_LOG_GATE
from omniattn.reference.limits import clamp
from omniattn.reference.precision import compute_dtype

__all__ = ["path_attention"]

#: Number of tokens of the smallest blocks, whose logits are a tensor.
_BLOCK = 64


def _queries(q: Tensor, through: Tensor) -> Tensor:
    carried: Tensor = q.flatten(2, 3) @ through
    return carried.unflatten(2, q.shape[2:4])


def _keys(k: Tensor, through: Tensor) -> Tensor:
    carried: Tensor = k.squeeze(3) @ through.mT
    return carried.unsqueeze(3)


#: `through` is (B, n, D, D), and Hkv is 1.
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
    return_keys: bool,
) -> tuple[Tensor, Tensor]:
    """Computes path attention of the last T of Tk tokens; returns out and the carried keys.

    Args:
        q: (B, T, Hq, D).
        k, v: (B, Tk, Hkv, D), (B, Tk, Hkv, Dv); the keys before the T tokens are carried to them.
        w, beta: (B, T, Hkv, D), (B, T, Hkv).
        g: log gates (B, Tk, Hq).
        ids: numbers of the tokens' sequences (1, T), if Tk = T and B = 1.
        scale: factor of the products.
        return_keys: False if the returned keys are not used.
    """
    dtype, (batch, steps), kv_heads = v.dtype, q.shape[:2], k.shape[2]
    past = k.shape[1] - steps
    q, k, v, w, beta = (t.to(compute_dtype(v)) for t in (q, k, v, w, beta))
    gates = None if g is None else clamp(g.double(), LEAST_LOG_GATE).cumsum(1)
    gates = None if gates is None else _rows(gates.unsqueeze(3), kv_heads).squeeze(3)
    q, k, v, w = (_rows(t, kv_heads) for t in (q, k, v, w))
    beta = _rows(beta.unsqueeze(3), kv_heads).squeeze(3)
    ids = None if ids is None else ids.expand(kv_heads, -1)
    new = Tokens(v, ids, gates).map(lambda t: t[:, past:])
    size = min(_BLOCK, steps)

    def in_blocks(t: Tensor) -> Tensor:
        pad = (*(0, 0) * (t.dim() - 2), 0, -steps % size)
        return blocks_of(torch.nn.functional.pad(t, pad), size)

    q, own, w_blocks, beta_blocks = (in_blocks(t) for t in (q, k[:, past:], w, beta))
    blocks = _within(q, own, w_blocks, beta_blocks, new.map(in_blocks), scale)
    whole = join_all(blocks, CARRY, scale, past > 0 or return_keys)
    keys, out = k[:, None, :past], whole.out
    if past > 0:
        old = Tokens(v, ids, gates).map(lambda t: t[:, None, :past])
        out = before(whole, keys, old, scale)[0]
        # One token costs less by its vector than by its matrix.
        keys = _keys(keys, whole.through) if steps > 1 else _reflected(keys, w, beta)
    keys = torch.cat([keys[:, 0], whole.k[:, 0, :steps]], 1) if past or return_keys else k
    out = _of_rows(out[:, 0, :steps], batch)
    return out.to(dtype), _of_rows(keys, batch).to(dtype)


def _rows(t: Tensor, kv_heads: int) -> Tensor:
    """Converts (B, T, Hkv G, D) to (B Hkv, T, G, D), so that products read it in place."""
    return t.unflatten(2, (kv_heads, -1)).transpose(1, 2).flatten(0, 1)


def _of_rows(t: Tensor, batch: int) -> Tensor:
    return t.unflatten(0, (batch, -1)).transpose(1, 2).flatten(2, 3)


def _reflected(k: Tensor, w: Tensor, beta: Tensor) -> Tensor:
    """Applies the matrix of one token to keys (B, 1, S, 1, D)."""
    w, beta = w[:, None], beta[:, None, ..., None]
    return k - (k * w).sum(-1, keepdim=True) * (beta * w)


def _within(q: Tensor, k: Tensor, w: Tensor, beta: Tensor, tokens: Tokens, scale: float) -> Blocks:
    """Computes blocks of S tokens by a delta rule whose values have S + D columns.

    With keys w, a state that starts from 0 and I, and the products w_t k_j for j < t as values,
    the outputs are ``q_i (1 - M_i ... M_(j+1)) k_j`` and the carried queries. The final state holds
    the differences of the carried keys from the keys, and the product of all matrices.
    """
    rows, blocks, size, group, dim = q.shape
    products = (w.squeeze(3) @ k.squeeze(3).mT).tril(-1)
    values = torch.nn.functional.pad(products, (0, dim)).unsqueeze(3)
    eye = torch.eye(dim, dtype=q.dtype, device=q.device)
    start = torch.nn.functional.pad(eye, (size, 0))
    start = start.expand(rows * blocks, group, dim, size + dim)
    key, values = (t.expand(-1, -1, -1, group, -1).flatten(0, 1) for t in (w, values))
    beta = beta.expand(-1, -1, -1, group).flatten(0, 1)
    nothing = (None,) * 6
    o, state = recurrence(
        *(q.flatten(0, 1), key, values, None, beta, *nothing),
        *(start, None, 1.0, True, 0, False, 0.0, False),
    )
    bias = -scale * o[..., :size].transpose(1, 2)
    if tokens.gates is not None:
        c = tokens.gates.flatten(0, 1).transpose(1, 2)
        bias = bias + (c[..., None] - c[..., None, :]).to(bias.dtype)
    out, lse = attend(q, k, tokens.v, scale, causal=True, bias=bias, ids=(tokens.ids, tokens.ids))
    state = state[:, 0].unflatten(0, (rows, blocks))
    carried = k - state[..., :size].mT.unsqueeze(3)
    queries = o[..., size:].unflatten(0, (rows, blocks))
    return Blocks(tokens, queries, carried, state[..., size:], out, lse)
