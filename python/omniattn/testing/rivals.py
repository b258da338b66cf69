"""What users of torch run today, with the signatures of our ops: rivals of the benchmarks.

A provider raises NotImplementedError for an option that it lacks. "aten" is torch's best eager
form, "math" its unfused attention, "hf" a formula of Hugging Face transformers (eager), "compiled"
torch.compile of the eager form, "flex" compiled flex_attention, "grouped" torch's grouped product.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from omniattn import reference
from omniattn.functional import masks
from omniattn.reference.masks import visible, window_rule
from omniattn.reference.scores import ScoreKind, table_bias

__all__ = [
    "ATTENTION",
    "CACHED",
    "CROSS_ENTROPY",
    "GLU",
    "GLU_MLP",
    "GROUP_NORM",
    "LAYER_NORM",
    "LINEAR",
    "LINEAR_CROSS_ENTROPY",
    "MLP",
    "MOE",
    "ON_GPU",
    "QK_NORM_ROTARY",
    "RMS_NORM",
    "RMS_NORM_GATED",
    "ROTARY",
    "SDPA",
    "TOP_K",
    "VARLEN",
    "WEIGHTS",
]

Function = Callable[..., Any]


def _compiled(function: Function) -> Function:
    """torch.compile of `function` at the first call; shapes are static, as in a training run."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return _compile(function)(*args, **kwargs)

    return call


@functools.cache
def _compile(function: Function) -> Function:
    return torch.compile(function, fullgraph=True, dynamic=False)


def _lacks(**options: Any) -> None:
    for name, wanted in options.items():
        if wanted:
            raise NotImplementedError(f"torch has no {name}")


def _sdpa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    mask: Tensor | masks.Mask | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    return_lse: bool = False,
    **options: Any,
) -> Tensor:
    _lacks(softcap=softcap, seeded_dropout=dropout_p, lse=return_lse, options=options)
    tq, tk = q.shape[1], k.shape[1]
    if alibi_slopes is not None:
        slopes = alibi_slopes.reshape(-1, 1, q.shape[2])
        term = table_bias(ScoreKind.ALIBI, slopes, 0, 0, tq, tk)
        bias = term if bias is None else bias + term
    mask = mask.dense(tq, tk, heads=q.shape[2]) if isinstance(mask, masks.Mask) else mask
    top_left = causal and tq == tk and window_size == (-1, -1) and mask is None and bias is None
    attn_mask = mask
    if (causal or window_size != (-1, -1)) and not top_left:
        seen = visible([window_rule(causal, window_size)], tq, tk, q.device)
        attn_mask = seen if mask is None else mask & seen
    if bias is not None:
        hidden = float("-inf")
        attn_mask = bias if attn_mask is None else bias.masked_fill(~attn_mask, hidden)
    return F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask,
        is_causal=top_left,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    ).transpose(1, 2)


def _padded_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    **options: Any,
) -> Tensor:
    """What one does without a packed kernel: pad, mask, and take the rows out again."""
    _lacks(options=options)
    lengths_q, lengths_k = cu_seqlens_q.diff()[:, None], cu_seqlens_k.diff()[:, None]
    rows_q = torch.arange(max_seqlen_q) < lengths_q
    rows_k = torch.arange(max_seqlen_k) < lengths_k

    def pad(t: Tensor, rows: Tensor) -> Tensor:
        return t.new_zeros(*rows.shape, *t.shape[1:]).index_put((rows,), t)

    mask = rows_k[:, None, None, :].expand(-1, 1, max_seqlen_q, -1)
    if causal:
        i = torch.arange(max_seqlen_q)[:, None] + (lengths_k - lengths_q)[..., None]
        mask = mask & (torch.arange(max_seqlen_k) <= i)[:, None]
    out = _sdpa_attention(pad(q, rows_q), pad(k, rows_k), pad(v, rows_k), mask=mask)
    return out[rows_q]


