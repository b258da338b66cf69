"""Attention to keys selected by each query: the basis of NSA, MoBA and DSA."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor
from typing_extensions import Unpack

from omniattn.checks.arguments import (
    implementation,
    is_one_of,
    is_traced,
    require_bool,
    require_int,
    require_seed,
    use_reference,
)
from omniattn.encoding.options import SelectedOptions, pack, spelled_out
from omniattn.functional.attention._common import (
    autocast,
    check_shapes,
    full_shape,
    require_int32_or_int64,
)
from omniattn.functional.attention._options import checked_codes
from omniattn.ops.selected_attention import selected_attention as op_of_selected
from omniattn.reference.attention.attention import default_scale
from omniattn.reference.sparse.selected_attention import require_entries, require_lists

__all__ = ["selected_attention"]

LONGEST = 2**40 - 1  # below the limit of csrc/ops/sparse/selected_attention.cpp


@overload
def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    *,
    block_size: int,
    query_block: int = 1,
    causal: bool = False,
    return_lse: Literal[False] = False,
    debug: bool = False,
    backend: str | None = None,
    **options: Unpack[SelectedOptions],
) -> Tensor: ...
@overload
def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    *,
    block_size: int,
    query_block: int = 1,
    causal: bool = False,
    return_lse: Literal[True],
    debug: bool = False,
    backend: str | None = None,
    **options: Unpack[SelectedOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    *,
    block_size: int,
    query_block: int = 1,
    causal: bool = False,
    return_lse: bool,
    debug: bool = False,
    backend: str | None = None,
    **options: Unpack[SelectedOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
@spelled_out(SelectedOptions, last=("return_lse", "debug", "backend"))
def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    *,
    block_size: int,
    query_block: int = 1,
    causal: bool = False,
    return_lse: bool = False,
    debug: bool = False,
    backend: str | None = None,
    **options: Unpack[SelectedOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`attention` of each query to its selected blocks of keys.

    ``O_i = softmax(softcap(scale q_i k_j^T)) v_j`` over the keys j of all blocks
    ``[n block_size, (n + 1) block_size)`` with n in the list of query i, each key once, and
    ``j <= i + Tk - Tq`` if causal. No (Tq, Tk) mask and no (Tq, n, D) copy of keys is made.

    Args:
        q: (B, Tq, Hq, D), as in :func:`attention`. For MLA in its absorbed form, k has one head of
            the latent and the rotary part, and v is the latent, a view of its first columns.
        k: (B, Tk, Hkv, D).
        v: (B, Tk, Hkv, Dv); Dv may differ from D.
        indices: (B | 1, heads, ceil(Tq / query_block), n) int32 or int64, the list of each query or
            block of queries in any order: numbers of blocks, each at most once, and -1 for none.
            `heads` is Hkv (the query heads of a group share their list), 1 (all heads do) or Hq.
            No gradient.
        block_size: keys per block, 1 for single keys. The last block may be partial. Blocks of
            fewer than 16 or an odd number of keys are copied, a few at a time, which takes several
            times as long for lists with few rows.
        query_block: queries per list: query i has list i // query_block.
        causal: query i sees keys up to i + Tk - Tq, also inside of blocks.
        scale: factor on q k^T; None is 1 / sqrt(D).
        softcap, sinks, dropout_p, seed: see :func:`attention`; with an equivalent mask that
            function drops the same weights.
        return_lse: also return the log-sum-exp of the logits.
        debug: check `indices` for numbers out of range and for repeated blocks, which count twice,
            with a synchronisation of a GPU. Without it, the CPU still rejects numbers out of range,
            and CUDA ignores them.
        backend: None for the native kernel of q's device, "cpu" or "cuda" to insist on it,
            "reference" for the eager definition, a mask.

    Returns:
        O (B, Tq, Hq, Dv) of q's dtype, and with return_lse lse (B, Hq, Tq) in float32 (float64 for
        float64). A query that sees no key gives O = 0, lse = -inf and zero gradients.

    Raises:
        TypeError: a dtype is unsupported or does not match the others.
        ValueError: a shape, device or value is invalid; RuntimeError for entries of indices
            outside of the keys.
        NotImplementedError: no native kernel for the device.

    Note:
        On the CPU the rows (query, head) of many lists that name a block are multiplied with it at
        once, if blocks have 16 keys or more, an even number; otherwise the rows that share a list.
        Products run at the rate of :func:`attention` from about 6 rows on. Where queries share a
        list, a NaN in a key that is hidden from some of them may reach these. Gradients flow to q,
        k, v and sinks through O and lse; they and the results do not depend on the number of
        threads. Additional memory is O(T D): one packed copy of the keys, and dK and dV in fp32.

    Reference:
        Yuan et al., Native Sparse Attention, 2025, arXiv:2502.11089; Lu et al., MoBA, 2025,
        arXiv:2502.13189; DeepSeek-AI, DeepSeek-V3.2, 2025, arXiv:2512.02556.

    Example:
        >>> q, k = torch.zeros(1, 2, 1, 4), torch.zeros(1, 4, 1, 4)
        >>> v = torch.tensor([1.0, 3.0, 5.0, 9.0]).view(1, 4, 1, 1)
        >>> selected_attention(q, k, v, torch.tensor([[[[0], [1]]]]), block_size=2).flatten()
        tensor([2., 7.])
    """
    op = "selected_attention"
    record = pack(op, options, SelectedOptions)
    q, k, v = autocast(op, q, k, v)
    check_shapes(op, q, k, v)
    require_int(op, "block_size", block_size, 1, LONGEST)
    require_int(op, "query_block", query_block, 1, LONGEST)
    require_bool(op, "causal", causal)
    require_bool(op, "return_lse", return_lse)
    require_bool(op, "debug", debug)
    checked_codes(op, q, full_shape(q, k), record)
    indices = _lists(op, indices, q, k, query_block)
    blocks = -(-k.shape[1] // block_size)
    if debug:
        require_lists(op, indices, blocks)
    elif use_reference(op, backend, q) and not is_traced():  # as the kernels do
        require_entries(op, indices, blocks)
    seed = require_seed(op, record.seed, q) if record.dropout_p > 0 else None
    factor = default_scale(q.shape[3]) if record.scale is None else float(record.scale)
    run = implementation(op, backend, q, op_of_selected)
    out, lse = run(
        *(q, k, v, indices, record.sinks, seed, int(block_size), int(query_block), causal),
        *(factor, float(record.softcap), float(record.dropout_p)),
    )
    return (out, lse) if return_lse else out


def _lists(op: str, indices: Tensor, q: Tensor, k: Tensor, query_block: int) -> Tensor:
    """Checks the lists; returns them for all batch entries."""
    require_int32_or_int64(op, "indices", indices, q)
    (batch, tq, heads), kv_heads = q.shape[:3], k.shape[2]
    lists = -(-tq // query_block)
    shape = tuple(indices.shape)
    if (
        len(shape) != 4
        or not is_one_of(shape[0], 1, batch)
        or not is_one_of(shape[1], 1, kv_heads, heads)
        or shape[2] != lists
    ):
        raise ValueError(
            f"{op}: indices must have shape (B | 1, 1 | Hkv | Hq, ceil(Tq / query_block), n) with "
            f"B={batch}, Hkv={kv_heads}, Hq={heads}, Tq={tq}, query_block={query_block}, "
            f"got indices.shape={shape}"
        )
    return indices.expand(batch, -1, -1, -1)
