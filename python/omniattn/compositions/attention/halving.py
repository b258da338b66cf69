"""Causal attention by halves, for logits in which the tokens between a key and a query take part.

The logit of query i and key j is ``q_i (M_i ... M_(j+1)) k_j`` with an operator M_t of each token.
For a block of tokens and the block to its left, the product splits at their border m: queries are
carried to the start of their block, ``q_i M_i ... M_(m+1)``, and keys to the end of theirs,
``M_m ... M_(j+1) k_j``. So all pairs of two neighbours are a plain call of attention, and two
blocks become one of twice the size. T tokens in blocks of b take log2(T / b) such calls of many
blocks, and the parts of the softmax are merged. All tensors are float32 or float64: rounding the
carried queries and keys and the parts to 16 bits would add up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from omniattn.encoding.attention import encode
from omniattn.encoding.masks import MaskKind, Rule
from omniattn.encoding.options import ScoreKind, ScoreRule
from omniattn.ops.attention import attention

__all__ = ["Blocks", "Carry", "Tokens", "attend", "before", "blocks_of", "join_all", "key_bias"]


class Carry(NamedTuple):
    """Functions that apply `through`, the product of the operators of a block."""

    #: (q (B, n, S, Hq, D), through) -> q in front of the block.
    queries: Callable[[Tensor, Tensor], Tensor]
    #: (k (B, n, S, Hkv, D), through) -> k behind the block.
    keys: Callable[[Tensor, Tensor], Tensor]
    #: (through of a block, through of the block to its left) -> through of both.
    both: Callable[[Tensor, Tensor], Tensor]


class Tokens(NamedTuple):
    """Values of tokens, in blocks."""

    v: Tensor  # (B, n, S, Hkv, Dv)
    ids: Tensor | None  # (B, n, S), the number of the token's sequence
    gates: Tensor | None  # (B, n, S, Hq), fp64, the sum of the log gates up to the token

    def map(self, change: Callable[[Tensor], Tensor]) -> Tokens:
        ids, gates = (t if t is None else change(t) for t in (self.ids, self.gates))
        return Tokens(change(self.v), ids, gates)


class Blocks(NamedTuple):
    """n blocks of S tokens in each of B rows, and the attention within each block."""

    tokens: Tokens
    q: Tensor  # (B, n, S, Hq, D), carried to the start of the block
    k: Tensor  # (B, n, S, Hkv, D), carried to the end of the block
    through: Tensor  # (B, n, ...), the product of the block's operators
    out: Tensor  # (B, n, S, Hq, Dv)
    lse: Tensor  # (B, n, S, Hq)

    def map(self, change: Callable[[Tensor], Tensor]) -> Blocks:
        return Blocks(self.tokens.map(change), *map(change, self[1:]))


def blocks_of(t: Tensor, size: int) -> Tensor:
    """Splits (B, T, ...) into blocks (B, n, size, ...)."""
    return t.unflatten(1, (-1, size))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    causal: bool = False,
    bias: Tensor | None = None,
    ids: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor]:
    """Calls attention on blocks (B, n, S, H, D); returns out and lse.

    Args:
        q, k, v: queries, keys and values.
        scale: factor of the products.
        causal: True if the queries are the keys' tokens.
        bias: (B n, Hq, 1 or S of q, S of k).
        ids: numbers of the sequences of the queries and of the keys, (B, n, S), or None.
    """
    rules: list[Rule] = [(MaskKind.WINDOW, -1, 0, ())] if causal else []
    own, others = ids
    if own is not None and others is not None:
        rules.append((MaskKind.DOCUMENTS, 0, 0, (own.flatten(0, 1), others.flatten(0, 1))))
    terms: list[ScoreRule] = [] if bias is None else [(ScoreKind.BIAS, bias, ())]
    aux, mask, score, params = encode(rules, terms, scale, 0.0)
    rows = [t.flatten(0, 1) for t in (q, k, v)]
    out, lse = attention(*rows, aux, None, mask, score, params)
    return out.unflatten(0, q.shape[:2]), lse.transpose(1, 2).unflatten(0, q.shape[:2])


def key_bias(gates: Tensor, border: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the decay from each key to the border, as a bias (B n, Hq, 1, S)."""
    return (border - gates).to(dtype).flatten(0, 1).transpose(1, 2)[:, :, None]


def before(blocks: Blocks, k: Tensor, tokens: Tokens, scale: float) -> tuple[Tensor, Tensor]:
    """Returns out and lse of blocks that also see the tokens to their left, with keys `k`."""
    bias = border = None
    if tokens.gates is not None:
        border = tokens.gates[:, :, -1:]
        bias = key_bias(tokens.gates, border, blocks.lse.dtype)
    ids = blocks.tokens.ids, tokens.ids
    out, lse = attend(blocks.q, k, tokens.v, scale, bias=bias, ids=ids)
    if blocks.tokens.gates is not None and border is not None:
        lse = lse + (blocks.tokens.gates - border).to(lse.dtype)
    both = torch.logaddexp(blocks.lse, lse)
    own, others = ((part - both).exp()[..., None] for part in (blocks.lse, lse))
    return blocks.out * own + out * others, both


def _joined(
    left: Blocks, right: Blocks, tokens: Tokens, carry: Carry | None, scale: float
) -> Blocks:
    """Joins blocks, whose tokens are `tokens`, to those on their right.

    Without `carry` the result has no q, k and through of its own.
    """
    out, lse = before(right, left.k, left.tokens, scale)
    out, lse = torch.cat([left.out, out], 2), torch.cat([left.lse, lse], 2)
    if carry is None:
        return right._replace(tokens=tokens, out=out, lse=lse)
    return Blocks(
        tokens,
        torch.cat([left.q, carry.queries(right.q, left.through)], 2),
        torch.cat([carry.keys(left.k, right.through), right.k], 2),
        carry.both(right.through, left.through),
        out,
        lse,
    )


def _part(blocks: Blocks, first: int, last: int, step: int = 1) -> Blocks:
    return blocks.map(lambda t: t[:, first:last:step])


def join_all(blocks: Blocks, carry: Carry, scale: float, carried: bool) -> Blocks:
    """Joins the blocks of each row to one, whose q, k and through are computed if `carried`."""
    last = carry if carried else None
    single: list[Blocks] = []
    while (n := blocks.out.shape[1]) > 1:
        paired = n // 2 * 2
        if paired < n:
            single.append(_part(blocks, paired, n))
        tokens = blocks.tokens.map(lambda t: t[:, : t.shape[1] // 2 * 2])
        tokens = tokens.map(lambda t: t.unflatten(1, (-1, 2)).flatten(2, 3))
        left, right = (_part(blocks, first, paired, 2) for first in range(2))
        blocks = _joined(left, right, tokens, carry if single or n > 3 else last, scale)
    # Blocks left over follow the large one, in the order of their sizes; the last are joined first.
    *between, right = [blocks, *reversed(single)]
    while between:
        left = between.pop()
        tokens = _after(left.tokens, right.tokens)
        right = _joined(left, right, tokens, carry if between else last, scale)
    return right


def _after(left: Tokens, right: Tokens) -> Tokens:
    ids, gates = (
        None if t is None or after is None else torch.cat([t, after], 2)
        for t, after in zip(left[1:], right[1:], strict=True)
    )
    return Tokens(torch.cat([left.v, right.v], 2), ids, gates)
