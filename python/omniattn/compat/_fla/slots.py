"""Gated slot attention and ABC of fla.ops; their states are pairs (N, H, K, M) and (N, H, M, V)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from omniattn import functional
from omniattn.compat._fla.calls import Call, fla_function

__all__ = ["chunk_abc", "chunk_gsa", "fused_recurrent_gsa"]

Pair = tuple[Tensor, Tensor]
Result = tuple[Tensor, Pair | None]


@fla_function(without_effect={"checkpoint_level"}, returns=Result)
def chunk_gsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: Pair | None = None,
    output_final_state: bool = False,
    checkpoint_level: int = 2,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Call:
    """Computes :func:`functional.gated_slot_attention`, or without g `chunk_abc`.

    fla sums the logits s of ABC over heads here, where its definition sums over tokens.
    """
    return _slots(q, k, v, s, g)


@fla_function(returns=Result)
def fused_recurrent_gsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: Pair | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Call:
    """Computes `chunk_gsa`; `reverse` goes from the last token to the first."""
    return _slots(q, k, v, s, g)


@fla_function(returns=Result)
def chunk_abc(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    initial_state: Pair | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Call:
    """Computes :func:`functional.abc_attention`; takes `cu_seqlens` too, which fla's does not.

    A state has no weight, as in fla: it counts as much as the first token after it. The state of
    :func:`functional.abc_attention` continues exactly.
    """
    return _abc, (q, k, v, s)


def _slots(q: Tensor, k: Tensor, v: Tensor, s: Tensor, g: Tensor | None) -> Call:
    if g is None:
        return _abc, (q, k, v, s)
    return functional.gated_slot_attention, (q, k, v, s, g)


def _abc(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, *, initial_state: Any, **options: Any
) -> tuple[Tensor, Pair]:
    if isinstance(initial_state, tuple) and len(initial_state) == 2:
        nothing = initial_state[0][:, :, 0] * 0
        initial_state = (*initial_state, nothing, nothing)
    o, (keys, values, n, _) = functional.abc_attention(
        q, k, v, s, initial_state=initial_state, **options
    )
    return o, (keys / n[..., None, :], values / n[..., None])
