"""Linear scan, RWKV-4 and sLSTM: scans with a few state values per channel."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import Unpack

from omniattn.checks.arguments import (
    cast_like,
    implementation,
    require_choice,
    require_float,
    require_range,
    require_shape,
    require_strided,
)
from omniattn.checks.jagged import over_sequences
from omniattn.encoding.sequences import SequenceOptions, sequences_of, spelled_out
from omniattn.functional.recurrences._common import log_decays, sequence_count, widened
from omniattn.ops import scan as ops
from omniattn.reference.recurrences.scan import FORGET_GATES

__all__ = ["linear_scan", "rwkv4", "slstm"]


@over_sequences("x", "g")
@spelled_out(SequenceOptions)
def linear_scan(
    x: Tensor,
    g: Tensor,
    **options: Unpack[SequenceOptions],
) -> tuple[Tensor, Tensor]:
    """Linear recurrence with one decaying state per channel, as in HGRN.

    ``h_t = exp(g_t) h_{t-1} + x_t``

    Args:
        x: (B, T, C), float64, float32, bfloat16 or float16; copied only where its channels are not
            next to each other.
        g: (B, T, C), floating-point, <= 0, logarithms of the decays. Computed in float32 (float64
            for float64).
        initial_state: (N, C), of any floating dtype, but computed in float32 (float64 for float64);
            None for zeros. N is B, or the number of sequences.
        cu_seqlens: (N + 1,) int32 or int64: B is 1, and tokens cu_seqlens[n] .. cu_seqlens[n + 1]
            are sequence n, with a state of its own. Jagged nested tensors (B, j, ...) in place of
            (B, T, ...) bring their own boundaries, and the output has them, too.
        backend: None for the native kernel of x's device, "cpu" or "cuda" to insist on it,
            "reference" for the eager definition.

    Returns:
        h (B, T, C) of x's dtype, and the state (N, C) after the last token in float32 (float64 for
        float64).

    Raises:
        TypeError: a dtype is unsupported.
        ValueError: a shape, device or value is invalid.
        NotImplementedError: no native kernel for the device.

    Note:
        States are kept in fp32 (fp64 for fp64); h is rounded where it is returned only. Gradients
        flow to all tensors, from h and from the final state; they do not depend on the number of
        threads. The inputs and the state of every 32nd token are saved for the backward. Second and
        forward-mode derivatives are scans, too.

    Reference:
        Qin et al., Hierarchically Gated Recurrent Neural Network for Sequence Modeling, 2023,
        arXiv:2311.04823. Verified against `ops/hgrn/naive.py` of fla-org/flash-linear-attention,
        commit bc3b101d.

    Example:
        >>> x, half = torch.tensor([4.0, 1.0, 1.0]).view(1, 3, 1), torch.full((1, 3, 1), 0.5)
        >>> h, state = linear_scan(x, half.log())
        >>> h.flatten()  # 4, 4 / 2 + 1, 3 / 2 + 1
        tensor([4.0000, 3.0000, 2.5000])
    """
    op = "linear_scan"
    initial_state, cu_seqlens, backend = sequences_of(op, options)
    require_float(op, "x", x)
    if x.ndim != 3:
        raise ValueError(f"{op}: x must have shape (B, T, C), got x.shape={tuple(x.shape)}")
    require_strided(op, "x", x)
    g = log_decays(op, "g", g, x, (tuple(x.shape),), "x")
    count = sequence_count(op, x, cu_seqlens, "x")
    if initial_state is not None:
        shape = (count, x.shape[2])
        initial_state = widened(op, "initial_state", initial_state, x, (shape,), "x")
    return implementation(op, backend, x, ops.linear_scan)(x, g, initial_state, cu_seqlens)


@over_sequences("k", "v")
@spelled_out(SequenceOptions)
def rwkv4(
    w: Tensor,
    u: Tensor,
    k: Tensor,
    v: Tensor,
    **options: Unpack[SequenceOptions],
) -> tuple[Tensor, Tensor]:
    """RWKV-4's time mixing: a mean of past values with decaying weights, per channel.

    ``y_t = (sum_{i<t} e^(k_i - (t-1-i) w) v_i + e^(u + k_t) v_t) / (the same without v)``

    Args:
        w: (C,), floating-point, > 0: ``exp(time_decay)`` of RWKV-4, whose kernels take its
            negative. Computed in float32 (float64 for float64), as are u and states.
        u: (C,), floating-point, ``time_first``: added to the key of the present token.
        k: (B, T, C), float64, float32, bfloat16 or float16; copied only where its channels are not
            next to each other.
        v: (B, T, C), of k's dtype.
        initial_state: (N, 3, C): the numerator and the denominator, both times ``e^-max``, and max.
            None for the state of no tokens, (0, 0, -1e38). N is B, or the number of sequences.
        cu_seqlens: (N + 1,) int32 or int64: B is 1, and tokens cu_seqlens[n] .. cu_seqlens[n + 1]
            are sequence n, with a state of its own. Jagged nested tensors (B, j, ...) in place of
            (B, T, ...) bring their own boundaries, and the output has them, too.
        backend: None for the native kernel of k's device, "cpu" or "cuda" to insist on it,
            "reference" for the eager definition.

    Returns:
        y (B, T, C) of k's dtype, and the state (N, 3, C) after the last token in float32 (float64
        for float64).

    Raises:
        TypeError: a dtype is unsupported or differs from k's.
        ValueError: a shape, device or value is invalid.
        NotImplementedError: no native kernel for the device.

    Note:
        Exponentials are taken only of numbers <= 0, so that keys of any size are accurate. Within a
        call the decay of the maximum is exact, too; a state rounds it. Gradients flow to all
        tensors, from y and from the final state; they do not depend on the number of threads. The
        inputs and the state of every 32nd token are saved for the backward. Second and forward-mode
        derivatives go through the eager definition.

    Reference:
        Peng et al., RWKV: Reinventing RNNs for the Transformer Era, 2023, arXiv:2305.13048.

    Example:
        >>> zero, v = torch.zeros(1), torch.tensor([1.0, 3.0, 8.0]).view(1, 3, 1)
        >>> y, state = rwkv4(torch.tensor([2.0]).log(), zero, torch.zeros(1, 3, 1), v)
        >>> y.flatten()  # 1; (1 + 3) / 2; (1 / 2 + 3 + 8) / (1 / 2 + 1 + 1)
        tensor([1.0000, 2.0000, 4.6000])
    """
    op = "rwkv4"
    initial_state, cu_seqlens, backend = sequences_of(op, options)
    require_float(op, "k", k)
    if k.ndim != 3:
        raise ValueError(f"{op}: k must have shape (B, T, C), got k.shape={tuple(k.shape)}")
    v = cast_like(op, "v", v, k, "k")
    require_shape(op, "v", v, tuple(k.shape))
    count, channels = sequence_count(op, k, cu_seqlens, "k"), k.shape[2]
    w = widened(op, "w", w, k, ((channels,),), "k")
    require_range(op, "w", w, least=0.0)
    u = widened(op, "u", u, k, ((channels,),), "k")
    if initial_state is not None:
        initial_state = widened(op, "initial_state", initial_state, k, ((count, 3, channels),), "k")
    return implementation(op, backend, k, ops.rwkv4)(w, u, k, v, initial_state, cu_seqlens)


@over_sequences("x")
@spelled_out(SequenceOptions)
def slstm(
    x: Tensor,
    r: Tensor,
    *,
    forget_gate: str = "sigmoid",
    **options: Unpack[SequenceOptions],
) -> tuple[Tensor, Tensor]:
    """sLSTM cell: an LSTM with exponential input gates and per-head recurrent weights.

    With the gates before their activations ``(i, f, z, o) = x_t + R h_{t-1}`` and ``m_t =
    max(ln sigmoid(f) + m_{t-1}, i)``:

    ``c_t = f' c_{t-1} + i' tanh(z)``, ``n_t = f' n_{t-1} + i'``, ``h_t = sigmoid(o) c_t / n_t``

    with ``f' = sigmoid(f) e^(m_{t-1} - m_t)`` and ``i' = e^(i - m_t)``, which are at most 1.

    Args:
        x: (B, T, 4, H, D), ``W x_t + b`` for the gates i, f, z and o; float64, float32, bfloat16 or
            float16. Copied only where a token's gates are not next to each other.
        r: (4, H, D, D) of x's dtype: element [g, h, a, b] takes h[a] of head h to element b of its
            gate g. Under autocast it is cast to x's dtype.
        forget_gate: "sigmoid", or "exp" for ln f = f.
        initial_state: (N, 4, H, D), h, c, n and m; computed in float32 (float64 for float64). None
            for zeros. Where n is 0, c, n and m are ignored: m_1 = i. N is B, or the number of
            sequences.
        cu_seqlens: (N + 1,) int32 or int64: B is 1, and tokens cu_seqlens[n] .. cu_seqlens[n + 1]
            are sequence n, with a state of its own. Jagged nested tensors (B, j, ...) in place of
            (B, T, ...) bring their own boundaries, and the output has them, too.
        backend: None for the native kernel of x's device, "cpu" or "cuda" to insist on it,
            "reference" for the eager definition.

    Returns:
        h (B, T, H, D) of x's dtype, and the state (N, 4, H, D) after the last token in float32
        (float64 for float64).

    Raises:
        TypeError: a dtype is unsupported or differs from x's.
        ValueError: a shape, device or value is invalid.
        NotImplementedError: no native kernel for the device.

    Note:
        Products, gates and states in fp32 (fp64 for fp64); h is rounded where it is returned only.
        Gradients through time are exact and flow to x, r and initial_state, from h and from the
        final state; they do not depend on the number of threads. The backward keeps 7 numbers per
        element of h in fp32. Second and forward-mode derivatives go through the eager definition.

        Steps are sequential. The CPU multiplies up to 8 sequences with R together, so that larger
        batches cost less per token.

    Reference:
        Beck et al., xLSTM: Extended Long Short-Term Memory, 2024, arXiv:2405.04517.

    Example:
        >>> x = torch.zeros(1, 2, 4, 1, 1)
        >>> x[0, :, 2, 0, 0] = torch.tensor([0.0, 20.0])  # tanh: 0, 1
        >>> h, state = slstm(x, torch.zeros(4, 1, 1, 1))
        >>> h.flatten()  # 0; half of (0 / 2 + 1) / (1 / 2 + 1)
        tensor([0.0000, 0.3333])
    """
    op = "slstm"
    initial_state, cu_seqlens, backend = sequences_of(op, options)
    require_float(op, "x", x)
    if x.ndim != 5 or x.shape[2] != 4:
        raise ValueError(f"{op}: x must have shape (B, T, 4, H, D), got x.shape={tuple(x.shape)}")
    heads, size = x.shape[3:]
    r = cast_like(op, "r", r, x)
    require_shape(op, "r", r, (4, heads, size, size))
    require_choice(op, "forget_gate", forget_gate, FORGET_GATES)
    count = sequence_count(op, x, cu_seqlens, "x")
    if initial_state is not None:
        shape = (count, 4, heads, size)
        initial_state = widened(op, "initial_state", initial_state, x, (shape,), "x")
    run = implementation(op, backend, x, ops.slstm)
    return run(x, r, initial_state, cu_seqlens, forget_gate == "exp")