def _masked_cached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache_seqlens: Tensor,
    *,
    causal: bool = False,
    block_table: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """A static cache, as transformers runs it: all of it, masked. Pages are gathered first."""
    _lacks(full=not causal, options=options)
    if block_table is not None:
        k, v = (t[block_table].flatten(1, 2) for t in (k, v))
    lengths = cache_seqlens[:, None, None, None]
    i = torch.arange(q.shape[1])[:, None] + lengths - q.shape[1]
    return _sdpa_attention(q, k, v, mask=torch.arange(k.shape[1]) <= i)


def _eager_weights(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    *,
    causal: bool = False,
    column_sums: bool = False,
    **options: Any,
) -> Tensor:
    _lacks(options=options)
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    s = q.transpose(1, 2) @ k.permute(0, 2, 3, 1) * q.shape[3] ** -0.5
    seen = visible([window_rule(causal, (-1, -1))], q.shape[1], k.shape[1], q.device)
    p = torch.exp(s - lse[..., None]).masked_fill(~seen, 0)
    return p.sum(-2) if column_sums else p


def _held_to(backend: SDPBackend, function: Function) -> Function:
    """`function` on one kernel of torch's attention."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with sdpa_kernel(backend):
            return function(*args, **kwargs)

    return call


def _flex_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    **options: Any,
) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    _lacks(options=options, backward=torch.is_grad_enabled() and q.requires_grad)
    block_mask = _flex_mask(q.shape[1], k.shape[1], causal, window_size, q.device.type)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = _compile(flex_attention)(
        q, k, v, block_mask=block_mask, enable_gqa=q.shape[1] != k.shape[1]
    )
    assert isinstance(out, Tensor)
    return out.transpose(1, 2)


@functools.cache
def _flex_mask(tq: int, tk: int, causal: bool, window: tuple[int, int], device: str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    left, right = window[0], 0 if causal else window[1]
    if left < 0 and right < 0:
        return None

    def rule(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = j - (i + (tk - tq))
        seen = torch.ones_like(distance, dtype=torch.bool)
        seen = seen & (distance >= -left) if left >= 0 else seen
        return seen & (distance <= right) if right >= 0 else seen

    return create_block_mask(rule, None, None, tq, tk, device=device)


def _rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "fp32",
    residual: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    _lacks(casting=casting != "fp32")
    h = x if residual is None else x + residual
    scale = weight + offset if weight is not None and offset else weight
    scale = None if scale is None else scale.to(h.dtype)
    y = F.rms_norm(h, x.shape[-1:], scale, eps).to(x.dtype)
    return y if residual is None else (y, h)


def _layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    residual: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    h = x if residual is None else x + residual
    y = F.layer_norm(h, x.shape[-1:], weight, bias, eps)
    return y if residual is None else (y, h)


def _group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    center: bool = True,
) -> Tensor:
    _lacks(rms=not center)
    return F.group_norm(x, num_groups, weight, bias, eps)


def _rms_norm_gated(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    norm_before_gate: bool = True,
    activation: str = "silu",
    num_groups: int = 1,
    casting: str = "fp32",
) -> Tensor:
    """Mamba-2's and Qwen3-Next's layers in fp32 throughout."""
    _lacks(casting=casting != "fp32")
    factor = (F.silu if activation == "silu" else torch.sigmoid)(gate.float())
    v = x.float() if norm_before_gate else x.float() * factor
    parts = v.unflatten(-1, (num_groups, -1))
    y = F.rms_norm(parts, parts.shape[-1:], None, eps).flatten(-2)
    y = y if weight is None else y * weight.float()
    return (y * factor if norm_before_gate else y).to(x.dtype)


def _hf_rotary(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor | int | None = None,
    rotary_start: int = 0,
    interleaved: bool = False,
    inverse: bool = False,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """Llama's, GPT-J's (interleaved) or GPT-NeoX's (partial) formula."""
    _lacks(positions=positions is not None, inplace=inplace, start=rotary_start, inverse=inverse)
    size = 2 * cos.shape[-1]
    rotate = _rotate_every_two if interleaved else _rotate_half
    cos, sin = (
        (t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1))
        .to(q.dtype)
        .unsqueeze(-2)
        for t in (cos, sin)
    )

    def turn(x: Tensor) -> Tensor:
        turned = x[..., :size] * cos + rotate(x[..., :size]) * sin
        return turned if size == x.shape[-1] else torch.cat((turned, x[..., size:]), -1)

    return turn(q), turn(k)


