"""BigBird's attention: global, window and random blocks."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from omniattn import reference
from omniattn.checks.arguments import (
    is_traced,
    require_bool,
    require_device,
    require_int,
    require_integers,
    require_shape,
    use_reference,
)
from omniattn.encoding.options import ScoreOptions, pack, spelled_out
from omniattn.functional.attention._common import autocast, check_shapes
from omniattn.functional.attention.attention import attention
from omniattn.functional.attention.lse import merge_attention
from omniattn.functional.masks import All, Blocks, BoolMask, Causal, KeyPadding, Mask
from omniattn.functional.masks.blocks import blocks_of_rows
from omniattn.functional.sparse._common import require_real, score_options
from omniattn.reference.layers import philox
from omniattn.reference.precision import widen

__all__ = ["bigbird_attention", "bigbird_random_blocks"]

_WORD = 0x00B16B1D  # counter word 3 of the random numbers
_DRAWS = 4096  # maximum number of picks per draw


def bigbird_random_blocks(
    blocks: int, heads: int, n_random: int, seed: int, *, draw: int = 0, causal: bool = False
) -> Tensor:
    """Returns BigBird's random key blocks, a function of the seed.

    Query block I draws `n_random` different blocks from 1 .. blocks - 2 except I - 1, I and I + 1,
    if causal only from the blocks before it; all if there are fewer. Pick m is at place
    ``floor(u n / 2^32)`` of the n blocks that are left, in ascending order at first; the last one
    then takes its place. u is the first word of Philox with the seed as its key and the counter
    (4096 draw + m, I, h, 0xB16B1D).

    Args:
        blocks: number of blocks of queries, and of keys.
        heads: number of query heads.
        n_random: at most 4096.
        seed: 64 bits.
        draw: index of the draw, to vary blocks between layers or steps.
        causal: only blocks before the query's.

    Returns:
        (heads, blocks - 2, n_random) int64 of the query blocks 1 .. blocks - 2, -1 for none.

    Raises:
        TypeError, ValueError: a number that does not fit.

    Reference:
        Zaheer et al., Big Bird: Transformers for Longer Sequences, 2020, arXiv:2007.14062.

    Example:
        >>> bigbird_random_blocks(7, 1, 2, seed=0)[0, 0].sort().values.diff() != 0
        tensor([True])
    """
    op = "bigbird_random_blocks"
    require_int(op, "blocks", blocks, 1)
    require_int(op, "heads", heads, 0)
    require_int(op, "n_random", n_random, 0, _DRAWS)
    require_int(op, "seed", seed)
    require_int(op, "draw", draw, 0, (1 << 20) - 1)
    require_bool(op, "causal", causal)
    inner = torch.arange(1, max(blocks - 1, 1))
    far = (inner - inner[:, None]).abs() > 1
    if causal:
        far = far & (inner < inner[:, None])
    count = far.sum(-1)
    # Candidates in ascending order, then the others.
    order = torch.argsort((~far).to(torch.int64), dim=-1, stable=True)
    left = inner[order].expand(heads, -1, -1).contiguous()
    key = (torch.tensor(seed & 0xFFFFFFFF), torch.tensor(seed >> 32 & 0xFFFFFFFF))
    rows, head = inner[None], torch.arange(heads)[:, None]
    found = torch.full((heads, len(inner), n_random), -1)
    for m in range(min(n_random, len(inner))):
        counter = (torch.tensor(_DRAWS * draw + m), rows, head, torch.tensor(_WORD))
        u = torch.broadcast_to(philox.philox4x32(counter, key)[0], left.shape[:2])
        n = (count - m).clamp(min=1)
        place = (u * n >> 32)[..., None]
        pick = left.gather(-1, place)
        found[..., m] = torch.where(count > m, pick[..., 0], -1)
        final = left.gather(-1, (n - 1).expand(heads, -1)[..., None])
        left.scatter_(-1, place, final)
    return found


@spelled_out(ScoreOptions, last=("dropout_p", "dropout_seed", "backend"))
def bigbird_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block: int = 64,
    n_random: int = 3,
    seed: int = 0,
    draw: int = 0,
    rand_blocks: Tensor | None = None,
    count_duplicates: bool = False,
    num_global_tokens: int = 0,
    key_padding: Tensor | None = None,
    causal: bool = False,
    length: int | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    backend: str | None = None,
    **options: Unpack[ScoreOptions],
) -> Tensor:
    """Attention to the first and last block, to three neighboring blocks, and to random blocks.

    ``O_i = sum_j softmax_j(scale q_i . k_j) v_j`` over the keys j of the blocks 0, n - 1, I - 1, I,
    I + 1 and R(h, I) for a query of block I, each block once; blocks 0 and n - 1 attend to all. Up
    to 5 + 2 n_random blocks, without rand_blocks, all attend to all.

    Args:
        q: (B, Tq, Hq, D), float64, float32, bfloat16 or float16.
        k: (B, T, Hkv, D), Hkv a divisor of Hq. Query q is at position q + T - Tq of the keys;
            Tq < T only without num_global_tokens.
        v: (B, T, Hkv, Dv).
        block: tokens of a block; the last one may have fewer.
        n_random, seed, draw: R, see :func:`bigbird_random_blocks`.
        rand_blocks: R in place of a draw, integers (Hq, n - 2, r) for the blocks 1 .. n - 2, -1 for
            none, as transformers keeps them.
        count_duplicates: a block that R lists c times, or that is among the others, counts as often
            as it is listed: its logits get + ln of that, as in transformers.
        num_global_tokens: number of tokens before the blocks that attend to all tokens and are seen
            by all (BigBird-ETC).
        key_padding: (B, T) of bool, True = real; the rows of other tokens are 0.
        causal: only keys up to the query, and only earlier random blocks (not in the paper).
        length: T for counting blocks; a longer one keeps the pattern of a text while it grows.
        scale: None is 1 / sqrt(D).
        softcap, dropout_p: see :func:`attention`.
        dropout_seed: `seed` of :func:`attention`.
        backend: see :func:`attention`.

    Returns:
        O (B, Tq, Hq, Dv) of q's dtype.

    Raises:
        TypeError, ValueError, NotImplementedError: see :func:`attention`; random blocks outside of
            the blocks, or without count_duplicates among the neighbors or named twice.

    Note:
        O(T block (5 + n_random)) time: a mask of blocks, or one for each number of times that
        blocks are counted, merged by their lse. Deterministic; gradients to q, k and v.

    Reference:
        Zaheer et al., Big Bird: Transformers for Longer Sequences, 2020, arXiv:2007.14062.

    Example:
        >>> q = torch.ones(1, 200, 2, 4)
        >>> bigbird_attention(q, q, q, block=16, n_random=2).shape
        torch.Size([1, 200, 2, 4])
    """
    op = "bigbird_attention"
    record = pack(op, options, ScoreOptions)._replace(dropout_p=dropout_p, seed=dropout_seed)
    q, k, v = autocast(op, q, k, v)
    check_shapes(op, q, k, v)
    total = k.shape[1] if length is None else length
    require_int(op, "length", total, k.shape[1])
    _require_sizes(op, q.shape[1], k.shape[1], block, n_random, num_global_tokens)
    for name, flag in (("count_duplicates", count_duplicates), ("causal", causal)):
        require_bool(op, name, flag)
    require_int(op, "seed", seed)
    require_int(op, "draw", draw, 0, (1 << 20) - 1)
    blocks = -(-(total - num_global_tokens) // block)
    if rand_blocks is not None:
        _require_random(op, rand_blocks, q, blocks, count_duplicates)
    if key_padding is not None:
        require_real(op, key_padding, k)
    how = score_options(op, q, k, record, "dropout_seed")
    if use_reference(op, backend, q):
        return reference.bigbird_attention(
            *(q, k, v),
            block=block,
            n_random=n_random,
            seed=seed,
            draw=draw,
            rand_blocks=rand_blocks,
            count_duplicates=count_duplicates,
            num_global_tokens=num_global_tokens,
            key_padding=key_padding,
            causal=causal,
            length=length,
            dropout_p=dropout_p,
            dropout_seed=how["seed"],
            **options,
        )
    if rand_blocks is None:
        drawn = _drawn_counts if is_traced() else _kept_counts
        counts = drawn(blocks, q.shape[2], n_random, seed, draw, causal).to(q.device)
    else:
        counts = _counts(blocks, rand_blocks)
    several = count_duplicates and rand_blocks is not None
    return _with_counts(
        *(q, k, v, counts, block, num_global_tokens),
        several=several,
        key_padding=key_padding,
        causal=causal,
        how=how | {"backend": backend},
    )


def _require_sizes(op: str, tq: int, tk: int, block: int, n_random: int, tokens: int) -> None:
    for name, n, least in (("block", block, 1), ("num_global_tokens", tokens, 0)):
        require_int(op, name, n, least)
    require_int(op, "n_random", n_random, 0, _DRAWS)
    if tq > tk or (tokens and tq < tk):
        raise ValueError(
            f"{op}: Tq must be T, or at most T with num_global_tokens=0, got Tq={tq}, "
            f"T={tk}, num_global_tokens={tokens}"
        )
    if tokens > tq:
        raise ValueError(
            f"{op}: num_global_tokens must be at most T, got num_global_tokens={tokens}, T={tq}"
        )


def _with_counts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    counts: Tensor,
    block: int,
    tokens: int,
    *,
    several: bool,
    key_padding: Tensor | None,
    causal: bool,
    how: dict[str, Any],
) -> Tensor:
    """Computes attention to each block `counts` (H, blocks, blocks) times, or once.

    The counts apply if `several`; otherwise each listed block counts once. The first `tokens` are
    global.
    """
    # Dropout depends on positions: global tokens then stay in place, as a block in front.
    front = tokens if how["dropout_p"] > 0 else 0
    tokens -= front
    if front:
        counts = torch.nn.functional.pad(counts, (1, 0, 1, 0), value=1)
    at = _blocks_of(k.shape[1] - tokens, block, front, q.device)
    bias = None
    if several and (is_traced() or q.is_meta):  # the number of different counts is unknown
        bias = counts[:, at[k.shape[1] - q.shape[1] :, None], at].clamp(min=1)
        bias, several = bias.to(widen(q).dtype).log(), False
    times = sorted(set(counts[counts > 0].tolist())) if several else [1]
    later = q[:, tokens:], k[:, tokens:], v[:, tokens:]
    parts = []
    for n in times:
        listed = counts == n if several else counts > 0
        mask = _mask(listed, at, block, later[0].shape[1], front, causal)
        if key_padding is not None:
            mask = mask & KeyPadding(key_padding[:, tokens:])
        out, lse = attention(*later, mask=mask, bias=bias, return_lse=True, **how)
        parts.append((out, lse + torch.log(lse.new_tensor(n)) if n > 1 else lse))
    if tokens:
        parts.append(_global_keys(q, k, v, tokens, key_padding, how))
    out = parts[0][0] if len(parts) == 1 else merge_attention(*zip(*parts, strict=True))[0]
    if tokens:
        rules: list[Mask] = [] if key_padding is None else [KeyPadding(key_padding)]
        rules += [Causal(top_left=True)] if causal else []
        top = attention(q[:, :tokens], k, v, mask=All(tuple(rules)), **how)
        out = torch.cat((top, out), 1)
    if key_padding is None:
        return out
    rows = key_padding[:, k.shape[1] - q.shape[1] :]
    return out.masked_fill(~rows[..., None, None], 0)


def _blocks_of(length: int, block: int, front: int, device: torch.device) -> Tensor:
    """Returns the block of each token; the first `front` tokens are block 0."""
    at = (torch.arange(length, device=device) - front) // block
    return (at + 1).clamp(min=0) if front else at


def _mask(listed: Tensor, at: Tensor, block: int, tq: int, front: int, causal: bool) -> Mask:
    """Returns the mask of `listed` blocks (H, blocks, blocks); queries are the last tq tokens."""
    mask: Mask
    tk = at.shape[0]
    if is_traced() or listed.is_meta or tq < tk:  # the number of partial blocks is a value
        mask = BoolMask(listed[:, at[tk - tq :, None], at])
    elif front:
        mask = blocks_of_rows(
            lambda first, last: listed[None, :, at[first:last, None], at], tq, tk, listed.device
        )
    else:
        size, shown = (tq, tk), -(-tk // block)
        listed = listed[:, :shown, :shown]
        mask = Blocks.from_block_mask(listed[None], block_size=block, size=size)
    return mask & Causal() if causal else mask


def _global_keys(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tokens: int,
    real: Tensor | None,
    how: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Returns O and lse of the other tokens' attention to the global tokens."""
    mask = None if real is None else KeyPadding(real[:, :tokens])
    rows = q[:, tokens:], k[:, :tokens], v[:, :tokens]
    out, lse = attention(*rows, mask=mask, return_lse=True, **how)
    return out, lse


