"""Attention to key blocks selected by block scores: MoBA, NSA."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from typing_extensions import Unpack

from omniattn.encoding.options import FormOptions, ScoreOptions, pack, spelled_out
from omniattn.reference.attention.attention import attend, attention_weights
from omniattn.reference.layers.topk import top_k
from omniattn.reference.precision import widen
from omniattn.reference.sparse.selected_attention import attend_to_blocks


def positions(tq: int, tk: int, device: torch.device) -> Tensor:
    """Returns each query's position among the keys."""
    return torch.arange(tq, device=device) + tk - tq


@spelled_out(FormOptions)
def moba_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_size: int,
    topk: int,
    block_keys: Tensor | None = None,
    **options: Unpack[FormOptions],
) -> Tensor:
    """q (B,Tq,Hq,D), k (B,Tk,Hkv,D), v (B,Tk,Hkv,Dv) -> O (B,Tq,Hq,Dv).

    Causal. Each query and head sees its own block and the topk - 1 earlier blocks with the largest
    product of q and the block's mean key.
    """
    record = pack("moba_attention", options, FormOptions)
    ends = positions(q.shape[1], k.shape[1], q.device)
    means = block_means(k, block_size) if block_keys is None else block_keys
    scores, past = moba_scores(q, means, ends, k.shape[1], block_size)
    _, index = top_k(scores, min(topk, scores.shape[-1]), mask=past)
    return attend_to_blocks(q, k, v, index, block_size, 1, record._replace(causal=True))[0]


def block_means(k: Tensor, block_size: int) -> Tensor:
    """Returns the means (B,blocks,Hkv,D) of complete blocks of k, without gradient."""
    if k.shape[1] < block_size:
        return widen(k.detach())[:, :0]
    return widen(k.detach()).unfold(1, block_size, block_size).mean(-1)


def moba_scores(
    q: Tensor, means: Tensor, ends: Tensor, tk: int, block_size: int
) -> tuple[Tensor, Tensor]:
    """Returns q . mean (B,Hq,Tq,blocks), and the mask of candidate blocks for queries at `ends`.

    The own block scores inf, and needs no mean.
    """
    blocks = -(-tk // block_size)
    means = means.repeat_interleave(q.shape[2] // max(means.shape[2], 1), 2)
    scores = widen(q.detach()).transpose(1, 2) @ means.permute(0, 2, 3, 1)
    scores = torch.nn.functional.pad(scores, (0, blocks - means.shape[1]))
    block, own = torch.arange(blocks, device=q.device), ends[:, None] // block_size
    past = (block <= own).expand(scores.shape)
    return scores.masked_fill(block == own, torch.inf), past


@spelled_out(FormOptions)
def nsa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_compressed: Tensor,
    v_compressed: Tensor,
    gates: Tensor,
    *,
    k_window: Tensor | None = None,
    v_window: Tensor | None = None,
    compress_size: int = 32,
    compress_stride: int = 16,
    block_size: int = 64,
    topk: int = 16,
    window: int = 512,
    **options: Unpack[FormOptions],
) -> Tensor:
    """Sum of gates (B,Tq,Hq,3) times attention to compressed keys, selected blocks and a window.

    Compressed key n (B,N,Hkv,.) stands for `compress_size` keys from n compress_stride on. Dropout
    in each branch is by the branch's own query and key indices.
    """
    record = pack("nsa_attention", options, FormOptions)
    k_window, v_window = (
        (k if k_window is None else k_window),
        (v if v_window is None else v_window),
    )
    tq, tk = q.shape[1], k.shape[1]
    ends = positions(tq, tk, q.device)
    seen = compressed_mask(ends, k_compressed.shape[1], compress_size, compress_stride)
    compressed, lse = attend(q, k_compressed, v_compressed, record._replace(mask=seen))
    with torch.no_grad():
        wide = widen(q), widen(k_compressed)
        scores_of: ScoreOptions = {"scale": record.scale, "softcap": record.softcap}
        p = attention_weights(*wide, lse, group_sums=True, mask=seen, **scores_of)
        scores, past = nsa_scores(p, ends, tk, compress_size, compress_stride, block_size)
        _, index = top_k(scores, min(topk, scores.shape[-1]), mask=past)
    record = record._replace(causal=True)
    selected, _ = attend_to_blocks(q, k, v, index, block_size, 1, record)
    near, _ = attend(q, k_window, v_window, record._replace(window_size=(window - 1, 0)))
    branches = torch.stack([widen(x) for x in (compressed, selected, near)], -1)
    return (branches * widen(gates)[..., None, :]).sum(-1).to(q.dtype)


def compressed_mask(ends: Tensor, count: int, size: int, stride: int) -> Tensor:
    """Returns (Tq, count): True if all tokens of a compressed key are at positions <= `ends`."""
    last = torch.arange(count, device=ends.device) * stride + size - 1
    return last <= ends[:, None]


def nsa_scores(
    p: Tensor, ends: Tensor, tk: int, size: int, stride: int, block_size: int
) -> tuple[Tensor, Tensor]:
    """Computes block scores (B,Hkv,Tq,blocks) from weights p (B,Hkv,Tq,N) of compressed keys, and
    the mask of candidate blocks.

    A compressed key adds its weight to a block once for each stride that both contain. The first
    block, the own block and the one before it score inf.
    """
    per_key, per_block = size // stride, block_size // stride
    blocks = -(-tk // block_size)
    # overlap[j, n]: number of strides that the key which begins at stride j of a block has in the
    # n-th block after it.
    reach = (per_block + per_key - 2) // per_block
    j = torch.arange(per_block, device=p.device)[:, None]
    begin = torch.arange(reach + 1, device=p.device) * per_block
    overlap = torch.minimum(j + per_key, begin + per_block) - torch.maximum(j, begin)
    strides = blocks * per_block
    missing = strides - p.shape[-1] if isinstance(tk, int) else strides + 1  # no sign of a symbol
    p = torch.nn.functional.pad(p, (reach * per_block, missing))
    overlap = overlap.clamp(min=0).to(p.dtype)
    parts = [
        p[..., (reach - n) * per_block :][..., :strides].unflatten(-1, (blocks, per_block))
        @ overlap[:, n]
        for n in range(reach + 1)
    ]
    scores = functools.reduce(torch.add, parts)
    block, own = torch.arange(blocks, device=p.device), ends[:, None] // block_size
    forced = (block == 0) | (block == own) | (block == own - 1)
    past = (block <= own).expand(scores.shape)
    return scores.masked_fill(forced & (block <= own), torch.inf), past
