"""Log-linear attention: linear attention with a state for each power of two of past tokens."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import Unpack

from omniattn.checks.arguments import (
    implementation,
    is_traced,
    require_tensor,
)
from omniattn.checks.jagged import over_sequences
from omniattn.compositions.recurrences.log_linear import log_linear_attention as native
from omniattn.encoding.sequences import SequenceOptions, sequences_of, spelled_out
from omniattn.functional.recurrences._common import (
    composed_sequence_count,
    log_decays,
    past_tokens,
    require_heads,
    widened,
)

__all__ = ["log_linear_attention"]


@over_sequences("q", "k", "v", "g", "level_scales")
@spelled_out(SequenceOptions)
def log_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    level_scales: Tensor,
    *,
    position: Tensor | None = None,
    **options: Unpack[SequenceOptions],
) -> tuple[Tensor, Tensor]:
    """Linear attention whose query weighs its past by blocks, whose sizes are powers of two.

    ``o_i = sum_{j <= i} s_i,l(i, j) exp(g_{j+1} + .. + g_i) (q_i . k_j) v_j``, where the level
    ``l(i, j)`` is the number of bits of i xor j: 0 for the token itself, and l for the block of
    2^(l-1) tokens before it that bit l-1 of i names (a Fenwick tree).

    Takes O(T log T) time and O(T) memory. A state after t tokens holds one matrix for each bit of
    t that is 1.

    Args:
        q, k, v, cu_seqlens, backend: as in `gated_linear_attention`.
        g: (B, T, Hv), logarithms of the decays, <= 0.
        level_scales: (B, T, Hv, L), floating-point, the factors s of the levels; sequences have at
            most 2^(L-1) tokens.
        position: (N,) int32 or int64, number of the tokens in each initial state; None without an
            initial state.
        initial_state: (N, Hv, L, K, V): matrix b is that of the block of 2^b tokens which bit b of
            `position` names, and is not read if the bit is 0. None for no tokens.

    Returns:
        o (B, T, Hv, V) of q's dtype, and the state (N, Hv, L, K, V) after the last token in float32
        (float64 for float64).

    Raises:
        TypeError: a dtype is unsupported or differs from q's.
        ValueError: a shape, device or value is invalid.

    Note:
        Chunks of 64 tokens are products of queries and keys; blocks of chunks have states, which
        the backward recomputes. Products are in fp32 for half types. On CUDA torch computes them.
        Second and forward-mode derivatives go through the eager definition.

    Reference:
        Guo et al., Log-Linear Attention, 2025, arXiv:2506.04761. Verified against
        `ops/log_linear_attn/naive.py` of fla-org/flash-linear-attention, commit bc3b101d.

    Example:
        >>> one = torch.ones(1, 4, 1, 1)
        >>> scales = torch.tensor([1.0, 10.0, 100.0]).expand(1, 4, 1, 3)
        >>> log_linear_attention(one, one, one, 0 * one[..., 0], scales)[0].flatten()
        tensor([  1.,  11., 201., 211.])
    """
    op = "log_linear_attention"
    initial_state, cu_seqlens, backend = sequences_of(op, options)
    k, v = require_heads(op, q, k, v)
    heads = tuple(v.shape[:3])
    g = log_decays(op, "g", g, v, (heads,))
    require_tensor(op, "level_scales", level_scales)
    levels = level_scales.shape[-1] if level_scales.ndim == 4 else 1
    scales = widened(op, "level_scales", level_scales, v, ((*heads, levels),))
    count = composed_sequence_count(op, q, cu_seqlens)
    if (position is None) != (initial_state is None):
        raise ValueError(
            f"{op}: position must be given with initial_state, and only with it, "
            f"got position={'None' if position is None else tuple(position.shape)}"
        )
    if initial_state is not None:
        shape = (count, v.shape[2], levels, q.shape[3], v.shape[3])
        initial_state = widened(op, "initial_state", initial_state, v, (shape,))
    position = past_tokens(op, position, v, count)
    _require_levels(op, q, levels, position, cu_seqlens)
    call = implementation(op, backend, q, native)
    o, state = call(q, k, v, g, scales, initial_state, position, cu_seqlens)
    return o, state


def _require_levels(
    op: str, q: Tensor, levels: int, position: Tensor | None, cu_seqlens: Tensor | None
) -> None:
    """Requires levels for the last tokens, if positions are readable without synchronisation."""
    last: int = q.shape[1]
    if is_traced() or not q.is_cpu:
        if position is not None or cu_seqlens is not None:
            return
    else:
        if cu_seqlens is not None:
            lengths = cu_seqlens.diff()
            ends = lengths if position is None else lengths + position
            last = int(ends.max()) if ends.numel() > 0 else 0
        elif position is not None and position.numel() > 0:
            last += int(position.max())
        if position is not None and position.numel() > 0 and int(position.min()) < 0:
            raise ValueError(f"{op}: position must be >= 0, got {int(position.min())}")
    if levels < 1 or last > 1 << (levels - 1):
        raise ValueError(
            f"{op}: level_scales must have L >= 1 levels for at most 2^(L-1) tokens, "
            f"got L={levels} for {last} tokens"
        )
