"""LightNet's attention: linear attention whose keys are a softmax over the tokens so far."""

from __future__ import annotations

from torch import Tensor

from omniattn.checks.jagged import over_sequences
from omniattn.encoding.sequences import Sequences
from omniattn.functional.recurrences._common import (
    repeated,
    require_heads,
    run,
    sequence_count,
    state_parts,
)
from omniattn.functional.recurrences._running_softmax import running_softmax
from omniattn.reference.precision import widen

__all__ = ["lightnet_attention"]

State = tuple[Tensor, Tensor, Tensor]


@over_sequences("q", "k", "v")
def lightnet_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    initial_state: State | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, State]:
    """Linear attention with a mean of past values for each channel of the keys.

    ``o_t = scale * sum_j (q_t . w_tj) v_j`` with the weights ``w_tj = softmax_{j <= t}(k_j)`` of
    each channel.

    Args:
        q, k, v: as in `gated_linear_attention`; k holds finite logits.
        scale: default K^-0.5.
        initial_state: (S, n, m) of shapes (N, Hv, K, V), (N, H, K) and (N, H, K): with the largest
            logit m, the sums of ``exp(k - m) v^T`` and of ``exp(k - m)``; None for no tokens, which
            are zeros.
        cu_seqlens, backend: as in `gated_linear_attention`.

    Returns:
        o (B, T, Hv, V) of q's dtype, and the state (S, n, m) after the last token in float32
        (float64 for float64), whose m has no gradient, since its value cancels.

    Raises:
        TypeError: a dtype is unsupported or differs from q's.
        ValueError: a shape, device or value is invalid.
        NotImplementedError: no native kernel for the device.

    Note:
        This is `gated_linear_attention` on sums relative to the largest logit so far, in fp32 for
        half types. So logits of any size keep their accuracy.

    Reference:
        Qin et al., You Only Scan Once: Efficient Multi-dimension Sequential Modeling with LightNet,
        2024, arXiv:2405.21022. Verified against the formula of `layers/lightnet.py` of
        fla-org/flash-linear-attention, commit bc3b101d.

    Example:
        >>> one, v = torch.ones(1, 2, 1, 1), torch.tensor([4.0, 8.0]).view(1, 2, 1, 1)
        >>> lightnet_attention(one, 0 * one, v)[0].flatten()  # means of 4 and of 4, 8
        tensor([4., 6.])
    """
    op = "lightnet_attention"
    sequences = Sequences(None, cu_seqlens, backend)
    k, v = require_heads(op, q, k, v)
    count, heads = sequence_count(op, q, cu_seqlens), q.shape[2]
    sizes = (count, heads, q.shape[3])
    shapes = ((count, v.shape[2], q.shape[3], v.shape[3]), sizes, sizes)
    state = state_parts(op, initial_state, "S, n, m", v, shapes)
    weights = running_softmax(op, widen(k), None if state is None else state[1:], sequences)
    o, sums = run(
        *(op, widen(q) / weights.totals, weights.weights, widen(v)),
        repeated(weights.decays, v.shape[2] // max(1, heads)),
        scale,
        sequences._replace(initial_state=None if state is None else state[0]),
    )
    return o.to(v.dtype), (sums, weights.n, weights.m)
