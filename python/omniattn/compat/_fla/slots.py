"""Gated slot attention, ABC and CyFA of fla.ops.

States of the first two are pairs (N, H, K, M) and (N, H, M, V).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from omniattn import functional
from omniattn.checks.arguments import require_number, require_shape
from omniattn.compat._errors import errors_as, errors_of, require_real
from omniattn.compat._fla.calls import Call, fla_function
from omniattn.compat._norms import normed

__all__ = [
    "chunk_abc",
    "chunk_cyfa",
    "chunk_gsa",
    "fused_recurrent_cyfa",
    "fused_recurrent_gsa",
]

Pair = tuple[Tensor, Tensor]
Result = tuple[Tensor, Pair | None]
CyFAState = tuple[Tensor, Tensor, Tensor]


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


def chunk_cyfa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    delta: Tensor,
    beta: Tensor,
    readout: Tensor,
    q_norm_weight: Tensor,
    k_norm_weight: Tensor,
    q_norm_eps: float,
    k_norm_eps: float,
    scale: float | None = None,
    initial_state: CyFAState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    checkpoint_level: int = 0,
) -> tuple[Tensor, CyFAState | None]:
    """Computes :func:`functional.cyclic_flow_attention` of RMS norms of q and k.

    `cu_seqlens_cpu` and `checkpoint_level` have no effect. The clock in the last state is in
    [0, P), where fla's goes on; both continue alike. The function is that of a pull request to fla,
    commit ef747b38.

    Args:
        q, k, v, g, delta, beta, readout, scale, cu_seqlens: as there.
        q_norm_weight, k_norm_weight: (K,), factors of the norms.
        q_norm_eps, k_norm_eps: numbers added to the mean squares.
        initial_state: states (N, H, K, P + 1) and (N, H, P + 1, V), and clocks (N, H).
        output_final_state: False to return None in place of the last state.
    """
    op = "chunk_cyfa"
    rows = []
    norms = ("q", q, q_norm_weight, q_norm_eps), ("k", k, k_norm_weight, k_norm_eps)
    for name, x, weight, eps in norms:
        require_real(op, **{name: x, f"{name}_norm_weight": weight})
        require_shape(op, f"{name}_norm_weight", weight, tuple(x.shape[-1:]))
        require_number(op, f"{name}_norm_eps", eps, 0.0)
        rows.append(normed(op, x, weight, None, None, eps, is_rms_norm=True)[0])
    with errors_of(op):
        o, state = functional.cyclic_flow_attention(
            *(*rows, v, g, delta, beta, readout),
            scale=scale,
            initial_state=initial_state,
            cu_seqlens=cu_seqlens,
        )
    return o, state if output_final_state else None


def fused_recurrent_cyfa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    delta: Tensor,
    beta: Tensor,
    readout: Tensor,
    q_norm_weight: Tensor,
    k_norm_weight: Tensor,
    q_norm_eps: float,
    k_norm_eps: float,
    scale: float | None = None,
    initial_state: CyFAState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, CyFAState | None]:
    """Computes :func:`chunk_cyfa`, with gradients, which fla's does not have."""
    norms = q_norm_weight, k_norm_weight, q_norm_eps, k_norm_eps
    rest = scale, initial_state, output_final_state, cu_seqlens
    with errors_as("fused_recurrent_cyfa", "chunk_cyfa"):
        return chunk_cyfa(q, k, v, g, delta, beta, readout, *norms, *rest)
