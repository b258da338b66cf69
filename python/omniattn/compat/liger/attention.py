"""Attention and rotary embeddings of `liger_kernel.transformers`."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf
from torch.nn.modules.utils import _pair

from omniattn import functional
from omniattn.checks.arguments import require_int
from omniattn.compat._errors import errors_of, require_form, require_optional, require_real
from omniattn.compat.liger import functions
from omniattn.functional.masks import Dilated
from omniattn.reference.precision import widen

Two = int | tuple[int, int]


def liger_multi_token_attention(
    scores: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Two = 1,
    padding: Two = 0,
    dilation: Two = 1,
    groups: int = 1,
    sparse: bool = False,
) -> Tensor:
    """Computes weights of attention from logits, convolved over queries and keys.

    ``mask_0(conv2d(softmax(mask_-inf(scores))))`` with causal masks (Golovneva et al.,
    arXiv:2504.00927). `functional.multi_token_attention` computes the outputs of attention, and
    convolves before the softmax, too.

    Args:
        scores: (B, C_in, L, L).
        weight: (C_out, C_in / groups, K, K).
        bias: (C_out,), or None.
        stride, padding, dilation, groups: see `torch.nn.functional.conv2d`. Its result must be
            (B, C_out, L, L).
        sparse: True for sparsemax in place of softmax.
    """
    op = "liger_multi_token_attention"
    require_real(op, scores=scores, weight=weight)
    require_optional(op, bias=bias)
    require_form(op, "scores", scores, "B, C_in, L, L")
    if scores.shape[-1] != scores.shape[-2]:
        raise ValueError(
            f"{op}: scores must have shape (B, C_in, L, L), got scores.shape={tuple(scores.shape)}"
        )
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    logits = scores.masked_fill(hidden, -torch.inf)
    if sparse:  # with a finite number, as sums over -inf are NaN
        logits = scores.masked_fill(hidden, torch.finfo(scores.dtype).min / 4)
        weights = functions.liger_sparsemax(logits)
    else:
        weights = logits.softmax(-1)
    out = nnf.conv2d(weights, weight, bias, stride, padding, dilation, groups)
    if out.shape[-2:] != scores.shape[-2:]:
        raise ValueError(
            f"{op}: the convolution must keep the size {tuple(scores.shape[-2:])}, "
            f"got {tuple(out.shape[-2:])} from {padding=}, {stride=}, {dilation=}"
        )
    return out.masked_fill(hidden, 0.0)


class LigerMultiTokenAttention(nn.Module):
    """Weights of attention from scores, see :func:`liger_multi_token_attention`."""

    bias: Tensor | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Two,
        stride: Two = 1,
        padding: Two = 0,
        dilation: Two = 1,
        groups: int = 1,
        bias: bool = True,
        sparse: bool = False,
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size, self.stride = _pair(kernel_size), _pair(stride)
        self.padding, self.dilation = _pair(padding), _pair(dilation)
        self.groups, self.sparse = groups, sparse
        size = out_channels, in_channels // groups, *self.kernel_size
        self.weight = nn.Parameter(torch.empty(size))
        self.register_parameter("bias", nn.Parameter(torch.empty(out_channels)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weight as nn.Conv2d does; the bias is 0."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, scores: Tensor) -> Tensor:
        rest = self.stride, self.padding, self.dilation, self.groups, self.sparse
        return liger_multi_token_attention(scores, self.weight, self.bias, *rest)


def liger_fused_neighborhood_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: int = 7,
    dilation: int = 1,
    scale: float | None = None,
) -> Tensor:
    """Computes attention to every `dilation`-th of the nearest keys on both sides.

    Query i sees the keys ``i + r dilation``, ``|r| <= kernel_size // 2``, that exist: fewer at the
    ends, where the windows of NATTEN and of `functional.na1d` keep their size.

    Args:
        query, key, value: (B, H, T, D).
        kernel_size: size of the window.
        dilation: distance of its keys.
        scale: of the logits, default D^-0.5.
    """
    op = "liger_fused_neighborhood_attention"
    for name, t in (("query", query), ("key", key), ("value", value)):
        require_real(op, **{name: t})
        require_form(op, name, t, "B, H, T, D")
    require_int(op, "kernel_size", kernel_size, 1)
    require_int(op, "dilation", dilation, 1)
    mask = Dilated(dilation, kernel_size // 2, causal=False)
    with errors_of(op, q="query", k="key", v="value"):
        rows = (t.transpose(1, 2) for t in (query, key, value))
        return functional.attention(*rows, mask=mask, scale=scale).transpose(1, 2)


class LigerFusedNeighborhoodAttention(nn.Module):
    """Layer of :func:`liger_fused_neighborhood_attention`, with dropout of its outputs."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        kernel_size: int = 7,
        dilation: int = 1,
        bias: bool = True,
        dropout: float = 0.0,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        op = "LigerFusedNeighborhoodAttention"
        require_int(op, "kernel_size", kernel_size, 1)
        require_int(op, "dilation", dilation, 1)
        if hidden_size % num_heads:
            raise ValueError(
                f"{op}: hidden_size must be a multiple of num_heads, "
                f"got {hidden_size=}, {num_heads=}"
            )
        if kernel_size % 2 == 0:
            raise ValueError(f"{op}: kernel_size must be odd, got {kernel_size=}")
        self.hidden_size, self.num_heads = hidden_size, num_heads
        self.head_dim = hidden_size // num_heads
        self.kernel_size, self.dilation = kernel_size, dilation
        self.scale = self.head_dim**-0.5 if scale is None else scale
        self.dropout_p = dropout
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            self.add_module(name, nn.Linear(hidden_size, hidden_size, bias=bias))
        self.dropout = nn.Dropout(dropout) if dropout > 0.0 else None

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Maps (B, T, hidden_size) to the same shape; attention_mask must be None."""
        if attention_mask is not None:
            raise NotImplementedError(
                "LigerFusedNeighborhoodAttention: attention_mask must be None, got a tensor"
            )
        q, k, v = (
            self.get_submodule(f"{name}_proj")(hidden_states)
            .unflatten(-1, (self.num_heads, self.head_dim))
            .transpose(1, 2)
            for name in "qkv"
        )
        size = self.kernel_size, self.dilation, self.scale
        o = liger_fused_neighborhood_attention(q, k, v, *size).transpose(1, 2).flatten(-2)
        y: Tensor = self.get_submodule("out_proj")(o if self.dropout is None else self.dropout(o))
        return y


class LigerFusedNeighborhoodAttentionLayer(nn.Module):
    """Computes ``x + dropout(attention(norm(x)))`` with a layer norm."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        kernel_size: int = 7,
        dilation: int = 1,
        bias: bool = True,
        dropout: float = 0.0,
        layer_norm_eps: float = 1e-5,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        sizes = hidden_size, num_heads, kernel_size, dilation
        self.attention = LigerFusedNeighborhoodAttention(*sizes, bias, dropout, scale)
        self.layer_norm = nn.LayerNorm(hidden_size, eps=layer_norm_eps)
        self.dropout = nn.Dropout(dropout) if dropout > 0.0 else None

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Maps (B, T, hidden_size) to the same shape; attention_mask must be None."""
        y: Tensor = self.attention(self.layer_norm(hidden_states), attention_mask)
        return hidden_states + (y if self.dropout is None else self.dropout(y))


class LigerFusedNeighborhoodAttentionConfig:
    """Options of :class:`LigerFusedNeighborhoodAttentionLayer`."""

    def __init__(
        self,
        hidden_size: int = 768,
        num_heads: int = 12,
        kernel_size: int = 7,
        dilation: int = 1,
        bias: bool = True,
        dropout: float = 0.0,
        layer_norm_eps: float = 1e-5,
        scale: float | None = None,
    ) -> None:
        self.hidden_size, self.num_heads = hidden_size, num_heads
        self.kernel_size, self.dilation = kernel_size, dilation
        self.bias, self.dropout = bias, dropout
        self.layer_norm_eps, self.scale = layer_norm_eps, scale

    def to_dict(self) -> dict[str, int | float | None]:
        """Returns the options by their names."""
        return dict(vars(self))


def liger_llama4_text_rotary_pos_emb(
    xq: Tensor, xk: Tensor, freqs_cis: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotates pairs of neighbours of xq and xk (B, T, H, D).

    freqs_cis is complex, (T', D / 2) or (1, T', D / 2) with T' >= T, or (B, T, D / 2), a table for
    each sequence, as transformers has it, where Liger reads that of the first one for all.
    """
    if freqs_cis.ndim == 3 and len(freqs_cis) == 1:
        freqs_cis = freqs_cis[0]
    if freqs_cis.ndim == 2:
        freqs_cis = freqs_cis[: xq.shape[1]]
    rows = {"xq": xq, "xk": xk}
    return _by_pairs("liger_llama4_text_rotary_pos_emb", rows, "freqs_cis", freqs_cis)


