"""Rotary positions: `flash_attn.layers.rotary`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from omniattn import functional
from omniattn.checks.arguments import (
    require_bool,
    require_int,
    require_integers,
    require_number,
    require_shape,
)
from omniattn.compat._errors import errors_as, errors_of, require_index, require_real


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotates the first dimensions of each head by the angles of its position.

    Args:
        x: (B, T, H, D), or with `cu_seqlens` (total, H, D).
        cos: (P, Dr / 2), one row for each position; Dr may be less than D. It gets no gradient.
        sin: of the shape of `cos`.
        interleaved: True if pairs are (2 i, 2 i + 1), False for (i, i + Dr / 2).
        inplace: if True, writes over x and returns it.
        seqlen_offsets: position of the first token, an int or (B,) int.
        cu_seqlens: (B + 1,) int: rows cu_seqlens[b] .. cu_seqlens[b + 1] are sequence b.
        max_seqlen: has no effect.

    Returns:
        Tensor of the shape and dtype of x.
    """
    op = "apply_rotary_emb"
    require_real(op, x=x, cos=cos, sin=sin)
    require_bool(op, "inplace", inplace)
    if max_seqlen is not None:
        require_int(op, "max_seqlen", max_seqlen, 0)
    form = "(B, T, H, D)" if cu_seqlens is None else "(total, H, D)"
    if x.ndim != form.count(",") + 1:
        raise ValueError(f"{op}: x must have shape {form}, got x.shape={tuple(x.shape)}")
    if cu_seqlens is None:
        positions = _positions(op, seqlen_offsets, x)
        return _rotated(op, x, cos, sin, interleaved, inplace, positions)
    require_integers(op, "cu_seqlens", cu_seqlens)
    with errors_of(op):
        places = functional.packed_positions(cu_seqlens, len(x)).long()
    if isinstance(seqlen_offsets, Tensor):
        shape = (len(cu_seqlens) - 1,)
        require_index(op, "seqlen_offsets", seqlen_offsets, shape, x)
        places = places + seqlen_offsets.long().repeat_interleave(cu_seqlens.long().diff())
    else:
        require_int(op, "seqlen_offsets", seqlen_offsets, 0)
        places = places + seqlen_offsets
    return _rotated(op, x[None], cos, sin, interleaved, inplace, places[None]).view(x.shape)


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotates the queries and keys of a packed tensor in place.

    Args:
        qkv: (B, T, 3, H, D), or (B, T, Hq + 2 Hkv, D) with `num_heads_q`.
        cos, sin, interleaved, seqlen_offsets: see :func:`apply_rotary_emb`.
        cos_k, sin_k: tables of the keys; None to use cos and sin.
        num_heads_q: Hq, the number of heads of the queries.

    Returns:
        qkv itself; a new tensor if it is a leaf that requires a gradient.
    """
    op = "apply_rotary_emb_qkv_"
    require_real(op, qkv=qkv, cos=cos, sin=sin)
    qkv = _writable(qkv)
    if qkv.ndim == 5 and qkv.shape[2] == 3:
        q, k = qkv[:, :, 0], qkv[:, :, 1]
    elif qkv.ndim == 4 and num_heads_q is not None:
        require_int(op, "num_heads_q", num_heads_q, 1, qkv.shape[2])
        heads_k, odd = divmod(qkv.shape[2] - num_heads_q, 2)
        if odd:
            raise ValueError(
                f"{op}: qkv must have num_heads_q + 2 Hkv heads, got {num_heads_q=}, "
                f"qkv.shape={tuple(qkv.shape)}"
            )
        q, k = qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + heads_k]
    else:
        raise ValueError(
            f"{op}: qkv must have shape (B, T, 3, H, D), or (B, T, H, D) with num_heads_q, got "
            f"qkv.shape={tuple(qkv.shape)}, num_heads_q={num_heads_q}"
        )
    cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    positions = _positions(op, seqlen_offsets, qkv)
    for part, table in ((q, (cos, sin)), (k, (cos_k, sin_k))):
        part.copy_(_rotated(op, part, *table, interleaved, False, positions))
    return qkv


def apply_rotary_emb_kv_(
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
) -> Tensor:
    """Rotates the keys of kv (B, T, 2, H, D) in place, see :func:`apply_rotary_emb_qkv_`."""
    op = "apply_rotary_emb_kv_"
    require_real(op, kv=kv, cos=cos, sin=sin)
    if kv.ndim != 5 or kv.shape[2] != 2:
        raise ValueError(f"{op}: kv must have shape (B, T, 2, H, D), got {tuple(kv.shape)=}")
    kv = _writable(kv)
    k = kv[:, :, 0]
    k.copy_(_rotated(op, k, cos, sin, interleaved, False, _positions(op, seqlen_offsets, kv)))
    return kv


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """Returns (-y, x) for each pair (x, y) of the last dimension."""
    if not interleaved:
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def apply_rotary_emb_torch(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> Tensor:
    """Computes :func:`apply_rotary_emb` with tables (T, Dr / 2) or (B, T, Dr / 2) of the tokens."""
    op = "apply_rotary_emb_torch"
    require_real(op, x=x, cos=cos, sin=sin)
    return _rotated(op, x, cos, sin, interleaved, False, None)


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """Computes :func:`apply_rotary_emb`, with `conjugate` by the negative angles."""
    require_bool("apply_rotary", "conjugate", conjugate)
    with errors_as("apply_rotary", "apply_rotary_emb"):
        return apply_rotary_emb(
            *(x, cos, -sin if conjugate else sin, interleaved, inplace),
            *(seqlen_offsets, cu_seqlens, max_seqlen),
        )


class RotaryEmbedding(nn.Module):
    """Rotary positions with tables that grow on demand.

    Args:
        dim: number of dimensions that are rotated.
        base: base of the frequencies.
        interleaved: see :func:`apply_rotary_emb`.
        scale_base: None, or the base of XPos (arXiv:2212.10554), which scales queries and keys.
        device: device of the frequencies.
    """

    inv_freq: Tensor
    scale: Tensor | None

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        require_int("RotaryEmbedding", "dim", dim, 1)
        require_number("RotaryEmbedding", "base", base, above=0.0)
        self.dim, self.base, self.interleaved = dim, float(base), interleaved
        self.scale_base = scale_base
        even = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
        self.register_buffer("inv_freq", self.base ** (-even / dim), persistent=False)
        scale = None if scale_base is None else (even + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("scale", scale, persistent=False)
        self._seq_len_cached = 0
        self._tables: tuple[Tensor, ...] | None = None

    def extra_repr(self) -> str:
        return f"{self.dim}, base={self.base:g}, interleaved={self.interleaved}"

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotates queries and keys in place.

        Args:
            qkv: (B, T, 3, H, D), (B, T, Hq + 2 Hkv, D) with `num_heads_q`, or with `kv` the queries
                (B, T, H, D).
            kv: (B, T, 2, H, D), or None.
            seqlen_offset: position of the first token, an int or (B,) int.
            max_seqlen: number of positions of the tables; needed once if `seqlen_offset` is a
                tensor.
            num_heads_q: Hq.

        Returns:
            qkv, or (q, kv).
        """
        cos, sin, cos_k, sin_k = self._updated(qkv, seqlen_offset, max_seqlen)
        if kv is None:
            return apply_rotary_emb_qkv_(
                qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q
            )
        queries = apply_rotary_emb(_writable(qkv), cos, sin, self.interleaved, True, seqlen_offset)
        return queries, apply_rotary_emb_kv_(kv, cos_k, sin_k, self.interleaved, seqlen_offset)

    def _updated(
        self, x: Tensor, offset: int | Tensor, max_seqlen: int | None
    ) -> tuple[Tensor, ...]:
        """Returns the tables of queries and keys, long enough for the call."""
        wanted = max_seqlen
        if wanted is None:
            wanted = 0 if isinstance(offset, Tensor) else x.shape[1] + offset
        tables = self._tables
        if (
            tables is None
            or wanted > self._seq_len_cached
            or tables[0].device != x.device
            or tables[0].dtype != x.dtype
        ):
            length = max(wanted, self._seq_len_cached if self.scale is None else wanted)
            if length == 0:
                raise ValueError(
                    "RotaryEmbedding: max_seqlen must be given with a tensor seqlen_offset, got "
                    "max_seqlen=None"
                )
            tables = self._made(length, x)
            self._seq_len_cached, self._tables = length, tables
        return tables

    def _made(self, length: int, x: Tensor) -> tuple[Tensor, ...]:
        places = torch.arange(length, device=x.device, dtype=torch.float32)
        even = torch.arange(0, self.dim, 2, device=x.device, dtype=torch.float32)
        angles = places[:, None] * self.base ** (-even / self.dim)
        cos, sin = angles.cos(), angles.sin()
        if self.scale is None or self.scale_base is None:
            cos, sin = cos.to(x.dtype), sin.to(x.dtype)
            return cos, sin, cos, sin
        power = (places - length // 2) / self.scale_base
        scale = self.scale.to(x.device, torch.float32) ** power[:, None]
        return tuple(t.to(x.dtype) for t in (cos * scale, sin * scale, cos / scale, sin / scale))


def _writable(x: Tensor) -> Tensor:
    """Returns `x`, or a copy of a leaf that requires a gradient, which torch cannot overwrite."""
    return x.clone() if x.requires_grad and x.is_leaf and torch.is_grad_enabled() else x


def _positions(op: str, offsets: int | Tensor, x: Tensor) -> int | Tensor:
    if not isinstance(offsets, Tensor):
        require_int(op, "seqlen_offsets", offsets, 0)
        return offsets
    require_integers(op, "seqlen_offsets", offsets)
    require_shape(op, "seqlen_offsets", offsets, (len(x),))
    return offsets.long()[:, None] + torch.arange(x.shape[1], device=x.device)


def _rotated(
    op: str,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    inplace: bool,
    positions: int | Tensor | None,
) -> Tensor:
    with errors_of(op, q="x", positions="seqlen_offsets"):
        return functional.apply_rotary(
            x,
            None,
            cos.detach(),
            sin.detach(),
            positions=positions,
            interleaved=interleaved,
            inplace=inplace,
        )[0]
