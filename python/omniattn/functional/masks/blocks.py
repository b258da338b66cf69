"""Masks in blocks of 64 x 64, whose hidden blocks are skipped, and masks from a predicate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from omniattn.checks.arguments import require_int, require_integers, require_pair, shown
from omniattn.encoding.masks import BLOCK, MaskKind, Rule
from omniattn.functional.masks.base import Mask, require_bool_mask
from omniattn.reference.attention.score_mod import at_each_pair

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


@dataclass(frozen=True)
class Blocks(Mask):
    """A pattern in blocks of 64 x 64, as made by `from_predicate`; hidden blocks are skipped.

    Args:
        codes: int32 (B | 1, Hq | 1, ceil(Tq / 64), ceil(Tk / 64)): 0 hidden, 1 visible, 2 + n
            partial, by bits[n].
        bits: int64 (N, 64): bit k of word q of block n.
        size: (Tq, Tk) that the mask was made for, or None for any size with these blocks.
    """

    codes: Tensor
    bits: Tensor
    size: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        require_integers("Blocks", "codes", self.codes)
        require_integers("Blocks", "bits", self.bits)
        if self.size is not None:
            require_pair("Blocks", "size", self.size, 0)

    def rules(self) -> list[Rule]:
        tq, tk = (0, 0) if self.size is None else self.size
        return [(MaskKind.BLOCKS, tq, tk, (self.codes, self.bits))]

    @classmethod
    def from_block_mask(
        cls,
        block_mask: Tensor,
        *,
        block_size: int | tuple[int, int] = BLOCK,
        size: tuple[int, int] | None = None,
    ) -> Blocks:
        """Makes a mask of whole blocks from a bool (B | 1, Hq | 1, query blocks, key blocks).

        Args:
            block_mask: True = attend; blocks are counted from the first query and the first key.
            block_size: numbers of queries and keys in a block, one number or two.
            size: (Tq, Tk), which may cut the last blocks; required unless blocks are of size 64.

        Raises:
            TypeError, ValueError: the mask is not bool, or its blocks do not match `size`.
        """
        op = "Blocks.from_block_mask"
        require_bool_mask(op, "block_mask", block_mask)
        if block_mask.dim() != 4:
            raise ValueError(
                f"{op}: block_mask must have 4 dimensions (B | 1, Hq | 1, blocks of queries, "
                f"blocks of keys), got block_mask.shape={tuple(block_mask.shape)}"
            )
        bq, bk = _block_size(op, block_size)
        if size is not None:
            require_pair(op, "size", size, 0)
            _require_blocks(op, "block_mask", tuple(block_mask.shape[2:]), (bq, bk), size)
        elif (bq, bk) != (BLOCK, BLOCK):
            raise ValueError(
                f"{op}: size must be given unless blocks are of {BLOCK}, got block_size={(bq, bk)}"
            )
        if bq % BLOCK or bk % BLOCK:
            assert size is not None
            columns = torch.arange(size[1], device=block_mask.device) // bk

            def seen(first: int, last: int) -> Tensor:
                rows = torch.arange(first, last, device=block_mask.device) // bq
                return block_mask[:, :, rows[:, None], columns]

            return blocks_of_rows(seen, *size, block_mask.device)
        codes = block_mask.to(torch.int32)
        codes = codes.repeat_interleave(bq // BLOCK, 2).repeat_interleave(bk // BLOCK, 3)
        if size is not None:
            codes = codes[:, :, : -(-size[0] // BLOCK), : -(-size[1] // BLOCK)].contiguous()
        return cls(codes, _no_bits(block_mask.device), size)

    @classmethod
    def from_csr(
        cls,
        row_ptr: Tensor,
        col_idx: Tensor,
        size: tuple[int, int],
        *,
        block_size: int | tuple[int, int] = BLOCK,
    ) -> Blocks:
        """Makes a mask from compressed sparse rows (CSR).

        Query block I sees the key blocks ``col_idx[row_ptr[I] : row_ptr[I + 1]]``.

        Args:
            row_ptr: integers (blocks of queries + 1,), or (B | 1, Hq | 1, blocks of queries + 1).
            col_idx: integers (N,), or (B | 1, Hq | 1, N); each row ascending, without repetition.
            size: (Tq, Tk), which may cut the last blocks.
            block_size: numbers of queries and keys in a block, one number or two.

        Raises:
            TypeError, ValueError: the pointers do not ascend from 0 to N, or columns are outside
                the key blocks, unsorted or repeated in a row.
        """
        op = "Blocks.from_csr"
        require_pair(op, "size", size, 0)
        block = _block_size(op, block_size)
        rows, columns = (-(-n // b) for n, b in zip(size, block, strict=True))
        dense = _dense_of_csr(op, row_ptr, col_idx, rows, columns)
        return cls.from_block_mask(dense, block_size=block, size=size)


def _block_size(op: str, block_size: int | tuple[int, int]) -> tuple[int, int]:
    if isinstance(block_size, int):
        block_size = (block_size, block_size)
    require_pair(op, "block_size", block_size, 1)
    return block_size


def _require_blocks(
    op: str, name: str, blocks: tuple[int, ...], block: tuple[int, int], size: tuple[int, int]
) -> None:
    wanted = tuple(-(-n // b) for n, b in zip(size, block, strict=True))
    if blocks != wanted:
        raise ValueError(
            f"{op}: {name} must have {wanted} blocks of {block} for (Tq, Tk)={tuple(size)}, "
            f"got {blocks}"
        )


def _dense_of_csr(op: str, row_ptr: Tensor, col_idx: Tensor, rows: int, columns: int) -> Tensor:
    """Checks compressed rows; returns a bool (B | 1, Hq | 1, rows, columns)."""
    for name, t in (("row_ptr", row_ptr), ("col_idx", col_idx)):
        require_integers(op, name, t)
        if t.dim() not in (1, 3):
            raise ValueError(
                f"{op}: {name} must have 1 dimension, or 3 with those of B and Hq, "
                f"got {name}.shape={tuple(t.shape)}"
            )
    if row_ptr.shape[:-1] != col_idx.shape[:-1] or row_ptr.shape[-1] != rows + 1:
        raise ValueError(
            f"{op}: row_ptr must have {rows + 1} entries and the other dimensions of col_idx, got "
            f"row_ptr.shape={tuple(row_ptr.shape)}, col_idx.shape={tuple(col_idx.shape)}"
        )
    pointers, found = (t.to(torch.int64)[(None,) * (3 - t.dim())] for t in (row_ptr, col_idx))
    count = found.shape[-1]
    steps = pointers.diff(dim=-1)
    ends = bool((pointers[..., 0] == 0).all()) and bool((pointers[..., -1] == count).all())
    if not ends or bool((steps < 0).any()):
        raise ValueError(
            f"{op}: row_ptr must ascend from 0 to the {count} entries of col_idx, "
            f"got row_ptr={shown(row_ptr)}"
        )
    if bool(((found < 0) | (found >= columns)).any()):
        low, high = (int(n) for n in found.aminmax())
        raise ValueError(
            f"{op}: col_idx must be in [0, {columns}), got col_idx from {low} to {high}"
        )
    entry = torch.arange(count, device=found.device).expand(found.shape).contiguous()
    row = torch.searchsorted(pointers[..., 1:].contiguous(), entry, right=True)
    same = row[..., 1:] == row[..., :-1]
    if bool((same & (found[..., 1:] <= found[..., :-1])).any()):
        raise ValueError(
            f"{op}: col_idx must ascend in each row, without repetition, got "
            f"col_idx={shown(col_idx)}"
        )
    dense = torch.zeros(*found.shape[:2], rows * columns, dtype=torch.bool, device=found.device)
    return dense.scatter_(-1, row * columns + found, 1).unflatten(-1, (rows, columns))


def from_predicate(
    predicate: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    tq: int,
    tk: int,
    *,
    batch: int = 1,
    heads: int = 1,
    device: torch.device | str = "cpu",
) -> Blocks:
    """Makes a mask from `predicate(b, h, q, k)`, True = attend, for a fixed (tq, tk).

    The predicate is a mask_mod of flex_attention: a function of four int64 tensors without
    dimensions, which runs under `torch.vmap` and so must not read their values. The mask is fused
    into forward and backward, takes 1 bit per pair in partial blocks and nothing elsewhere, and can
    be reused for any number of calls. batch or heads of 1 broadcast.

    Raises:
        TypeError: the predicate does not return a bool tensor.
        ValueError: the returned tensor has dimensions.
    """
    for name, n in (("tq", tq), ("tk", tk), ("batch", batch), ("heads", heads)):
        require_int("from_predicate", name, n, 0)
    seen = _seen("from_predicate: predicate", predicate, (batch, heads, tk), device)
    return blocks_of_rows(seen, tq, tk, device)


def from_block_mask(block_mask: BlockMask) -> Blocks:
    """Converts flex_attention's BlockMask: full blocks are visible, mask_mod applies in partial
    blocks."""
    if not hasattr(block_mask, "mask_mod"):
        raise TypeError(
            f"from_block_mask: block_mask must be a BlockMask, got block_mask={shown(block_mask)}"
        )
    tq, tk = block_mask.seq_lengths
    rows, columns = block_mask.BLOCK_SIZE
    listed = block_mask.to_dense().bool()
    full = torch.zeros_like(listed)
    counts, indices = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
    if counts is not None and indices is not None:
        is_listed = torch.arange(indices.shape[-1], device=counts.device) < counts[..., None]
        marks = torch.zeros_like(full, dtype=torch.int64)
        full = marks.scatter_add(-1, indices.long(), is_listed.long()) > 0
    device = listed.device
    name = "from_block_mask: mask_mod"
    by_mod = _seen(name, block_mask.mask_mod, (*listed.shape[:2], tk), device)
    k = torch.arange(tk, device=device)

    def seen(first: int, last: int) -> Tensor:
        q = torch.arange(first, last, device=device)
        places = (slice(None), slice(None), q[:, None] // rows, k // columns)
        return listed[places] & (by_mod(first, last) | full[places])

    return blocks_of_rows(seen, tq, tk, device)


def blocks_of_rows(
    seen: Callable[[int, int], Tensor], tq: int, tk: int, device: torch.device | str
) -> Blocks:
    """Makes a mask's blocks; seen(first, last) gives rows, broadcastable to (B, Hq, rows, Tk)."""
    if torch.device(device).type == "meta":
        raise ValueError("Blocks: partial blocks must have values, got device='meta'")
    codes: Tensor | None = None
    bits, partials = _no_bits(device), 0
    for first in range(0, tq, BLOCK):
        rows = seen(first, min(first + BLOCK, tq))
        rows = rows[(None,) * (4 - rows.dim())]
        row, partial = _encoded(rows.expand(*rows.shape[:2], -1, tk), partials)
        if codes is None:
            codes = row.new_empty(*row.shape[:2], -(-tq // BLOCK), row.shape[2])
        codes[:, :, first // BLOCK] = row
        # Grows by doubling: small allocations between the temporaries of each row would fragment
        # the heap, which would then grow with Tq Tk.
        if partials + len(partial) > len(bits):
            grown = bits.new_empty(2 * len(bits) + len(partial), BLOCK)
            grown[:partials] = bits[:partials]
            bits = grown
        bits[partials : partials + len(partial)] = partial
        partials += len(partial)
    if codes is None:
        return Blocks(torch.zeros(1, 1, 0, -(-tk // BLOCK), dtype=torch.int32), bits)
    return Blocks(codes, bits[:partials].clone(), (tq, tk))


def _seen(
    name: str,
    predicate: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    shape: tuple[int, int, int],
    device: torch.device | str,
) -> Callable[[int, int], Tensor]:
    """Returns a predicate's rows (B, Hq, rows, Tk) as a function for `blocks_of_rows`."""

    def checked(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        found = predicate(b, h, q, k)
        if not isinstance(found, Tensor) or found.dtype != torch.bool:
            raise TypeError(f"{name} must return a bool tensor, got {shown(found)}")
        if found.dim() > 0:
            raise ValueError(
                f"{name} must return a tensor without dimensions, got shape={tuple(found.shape)}"
            )
        return found

    def seen(first: int, last: int) -> Tensor:
        if 0 in shape:
            return torch.zeros(*shape[:2], last - first, shape[2], dtype=torch.bool, device=device)
        b, h, k = (torch.arange(n, device=device) for n in shape)
        return at_each_pair(checked, (b, h, torch.arange(first, last, device=device), k))

    return seen


def _encoded(seen: Tensor, partials: int) -> tuple[Tensor, Tensor]:
    """Returns the codes of a row of blocks (B, Hq, up to 64, Tk) and the bits of partial ones.

    Earlier rows have `partials` partial blocks.
    """
    pad = (0, -seen.shape[3] % BLOCK, 0, BLOCK - seen.shape[2])
    blocks = torch.nn.functional.pad(seen, pad).unflatten(-1, (-1, BLOCK)).transpose(2, 3)
    whole = torch.nn.functional.pad(seen, pad, value=True)
    full = whole.unflatten(-1, (-1, BLOCK)).transpose(2, 3).all(-1).all(-1)
    partial = blocks.any(-1).any(-1) & ~full
    bits = (blocks[partial].to(torch.int64) << torch.arange(BLOCK, device=seen.device)).sum(-1)
    codes = full.to(torch.int32)
    codes[partial] = torch.arange(2 + partials, 2 + partials + len(bits), device=seen.device).int()
    return codes, bits


def _no_bits(device: torch.device | str) -> Tensor:
    return torch.zeros(0, BLOCK, dtype=torch.int64, device=device)