def liger_llama4_vision_rotary_pos_emb(
    query: Tensor, key: Tensor, freqs_ci: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotates pairs of neighbours of query and key (B, T, H, D).

    freqs_ci is (T, D / 2) or, with dimensions of 1, (T, 1, D / 2) or (1, T, 1, D / 2). Where it is
    real, because a model was cast to a real dtype, pairs are multiplied by it and not rotated, as
    in Liger and transformers.
    """
    op, rows = "liger_llama4_vision_rotary_pos_emb", {"query": query, "key": key}
    if freqs_ci.is_complex():
        return _by_pairs(op, rows, "freqs_ci", freqs_ci.flatten(0, -2))
    require_real(op, query=query, key=key, freqs_ci=freqs_ci)
    factor = freqs_ci.flatten(0, -2).repeat_interleave(2, -1)[:, None]
    return (widen(query) * factor).to(query.dtype), (widen(key) * factor).to(key.dtype)


def _by_pairs(op: str, rows: dict[str, Tensor], name: str, table: Tensor) -> tuple[Tensor, Tensor]:
    require_real(op, **rows)
    (q_name, q), (k_name, k) = rows.items()
    require_form(op, q_name, q, "B, T, H, D")
    shapes = [(*size, q.shape[3] // 2) for size in (q.shape[1:2], q.shape[:2])]
    if not table.is_complex() or tuple(table.shape) not in shapes:
        raise ValueError(
            f"{op}: {name} must be complex with a row of {shapes[0][1]} numbers for each token of "
            f"{q_name}, got {name}.dtype={table.dtype}, {name}.shape={tuple(table.shape)}, "
            f"{q_name}.shape={tuple(q.shape)}"
        )
    with errors_of(op, q=q_name, k=k_name):
        turned, other = functional.apply_rotary(q, k, table.real, table.imag, interleaved=True)
    return turned, other


def liger_rotary_pos_emb_vision(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotates q and k (T, H, D) by cos and sin (T, D), whose halves are equal."""
    op = "liger_rotary_pos_emb_vision"
    require_real(op, q=q, k=k, cos=cos, sin=sin)
    for name, t in (("q", q), ("k", k)):
        require_form(op, name, t, "T, H, D")
    require_form(op, "cos", cos, "T, D")
    half = cos.shape[-1] // 2
    with errors_of(op):
        turned, other = functional.apply_rotary(q[None], k[None], cos[:, :half], sin[:, :half])
    return turned[0], other[0]
