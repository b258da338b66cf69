"""fla's parts of layers: rotary positions, gates, boundaries of packed sequences."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from omniattn.checks.arguments import (
    require_choice,
    require_int,
    require_number,
    require_shape,
    require_tensor,
)
from omniattn.compat._errors import require_optional, require_real
from omniattn.compat.flash_attn import rotary
from omniattn.reference.precision import widen


def l2norm(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    """Computes ``x / sqrt(sum(x^2) + eps)`` over the last dimension."""
    require_real("l2norm", x=x)
    require_number("l2norm", "eps", eps, 0.0)
    wide = widen(x)
    y = wide * (wide.square().sum(-1, keepdim=True) + eps).rsqrt()
    return y.to(output_dtype or x.dtype)


l2_norm = l2norm


class L2Norm(nn.Module):
    """Computes :func:`l2norm`."""

    def __init__(self, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.eps, self.output_dtype = eps, output_dtype

    def forward(self, x: Tensor) -> Tensor:
        return l2norm(x, self.eps, self.output_dtype)


def rotary_embedding(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> Tensor:
    """Computes :func:`flash_attn.apply_rotary_emb` of x (B, T, H, D), with B = 1 if packed."""
    op = "rotary_embedding"
    require_real(op, x=x)
    if x.ndim != 4 or (cu_seqlens is not None and len(x) != 1):
        raise ValueError(
            f"{op}: x must have shape (B, T, H, D), with B = 1 for cu_seqlens, got "
            f"x.shape={tuple(x.shape)}"
        )
    if cu_seqlens is None:
        return rotary.apply_rotary_emb(x, cos, sin, interleaved, inplace, seqlen_offsets)
    packed = rotary.apply_rotary_emb(
        x[0], cos, sin, interleaved, inplace, seqlen_offsets, cu_seqlens
    )
    return x if inplace else packed[None]


class RotaryEmbedding(rotary.RotaryEmbedding):
    """Rotary positions of queries and keys, see :class:`flash_attn.RotaryEmbedding`.

    Args:
        dim, base, scale_base, interleaved, device: see there.
        pos_idx_in_fp32: must be True.
    """

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        scale_base: float | None = None,
        interleaved: bool = False,
        pos_idx_in_fp32: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        if not pos_idx_in_fp32:
            raise NotImplementedError("RotaryEmbedding: pos_idx_in_fp32 must be True, got False")
        super().__init__(dim, base, interleaved, scale_base, device)

    def forward(  # type: ignore[override]
        self,
        q: Tensor,
        k: Tensor,
        seqlen_offset: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        chunk_indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns q and k (B, T, H, D) rotated."""
        cos, sin, cos_k, sin_k = self._updated(q, seqlen_offset, max_seqlen)
        rest = self.interleaved, False, seqlen_offset, cu_seqlens
        return rotary_embedding(q, cos, sin, *rest), rotary_embedding(k, cos_k, sin_k, *rest)


