"""fla's parts of layers: rotary positions, gates, boundaries of packed sequences."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from omniattn.checks.arguments import require_number, require_shape, require_tensor
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