def _rotate_every_two(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def _hf_qk_norm_rotary(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "fp32",
    positions: Tensor | int | None = None,
    rotary_start: int = 0,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Qwen3's: a norm per head, then the rotation."""
    _lacks(casting=casting != "fp32")
    q, k = (
        F.rms_norm(x, x.shape[-1:], w if w is None or not offset else w + offset, eps)
        for x, w in ((q, q_weight), (k, k_weight))
    )
    return _hf_rotary(
        q, k, cos, sin, positions=positions, rotary_start=rotary_start, interleaved=interleaved
    )


def _rotate_half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def _glu(activation: Function) -> dict[str, Function]:
    def glu(gate: Tensor, up: Tensor | None = None, *, approximate: str = "none") -> Any:
        if up is None:
            gate, up = gate.chunk(2, -1)
        act = (
            activation(gate, approximate=approximate) if activation is F.gelu else activation(gate)
        )
        return act * up

    return {"aten": glu, "compiled": _compiled(glu)}


def _activation(name: str) -> Function:
    table: dict[str, Function] = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
        "relu": F.relu,
        "sigmoid": torch.sigmoid,
        "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
        "relu_squared": lambda x: F.relu(x).square(),
    }
    return table[name]


def _glu_mlp(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    *,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    recompute: bool = False,
) -> Tensor:
    _lacks(seeded_dropout=dropout_p, recompute=recompute)
    gate = _activation(activation)(F.linear(x, gate_weight, gate_bias))
    return F.linear(gate * F.linear(x, up_weight, up_bias), down_weight, down_bias)


def _mlp(
    x: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    *,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "gelu",
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    recompute: bool = False,
) -> Tensor:
    _lacks(seeded_dropout=dropout_p, recompute=recompute)
    return F.linear(
        _activation(activation)(F.linear(x, up_weight, up_bias)), down_weight, down_bias
    )


def _cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    _lacks(z_loss=z_loss, softcap=softcap)
    return F.cross_entropy(
        logits.float() if logits.dtype != torch.float64 else logits,
        target,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )


def _linear_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, **options: Any
) -> Tensor:
    return _cross_entropy(F.linear(x, weight, bias), target, **options)


def _chunked_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    **options: Any,
) -> Tensor:
    _lacks(z_loss=z_loss, softcap=softcap)
    chunks = torch.nn.LinearCrossEntropyOptions()
    loss = F.linear_cross_entropy(x, weight, target, linear_bias=bias, options=chunks, **options)
    return loss.to(torch.promote_types(x.dtype, torch.float32))


def _swiglu_only(
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "swiglu",
    interleaved: bool = False,
    weigh_inputs: bool = False,
    recompute: bool = False,
) -> None:
    _lacks(biases=up_bias is not None, layout=interleaved, recomputation=recompute)
    _lacks(weighed_inputs=weigh_inputs)
    _lacks(activation=activation != "swiglu")


def _experts_loop(
    x: Tensor, index: Tensor, weights: Tensor, up: Tensor, down: Tensor, **options: Any
) -> Tensor:
    """A product per expert that has tokens, gathered and added back by index."""
    _swiglu_only(**options)
    y = torch.zeros_like(x)
    for expert in index.unique().tolist():
        token, slot = torch.where(index == expert)
        gate, linear = F.linear(x[token], up[expert]).chunk(2, -1)
        out = F.linear(F.silu(gate) * linear, down[expert])
        y.index_add_(0, token, out * weights[token, slot, None])
    return y


