"""Rotary positions of new tokens and their place in a cache: `xformers.ops.rope_padded`."""

from __future__ import annotations

import torch
from torch import Tensor

from omniattn import functional
from omniattn.checks.arguments import (
    require_choice,
    require_device,
    require_integers,
    require_like,
    require_number,
    require_shape,
    shown,
)
from omniattn.compat._errors import errors_of, require_flags, require_real, require_writable
from omniattn.compat.xformers.cached import BlockDiagonalPaddedKeysMask


def rope_padded(
    xq: Tensor,
    xk: Tensor,
    xv: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    attn_bias: BlockDiagonalPaddedKeysMask,
    *,
    theta: float = 10000.0,
    linear_scale: float = 1.0,
    use_dynamic_scaling: bool = False,
    dynamic_old_context_len: float = 8192.0,
    dynamic_scale_factor: float = 16.0,
    dynamic_low_freq_factor: float = 1.0,
    dynamic_high_freq_factor: float = 32.0,
    out_q: Tensor | None = None,
    first_seqpos: Tensor | None = None,
    seqpos: Tensor | None = None,
    adjacents: bool = True,
    internal_dtype: str = "",
) -> Tensor:
    """Rotates queries and keys, writes keys and values to a cache, and returns the queries.

    The tokens of a sequence are the last ones in its part of the cache. The result is ready for
    ``memory_efficient_attention(rope_padded(...), cache_k, cache_v, attn_bias)``. There are no
    gradients.

    Args:
        xq: (1, T, Hq, D) or (1, T, G, Hq, D), queries of packed sequences.
        xk, xv: (1, T, H, D) or (1, T, G, H, D), their keys and values; H may be expanded from 1.
        cache_k, cache_v: (1, N * padding, H, D) or (1, N * padding, G, H, D), written in place; H
            may be expanded from 1 if it is in xk and xv.
        attn_bias: mask, whose lengths of keys include the new tokens.
        theta: base of the frequencies ``theta^(-2 i / D)``.
        linear_scale: positions are divided by it.
        use_dynamic_scaling: True for :class:`functional.Llama3Scaling` with the four numbers
            `dynamic_scale_factor`, `dynamic_low_freq_factor`, `dynamic_high_freq_factor` and
            `dynamic_old_context_len`.
        out_q: tensor like xq for the result, or None.
        first_seqpos: (N,) int, positions of the first rows of the sequences in the cache; None for
            zeros.
        seqpos: (T,) int, positions of the tokens; None to count from the first rows. At most
            one of first_seqpos and seqpos may be given.
        adjacents: True for pairs of channels (2 i, 2 i + 1), False for (i, i + D / 2).
        internal_dtype: "", "f32" or "f64"; has no effect, since all angles are fp64.
    """
    op = "rope_padded"
    tensors = {"xq": xq, "xk": xk, "xv": xv, "cache_k": cache_k, "cache_v": cache_v}
    _check(op, tensors, out_q, attn_bias)
    require_flags(op, use_dynamic_scaling=use_dynamic_scaling, adjacents=adjacents)
    require_choice(op, "internal_dtype", internal_dtype, ("", "f32", "f64"))
    require_number(op, "linear_scale", linear_scale, above=0)
    if first_seqpos is not None and seqpos is not None:
        raise ValueError(f"{op}: seqpos must be None with first_seqpos, got both")
    k, v, keys, values = (_own(t) for t in (xk, xv, cache_k, cache_v))
    counts = [last - first for first, last in attn_bias.q_seqinfo.intervals()]
    rows, positions = _places(op, attn_bias, counts)
    if first_seqpos is not None:
        _require_positions(op, "first_seqpos", first_seqpos, len(counts), xq)
        shifts = first_seqpos.cpu().repeat_interleave(torch.tensor(counts))
        positions = positions + shifts
    if seqpos is not None:
        _require_positions(op, "seqpos", seqpos, len(positions), xq)
        positions = seqpos
    rows, positions = rows.to(xq.device), positions.to(xq.device)
    names = {f: f"dynamic_{f}" for f in ("low_freq_factor", "high_freq_factor")}
    names |= {"factor": "dynamic_scale_factor", "original_max_positions": "dynamic_old_context_len"}
    with torch.no_grad(), errors_of(op, rotary_dim="D", base="theta", **names):
        scaling = None
        if use_dynamic_scaling:
            low, high = dynamic_low_freq_factor, dynamic_high_freq_factor
            context = int(dynamic_old_context_len)
            scaling = functional.Llama3Scaling(dynamic_scale_factor, low, high, context)
        freqs = functional.rope_frequencies(
            xq.shape[-1], base=theta, scaling=scaling, device=xq.device
        )
        cos, sin = functional.rotary_tables(freqs / linear_scale, positions)
        q, k = functional.apply_rotary(
            xq.flatten(2, -2), k.flatten(2, -2), cos, sin, interleaved=adjacents
        )
        q = q.view(xq.shape)
        keys[0, rows] = k.view(1, len(rows), *keys.shape[2:])[0]
        values[0, rows] = v[0]
        return q if out_q is None else out_q.copy_(q)


