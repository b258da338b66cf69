"""Attention whose products of q and k decay by a gate for each channel (wall attention)."""

from __future__ import annotations

import torch
from torch import Tensor

from omniattn.compositions.attention.halving import (
    Blocks,
    Carry,
    Tokens,
    before,
    blocks_of,
    join_all,
)
from omniattn.reference.attention.forgetting import LEAST_LOG_GATE
from omniattn.reference.limits import clamp
from omniattn.reference.precision import compute_dtype

__all__ = ["wall_attention"]

#: Number of tokens of the smallest blocks, whose logits are a tensor; a power of 2.
_BLOCK = 16


def _decayed(t: Tensor, through: Tensor) -> Tensor:
    return t * through[:, :, None]


#: `through` is (B, n, Hq, D).
CARRY = Carry(_decayed, _decayed, torch.mul)


def wall_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    g_scalar: Tensor | None,
    sinks: Tensor | None,
    ids: Tensor | None,
    scale: float,
    return_keys: bool,
) -> tuple[Tensor, Tensor]:
    """Computes wall attention of the last T of Tk tokens; returns out and the decayed keys.

    Args:
        q, g: (B, T, Hq, D), g logarithms of the decays.
        k, v: (B, Tk, Hkv, D), (B, Tk, Hkv, Dv); the keys before the T tokens are decayed to them,
            and then Hkv = Hq.
        g_scalar: log gates (B, Tk, Hq).
        sinks: logits (Hq,) of keys without values.
        ids: numbers of the tokens' sequences (B, T), if Tk = T.
        scale: factor of the products.
        return_keys: False if the returned keys are not used.
    """
    dtype, steps = v.dtype, q.shape[1]
    q, k, v, g = (t.to(compute_dtype(v)) for t in (q, k, v, g))
    k, v = (_repeated(t, q.shape[2]) for t in (k, v))
    past = k.shape[1] - steps
    gates = None if g_scalar is None else clamp(g_scalar.double(), LEAST_LOG_GATE).cumsum(1)
    new = Tokens(v, ids, gates).map(lambda t: t[:, past:])
    keys = k[:, None, :past]
    size = min(_BLOCK, 1 << (int(steps) - 1).bit_length())

    def in_blocks(t: Tensor, value: float = 0.0) -> Tensor:
        pad = (*(0, 0) * (t.dim() - 2), 0, -steps % size)
        return blocks_of(torch.nn.functional.pad(t, pad, value=value), size)

    decay = in_blocks(clamp(g, LEAST_LOG_GATE).exp(), 1.0)
    rows = in_blocks(q), in_blocks(k[:, past:]), decay
    blocks = _within(*rows, new.map(in_blocks), scale)
    whole = join_all(blocks, CARRY, scale, past > 0 or return_keys)
    out, lse = whole.out, whole.lse
    if past > 0:
        old = Tokens(v, ids, gates).map(lambda t: t[:, None, :past])
        out, lse = before(whole, keys, old, scale)
        keys = _decayed(keys, whole.through)
    if sinks is not None:
        out = out * (lse - torch.logaddexp(lse, sinks.to(lse.dtype))).exp()[..., None]
    keys = torch.cat([keys[:, 0], whole.k[:, 0, :steps]], 1) if past or return_keys else k
    return out[:, 0, :steps].to(dtype), keys.to(dtype)


def _repeated(t: Tensor, heads: int) -> Tensor:
    """Repeats the heads of (B, T, Hkv, D), since the decays of each query head change its keys."""
    return t if t.shape[2] == heads else t.repeat_interleave(heads // t.shape[2], 2)


def _within(q: Tensor, k: Tensor, decay: Tensor, tokens: Tokens, scale: float) -> Blocks:
    """Computes blocks of S tokens from S blocks of one token, by halves, too.

    Each factor is a product of decays. Differences of sums of their logarithms would lose digits.
    """
    size = q.shape[2]
    logits = (q * k).sum(-1)[:, :, :, :, None, None]  # (B, n, blocks, H, s, s)
    q, k, through = (q * decay)[:, :, :, None], k[:, :, :, None], decay
    while q.shape[2] > 1:
        (ql, qr), (kl, kr), (dl, dr), (upper, lower) = (
            (t[:, :, 0::2], t[:, :, 1::2]) for t in (q, k, through, logits)
        )
        cross = torch.einsum("bnmshd,bnmthd->bnmhst", qr, kl)
        upper = torch.nn.functional.pad(upper, (0, cross.shape[-1]))
        logits = torch.cat([upper, torch.cat([cross, lower], -1)], -2)
        q = torch.cat([ql, qr * dl[:, :, :, None]], 3)
        k = torch.cat([kl * dr[:, :, :, None], kr], 3)
        through = dl * dr
    logits = scale * logits[:, :, 0]
    if tokens.gates is not None:
        c = tokens.gates.transpose(2, 3)
        logits = logits + (c[..., None] - c[..., None, :]).to(logits.dtype)
    seen = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    if tokens.ids is not None:
        seen = seen & (tokens.ids[..., None] == tokens.ids[..., None, :])[:, :, None]
    logits = logits.masked_fill(~seen, -torch.inf)
    out = torch.einsum("bnhst,bnthd->bnshd", logits.softmax(-1), tokens.v)
    lse = logits.logsumexp(-1).transpose(2, 3)
    return Blocks(tokens, q[:, :, 0], k[:, :, 0], through[:, :, 0], out, lse)
