"""Dual chunk attention for length extrapolation, and local plus strided attention."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from omniattn import reference
from omniattn.checks.arguments import (
    autocast_dtype,
    is_traced,
    require_bool,
    require_choice,
    require_device,
    require_float,
    require_int,
    shown,
    use_reference,
)
from omniattn.encoding.masks import Sizes
from omniattn.encoding.options import FormOptions, pack, spelled_out
from omniattn.functional.attention._common import autocast, check_shapes, require_parameter
from omniattn.functional.attention.attention import attention
from omniattn.functional.attention.lse import merge_attention
from omniattn.functional.masks import Chunked, SlidingWindow
from omniattn.functional.masks.tokens import OfPositions
from omniattn.functional.positions.rope import apply_rotary, require_constant_tables, table_shape
from omniattn.functional.sparse._common import score_options
from omniattn.functional.sparse.selected_attention import selected_attention
from omniattn.reference.attention.attention import default_scale
from omniattn.reference.precision import widen
from omniattn.reference.sparse.dual_chunk import dual_chunk_mscale

__all__ = ["dual_chunk_attention", "dual_chunk_mscale", "local_strided_attention"]


@spelled_out(FormOptions, last=("backend",))
def dual_chunk_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    chunk_size: int,
    local_window: int,
    train_length: int | None = None,
    mscale: str | None = None,
    interleaved: bool = False,
    k_rotated: bool = False,
    backend: str | None = None,
    **options: Unpack[FormOptions],
) -> Tensor:
    """Causal attention with rotary distances below chunk_size for sequences of any length.

    ``O_i = sum_j softmax_j(scale RoPE(q_i, p_q) . RoPE(k_j, p_k)) v_j`` over all j <= i. With
    c = chunk_size - local_window the key has p_k = j mod c, and the query, of chunk I = floor(i/c)
    and place r = i mod c, has p_q = r for the keys of its own chunk, min(r + c, chunk_size) for the
    keys of the previous chunk and min(2 c - 1, chunk_size) for all earlier keys. Distances within
    local_window, and within a chunk, are exact.

    Args:
        q: (B, Tq, Hq, D), before the rotation, float64, float32, bfloat16 or float16.
        k: (B, Tk, Hkv, D), before the rotation, or after it with k_rotated. Query q is at position
            q + Tk - Tq of the keys; Tq <= Tk.
        v: (B, Tk, Hkv, Dv).
        cos: (P, Dr / 2) of the positions 0, 1, ..., at least chunk_size + 1, as for
            :func:`apply_rotary`.
        sin: as cos.
        chunk_size, local_window: local_window < chunk_size; ChunkLlama has 3/4 and 1/8 of
            train_length.
        train_length, mscale: of texts longer than in training the logits are multiplied by
            :func:`dual_chunk_mscale`; None leaves them.
        interleaved: rotary pairs are (2i, 2i + 1).
        k_rotated: k has the rotations by p_k already, as a cache keeps it.
        scale: None is 1 / sqrt(D).
        softcap, dropout_p, seed: see :func:`attention`.
        backend: see :func:`attention`.

    Returns:
        O (B, Tq, Hq, Dv) of q's dtype.

    Raises:
        TypeError, ValueError, NotImplementedError: see :func:`attention` and :func:`apply_rotary`;
            tables that are too short.

    Note:
        Three rotations of q, each on the keys of its chunks, merged by their lse. Deterministic;
        gradients to q, k and v.

    Reference:
        An et al., Training-Free Long-Context Scaling of Large Language Models, 2024,
        arXiv:2402.17463. Qwen Team, Qwen2.5-1M Technical Report, 2025, arXiv:2501.15383.

    Example:
        >>> from omniattn.functional import rope_frequencies, rotary_tables
        >>> cos, sin = rotary_tables(rope_frequencies(4), torch.arange(9))
        >>> q = torch.ones(1, 20, 2, 4)
        >>> dual_chunk_attention(q, q, q, cos, sin, chunk_size=8, local_window=2).shape
        torch.Size([1, 20, 2, 4])
    """
    op = "dual_chunk_attention"
    record = pack(op, options, FormOptions)
    q, k, v = autocast(op, q, k, v)
    check_shapes(op, q, k, v)
    tq, tk = q.shape[1], k.shape[1]
    require_int(op, "chunk_size", chunk_size, 1)
    require_int(op, "local_window", local_window, 0, chunk_size - 1)
    require_bool(op, "k_rotated", k_rotated)
    if tq > tk:
        raise ValueError(f"{op}: Tq must be at most Tk, got Tq={tq}, Tk={tk}")
    require_bool(op, "interleaved", interleaved)
    _require_tables(op, q, cos, sin, chunk_size)
    _require_scaling(op, mscale, train_length)
    how = score_options(op, q, k, record)
    if use_reference(op, backend, q):
        return reference.dual_chunk_attention(
            *(q, k, v, cos, sin),
            chunk_size=chunk_size,
            local_window=local_window,
            train_length=train_length,
            mscale=mscale,
            interleaved=interleaved,
            k_rotated=k_rotated,
            **how,
        )
    require_constant_tables(op, cos, sin)
    scale = default_scale(q.shape[3]) if record.scale is None else record.scale
    if mscale is not None and train_length is not None:
        scale = scale * dual_chunk_mscale(tk, train_length, mscale)
    how |= {"scale": scale, "backend": backend}
    c = chunk_size - local_window
    turn = functools.partial(_turned, tables=(cos, sin), interleaved=interleaved, backend=backend)
    if not k_rotated:
        k = turn(k, torch.arange(tk, device=k.device) % c)
    place = torch.arange(tk - tq, tk, device=q.device) % c
    # p_q, and the chunks of keys that it applies to
    kinds: list[tuple[Tensor, Chunked]] = [(place, Chunked(c))]
    if tk > c:
        kinds.append(((place + c).clamp(max=chunk_size), Chunked(c, back=(1, 1))))
    if tk > 2 * c:
        far = torch.full_like(place, min(2 * c - 1, chunk_size))
        kinds.append((far, Chunked(c, back=(2, None))))
    parts = [
        attention(
            *(turn(q, positions), k, v),
            mask=mask,
            return_lse=True,
            **how,
        )
        for positions, mask in kinds
    ]
    return parts[0][0] if len(parts) == 1 else merge_attention(*zip(*parts, strict=True))[0]


def _require_tables(op: str, q: Tensor, cos: Tensor, sin: Tensor, chunk_size: int) -> None:
    table_shape(op, cos, sin, q.shape[0], q.shape[3])
    require_device(op, "cos", cos, q, "q")
    if cos.dim() != 2 or cos.shape[0] <= chunk_size:
        raise ValueError(
            f"{op}: cos must have shape (P, Dr / 2) with P > chunk_size={chunk_size}, "
            f"got cos.shape={tuple(cos.shape)}"
        )


def _require_scaling(op: str, mscale: str | None, train_length: int | None) -> None:
    if mscale is not None:
        require_choice(op, "mscale", mscale, ("chunkllama", "qwen"))
    if (mscale is None) != (train_length is None):
        raise ValueError(
            f"{op}: mscale and train_length must be given together, got mscale={shown(mscale)}, "
            f"train_length={shown(train_length)}"
        )
    if train_length is not None:
        require_int(op, "train_length", train_length, 1)


def _turned(
    x: Tensor,
    positions: Tensor,
    *,
    tables: tuple[Tensor, Tensor],
    interleaved: bool,
    backend: str | None,
) -> Tensor:
    out, _ = apply_rotary(
        x, None, *tables, positions=positions, interleaved=interleaved, backend=backend
    )
    return out


@spelled_out(FormOptions, last=("backend",))
def local_strided_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    *,
    window: int,
    stride: int,
    backend: str | None = None,
    **options: Unpack[FormOptions],
) -> Tensor:
    """Gated mean of causal attention to the last `window` keys and to every `stride`-th key.

    ``O = g O_local + (1 - g) O_strided`` with g = sigmoid(gate): O_local over
    ``i - window < j <= i``, O_strided over the multiples of stride j <= i, in two softmaxes.

    Args:
        q: (B, Tq, Hq, D), float64, float32, bfloat16 or float16.
        k: (B, Tk, Hkv, D), Hkv a divisor of Hq. Query q is at position q + Tk - Tq of the keys.
        v: (B, Tk, Hkv, Dv).
        gate: (B, Tq, Hq, Dv), or (B, Tq, Hq, 1) for one gate of each head.
        window: keys that O_local sees, the query's own included.
        stride: distance of the keys that O_strided sees.
        scale: None is 1 / sqrt(D).
        softcap, dropout_p, seed: of both, see :func:`attention`.
        backend: see :func:`attention`.

    Returns:
        O (B, Tq, Hq, Dv) of q's dtype.

    Raises:
        TypeError, ValueError, NotImplementedError: see :func:`attention`.

    Note:
        Two calls of :func:`attention`, O(T window + T^2 / stride). With dropout the strided keys
        are selected where they are, as its mask follows from their positions. Deterministic;
        gradients to all four tensors.

    Reference:
        No paper; the two patterns of Child et al., 2019, arXiv:1904.10509, each with its softmax.

    Example:
        >>> q = torch.ones(1, 6, 2, 4)
        >>> local_strided_attention(q, q, q, torch.zeros(1, 6, 2, 1), window=2, stride=4).shape
        torch.Size([1, 6, 2, 4])
    """
    op = "local_strided_attention"
    record = pack(op, options, FormOptions)
    q, k, v = autocast(op, q, k, v)
    check_shapes(op, q, k, v)
    require_int(op, "window", window, 1)
    require_int(op, "stride", stride, 1)
    require_float(op, "gate", gate)
    if autocast_dtype(q) is not None:
        gate = gate.to(q.dtype)
    rows = (*q.shape[:2], q.shape[2])
    require_parameter(op, "gate", gate, q, [(*rows, v.shape[3]), (*rows, 1)])
    how = score_options(op, q, k, record)
    if use_reference(op, backend, q):
        return reference.local_strided_attention(q, k, v, gate, window=window, stride=stride, **how)
    how["backend"] = backend
    local = attention(q, k, v, mask=SlidingWindow(window - 1, 0), **how)
    far = _strided(q, k, v, stride, how)
    g = widen(gate).sigmoid()
    return (g * widen(local) + (1 - g) * widen(far)).to(q.dtype)


def _strided(q: Tensor, k: Tensor, v: Tensor, stride: int, options: dict[str, Any]) -> Tensor:
    """Computes O for the keys at multiples of `stride`."""
    tq, tk = q.shape[1], k.shape[1]
    if options["dropout_p"] == 0:
        mask = (_Multiples if is_traced() else _multiples)(stride, tk)  # sizes may be symbols
        out: Tensor = attention(q, k[:, ::stride], v[:, ::stride], mask=mask, **options)
        return out
    keys = torch.arange(0, tk, stride, device=q.device).expand(1, 1, min(tq, 1), -1)
    selected: Tensor = selected_attention(
        q, k, v, keys, block_size=1, query_block=max(tq, 1), causal=True, **options
    )
    return selected


@functools.lru_cache(maxsize=64)
def _multiples(stride: int, keys: int) -> _Multiples:
    return _Multiples(stride, keys)


@dataclass(frozen=True)
class _Multiples(OfPositions):
    """Mask whose column m is key stride * m of `keys`, visible to queries from that position."""

    stride: int
    keys: int

    def pairs(self, sizes: Sizes, queries: tuple[int, int] | None = None) -> Tensor:
        i = replace(sizes, tk=self.keys).positions(queries)
        return self.stride * torch.arange(sizes.tk, device=sizes.device) <= i
