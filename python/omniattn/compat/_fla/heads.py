"""Linear attention with per-head decays of fla.ops: simple GLA, lightning attention; and Based."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as nnf

from omniattn import functional
from omniattn.checks.arguments import (
    require_int,
    require_number,
    require_shape,
    require_tensor,
    shown,
)
from omniattn.compat._errors import errors_of, require_flags, require_form
from omniattn.compat._fla.calls import Call, fla_function, require_inputs
from omniattn.reference.precision import widen

__all__ = [
    "chunk_lightning_attn",
    "chunk_simple_gla",
    "fused_chunk_based",
    "fused_chunk_simple_gla",
    "fused_recurrent_lightning_attn",
    "fused_recurrent_simple_gla",
    "parallel_based",
    "parallel_rebased",
    "parallel_retention",
    "parallel_simple_gla",
]


def _simple(
    op: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, g_gamma: Tensor | None
) -> Call:
    """Returns a call with decays per token and head, per head, or none."""
    if g is not None and g_gamma is not None:
        raise ValueError(
            f"{op}: g must be None where g_gamma is given, got g.shape={tuple(g.shape)}"
        )
    if g_gamma is not None:
        require_tensor(op, "g_gamma", g_gamma)
        require_shape(op, "g_gamma", g_gamma, (v.shape[2],))
        g = g_gamma.expand(v.shape[:3])
    if g is None:
        g = widen(q).new_zeros(v.shape[:3])
    return functional.gated_linear_attention, (q, k, v, g)


def _lightning(op: str, q: Tensor, layer_idx: int, num_layers: int) -> Tensor:
    """Returns log-decays of heads: 0 for the first head, weaker in later layers."""
    require_int(op, "num_layers", num_layers, 1)
    require_int(op, "layer_idx", layer_idx, 0, num_layers - 1)
    heads = q.shape[2]
    rate = 8 / max(1, heads) * (1 - layer_idx / num_layers)
    return -rate * torch.arange(heads, dtype=torch.float32, device=q.device)


@fla_function()
def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Call:
    """Computes :func:`functional.gated_linear_attention` with g (B, T, H) or g_gamma (H)."""
    return _simple("chunk_simple_gla", q, k, v, g, g_gamma)


@fla_function()
def fused_chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Call:
    """Computes `chunk_simple_gla`."""
    return _simple("fused_chunk_simple_gla", q, k, v, g, g_gamma)


@fla_function()
def fused_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Call:
    """Computes `chunk_simple_gla`; `reverse` goes from the last token to the first."""
    return _simple("fused_recurrent_simple_gla", q, k, v, g, g_gamma)


@fla_function()
def chunk_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Call:
    """Computes :func:`functional.gated_linear_attention` with a fixed decay per head.

    Head h of H decays by ``exp(-8 h / H (1 - layer_idx / num_layers))``.
    """
    op = "chunk_lightning_attn"
    return _simple(op, q, k, v, None, _lightning(op, q, layer_idx, num_layers))


@fla_function()
def fused_recurrent_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Call:
    """Computes `chunk_lightning_attn`."""
    op = "fused_recurrent_lightning_attn"
    return _simple(op, q, k, v, None, _lightning(op, q, layer_idx, num_layers))


def parallel_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    output_attentions: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Computes :func:`functional.gated_linear_attention` with g (B, T, H); returns o and None.

    With `output_attentions`, the second result is the matrix (B, H, T, T) of which o is the product
    with v; only without `cu_seqlens`.
    """
    op = "parallel_simple_gla"
    require_inputs(op, scale, q=q, k=k, v=v)
    return _parallel(op, _simple(op, q, k, v, g, None), scale, output_attentions, cu_seqlens)


