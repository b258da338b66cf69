"""Attention whose products of q and k decay by a gate for each channel (wall attention)."""

from __future__ import annotations

from typing import Any, Literal, overload

from torch import Tensor

from omniattn import reference
from omniattn.checks.arguments import (
    full_precision,
    require_bool,
    require_number,
    require_range,
    require_shape,
    use_reference,
)
from omniattn.checks.jagged import over_sequences
from omniattn.compositions.attention.wall_attention import wall_attention as composed
from omniattn.functional.attention._common import (
    autocast,
    check_shapes,
    require_bias,
    require_parameter,
)
from omniattn.functional.attention.path_attention import sequence_ids
from omniattn.reference.attention.attention import default_scale

__all__ = ["wall_attention"]


@overload
def wall_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    g_scalar: Tensor | None = None,
    *,
    sinks: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    return_keys: Literal[False] = False,
    backend: str | None = None,
) -> Tensor: ...
@overload
def wall_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    g_scalar: Tensor | None = None,
    *,
    sinks: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    return_keys: bool,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...
@over_sequences("q", "k", "v", "g", "g_scalar")
def wall_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    g_scalar: Tensor | None = None,
    *,
    sinks: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    return_keys: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention in which each channel of the scores forgets at its own rate (wall).

    ``O = softmax(scale sum_n q_in k_jn exp(c_in - c_jn) + C_i - C_j) v`` over the keys j up to
    query i, with ``c_t = g_0 + ... + g_t`` and C the sum of g_scalar. Every factor is a product of
    decays, so that strong gates neither overflow nor cancel, and no (T, T) tensor is made.

    Args:
        q: (B, T, Hq, D), float64, float32, bfloat16 or float16. The queries are the last T of the
            Tk tokens.
        k: (B, Tk, Hkv, D) of q's dtype; Hq must be a multiple of Hkv. The first Tk - T keys are
            those that a call with `return_keys` returned for the earlier tokens; then Hkv = Hq.
        v: (B, Tk, Hkv, Dv) of q's dtype.
        g: (B, T, Hq, D), logarithms of the decays, at most 0, such as ``logsigmoid(x)``.
        g_scalar: (B, Tk, Hq), logarithms of forget gates, at most 0; None for none. Values below
            -1000, -inf among them, count as -1000 in both and have no gradient. g and g_scalar may
            be of any floating dtype not wider than q's accumulator.
        sinks: (Hq,), logits of keys without values; None for none.
        scale: default D^-0.5.
        cu_seqlens: (N + 1,), int32 or int64, boundaries of sequences packed along T, with B = 1.
            Instead, all tensors of tokens may be jagged nested tensors with the same boundaries.
        return_keys: also return the keys after the last token, decayed by the gates of all later
            tokens, for calls with later tokens.
        backend: None, "cpu" or "cuda" to compute it by the package's kernels of q's device,
            "reference" for the eager definition.

    Returns:
        O (B, T, Hq, Dv) of q's dtype, and with return_keys the keys (B, Tk, Hq, D).

    Raises:
        TypeError: a dtype is unsupported or differs from q's.
        ValueError: a shape, device or value is invalid.

    Note:
        16-bit inputs are computed in float32 and rounded once. For the gradients a call keeps
        log2(T / 16) + 1 copies of q, k and O, whose heads are all Hq.

    Reference:
        Averbuch and Pai, Wall Attention, Tilde Research, 2026,
        https://blog.tilderesearch.com/blog/wall-attn. Equal to `naive_wall_attn` of
        fla-org/flash-linear-attention at commit bc3b101, without its window.

    Example:
        >>> one, v = torch.ones(1, 2, 1, 1), torch.tensor([0.0, 1.0]).view(1, 2, 1, 1)
        >>> wall_attention(one, one, v, torch.full((1, 2, 1, 1), 0.5).log()).flatten()
        tensor([0.0000, 0.6225])
    """
    op = "wall_attention"
    q, k, v = autocast(op, q, k, v)
    batch, heads, steps, total = check_shapes(op, q, k, v)
    if steps > total:
        raise ValueError(f"{op}: T must be at most Tk, got T={steps}, Tk={total}")
    if steps < total and k.shape[2] != heads:
        raise ValueError(
            f"{op}: Hkv must be Hq with keys of earlier calls, got Hq={heads}, Hkv={k.shape[2]}"
        )
    require_bias(op, "g", g, q)
    require_shape(op, "g", g, tuple(q.shape))
    require_range(op, "g", g, most=0.0)
    if g_scalar is not None:
        require_bias(op, "g_scalar", g_scalar, q)
        require_shape(op, "g_scalar", g_scalar, (batch, total, heads))
        require_range(op, "g_scalar", g_scalar, most=0.0)
    if sinks is not None:
        require_parameter(op, "sinks", sinks, q, [(heads,)])
    if scale is not None:
        require_number(op, "scale", scale)
    require_bool(op, "return_keys", return_keys)
    ids = None
    if cu_seqlens is not None:
        ids = sequence_ids(op, cu_seqlens, q, total, return_keys)
    if use_reference(op, backend, q) or total <= 1 or q.numel() == 0 or v.numel() == 0:
        options: dict[str, Any] = {"scale": scale, "cu_seqlens": cu_seqlens}
        options |= {"sinks": sinks, "return_keys": return_keys}
        return reference.wall_attention(q, k, v, g, g_scalar, **options)
    scale = default_scale(q.shape[3]) if scale is None else scale
    with full_precision(q):
        out, keys = composed(q, k, v, g, g_scalar, sinks, ids, scale, return_keys)
    return (out, keys) if return_keys else out
