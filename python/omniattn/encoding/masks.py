"""Mask rules: numbers and definitions; csrc/semantics has their counterparts for kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor


class MaskKind(IntEnum):
    """Kinds of rules, numbered as in csrc/semantics/{mask_rules,sequences}.h. i = q + Tk - Tq."""

    WINDOW = 0  # i - a <= k <= i + b; -1: unbounded
    WINDOW_TOP_LEFT = 1  # WINDOW with i = q
    KEY_LENGTHS = 2  # k < lengths[b], int64 (B,)
    TENSOR = 3  # bool, broadcastable to (B, Hq, Tq, Tk)
    PREFIX = 4  # k < lengths[b] or k <= i
    CHUNK = 5  # near <= i // a - k // a <= far, see chunk_range
    DOCUMENTS = 6  # ids of q (B, Tq) == ids of k (B, Tk), int64
    DILATED = 7  # (i - k) % a == 0
    STRIDED = 8  # i - b < k or (i - k) % a == 0
    STRIDED_HEADS = 9  # even heads: i - b < k, odd heads: (i - k) % a == 0
    FIXED = 10  # i // a == k // a or (k + shift) % a >= a - columns, see COLUMN_BITS
    EVERY = 11  # k % a == 0 or k == i
    BLOCKS = 12  # int32 codes of 64 x 64 blocks, bits of partial blocks, see Blocks
    PACKED = 13  # layout: cu_seqlens_q, cu_seqlens_k; a and b: longest sequences
    CACHED = 14  # layout: sequence b has the first lengths[b] keys
    PAGED = 15  # layout: CACHED in pages that a table (B, N) lists
    NEIGHBORS = 16  # the a keys with k % b == i % b around i, shifted inwards at the ends
    QUERIES = 17  # part: q has rows a .. a + Tq of b
    KEYS = 18  # part: k and v have rows a .. a + Tk of b
    GRID = 19  # one axis of a neighborhood in a grid, see GridAxis
    POOLED = 20  # k a + b <= q
    OWN_KERNELS = 21  # hides nothing: the call takes no kernel of torch; the last rule


#: Kinds that define where sequences lie. A layout is the first rule.
LAYOUTS = (MaskKind.PACKED, MaskKind.CACHED, MaskKind.PAGED)
#: Kinds for a part of a larger call, also first rules. All other rules refer to the larger call.
PARTS = (MaskKind.QUERIES, MaskKind.KEYS)
#: Maximum number of rules, including the layout (kMaxMaskRules in csrc/semantics/mask.h).
MAX_RULES = 8
#: Number of queries and of keys per block of MaskKind.BLOCKS.
BLOCK = 64
#: MaskKind.FIXED encodes b = columns, for shift = 0; or b = columns + n 2^COLUMN_BITS, where head h
#: has shift = (h % n) columns.
COLUMN_BITS = 28

#: MaskKind.CHUNK encodes b = near + far 2^CHUNK_BITS; far = ANY_FAR means unbounded.
CHUNK_BITS = 19
ANY_FAR = (1 << CHUNK_BITS) - 1
#: Number of bits of a size and of a window in a GridAxis's code.
SIZE_BITS, WINDOW_BITS = 20, 13

#: kind, a, b, side tensors
Rule = tuple[int, int, int, tuple[Tensor, ...]]


@dataclass(frozen=True)
class GridAxis:
    """MaskKind.GRID: a neighborhood along one axis; position p has coordinate p // inner % length.

    A query sees a window of `kernel` coordinates that differ from its own by multiples of
    `dilation`. The window surrounds the query, shifted inwards at the ends of the axis; if causal,
    it ends at the query. Groups of `stride` queries share the window of their middle query, or of
    their last one if causal.
    """

    inner: int
    length: int
    kernel: int
    dilation: int = 1
    stride: int = 1
    causal: bool = False

    def rule(self) -> Rule:
        a = self.inner + (self.length << SIZE_BITS)
        b = self.kernel + (self.dilation << WINDOW_BITS) + (self.stride << 2 * WINDOW_BITS)
        return (MaskKind.GRID, a, b + (self.causal << 3 * WINDOW_BITS), ())

    @classmethod
    def of(cls, a: int, b: int) -> GridAxis:
        window = (1 << WINDOW_BITS) - 1
        kernel, dilation, stride = (b >> n * WINDOW_BITS & window for n in range(3))
        inner = a & ((1 << SIZE_BITS) - 1)
        return cls(inner, a >> SIZE_BITS, kernel, dilation, stride, bool(b >> 3 * WINDOW_BITS))

    def visible(self, i: Tensor, k: Tensor) -> Tensor:
        y, z = i // self.inner % self.length, k // self.inner % self.length
        rest, place = y % self.dilation, y // self.dilation
        count = (self.length - rest + self.dilation - 1) // self.dilation  # with this remainder
        leads = self.stride - 1 if self.causal else self.stride // 2
        leader = (place // self.stride * self.stride + leads).minimum(count - 1)
        if self.causal:
            first, last = leader - self.kernel + 1, place
        else:
            first = (leader - self.kernel // 2).clamp(min=0).minimum(count - self.kernel)
            last = first + self.kernel - 1
        at = z // self.dilation
        return (z % self.dilation == rest) & (at >= first) & (at <= last)


def chunk_range(b: int) -> tuple[int, int]:
    """Decodes near and far of MaskKind.CHUNK."""
    return b & ANY_FAR, b >> CHUNK_BITS


@dataclass(frozen=True)
class Sizes:
    """Sizes and device of the call that a mask is evaluated for.

    In packed and cached batches tq and tk belong to the longest sequence, and `lengths` holds
    Tk - Tq and Tk of the sequences, each an int or a tensor (N, 1, 1, 1).
    """

    tq: int
    tk: int
    device: torch.device
    heads: int = 1
    lengths: tuple[int | Tensor, int | Tensor] | None = None

    @property
    def offset(self) -> int | Tensor:
        """Position of the first query, Tk - Tq."""
        return self.tk - self.tq if self.lengths is None else self.lengths[0]

    @property
    def keys(self) -> int | Tensor:
        """Number of keys Tk."""
        return self.tk if self.lengths is None else self.lengths[1]

    def positions(self, queries: tuple[int, int] | None) -> Tensor:
        """Returns the key positions of queries [first, last), or of all: (rows, 1), or
        (N, 1, rows, 1) if sequences differ in length."""
        rows = slice(0, self.tq) if queries is None else slice(*queries)
        return torch.arange(self.tq, device=self.device)[rows, None] + self.offset


class EncodedMask:
    """Mask that is the AND of rules."""

    def rules(self) -> list[Rule]:
        raise NotImplementedError

    def visible(self, tq: int, tk: int, device: torch.device, heads: int) -> Tensor:
        """Returns the boolean mask, True = attend, broadcastable to (B, Hq, Tq, Tk)."""
        return visible(self.rules(), Sizes(tq, tk, device, heads))

    def of_sequence(self, n: int, tq: int, tk: int) -> EncodedMask:
        """Returns the mask for sequence n, of lengths tq and tk, in a packed or cached batch."""
        return Rules(of_sequence(self.rules(), n, tq, tk))


@dataclass(frozen=True)
class Rules(EncodedMask):
    """Mask from a list of rules."""

    found: list[Rule]

    def rules(self) -> list[Rule]:
        return self.found


def cut(t: Tensor, n: int, rows: int, columns: int) -> Tensor:
    """Slices a tensor, broadcastable to (B, H, longest rows, longest columns), for sequence n."""
    t = t[(None,) * (4 - t.dim())]
    t = t[n : n + 1] if t.shape[0] > 1 else t
    t = t[:, :, :rows] if t.shape[2] > 1 else t
    return t[..., :columns] if t.shape[3] > 1 else t


def known(kind: int) -> MaskKind:
    """Returns the kind as a constant: torch.compile may have it as a symbol, which is never equal
    to a member of an enum."""
    return MaskKind(kind)


def of_sequence(rules: Sequence[Rule], n: int, tq: int, tk: int) -> list[Rule]:
    """Returns the rules for sequence n, of lengths tq and tk, in a packed or cached batch."""
    found: list[Rule] = []
    for code, a, b, side in rules:
        kind = known(code)
        if kind == MaskKind.TENSOR:
            side = (cut(side[0], n, tq, tk),)
        elif kind == MaskKind.BLOCKS:
            side = (cut(side[0], n, -(-tq // BLOCK), -(-tk // BLOCK)), side[1])
        elif kind == MaskKind.DOCUMENTS:
            side = (side[0][n : n + 1, :tq], side[1][n : n + 1, :tk])
        elif side:
            side = (side[0][n : n + 1],)
        found.append((kind, a, b, side))
    return found


def visible(
    rules: Sequence[Rule],
    sizes: Sizes,
    queries: tuple[int, int] | None = None,
    keys: tuple[int, int] | None = None,
) -> Tensor:
    """Returns the AND of all rules, True = attend, broadcastable to (B, Hq, Tq, Tk).

    With `queries` and `keys` it has these rows and columns [first, last) only.
    """
    rows = slice(*queries) if queries is not None else slice(0, sizes.tq)
    columns = slice(*keys) if keys is not None else slice(0, sizes.tk)
    q = torch.arange(sizes.tq, device=sizes.device)[rows, None]
    k = torch.arange(sizes.tk, device=sizes.device)[None, columns]
    allowed = torch.ones(q.shape[0], k.shape[1], dtype=torch.bool, device=sizes.device)
    for kind, a, b, side in rules:
        allowed = allowed & _visible(known(kind), a, b, side, q, k, sizes, rows, columns)
    return allowed


def key_range(rules: Sequence[Rule], offset: int, tk: int, queries: tuple[int, int]) -> range:
    """Returns keys among which are all that queries [first, last) see; a query q has the position
    q + offset among the keys."""
    first, last, (q, end) = 0, tk, queries
    for code, a, b, _ in rules:
        kind = known(code)
        at = offset if kind == MaskKind.WINDOW else 0
        if kind in (MaskKind.WINDOW, MaskKind.WINDOW_TOP_LEFT):
            first = max(first, q + at - a) if a >= 0 else first
            last = min(last, end + at + b) if b >= 0 else last
        elif kind == MaskKind.CHUNK:
            near, far = chunk_range(b)
            last = min(last, ((end - 1 + offset) // a - near + 1) * a)
            first = max(first, ((q + offset) // a - far) * a) if far != ANY_FAR else first
    return range(min(first, tk), max(last, min(first, tk)))


def _visible(
    kind: int,
    a: int,
    b: int,
    side: tuple[Tensor, ...],
    q: Tensor,
    k: Tensor,
    sizes: Sizes,
    rows: slice,
    columns: slice,
) -> Tensor:
    i = q + sizes.offset
    if kind in (MaskKind.WINDOW, MaskKind.WINDOW_TOP_LEFT):
        distance = k - (i if kind == MaskKind.WINDOW else q)
        allowed = torch.ones_like(distance, dtype=torch.bool)
        if a >= 0:
            allowed = allowed & (distance >= -a)
        if b >= 0:
            allowed = allowed & (distance <= b)
        return allowed
    if kind == MaskKind.KEY_LENGTHS:
        return k < side[0][:, None, None, None]
    if kind == MaskKind.TENSOR:
        seen = side[0]
        seen = seen if seen.dim() < 2 or seen.shape[-2] == 1 else seen[..., rows, :]
        return seen if seen.dim() < 1 or seen.shape[-1] == 1 else seen[..., columns]
    if kind == MaskKind.PREFIX:
        return (k < side[0][:, None, None, None]) | (k <= i)
    if kind == MaskKind.POOLED:
        return k * a + b <= q
    if kind == MaskKind.CHUNK:
        near, far = chunk_range(b)
        back = i // a - k // a
        return (back >= near) & (back <= far) if far != ANY_FAR else back >= near
    if kind == MaskKind.DOCUMENTS:
        return side[0][:, None, rows, None] == side[1][:, None, None, columns]
    if kind == MaskKind.BLOCKS:
        return _blocks_visible(side[0], side[1], q, k)
    if kind == MaskKind.GRID:
        return GridAxis.of(a, b).visible(i, k)
    if kind == MaskKind.NEIGHBORS:
        return _neighbors(a, b, i, k, sizes.keys)
    dilated, local = (i - k) % a == 0, i - b < k
    if kind == MaskKind.DILATED:
        return dilated
    if kind == MaskKind.STRIDED:
        return local | dilated
    if kind == MaskKind.STRIDED_HEADS:
        odd = torch.arange(sizes.heads, device=k.device)[:, None, None] % 2 == 1
        return torch.where(odd, dilated, local)
    if kind == MaskKind.FIXED:
        n, width = divmod(b, 1 << COLUMN_BITS)
        shift = torch.arange(sizes.heads if n else 1, device=k.device)[:, None, None] % max(n, 1)
        return (i // a == k // a) | ((k + shift * width) % a >= a - width)
    assert kind == MaskKind.EVERY
    return (k % a == 0) | (k == i)


def _neighbors(size: int, dilation: int, i: Tensor, k: Tensor, keys: int | Tensor) -> Tensor:
    rest = i % dilation
    count = (keys - rest + dilation - 1) // dilation  # keys with this remainder
    first = (i // dilation - size // 2).clamp(min=0).minimum((count - size).clamp(min=0))
    place = k // dilation
    return (k % dilation == rest) & (place >= first) & (place < first + size)


def _blocks_visible(codes: Tensor, bits: Tensor, q: Tensor, k: Tensor) -> Tensor:
    code = codes[..., q // BLOCK, k // BLOCK].to(torch.int64)
    words = torch.cat((bits.new_zeros(1, BLOCK), bits.new_full((1, BLOCK), -1), bits))
    return (words[code, q % BLOCK] >> (k % BLOCK)) & 1 == 1
