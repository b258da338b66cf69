"""Attention with a bias that depends on earlier queries, computed for some queries at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.utils.checkpoint import checkpoint
from typing_extensions import Unpack

from omniattn.checks.arguments import implementation, require_seed
from omniattn.encoding.attention import bias_index
from omniattn.encoding.masks import MaskKind
from omniattn.encoding.options import AttentionOptions, pack
from omniattn.functional.attention._common import autocast, check_shapes, full_shape
from omniattn.functional.attention._options import checked_codes
from omniattn.functional.attention.attention import attention
from omniattn.ops import attention as ops

#: Number of bias elements computed at once, per batch entry and head.
_ELEMENTS = 512 * 512
#: Minimum number of queries of a part; products with fewer rows are slower.
_LEAST = 256

#: bias_of(first, last, keys, carry) returns the bias (B, Hq, last - first, keys) of the queries
#: first .. last - 1 and the first `keys` keys, and the carry for later queries. `carry` comes from
#: the earlier queries.
CarriedBiasOf = Callable[[int, int, int, Tensor], tuple[Tensor, Tensor]]


def attention_with_carry(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias_of: CarriedBiasOf,
    carry: Tensor,
    *,
    backend: str | None = None,
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]:
    """Computes ``attention(q, k, v, bias=bias_of(0, Tq, Tk, carry)[0], **options)`` in O(T) memory.

    Returns the final carry too. Parts of the queries are computed in turn, and recomputed in the
    backward. Masks, terms and dropout refer to the whole call. With `causal` a part reads the keys
    up to its last query.
    """
    tq, tk = q.shape[1], k.shape[1]
    size = tq if tq * tk <= _ELEMENTS else max(_LEAST, _ELEMENTS // tk // 64 * 64)
    if size >= tq:
        options["bias"], carry = bias_of(0, tq, tk, carry)
        return attention(q, k, v, backend=backend, **options), carry
    op = "attention"
    q, k, v = autocast(op, q, k, v)
    check_shapes(op, q, k, v)
    blank = q.new_empty(()).expand(1, 1, 1, tk)  # placeholder of the bias in the call's codes
    record = pack(op, options)._replace(bias=blank)
    aux, mask, score, params = checked_codes(op, q, full_shape(q, k), record)
    place = bias_index(score)
    seed = require_seed(op, record.seed, q) if record.dropout_p > 0 else None
    attend = implementation(op, backend, q, ops.attention)

    def part(first: int, last: int, keys: int, carry: Tensor) -> tuple[Tensor, Tensor]:
        bias, carry = bias_of(first, last, keys, carry)
        own = [bias if i == place else t for i, t in enumerate(aux)]
        rules = [MaskKind.QUERIES, first, tq, -1, MaskKind.KEYS, 0, tk, -1, *mask]
        rows = q[:, first:last], k[:, :keys], v[:, :keys]
        return attend(*rows, own, seed, rules, score, params)[0], carry

    # torch.func allows no hooks on saved tensors.
    again = torch.is_grad_enabled() and peek_interpreter_stack() is None
    outs = []
    for first in range(0, tq, size):
        last = min(first + size, tq)
        keys = min(max(last + tk - tq, 1), tk) if record.causal else tk
        rows = functools.partial(part, first, last, keys)
        if again:
            out, carry = checkpoint(rows, carry, use_reentrant=False, preserve_rng_state=False)
        else:
            out, carry = rows(carry)
        outs.append(out)
    return torch.cat(outs, 1), carry
