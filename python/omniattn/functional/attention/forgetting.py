"""Forgetting attention: softmax attention whose logits decay by gates between key and query."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from omniattn import reference
from omniattn.checks.arguments import require_seed, require_shape, use_reference
from omniattn.checks.jagged import is_jagged, length_bound, require_ragged, same_boundaries
from omniattn.encoding.options import ForgettingOptions, pack, spelled_out
from omniattn.functional.attention._common import autocast, check_shapes, require_bias
from omniattn.functional.attention._options import checked_codes, run
from omniattn.functional.attention.attention import attention
from omniattn.ops.dispatch.ranks import ACTIVE
from omniattn.reference.attention.forgetting import LEAST_LOG_GATE
from omniattn.reference.limits import clamp
from omniattn.reference.precision import compute_dtype

__all__ = ["forgetting_attention"]


def forget_terms(log_f: Tensor, lengths: Tensor | None = None) -> dict[str, Any]:
    """Returns the options of `attention` that add c_i - c_j to the logits, c the sum of log_f.

    Softmax does not change if c_i is left out, so that a bias of the keys suffices. But c grows
    with the sequence, and fp32 would lose the small differences that matter. ALiBi's term
    therefore takes the mean decay m, as it computes m (i - j) without cancellation, and the bias is
    only the deviation from it, computed in fp64.

    Args:
        log_f: (B, T, H) in the compute dtype.
        lengths: (B,) number of tokens of each sequence, followed by zeros.
    """
    if ACTIVE.region is not None and lengths is None:
        log_f = ACTIVE.region.unshard(log_f)
    c = clamp(log_f.double(), LEAST_LOG_GATE).cumsum(1)
    c = c - c[:, :1]
    last = c[:, -1:].detach().sum(1)  # (B, H), also without tokens
    steps = max(log_f.shape[1] - 1, 1) if lengths is None else (lengths - 1).clamp(min=1)[:, None]
    # Slopes that are not finite would carry a NaN gate to the tokens before it.
    slopes = (-last / steps).nan_to_num(0, 0, 0).to(log_f.dtype)
    place = torch.arange(log_f.shape[1], dtype=c.dtype, device=c.device)
    bias = -c - slopes.to(c.dtype)[:, None] * place[:, None]
    return {"bias": bias.to(log_f.dtype).transpose(1, 2)[:, :, None], "alibi_slopes": slopes}


def packed_forget_terms(log_f: Tensor, nested: Any) -> dict[str, Any]:
    """Returns `forget_terms` for gates (total, H) of the sequences of a nested tensor."""
    offsets, bound = nested.offsets(), length_bound(nested)
    rows = torch.nested.nested_tensor_from_jagged(log_f, offsets, max_seqlen=bound)
    return forget_terms(torch.nested.to_padded_tensor(rows, 0.0), offsets.diff())


@spelled_out(ForgettingOptions, last=("backend",))
def forgetting_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_f: Tensor,
    *,
    backend: str | None = None,
    **options: Unpack[ForgettingOptions],
) -> Tensor:
    """Causal attention in which each token makes all earlier ones count less (FoX).

    ``O = softmax(scale q k^T + c_i - c_j) v`` over the keys j up to query i, with
    ``c_t = log_f_0 + ... + log_f_t``: between key j and query i the weight decays by the gates f of
    the tokens j + 1 to i. No (Tq, Tk) tensor is made, and nothing overflows or cancels with strong
    gates.

    Args:
        q: (B, Tq, Hq, D), float64, float32, bfloat16 or float16. The queries are the last Tq of the
            Tk tokens.
        k: (B, Tk, Hkv, D) of q's dtype; Hq must be a multiple of Hkv.
        v: (B, Tk, Hkv, Dv) of q's dtype.
        log_f: (B, Tk, Hq), logarithms of the forget gates, such as ``logsigmoid(x)``, of any
            floating dtype not wider than q's accumulator. Values below -1000, -inf among them,
            count as -1000 and have no gradient. All four may be jagged nested tensors with the same
            boundaries: sequences of any lengths.
        window_size, mask, scale, softcap, dropout_p, seed, backend: as in :func:`attention`.

    Returns:
        O (B, Tq, Hq, Dv) of q's dtype.

    Raises:
        TypeError, ValueError, NotImplementedError: see :func:`attention`.

    Note:
        Gates are summed in fp64. Logits have the error of their own size and of the deviation of c
        from a line, times the accumulator's precision.

    Reference:
        Lin et al., Forgetting Transformer: Softmax Attention with a Forget Gate, 2025,
        arXiv:2503.02130. Equal to `naive_forgetting_attn` of fla-org/flash-linear-attention at
        commit 012a873.

    Example:
        >>> q = k = torch.zeros(1, 2, 1, 4)
        >>> v = torch.tensor([1.0, 4.0]).view(1, 2, 1, 1)
        >>> log_f = torch.tensor([0.0, 0.5]).log().view(1, 2, 1)
        >>> forgetting_attention(q, k, v, log_f).flatten()
        tensor([1., 3.])
    """
    op = "forgetting_attention"
    if is_jagged(q):
        return _of_jagged(q, k, v, log_f, backend, options)
    record = pack(op, options, ForgettingOptions)
    q, k, v = autocast(op, q, k, v)
    full = check_shapes(op, q, k, v)
    require_bias(op, "log_f", log_f, q)
    require_shape(op, "log_f", log_f, (full[0], full[3], full[1]))
    if ACTIVE.region is not None:
        terms = forget_terms(log_f.to(compute_dtype(q)))
        split: Tensor = ACTIVE.region.attend(
            q, k, v, causal=True, backend=backend, **terms, **options
        )
        return split
    if use_reference(op, backend, q):
        checked_codes(op, q, full, record)
        if record.dropout_p > 0:
            require_seed(op, record.seed, q)
        return reference.forgetting_attention(q, k, v, log_f, **options)
    terms = forget_terms(log_f.to(compute_dtype(q)))
    record = record._replace(causal=True, **terms)
    return run(op, q, k, v, full, record, False, backend)[0]


def _of_jagged(
    q: Any, k: Any, v: Any, log_f: Any, backend: str | None, options: ForgettingOptions
) -> Tensor:
    """Returns O (B, j, Hq, Dv) of nested q, k and v (B, j, H, D) and log_f (B, j, Hq)."""
    op = "forgetting_attention"
    for name, t in (("k", k), ("v", v), ("log_f", log_f)):
        require_ragged(op, name, t)
        if not same_boundaries(t, q):
            raise ValueError(
                f"{op}: {name} must have the boundaries of q, got {name}.shape={t.shape}, "
                f"q.shape={q.shape}"
            )
    require_bias(op, "log_f", log_f.values(), q.values())
    wide = log_f.values().to(compute_dtype(q.values()))
    terms = packed_forget_terms(wide, q)
    return attention(q, k, v, causal=True, backend=backend, **terms, **options)
