"""The matrix LSTM of xLSTM: linear attention with exponential gates."""

from __future__ import annotations

import torch
from torch import Tensor

from omniattn.checks.arguments import implementation, require_choice, require_number
from omniattn.checks.jagged import over_sequences
from omniattn.encoding.sequences import Sequences
from omniattn.functional.recurrences._common import require_heads, run, sequence_count, widened
from omniattn.ops import scan as ops
from omniattn.reference.recurrences.scan import FORGET_GATES, inverse_exp

__all__ = ["mlstm"]

State = tuple[Tensor, Tensor, Tensor]


@over_sequences("q", "k", "v", "i", "f")
def mlstm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    scale: float | None = None,
    eps: float = 1e-6,
    forget_gate: str = "sigmoid",
    initial_state: State | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, State]:
    """The cell of mLSTM: a matrix state with a forget gate and an exponential input gate per head.

    With ``m_t = max(ln sigmoid(f_t) + m_{t-1}, i_t)``, ``f' = sigmoid(f_t) e^(m_{t-1} - m_t)`` and
    ``i' = e^(i_t - m_t)``, which are at most 1:

    ``C_t = f' C_{t-1} + i' k'_t v_t^T``, ``n_t = f' n_{t-1} + i' k'_t`` with ``k' = scale * k``,
    ``h_t = C_t^T q_t / (max(|n_t . q_t|, e^-m_t) + eps)``.

    Args:
        q: (B, T, H, K), float64, float32, bfloat16 or float16, any strides.
        k: (B, T, H, K), of q's dtype.
        v: (B, T, H, V), of q's dtype.
        i: (B, T, H), floating-point: the input gates before exp. Gates and states are computed in
            float32 (float64 for float64).
        f: (B, T, H), floating-point: the forget gates before their activation.
        scale: of the keys, default K^-0.5.
        eps: added to the denominator, >= 0.
        forget_gate: "sigmoid" or "exp".
        initial_state: (C, n, m) of shapes (N, H, K, V), (N, H, K) and (N, H); None for zeros, in m
            too: a first m of -inf would let the first gates alone decide the next one. N is B, or
            the number of sequences.
        cu_seqlens: (N + 1,) int32 or int64: B is 1, and tokens cu_seqlens[n] .. cu_seqlens[n + 1]
            are sequence n, with a state of its own. Jagged nested tensors (B, j, ...) in place of
            (B, T, ...) bring their own boundaries, and the output has them, too.
        backend: None for the native kernels of q's device, "cpu" or "cuda" to insist on them,
            "reference" for the eager definition.

    Returns:
        h (B, T, H, V) of q's dtype, and the state (C, n, m) after the last token in float32
        (float64 for float64).

    Raises:
        TypeError: a dtype is unsupported or differs from q's.
        ValueError: a shape, device or value is invalid.
        NotImplementedError: no native kernel for the device.

    Note:
        The gates of all tokens come from a scan, and the states from the kernels of
        `gated_linear_attention`. Gradients are exact and flow to all tensors, from h and from the
        final state; the kernels of NX-AI treat the denominator as a constant. They do not depend on
        the number of threads. e^-m is computed with m clamped to at least -80 (-700 for float64),
        so that gradients stay finite. Second and forward-mode derivatives go through the eager
        definition of the gates.

        States are computed by products over blocks of steps: a NaN or infinity may also reach
        outputs of up to 31 earlier steps.

        The states hold scaled keys, as in the xlstm package. mlstm_kernels scales q and so
        has K^0.5 times this C and n.

    Reference:
        Beck et al., xLSTM: Extended Long Short-Term Memory, 2024, arXiv:2405.04517.

    Example:
        >>> one, gate = torch.ones(1, 2, 1, 1), torch.zeros(1, 2, 1)
        >>> v = torch.tensor([2.0, 8.0]).view(1, 2, 1, 1)
        >>> h, state = mlstm(one, one, v, gate, gate, eps=0.0)
        >>> h.flatten()  # 2; (2 / 2 + 8) / (1 / 2 + 1)
        tensor([2., 6.])
    """
    op = "mlstm"
    k, v = require_heads(op, q, k, v)
    batch, steps, heads, size = q.shape
    if v.shape[2] != heads:
        raise ValueError(
            f"{op}: v must have the heads of q, got v.shape={tuple(v.shape)}, "
            f"q.shape={tuple(q.shape)}"
        )
    i = widened(op, "i", i, q, ((batch, steps, heads),), "q")
    f = widened(op, "f", f, q, ((batch, steps, heads),), "q")
    require_choice(op, "forget_gate", forget_gate, FORGET_GATES)
    require_number(op, "eps", eps, 0)
    if scale is None:
        scale = size**-0.5 if size > 0 else 1.0
    else:
        require_number(op, "scale", scale)
    count = sequence_count(op, q, cu_seqlens)
    matrix, m = _parts(op, initial_state, q, (count, heads, size, v.shape[3]))
    gates = implementation(op, backend, q, ops.exponential_gates)
    decay, factor, maxima, m = gates(FORGET_GATES[forget_gate](f), i, m, cu_seqlens)
    # The keys' factors multiply the values and the normalizer's ones instead; keys stay unchanged.
    o, state = run(
        *(op, q, k, v, decay, 1.0, Sequences(matrix, cu_seqlens, backend)),
        beta=factor * scale,
        min_denominator=inverse_exp(maxima),
        normalize=True,
        eps=eps,
    )
    return o, (state[..., :-1], state[..., -1], m)


def _parts(
    op: str, state: State | None, q: Tensor, sizes: tuple[int, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Checks a state; returns C and n as one matrix, and m."""
    if state is None:
        return None, None
    if not isinstance(state, tuple) or len(state) != 3:
        raise TypeError(
            f"{op}: initial_state must be a tuple (C, n, m), got "
            f"type(initial_state)={type(state).__name__}"
        )
    shapes = (sizes, sizes[:3], sizes[:2])
    c, n, m = (
        widened(op, name, part, q, (shape,), "q")
        for name, part, shape in zip(("C", "n", "m"), state, shapes, strict=True)
    )
    return torch.cat((c, n[..., None]), -1), m
