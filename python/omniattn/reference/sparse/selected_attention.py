"""Attention to selected keys: the key of least energy, or listed blocks."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import Unpack

from omniattn.encoding.masks import EncodedMask
from omniattn.encoding.options import Options, SelectedOptions, pack, spelled_out
from omniattn.reference.attention.attention import attend, default_scale, softmax, visible
from omniattn.reference.precision import widen


def select_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    energy: Literal["l2", "dot"] = "l2",
    theta: float = math.inf,
    tau: float = 1.0,
    ste: bool = True,
    scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    mask: Tensor | EncodedMask | None = None,
) -> Tensor:
    """O (B,Tq,Hq,Dv) = v of the key with the least energy E, the first one on ties.

    ``E = scale |q - k|^2 / 2``, or ``-scale q.k``. O is 0 where E exceeds theta or all keys are
    masked. q and k get the gradient of softmax(-E / tau) v if `ste`, else none; v gets the
    gradient of the selection.
    """
    (tq, heads, dim), (tk, kv_heads) = q.shape[1:], k.shape[1:3]
    qw, kw, vw = (widen(t).transpose(1, 2) for t in (q, k, v))
    if kv_heads != heads:
        kw, vw = (t.repeat_interleave(heads // kv_heads, 1) for t in (kw, vw))
    score = qw @ kw.transpose(-1, -2)
    if energy == "l2":
        score = score - (qw.square().sum(-1)[..., None] + kw.square().sum(-1)[..., None, :]) / 2
    score = score * (default_scale(dim) if scale is None else scale)
    i = torch.arange(tk - tq, tk, device=q.device)[:, None]
    distance = torch.arange(tk, device=q.device) - i
    seen = visible(Options(window_size, causal, mask=mask), distance, heads)
    score = score.masked_fill(~seen, -math.inf)
    # NaN is never chosen. The column added at the end keeps max() defined for no keys.
    choices = score.detach().masked_fill(score.isnan(), -math.inf)
    top, index = torch.nn.functional.pad(choices, (0, 1), value=-math.inf).max(-1)
    chosen = (-top <= theta) & (top > -math.inf)
    weights = torch.nn.functional.one_hot(index, tk + 1)[..., :tk].to(vw.dtype)
    out = weights @ vw
    if ste:
        soft = softmax(score / tau, None)[0] @ vw.detach()
        out = out + (soft - soft.detach())
    return out.masked_fill(~chosen[..., None], 0).transpose(1, 2).to(q.dtype)


@spelled_out(SelectedOptions, last=("return_lse", "debug"))
def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    *,
    block_size: int,
    query_block: int = 1,
    causal: bool = False,
    return_lse: bool = False,
    debug: bool = False,
    **options: Unpack[SelectedOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention to the key blocks listed in indices (B|1,1|Hkv|Hq,nq,n); -1 means none.

    Query i uses list i // query_block; block n has the keys [n block_size, (n + 1) block_size).
    """
    record = pack("selected_attention", options, SelectedOptions)._replace(causal=causal)
    if debug:
        require_lists("selected_attention", indices, -(-k.shape[1] // block_size))
    out, lse = attend_to_blocks(q, k, v, indices, block_size, query_block, record)
    return (out, lse) if return_lse else out


def attend_to_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    block_size: int,
    query_block: int,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """Returns O and lse of :func:`selected_attention` with packed options."""
    seen = selected_keys(indices, block_size, query_block, (q.shape[1], k.shape[1]))
    seen = seen.repeat_interleave(q.shape[2] // max(1, seen.shape[1]), 1)
    return attend(q, k, v, options._replace(mask=seen))


def selected_keys(
    indices: Tensor, block_size: int, query_block: int, lengths: tuple[int, int]
) -> Tensor:
    """Returns the mask (B | 1, heads, Tq, Tk) for lists of blocks (B | 1, heads, lists, n)."""
    tq, tk = lengths
    blocks = -(-tk // block_size)
    chosen = torch.zeros(*indices.shape[:3], blocks + 1, dtype=torch.bool, device=indices.device)
    index = indices.long()
    chosen = chosen.scatter(-1, index.masked_fill(index < 0, blocks), 1)[..., :blocks]
    query = torch.arange(tq, device=indices.device) // query_block
    key = torch.arange(tk, device=indices.device) // block_size
    return chosen[:, :, query][..., key]


def require_entries(op: str, indices: Tensor, blocks: int, kind: str = "block") -> None:
    """Requires entries of -1 or in [0, blocks). Synchronizes with the GPU."""
    low, high = (int(t) for t in indices.aminmax()) if indices.numel() else (-1, -1)
    if low < -1 or high >= blocks:
        raise ValueError(
            f"{op}: indices must be -1 or numbers of {kind}s in [0, {blocks}), "
            f"got {low if low < -1 else high}"
        )


def require_lists(op: str, indices: Tensor, blocks: int, kind: str = "block") -> None:
    """Requires entries in range, without duplicates in a list."""
    require_entries(op, indices, blocks, kind)
    ordered = indices.sort(-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    if twice.any():
        place = tuple(twice.any(-1).nonzero()[0].tolist())
        raise ValueError(
            f"{op}: indices must name each {kind} once in a list, "
            f"got indices[{place}]={indices[place].tolist()}"
        )
