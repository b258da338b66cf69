"""Longhorn's scan: each token solves a small regression in closed form."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import Unpack

from omniattn.checks.arguments import cast_like, implementation, require_strided, require_tensor
from omniattn.checks.jagged import over_sequences
from omniattn.encoding.sequences import SequenceOptions, sequences_of, spelled_out
from omniattn.functional.recurrences._common import sequence_count, widened
from omniattn.functional.state_space.selective_scan import of_steps
from omniattn.ops import scan as ops

__all__ = ["longhorn_scan"]


@over_sequences("u", "delta", "z", "B", "C")
@spelled_out(SequenceOptions)
def longhorn_scan(
    u: Tensor,
    delta: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    **options: Unpack[SequenceOptions],
) -> tuple[Tensor, Tensor]:
    """Selective scan without A, whose decays follow from its keys.

    For each channel d of group g and state n, with ``b = sigmoid(delta + delta_bias)`` and
    ``dt_t[d] = b_t[d] / (1 + b_t[d] |B_t[g]|^2)``:

    ``h_t[d, n] = (1 - dt_t[d] B_t[g, n]^2) h_{t-1}[d, n] + dt_t[d] B_t[g, n] u_t[d]``

    ``y_t[d] = (sum_n C_t[g, n] h_t[d, n] + D[d] u_t[d]) silu(z_t[d])``

    The update is the diagonal part of the ``h`` that minimises
    ``|h - h_{t-1}|^2 + b (B_t . h - u_t)^2``.

    Args:
        u: (B, T, D), float64, float32, bfloat16 or float16; like delta, z, B and C copied only
            where the numbers of a token are not next to each other.
        delta: (B, T, D) of u's dtype, logits of the weights b of the regression.
        B: (B, T, N) or (B, T, G, N) of u's dtype, the keys k of the paper; channel d is of group
            d // (D / G).
        C: as B, with the groups of B; the queries q of the paper.
        D: (D,), or None for no such term; computed in float32 (float64 for float64), as are
            delta_bias and states.
        z: (B, T, D) of u's dtype, or None for no gate.
        delta_bias: (D,), or None.
        initial_state, cu_seqlens, backend: as in :func:`selective_scan`.

    Returns:
        y (B, T, D) of u's dtype, and the state (S, D, N) after the last token in float32 (float64
        for float64).

    Raises:
        TypeError: a dtype is unsupported or differs from u's.
        ValueError: a shape, device or value is invalid.
        NotImplementedError: no native kernel for the device.

    Note:
        Gradients, their memory and their determinism are those of :func:`selective_scan`, whose
        kernels compute this rule, too. Second and forward-mode derivatives go through the eager
        definition, chunk by chunk. CUDA takes at most 256 states.

    Reference:
        Liu, Wang, Wu, Feng, Stone and Liu, Longhorn: State Space Models are Amortized Online
        Learners, 2024, arXiv:2407.14207. Equal to `step` of `models/longhorn.py` of
        Cranial-XIX/longhorn at commit 4ea1745, whose k, q and dt are B, C and delta.

    Example:
        >>> one = torch.ones(1, 3, 1)
        >>> y, state = longhorn_scan(one, one * 0, one, one)  # dt = 1/2 / (1 + 1/2)
        >>> [round(x, 4) for x in y.flatten().tolist()]
        [0.3333, 0.5556, 0.7037]
    """
    op = "longhorn_scan"
    initial_state, cu_seqlens, backend = sequences_of(op, options)
    delta, z = of_steps(op, u, delta, z)
    channels = u.shape[2]
    B = _rows(op, "B", B, u)
    C = _rows(op, "C", C, u)
    if B.shape != C.shape:
        raise ValueError(
            f"{op}: C must have the groups and states of B, got {tuple(C.shape[2:])}, "
            f"and {tuple(B.shape[2:])} of B"
        )
    if D is not None:
        D = widened(op, "D", D, u, ((channels,),), "u")
    if delta_bias is not None:
        delta_bias = widened(op, "delta_bias", delta_bias, u, ((channels,),), "u")
    count = sequence_count(op, u, cu_seqlens, "u")
    if initial_state is not None:
        shape = (count, channels, B.shape[3])
        initial_state = widened(op, "initial_state", initial_state, u, (shape,), "u")
    run = implementation(op, backend, u, ops.selective_scan)
    y, state = run(u, delta, None, B, C, D, z, delta_bias, initial_state, cu_seqlens, False, False)
    return y, state


def _rows(op: str, name: str, t: Tensor, u: Tensor) -> Tensor:
    """Returns B or C as (B, T, G, N)."""
    require_tensor(op, name, t)
    require_strided(op, name, t)
    batch, steps, channels = u.shape
    groups = t.shape[2] if t.ndim == 4 else 1
    fits = t.ndim in (3, 4) and tuple(t.shape[:2]) == (batch, steps)
    if not fits or (channels % groups if groups > 0 else channels):
        raise ValueError(
            f"{op}: {name} must have shape ({batch}, {steps}, N), or ({batch}, {steps}, G, N) with "
            f"G groups of the {channels} channels, got {name}.shape={tuple(t.shape)}"
        )
    t = cast_like(op, name, t, u, "u")
    return t.unsqueeze(2) if t.ndim == 3 else t
