"""Chunks of packed sequences, sums within them, and products: `fla.ops.utils`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as nnf

from omniattn.checks.arguments import require_choice, require_int, require_tensor
from omniattn.compat._errors import require_form, require_real
from omniattn.compat._fla.parts import fused_gdn_gate, fused_kda_gate
from omniattn.reference.precision import widen

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda y: y,
    "leaky_relu": nnf.leaky_relu,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def prepare_chunk_indices(
    cu_seqlens: Tensor, chunk_size: int, cu_seqlens_cpu: Tensor | None = None
) -> Tensor:
    """Returns the sequence and the number in it (N, 2) of each chunk of packed sequences."""
    op = "prepare_chunk_indices"
    require_tensor(op, "cu_seqlens", cu_seqlens)
    require_int(op, "chunk_size", chunk_size, 1)
    counts = _counts(cu_seqlens, chunk_size)
    sequence = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    starts = (counts.cumsum(0) - counts).repeat_interleave(counts)
    place = torch.arange(len(sequence), device=counts.device) - starts
    return torch.stack((sequence, place), 1).to(cu_seqlens)


def prepare_chunk_offsets(cu_seqlens: Tensor, chunk_size: int) -> Tensor:
    """Returns the number of chunks (N + 1,) before each packed sequence, and of all."""
    op = "prepare_chunk_offsets"
    require_tensor(op, "cu_seqlens", cu_seqlens)
    require_int(op, "chunk_size", chunk_size, 1)
    counts = _counts(cu_seqlens, chunk_size)
    return torch.cat((counts.new_zeros(1), counts.cumsum(0))).to(cu_seqlens)


def _counts(cu_seqlens: Tensor, chunk_size: int) -> Tensor:
    return (cu_seqlens.diff().long() + chunk_size - 1) // chunk_size


def chunk_local_cumsum(
    g: Tensor,
    chunk_size: int,
    reverse: bool = False,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float,
    chunk_indices: Tensor | None = None,
) -> Tensor:
    """Computes sums of the tokens so far in each chunk of g (B, T, H) or (B, T, H, S).

    Args:
        g: summed in fp32 (fp64 for fp64).
        chunk_size: number of tokens of a chunk; the last one may be shorter.
        reverse: True for sums of the tokens from here on.
        scale: factor of the sums, or None.
        cu_seqlens: boundaries of packed sequences, for B = 1; chunks start at each of them.
        output_dtype: dtype of the result, None for that of g.
        chunk_indices: has no effect.
    """
    op = "chunk_local_cumsum"
    _require_gates(op, "g", g)
    require_int(op, "chunk_size", chunk_size, 1)
    return _sums(g, chunk_size, reverse, scale, cu_seqlens, output_dtype)


def chunk_local_cumsum_scalar(
    g: Tensor,
    chunk_size: int,
    reverse: bool = False,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float,
    chunk_indices: Tensor | None = None,
) -> Tensor:
    """Computes :func:`chunk_local_cumsum` of g (B, T, H)."""
    require_form("chunk_local_cumsum_scalar", "g", g, "B, T, H")
    return chunk_local_cumsum(g, chunk_size, reverse, scale, cu_seqlens, output_dtype)


def chunk_local_cumsum_vector(
    g: Tensor,
    chunk_size: int,
    reverse: bool = False,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float,
    chunk_indices: Tensor | None = None,
) -> Tensor:
    """Computes :func:`chunk_local_cumsum` of g (B, T, H, S)."""
    require_form("chunk_local_cumsum_vector", "g", g, "B, T, H, S")
    return chunk_local_cumsum(g, chunk_size, reverse, scale, cu_seqlens, output_dtype)


def chunk_global_cumsum(
    s: Tensor,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    output_dtype: torch.dtype | None = torch.float,
) -> Tensor:
    """Computes :func:`chunk_local_cumsum` with each sequence of s as one chunk."""
    _require_gates("chunk_global_cumsum", "s", s)
    return _sums(s, max(1, s.shape[1]), reverse, scale, cu_seqlens, output_dtype)


def chunk_global_cumsum_scalar(
    s: Tensor,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    output_dtype: torch.dtype | None = torch.float,
) -> Tensor:
    """Computes :func:`chunk_global_cumsum` of s (B, T, H)."""
    require_form("chunk_global_cumsum_scalar", "s", s, "B, T, H")
    return chunk_global_cumsum(s, reverse, cu_seqlens, scale, output_dtype)


def chunk_global_cumsum_vector(
    s: Tensor,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    output_dtype: torch.dtype | None = torch.float,
) -> Tensor:
    """Computes :func:`chunk_global_cumsum` of s (B, T, H, S)."""
    require_form("chunk_global_cumsum_vector", "s", s, "B, T, H, S")
    return chunk_global_cumsum(s, reverse, cu_seqlens, scale, output_dtype)


def gdn_gate_chunk_cumsum(
    g: Tensor,
    A_log: Tensor,
    chunk_size: int,
    scale: float | None = None,
    dt_bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float,
) -> Tensor:
    """Computes :func:`chunk_local_cumsum` of the log-decays of :func:`fused_gdn_gate`."""
    require_form("gdn_gate_chunk_cumsum", "g", g, "B, T, H")
    gates = fused_gdn_gate(g, A_log, dt_bias, widen(g).dtype)
    found = chunk_local_cumsum(gates, chunk_size, False, scale, cu_seqlens, None)
    return found.to(output_dtype or g.dtype)


def kda_gate_chunk_cumsum(
    g: Tensor,
    A_log: Tensor | None,
    chunk_size: int,
    scale: float | None = None,
    dt_bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float,
    chunk_indices: Tensor | None = None,
    lower_bound: float | None = None,
) -> Tensor:
    """Computes :func:`chunk_local_cumsum` of the log-decays of :func:`fused_kda_gate`."""
    require_form("kda_gate_chunk_cumsum", "g", g, "B, T, H, S")
    gates = fused_kda_gate(g, A_log, dt_bias, lower_bound, widen(g).dtype)
    found = chunk_local_cumsum(gates, chunk_size, False, scale, cu_seqlens, None)
    return found.to(output_dtype or g.dtype)


def solve_tril(
    A: Tensor,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float,
) -> Tensor:
    """Computes the inverses of I + A for the chunks of A (B, T, H, C), whose matrices are (C, C).

    Args:
        A: rows of chunks of C tokens, strictly lower triangular. What is not below the diagonal of
            a chunk, whose last one may be shorter, is not read.
        cu_seqlens: boundaries of packed sequences, for B = 1; chunks start at each of them.
        chunk_indices: has no effect.
        output_dtype: dtype of the result, None for that of A.
    """
    op = "solve_tril"
    require_real(op, A=A)
    require_form(op, "A", A, "B, T, H, C")
    size = A.shape[3]
    parts = []
    for part in _chunks(widen(A), size, cu_seqlens):
        rows = part.shape[1]
        below = part[..., :rows].transpose(1, 2).tril(-1)
        one = torch.eye(rows, dtype=below.dtype, device=below.device)
        inverse = torch.linalg.solve_triangular(below, one, upper=False, unitriangular=True)
        parts.append(nnf.pad(inverse.transpose(1, 2), (0, size - rows)))
    return torch.cat([widen(A)[:, :0], *parts], 1).to(output_dtype or A.dtype)


def matmul(a: Tensor, b: Tensor, activation: str = "") -> Tensor:
    """Computes ``activation(a b)`` of a (M, K) or (B, M, K) and b (K, N)."""
    op = "matmul"
    require_choice(op, "activation", activation, _ACTIVATIONS)
    y = _product(op, a, b)
    return _ACTIVATIONS[activation](y)


def addmm(
    x: Tensor, a: Tensor, b: Tensor, alpha: float | None = None, beta: float | None = None
) -> Tensor:
    """Computes ``beta x + alpha a b`` of a (M, K) or (B, M, K), b (K, N) and x like the result.

    alpha and beta are 1 if they are None.
    """
    op = "addmm"
    require_real(op, x=x)
    y = _product(op, a, b)
    return (1.0 if beta is None else beta) * x + (1.0 if alpha is None else alpha) * y


def _product(op: str, a: Tensor, b: Tensor) -> Tensor:
    require_real(op, a=a, b=b)
    if a.ndim not in (2, 3) or b.ndim != 2 or a.shape[-1] != b.shape[0]:
        raise ValueError(
            f"{op}: a must have shape (M, K) or (B, M, K) and b (K, N), "
            f"got a.shape={tuple(a.shape)}, b.shape={tuple(b.shape)}"
        )
    return a @ b


def _require_gates(op: str, name: str, t: Tensor) -> None:
    require_real(op, **{name: t})
    if t.ndim not in (3, 4):
        raise ValueError(
            f"{op}: {name} must have shape (B, T, H) or (B, T, H, S), "
            f"got {name}.shape={tuple(t.shape)}"
        )


def _sums(
    t: Tensor,
    chunk_size: int,
    reverse: bool,
    scale: float | None,
    cu_seqlens: Tensor | None,
    dtype: torch.dtype | None,
) -> Tensor:
    parts = []
    for part in _chunks(widen(t), chunk_size, cu_seqlens):
        sums = part.flip(1).cumsum(1).flip(1) if reverse else part.cumsum(1)
        parts.append(sums if scale is None else sums * scale)
    return torch.cat([widen(t)[:, :0], *parts], 1).to(dtype or t.dtype)


def _chunks(t: Tensor, size: int, cu_seqlens: Tensor | None) -> list[Tensor]:
    """Returns the chunks of the sequences of t (B, T, ..), each with at most `size` tokens."""
    lengths = [t.shape[1]] if cu_seqlens is None else cu_seqlens.diff().tolist()
    return [part for row in t.split(lengths, 1) if row.shape[1] for part in row.split(size, 1)]
