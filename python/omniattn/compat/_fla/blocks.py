"""Log-linear attention and DeltaFormer of fla.ops."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from omniattn import functional
from omniattn.checks.arguments import require_shape, require_tensor, shown
from omniattn.compat._errors import errors_of
from omniattn.compat.fla_layers.base import get_unpad_data, repad_hidden_states

__all__ = ["LogLinearAttentionState", "chunk_log_linear_attn", "deltaformer_attn"]


@dataclass
class LogLinearAttentionState:
    """State of `chunk_log_linear_attn`: that of :func:`functional.log_linear_attention`.

    Args:
        ht: (N, H, L, K, V), the matrices of blocks of past tokens.
        offsets: (N,) int64, numbers of past tokens.

    Note:
        fla also stores the tokens of the last chunk, which this state contains already.
    """

    ht: Tensor
    offsets: Tensor


def chunk_log_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    level_scales: Tensor,
    initial_state: LogLinearAttentionState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, LogLinearAttentionState | None]:
    """Computes :func:`functional.log_linear_attention`, with gradients through states as well."""
    op = "chunk_log_linear_attn"
    state, offsets = None, None
    if initial_state is not None:
        if not isinstance(initial_state, LogLinearAttentionState):
            raise TypeError(
                f"{op}: initial_state must be a LogLinearAttentionState, "
                f"got initial_state={shown(initial_state)}"
            )
        state, offsets = initial_state.ht, initial_state.offsets
    with errors_of(op, position="offsets"):
        o, final = functional.log_linear_attention(
            *(q, k, v, g, level_scales),
            initial_state=state,
            position=offsets,
            cu_seqlens=cu_seqlens,
        )
    if not output_final_state:
        return o, None
    counts = q.shape[1] if cu_seqlens is None else cu_seqlens.diff()
    before = torch.zeros(final.shape[0], dtype=torch.int64, device=final.device)
    return o, LogLinearAttentionState(final, (before if offsets is None else offsets) + counts)


def deltaformer_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    C: int = 512,
) -> Tensor:
    """Computes :func:`functional.deltaformer_attention`; C affects only fla's speed.

    Padding, where `attention_mask` (B, T) is 0, is not read, and its results are 0. The first pass
    of fla reads it.
    """
    op = "deltaformer_attn"
    batch = q.shape[:2]
    places = None
    if attention_mask is not None:
        if cu_seqlens is not None:
            raise ValueError(f"{op}: attention_mask must be None with cu_seqlens")
        require_tensor(op, "attention_mask", attention_mask)
        require_shape(op, "attention_mask", attention_mask, tuple(batch))
        places, cu_seqlens, _ = get_unpad_data(attention_mask)
        q, k, v = (t.flatten(0, 1)[places][None] for t in (q, k, v))
        beta = None if beta is None else beta.flatten(0, 1)[places][None]
    with errors_of(op):
        o, _ = functional.deltaformer_attention(q, k, v, beta, cu_seqlens=cu_seqlens)
    return repad_hidden_states(o, places, *batch)