def _experts_grouped(
    x: Tensor, index: Tensor, weights: Tensor, up: Tensor, down: Tensor, **options: Any
) -> Tensor:
    """Tokens sorted by expert and torch's grouped product."""
    _swiglu_only(**options)
    order = index.flatten().argsort(stable=True)
    ends = index.flatten().bincount(minlength=len(up)).cumsum(0).int()
    gate, linear = F.grouped_mm(x[order // index.shape[1]], up.mT, offs=ends).chunk(2, -1)
    rows = F.grouped_mm(F.silu(gate) * linear, down.mT, offs=ends)
    weighted = rows * weights.flatten()[order, None]
    return weighted[order.argsort()].unflatten(0, index.shape).sum(1)


def _sorted_top_k(scores: Tensor, k: int, *, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    _lacks(mask=mask is not None)
    values, index = scores.sort(dim=-1, descending=True, stable=True)
    return values[..., :k], index[..., :k]


def _unstable_top_k(scores: Tensor, k: int, *, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    _lacks(mask=mask is not None)
    values, index = scores.topk(k)
    return values, index


ATTENTION = {
    "aten": _sdpa_attention,
    "math": _held_to(SDPBackend.MATH, _sdpa_attention),
    "flex": _flex_attention,
}
#: By op, where users of a GPU have other choices; "math" would hold all scores of long sequences.
ON_GPU = {
    "attention": {
        "aten": _sdpa_attention,
        "flash": _held_to(SDPBackend.FLASH_ATTENTION, _sdpa_attention),
        "cudnn": _held_to(SDPBackend.CUDNN_ATTENTION, _sdpa_attention),
        "flex": _flex_attention,
    }
}
SDPA = {
    "aten": F.scaled_dot_product_attention,
    "math": _held_to(SDPBackend.MATH, F.scaled_dot_product_attention),
}
VARLEN = {"aten": _padded_varlen}
WEIGHTS = {"eager": _eager_weights}
CACHED = {"aten": _masked_cached}
GROUP_NORM = {"aten": _group_norm, "compiled": _compiled(_group_norm)}
RMS_NORM = {"aten": _rms_norm, "compiled": _compiled(_rms_norm)}
RMS_NORM_GATED = {"hf": _rms_norm_gated, "compiled": _compiled(_rms_norm_gated)}
LAYER_NORM = {"aten": _layer_norm, "compiled": _compiled(_layer_norm)}
ROTARY = {"hf": _hf_rotary, "compiled": _compiled(_hf_rotary)}
QK_NORM_ROTARY = {"hf": _hf_qk_norm_rotary, "compiled": _compiled(_hf_qk_norm_rotary)}
GLU = {
    "swiglu": _glu(F.silu),
    "geglu": _glu(F.gelu),
    "reglu": _glu(F.relu),
    "glu": _glu(torch.sigmoid),
    "bilinear": _glu(lambda gate: gate),
}
CROSS_ENTROPY = {"aten": _cross_entropy, "compiled": _compiled(_cross_entropy)}
LINEAR_CROSS_ENTROPY = {
    "aten": _linear_cross_entropy,
    "chunked": _chunked_linear_cross_entropy,
    "compiled": _compiled(_linear_cross_entropy),
}
GLU_MLP = {"aten": _glu_mlp, "compiled": _compiled(_glu_mlp)}
MLP = {"aten": _mlp, "compiled": _compiled(_mlp)}
LINEAR = {"aten": F.linear}
MOE = {"loop": _experts_loop, "grouped": _experts_grouped}
DROPOUT = {"eager": reference.dropout}  # torch's draws other bits
UNIFORM_LIKE = {"eager": reference.uniform_like}
TOP_K = {"sort": _sorted_top_k, "aten": _unstable_top_k}
