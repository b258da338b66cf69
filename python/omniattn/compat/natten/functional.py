"""NATTEN's attention, and merging of attention to several sets of keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from omniattn import functional
from omniattn.checks.arguments import require_choice, require_int, require_number, shown
from omniattn.compat._errors import errors_of, require_flags, require_form, require_real
from omniattn.functional import masks

#: O, or (O, lse) with `return_lse`.
Result = Tensor | tuple[Tensor, Tensor]
BACKENDS = ("cutlass-fmha", "hopper-fmha", "blackwell-fmha", "flex-fmha")
#: Names of functional.attention -> names of NATTEN.
NAMES = {
    "q": "query",
    "k": "key",
    "v": "value",
    "cu_seqlens_q": "cumulative_seqlen_Q",
    "cu_seqlens_k": "cumulative_seqlen_KV",
    "max_seqlen_q": "max_seqlen_Q",
    "max_seqlen_k": "max_seqlen_KV",
}
#: Lengths of packed sequences: cumulative lengths and bounds, or (None, None, 0, 0).
Packed = tuple[Tensor | None, Tensor | None, int, int]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    seqlens_Q: Tensor | None = None,
    seqlens_KV: Tensor | None = None,
    cumulative_seqlen_Q: Tensor | None = None,
    cumulative_seqlen_KV: Tensor | None = None,
    max_seqlen_Q: int | None = None,
    max_seqlen_KV: int | None = None,
    backend: str | None = None,
    q_tile_size: int | None = None,
    kv_tile_size: int | None = None,
    backward_q_tile_size: int | None = None,
    backward_kv_tile_size: int | None = None,
    backward_kv_splits: int | None = None,
    backward_use_pt_reduction: bool = False,
    run_persistent_kernel: bool = True,
    kernel_schedule: object = None,
    torch_compile: bool = False,
    return_lse: bool = False,
) -> Result:
    """Computes :func:`functional.attention`, or of packed sequences `attention_varlen`.

    Args:
        query: (B, Tq, Hq, D); packed sequences have B = 1.
        key: (B, Tk, Hkv, D).
        value: (B, Tk, Hkv, Dv).
        is_causal: True if query i sees keys 0 .. i, also for different Tq and Tk.
        scale: factor of q k^T; None and 0 are 1 / sqrt(D).
        seqlens_Q, seqlens_KV: (N,) int, lengths of packed sequences, given together.
        cumulative_seqlen_Q, cumulative_seqlen_KV: (N + 1,) int, their cumulated lengths from 0 on,
            given together and instead of the lengths.
        max_seqlen_Q, max_seqlen_KV: upper bounds of the lengths, given with cumulated lengths.
        backend: one of NATTEN's names; has no effect, as the next ones.
        q_tile_size, kv_tile_size, backward_q_tile_size, backward_kv_tile_size: have no effect.
        backward_kv_splits, backward_use_pt_reduction, run_persistent_kernel: have no effect.
        kernel_schedule, torch_compile: have no effect.
        return_lse: if True, returns (O, lse) with lse (B, Tq, Hq).

    Returns:
        O (B, Tq, Hq, Dv).
    """
    op = "attention"
    require_real(op, query=query, key=key, value=value)
    for name, t in (("query", query), ("key", key), ("value", value)):
        require_form(op, name, t, "B, T, H, D")
    require_flags(op, is_causal=is_causal, return_lse=return_lse)
    if backend is not None:
        require_choice(op, "backend", backend, BACKENDS)
    if scale is not None:
        require_number(op, "scale", scale)
    given = cumulative_seqlen_Q, cumulative_seqlen_KV, max_seqlen_Q, max_seqlen_KV
    cu_q, cu_k, longest_q, longest_k = _lengths(op, query, seqlens_Q, seqlens_KV, given)
    mask = masks.Causal(top_left=True) if is_causal else None
    with errors_of(op, **NAMES):
        if cu_q is None or cu_k is None:
            out, lse = functional.attention(
                query, key, value, mask=mask, scale=scale or None, return_lse=True
            )
        else:
            rows = query[0], key[0], value[0]
            out, lse = functional.attention_varlen(
                *rows, cu_q, cu_k, longest_q, longest_k,
                mask=mask, scale=scale or None, return_lse=True,
            )  # fmt: skip
            out, lse = out[None], lse[None]
    return (out, lse.transpose(1, 2)) if return_lse else out


def generate_varlen_parameters(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seqlens_Q: Tensor | None = None,
    seqlens_KV: Tensor | None = None,
) -> Packed:
    """Returns (cumulative_seqlen_Q, cumulative_seqlen_KV, max_seqlen_Q, max_seqlen_KV).

    Without lengths the result is (None, None, 0, 0).
    """
    op = "generate_varlen_parameters"
    if seqlens_Q is None and seqlens_KV is None:
        return None, None, 0, 0
    require_real(op, query=query, key=key, value=value)
    for name, lengths in (("seqlens_Q", seqlens_Q), ("seqlens_KV", seqlens_KV)):
        wanted = isinstance(lengths, Tensor) and lengths.ndim == 1 and len(lengths) > 0
        if not isinstance(lengths, Tensor) or not wanted or lengths.is_floating_point():
            raise ValueError(
                f"{op}: seqlens_Q and seqlens_KV must both be integers (N,), got "
                f"{name}={shown(lengths)}"
            )
    assert seqlens_Q is not None and seqlens_KV is not None
    if len(seqlens_Q) != len(seqlens_KV):
        raise ValueError(
            f"{op}: seqlens_Q and seqlens_KV must have the same length, got {len(seqlens_Q)} and "
            f"{len(seqlens_KV)}"
        )
    if len(query) != 1:
        raise ValueError(f"{op}: query must have B = 1, got query.shape={tuple(query.shape)}")
    pairs = [(_cumulated(t), int(t.max())) for t in (seqlens_Q, seqlens_KV)]
    return pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1]


def merge_attentions(
    outputs: Sequence[Tensor],
    lse_tensors: Sequence[Tensor],
    torch_compile: bool = True,
    use_autograd_fix: bool = True,
) -> tuple[Tensor, Tensor]:
    """Merges attention to disjoint sets of keys, see :func:`functional.merge_attention`.

    Gradients are exact for every number of sets, so `use_autograd_fix` has no effect.

    Args:
        outputs: two or more O (B, T, H, Dv).
        lse_tensors: lse (B, T, H) of each.
        torch_compile, use_autograd_fix: have no effect.

    Returns:
        O (B, T, H, Dv) and lse (B, T, H) of the union of the keys.
    """
    op = "merge_attentions"
    for name, parts in (("outputs", outputs), ("lse_tensors", lse_tensors)):
        if not isinstance(parts, (tuple, list)) or len(parts) < 2:
            raise ValueError(f"{op}: {name} must be two or more tensors, got {shown(parts)}")
    for i, lse in enumerate(lse_tensors):
        require_real(op, **{f"lse_tensors[{i}]": lse})
        require_form(op, f"lse_tensors[{i}]", lse, "B, T, H")
    with errors_of(op, outs="outputs", lses="lse_tensors"):
        lses = [lse.transpose(1, 2) for lse in lse_tensors]
        out, lse = functional.merge_attention(outputs, lses)
    return out, lse.transpose(1, 2)


def _lengths(
    op: str,
    query: Tensor,
    seqlens_Q: Tensor | None,
    seqlens_KV: Tensor | None,
    given: tuple[Tensor | None, Tensor | None, int | None, int | None],
) -> Packed:
    """Returns cumulated lengths and their bounds, (None, None, 0, 0) without packed sequences."""
    if seqlens_Q is not None or seqlens_KV is not None:
        return generate_varlen_parameters(query, query, query, seqlens_Q, seqlens_KV)
    cu_q, cu_k, longest_q, longest_k = given
    if cu_q is None and cu_k is None and not longest_q and not longest_k:
        return None, None, 0, 0
    if cu_q is None or cu_k is None or longest_q is None or longest_k is None:
        raise ValueError(
            f"{op}: cumulative_seqlen_Q, cumulative_seqlen_KV, max_seqlen_Q and max_seqlen_KV "
            f"must be given together, got {', '.join(shown(value) for value in given)}"
        )
    if len(query) != 1:
        raise ValueError(
            f"{op}: query must have B = 1 with cumulative_seqlen_Q, got "
            f"query.shape={tuple(query.shape)}"
        )
    require_int(op, "max_seqlen_Q", longest_q, 0)
    require_int(op, "max_seqlen_KV", longest_k, 0)
    return cu_q, cu_k, longest_q, longest_k


def _cumulated(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