def parallel_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    output_attentions: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Computes :func:`functional.retention`; for results see `parallel_simple_gla`."""
    op = "parallel_retention"
    require_inputs(op, scale, q=q, k=k, v=v)
    require_form(op, "v", v, "B, T, H, V")
    heads = torch.arange(v.shape[2], dtype=torch.float64, device=v.device)
    decays = torch.log1p(-torch.exp2(-5 - heads)).to(widen(q).dtype)
    call = _simple(op, q, k, v, None, decays)
    return _parallel(op, call, scale, output_attentions, cu_seqlens)


def _parallel(
    op: str, call: Call, scale: float | None, with_matrix: bool, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Returns o, and the matrix (B, H, T, T) if it is wanted."""
    require_flags(op, output_attentions=with_matrix)
    if with_matrix and cu_seqlens is not None:
        raise NotImplementedError(
            f"{op}: cu_seqlens must be None with output_attentions=True, got "
            f"cu_seqlens={shown(cu_seqlens)}"
        )
    function, tensors = call
    with errors_of(op):
        o = function(*tensors, scale=scale, cu_seqlens=cu_seqlens)[0]
    if not with_matrix:
        return o, None
    q, k, v, g = (widen(t) for t in tensors)
    copies = v.shape[2] // max(1, q.shape[2])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k = scale * q.repeat_interleave(copies, 2), k.repeat_interleave(copies, 2)
    passed = g.cumsum(1).transpose(1, 2)
    decays = (passed[..., None] - passed[..., None, :]).tril().exp().tril()
    return o, (torch.einsum("bihd,bjhd->bhij", q, k) * decays).to(o.dtype)


def parallel_based(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    use_norm: bool = True,
    head_first: bool = False,
) -> Tensor:
    """Computes :func:`functional.linear_attention` with Taylor features.

    The weights are ``1 + u + u^2 / 2`` with ``u = scale q . k``. The magnitude of the denominator
    is clamped to at least 1e-6; fla adds 1e-6 instead. With `head_first` the tensors and the result
    are (B, H, T, D).
    """
    return _based("parallel_based", q, k, v, scale, use_norm, head_first)


def fused_chunk_based(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    use_norm: bool = True,
    head_first: bool = False,
) -> Tensor:
    """Computes `parallel_based`."""
    return _based("fused_chunk_based", q, k, v, scale, use_norm, head_first)


def parallel_rebased(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eps: float = 1e-5,
    use_scale: bool = True,
    use_normalize: bool = True,
    return_both: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes causal attention with the weights ``u^2``, ``u = q . k``, or over sqrt(K).

    Args:
        q, k, v: (B, T, H, K), and v (B, T, H, V).
        eps: added to the sum of the weights.
        use_scale: False for ``u = q . k``.
        use_normalize: False for no division by the sum.
        return_both: True for (o, sums) in fla's layout (B, H, T, V) and (B, H, T), not divided.
    """
    op = "parallel_rebased"
    require_inputs(op, None, q=q, k=k, v=v)
    require_number(op, "eps", eps, 0)
    require_flags(op, use_scale=use_scale, use_normalize=use_normalize, return_both=return_both)
    with errors_of(op):  # the sum is the last column
        both, _ = functional.linear_attention(
            q, k, nnf.pad(v, (0, 1), value=1.0), feature_map="square", normalize=False
        )
    if not use_scale:
        both = both * q.shape[-1]
    o, total = both[..., :-1], both[..., -1]
    if return_both:
        return o.transpose(1, 2), total.transpose(1, 2)
    return o / (total[..., None] + eps) if use_normalize else o


def _based(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    use_norm: bool,
    head_first: bool,
) -> Tensor:
    require_inputs(op, scale, q=q, k=k, v=v)
    if head_first:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    # The features include a scale of K^-0.5.
    scale = 1.0 if scale is None else scale * q.shape[-1] ** 0.5
    with errors_of(op, normalize="use_norm"):
        o, _ = functional.linear_attention(
            q, k, v, feature_map="taylor", normalize=use_norm, scale=scale
        )
    return o.transpose(1, 2) if head_first else o