def _drawn_counts(
    blocks: int, heads: int, n_random: int, seed: int, draw: int, causal: bool
) -> Tensor:
    if blocks <= 5 + 2 * n_random:
        return torch.ones(1, blocks, blocks, dtype=torch.int64)
    random = bigbird_random_blocks(blocks, heads, n_random, seed, draw=draw, causal=causal)
    return _counts(blocks, random)


_kept_counts = functools.lru_cache(maxsize=64)(_drawn_counts)


def _counts(blocks: int, rand_blocks: Tensor) -> Tensor:
    """Counts how often each query block lists each key block, (H, blocks, blocks) int64."""
    at = torch.arange(blocks, device=rand_blocks.device)
    ends = (at == 0) | (at == blocks - 1)
    base = ends | ends[:, None] | ((at - at[:, None]).abs() <= 1)
    target = torch.where(rand_blocks >= 0, rand_blocks, blocks).long()
    drawn = target.new_zeros(*target.shape[:2], blocks + 1)
    drawn = drawn.scatter_add(-1, target, torch.ones_like(target))[..., :blocks]
    return base.long() + torch.nn.functional.pad(drawn, (0, 0, 1, 1))[:, :blocks]


def _require_random(
    op: str, rand_blocks: Tensor, q: Tensor, blocks: int, count_duplicates: bool
) -> None:
    require_integers(op, "rand_blocks", rand_blocks)
    if rand_blocks.dim() != 3:
        raise ValueError(
            f"{op}: rand_blocks must have shape (Hq, blocks - 2, r), "
            f"got rand_blocks.shape={tuple(rand_blocks.shape)}"
        )
    require_device(op, "rand_blocks", rand_blocks, q, "q")
    heads = q.shape[2]
    require_shape(op, "rand_blocks", rand_blocks, (heads, max(blocks - 2, 0), rand_blocks.shape[2]))
    if is_traced() or rand_blocks.is_meta or rand_blocks.numel() == 0:
        return
    low, high = (int(n) for n in rand_blocks.aminmax())
    if low < -1 or high >= blocks:
        raise ValueError(
            f"{op}: rand_blocks must be in [0, {blocks}), or -1 for none, "
            f"got rand_blocks from {low} to {high}"
        )
    counts = _counts(blocks, rand_blocks)
    counts[:, 0] = counts[:, -1] = 1
    if not count_duplicates and int(counts.max()) > 1:
        h, row, column = (int(n) for n in (counts > 1).nonzero()[0])
        raise ValueError(
            f"{op}: rand_blocks must name blocks that are not listed yet unless "
            f"count_duplicates=True, got block {column} for head {h} and query block {row}"
        )