def fused_kda_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Computes log-decays ``-exp(A_log) softplus(g + dt_bias)``.

    Args:
        g: (..., H, K).
        A_log: (H,); None for 0, which needs a `lower_bound`.
        dt_bias: (H K,), or None.
        lower_bound: None, or the bound b of ``b sigmoid(exp(A_log) (g + dt_bias))``.
        output_dtype: dtype of the result.
    """
    op = "fused_kda_gate"
    require_real(op, g=g)
    require_optional(op, A_log=A_log, dt_bias=dt_bias)
    if g.ndim < 2 or (A_log is None and lower_bound is None):
        raise ValueError(
            f"{op}: g must have shape (..., H, K), and A_log must be given without a lower_bound, "
            f"got g.shape={tuple(g.shape)}, lower_bound={lower_bound}"
        )
    heads, channels = g.shape[-2:]
    x = widen(g)
    if dt_bias is not None:
        require_shape(op, "dt_bias", dt_bias.flatten(), (heads * channels,))
        x = x + widen(dt_bias).view(heads, channels)
    rate = x.new_ones(heads) if A_log is None else widen(A_log).flatten().exp()
    require_shape(op, "A_log", rate, (heads,))
    if lower_bound is None:
        return (-rate[:, None] * nnf.softplus(x)).to(output_dtype)
    return (lower_bound * (rate[:, None] * x).sigmoid()).to(output_dtype)


def prepare_lens(cu_seqlens: Tensor) -> Tensor:
    """Returns the lengths of packed sequences."""
    require_tensor("prepare_lens", "cu_seqlens", cu_seqlens)
    return cu_seqlens.diff()


def prepare_lens_from_mask(mask: Tensor) -> Tensor:
    """Returns the number of tokens in each row of a mask (B, T), as int32."""
    require_tensor("prepare_lens_from_mask", "mask", mask)
    return mask.sum(-1, dtype=torch.int32)


def prepare_cu_seqlens_from_lens(lens: Tensor, dtype: torch.dtype | None = torch.int32) -> Tensor:
    """Returns the boundaries (N + 1,) of sequences of these lengths."""
    require_tensor("prepare_cu_seqlens_from_lens", "lens", lens)
    return nnf.pad(lens.cumsum(0, dtype=dtype), (1, 0))


def prepare_cu_seqlens_from_mask(mask: Tensor, dtype: torch.dtype | None = torch.int32) -> Tensor:
    """Returns the boundaries (B + 1,) of the tokens in each row of a mask (B, T)."""
    return prepare_cu_seqlens_from_lens(prepare_lens_from_mask(mask), dtype)


def prepare_position_ids(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None = None) -> Tensor:
    """Returns the position of each packed token in its sequence."""
    require_tensor("prepare_position_ids", "cu_seqlens", cu_seqlens)
    lengths = cu_seqlens.diff().long()
    starts = cu_seqlens[:-1].long().repeat_interleave(lengths)
    places = torch.arange(len(starts), device=cu_seqlens.device) + cu_seqlens[0]
    return (places - starts).to(cu_seqlens)


def prepare_sequence_ids(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None = None) -> Tensor:
    """Returns the number of the sequence of each packed token, without empty sequences."""
    return prepare_position_ids(cu_seqlens).eq(0).cumsum(0) - 1


def prepare_token_indices(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None = None) -> Tensor:
    """Returns the sequence and the position (total, 2) of each packed token."""
    pair = prepare_sequence_ids(cu_seqlens), prepare_position_ids(cu_seqlens)
    return torch.stack(pair, 1).to(cu_seqlens)


def fused_gdn_gate(
    g: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Computes log-decays ``-exp(A_log) softplus(g + dt_bias)`` of heads.

    Args:
        g: (..., H).
        A_log, dt_bias: (H,); dt_bias may be None.
        output_dtype: dtype of the result.
    """
    op = "fused_gdn_gate"
    require_real(op, g=g, A_log=A_log)
    require_optional(op, dt_bias=dt_bias)
    rate, x = widen(A_log).flatten().exp(), widen(g)
    require_shape(op, "A_log", rate, tuple(g.shape[-1:]))
    if dt_bias is not None:
        require_shape(op, "dt_bias", dt_bias.flatten(), tuple(g.shape[-1:]))
        x = x + widen(dt_bias).flatten()
    return (-rate * nnf.softplus(x)).to(output_dtype)


def fused_beta_sigmoid(x: Tensor, scale: float = 1.0) -> Tensor:
    """Computes ``scale sigmoid(x)`` in fp32 (fp64 for fp64)."""
    require_real("fused_beta_sigmoid", x=x)
    require_number("fused_beta_sigmoid", "scale", scale)
    return scale * widen(x).sigmoid()


def pack_sequence(x: Tensor, cu_seqlens: Tensor, padding_side: str = "left") -> Tensor:
    """Returns the tokens (total, ...) of padded sequences x (N, T, ...), whose boundaries are
    given."""
    op = "pack_sequence"
    require_real(op, x=x)
    kept = _kept(op, x.shape[:2], cu_seqlens, padding_side)
    return x.flatten(0, 1)[kept.flatten().nonzero()[:, 0]]


def unpack_sequence(
    x: Tensor,
    cu_seqlens: Tensor,
    padding_side: str = "left",
    desired_shape: torch.Size | tuple[int, ...] | None = None,
) -> Tensor:
    """Undoes :func:`pack_sequence`, with zeros in the padding.

    The result has `desired_shape` (N, T, ...), or T is the longest length.
    """
    op = "unpack_sequence"
    require_real(op, x=x)
    lengths = prepare_lens(cu_seqlens)
    if desired_shape is None:
        longest = int(lengths.max()) if len(lengths) else 0
        desired_shape = (len(lengths), longest, *x.shape[1:])
    elif tuple(desired_shape[2:]) != x.shape[1:]:
        raise ValueError(
            f"{op}: desired_shape must end as x.shape, got desired_shape={tuple(desired_shape)}, "
            f"x.shape={tuple(x.shape)}"
        )
    kept = _kept(op, desired_shape[:2], cu_seqlens, padding_side).flatten().nonzero()[:, 0]
    require_shape(op, "x", x, (len(kept), *x.shape[1:]))
    rows = x.new_zeros(desired_shape[0] * desired_shape[1], *x.shape[1:])
    return rows.index_copy(0, kept, x).view(tuple(desired_shape))