def _check(op: str, tensors: dict[str, Tensor], out_q: Tensor | None, bias: object) -> None:
    """Checks types, dtypes, shapes and strides."""
    require_real(op, **tensors)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors.values()):
        raise NotImplementedError(f"{op}: gradients are not supported, got requires_grad=True")
    if not isinstance(bias, BlockDiagonalPaddedKeysMask):
        raise TypeError(
            f"{op}: attn_bias must be a BlockDiagonalCausalWithOffsetPaddedKeysMask, got "
            f"{shown(bias)}"
        )
    xq = tensors["xq"]
    total, room = bias.q_seqinfo.seqstart_py[-1], bias.k_seqinfo.seqstart_py[-1]
    if xq.ndim not in (4, 5) or xq.shape[:2] != (1, total):
        raise ValueError(
            f"{op}: xq must have shape (1, {total}, H, D) or (1, {total}, G, H, D), got "
            f"xq.shape={tuple(xq.shape)}"
        )
    heads = tensors["xk"].shape[-2] if tensors["xk"].ndim == xq.ndim else 1
    for name, t in tensors.items():
        require_like(op, name, t, xq, "xq")
        if name in ("xk", "xv"):
            require_shape(op, name, t, (1, total, *xq.shape[2:-2], heads, xq.shape[-1]))
    for name, new in (("cache_k", tensors["xk"]), ("cache_v", tensors["xv"])):
        cache = _own(tensors[name])
        require_shape(op, name, cache, (1, room, *_own(new).shape[2:]))
        require_writable(op, name, cache)
    if out_q is not None:
        require_like(op, "out_q", out_q, xq, "xq")
        require_shape(op, "out_q", out_q, tuple(xq.shape))
        require_writable(op, "out_q", out_q)


def _own(t: Tensor) -> Tensor:
    """Returns one head of a tensor that has been expanded over heads, else the tensor."""
    return t[..., :1, :] if t.stride(-2) == 0 else t


def _places(op: str, bias: BlockDiagonalPaddedKeysMask, counts: list[int]) -> tuple[Tensor, Tensor]:
    """Returns the rows of new tokens in the cache, and their positions in their sequences."""
    rows, positions = [torch.arange(0)], [torch.arange(0)]
    for count, (first, last) in zip(counts, bias.k_seqinfo.intervals(), strict=True):
        if last - first < count:
            raise ValueError(
                f"{op}: attn_bias must have at least as many keys as queries in each sequence, got "
                f"{last - first} and {count}"
            )
        rows.append(torch.arange(last - count, last))
        positions.append(rows[-1] - first)
    return torch.cat(rows), torch.cat(positions)


def _require_positions(op: str, name: str, given: Tensor, count: int, xq: Tensor) -> None:
    require_integers(op, name, given)
    require_shape(op, name, given, (count,))
    require_device(op, name, given, xq, "xq")
