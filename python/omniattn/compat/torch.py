"""torch.nn.attention: `varlen_attn` and `flex_attention`, on the CPU with a backward.

Unlike in torch, `varlen_attn` takes any dtype and head size, and has gradients with `seqused_k` and
`block_table`.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from omniattn import functional
from omniattn.checks.arguments import require_int, require_shape, require_tensor, shown
from omniattn.compat._errors import errors_of, require_flags, require_form, require_real
from omniattn.compat.flash_attn.lengths import Lengths, attend
from omniattn.functional import masks
from omniattn.functional.scores.score_mod import ScoreMod

__all__ = ["AuxOutput", "AuxRequest", "flex_attention", "varlen_attn", "varlen_attn_out"]


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes :func:`functional.attention_varlen`.

    Args:
        query: (total_q, Hq, D).
        key, value: (total_k, Hkv, D), or with a block table (pages, page size, Hkv, D).
        cu_seq_q, cu_seq_k: (N + 1,) int32 or int64, first rows of the sequences; cu_seq_k is not
            read with a block table, and may be None then.
        max_q, max_k: upper bounds of the lengths.
        return_aux: AuxRequest of flex_attention or of varlen; None for none.
        scale: default D^-0.5.
        window_size: keys before and after a query's own position, -1 for all; (-1, 0) is causal.
        enable_gqa: True if Hkv may be less than Hq.
        seqused_k: (N,) int, number of keys in use of each sequence, or None.
        block_table: (N, M) int, pages of each sequence; needs seqused_k.
        num_splits: has no effect: results never depend on the other sequences.

    Returns:
        O (total_q, Hq, D), and with ``return_aux.lse`` lse (Hq, total_q) in fp32 (fp64 for fp64).
    """
    op = "varlen_attn"
    require_real(op, query=query, key=key, value=value)
    require_form(op, "query", query, "total_q, Hq, D")
    _require_heads(op, query.shape[1], key.shape[-2] if key.ndim > 2 else 0, enable_gqa)
    if cu_seq_k is None and block_table is None:
        raise ValueError(f"{op}: cu_seq_k must be given without block_table, got cu_seq_k=None")
    for name, bound in (("max_q", max_q), ("max_k", max_k)):
        require_int(op, name, bound, 0)
    lengths = Lengths(
        cu_seqlens_q=cu_seq_q,
        cu_seqlens_k=cu_seq_k if block_table is None else None,
        max_seqlen_q=max_q,
        max_seqlen_k=max_k,
        seqused_k=seqused_k,
        page_table=block_table,
    )
    options = {"scale": scale, "window_size": tuple(window_size)}
    with errors_of(op):
        out, lse = attend(op, query, key, value, lengths, options)
    return (out, lse) if return_aux is not None and return_aux.lse else out


def varlen_attn_out(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes :func:`varlen_attn`, whose options it takes, into `out` (total_q, Hq, D)."""
    require_tensor("varlen_attn_out", "out", out)
    found = varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **options)
    result = found[0] if isinstance(found, tuple) else found
    require_shape("varlen_attn_out", "out", out, tuple(result.shape))
    out.copy_(result)
    return (out, found[1]) if isinstance(found, tuple) else out


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """Computes :func:`functional.attention` with a score function and blocks of a mask.

    Args:
        query: (B, Hq, Tq, D).
        key, value: (B, Hkv, Tk, D) and (B, Hkv, Tk, Dv).
        score_mod: f(score, b, h, q, k) of 0-d tensors, or None.
        block_mask: result of `create_block_mask` of size (Tq, Tk), or None. Each call converts it
            (`masks.from_block_mask`), which takes O(Tq Tk) time.
        scale: default D^-0.5.
        enable_gqa: True if Hkv may be less than Hq.
        return_lse: True for (O, lse), deprecated in torch.
        kernel_options: has no effect.
        return_aux: AuxRequest(lse=True) for (O, AuxOutput); `max_scores` is not supported.

    Returns:
        O (B, Hq, Tq, Dv); lse is (B, Hq, Tq) in fp32 (fp64 for fp64).
    """
    op = "flex_attention"
    require_real(op, query=query, key=key, value=value)
    require_flags(op, enable_gqa=enable_gqa, return_lse=return_lse)
    for name, t in (("query", query), ("key", key), ("value", value)):
        require_form(op, name, t, "B, H, T, D")
    _require_heads(op, query.shape[1], key.shape[1], enable_gqa)
    if return_lse and return_aux is not None:
        raise ValueError(f"{op}: return_lse must be False with return_aux, got return_lse=True")
    if return_aux is not None and return_aux.max_scores:
        raise NotImplementedError(
            f"{op}: return_aux.max_scores is not supported, got return_aux={shown(return_aux)}"
        )
    if return_lse:
        warnings.warn(
            f"{op}: return_lse is deprecated in torch, for return_aux=AuxRequest(lse=True)",
            FutureWarning,
            stacklevel=2,
        )
    mask = None
    if block_mask is not None:
        sizes = query.shape[2], key.shape[2]
        if tuple(block_mask.seq_lengths) != sizes:
            raise ValueError(
                f"{op}: block_mask must have the lengths of query and key {sizes}, got "
                f"block_mask.seq_lengths={tuple(block_mask.seq_lengths)}"
            )
        mask = masks.from_block_mask(block_mask)
    with errors_of(op, q="query", k="key", v="value"):
        out, lse = functional.attention(
            *(t.transpose(1, 2) for t in (query, key, value)),
            score_mod=score_mod,
            mask=mask,
            scale=scale,
            return_lse=True,
        )
    out = out.transpose(1, 2)
    if return_aux is not None:
        return out, AuxOutput(lse=lse if return_aux.lse else None)
    return (out, lse) if return_lse else out


def _require_heads(op: str, heads: int, kv_heads: int, enable_gqa: bool) -> None:
    require_flags(op, enable_gqa=enable_gqa)
    if heads != kv_heads and not enable_gqa:
        raise ValueError(
            f"{op}: Hq must be Hkv with enable_gqa=False, got Hq={heads}, Hkv={kv_heads}"
        )