def _kept(op: str, sizes: Any, cu_seqlens: Tensor, padding_side: str) -> Tensor:
    """Returns True for the tokens of padded sequences."""
    require_choice(op, "padding_side", padding_side, ("left", "right"))
    lengths = prepare_lens(cu_seqlens)
    if len(lengths) != sizes[0] or bool((lengths > sizes[1]).any()):
        raise ValueError(
            f"{op}: cu_seqlens must be boundaries of {sizes[0]} sequences of at most {sizes[1]} "
            f"tokens, got lengths {lengths.tolist()}"
        )
    places = torch.arange(sizes[1], device=cu_seqlens.device)
    if padding_side == "left":
        places = places.flip(0)
    return places < lengths[:, None]


def mean_pooling(x: Tensor, chunk_size: int, cu_seqlens: Tensor | None = None) -> Tensor:
    """Returns the means (B, N, H, D) of chunks of x (B, T, H, D), of which the last may be shorter.

    With `cu_seqlens` B is 1, chunks start at each sequence, and N is their total.
    """
    op = "mean_pooling"
    require_real(op, x=x)
    require_int(op, "chunk_size", chunk_size, 1)
    if x.ndim != 4 or (cu_seqlens is not None and len(x) != 1):
        raise ValueError(
            f"{op}: x must have shape (B, T, H, D), with B = 1 for cu_seqlens, got "
            f"x.shape={tuple(x.shape)}"
        )
    edges = [0, x.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    means = [
        widen(part).mean(1, keepdim=True)
        for first, last in pairwise(edges)
        for part in x[:, first:last].split(chunk_size, 1)
        if part.shape[1]
    ]
    return torch.cat([x[:, :0], *(mean.to(x.dtype) for mean in means)], 1)


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """Returns (-x_2, x_1) of the halves of the last dimension, or of its pairs."""
    if interleaved:
        pairs = x.unflatten(-1, (-1, 2))
        return torch.stack((-pairs[..., 1], pairs[..., 0]), -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def fused_attnres(
    query: Tensor,
    residuals: Sequence[Tensor],
    rms_weight: Tensor,
    output_rms_weight: Tensor | None = None,
    rms_eps: float = 1e-6,
    scale: float = 1.0,
    return_weights: bool = False,
    checkpoint_level: int = 1,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes ``sum_l softmax_l(scale query . norm(v_l)) v_l`` of attention residuals.

    Args:
        query: (D,) or (D, 1).
        residuals: L tensors v_l (..., D).
        rms_weight: (D,), weight of the root mean square norm of v_l.
        output_rms_weight: (D,), weight of such a norm of the result, or None for no norm.
        rms_eps: added to mean squares.
        scale: factor of the logits.
        return_weights: if True, also returns the softmax (L, ...) in fp32 (fp64 for fp64).
        checkpoint_level: has no effect.

    Returns:
        o (..., D) of the dtype of the residuals, rounded once.
    """
    op = "fused_attnres"
    if not residuals:
        raise ValueError(f"{op}: residuals must have a tensor at least, got {residuals!r}")
    require_real(op, query=query, rms_weight=rms_weight)
    require_optional(op, output_rms_weight=output_rms_weight)
    values = torch.stack([widen(v) for v in residuals])
    size = values.shape[-1:]
    require_shape(op, "query", query.flatten(), tuple(size))
    keys = nnf.rms_norm(values, size, widen(rms_weight).flatten(), rms_eps)
    weights = (keys @ (widen(query).flatten() * scale)).softmax(0)
    o = (weights[..., None] * values).sum(0)
    if output_rms_weight is not None:
        o = nnf.rms_norm(o, size, widen(output_rms_weight), rms_eps)
    o = o.to(residuals[0].dtype)
    return (o, weights) if return_weights else o
