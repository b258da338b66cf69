"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from omniattn.checks.arguments import (
    cast_like,
    implementation,
    is_one_of,
    require_bool,
    require_device,
    require_float,
    require_int,
    require_integers,
    require_like,
    require_number,
    require_shape,
)
from omniattn.checks.jagged import token_wise
from omniattn.functional.layers.norm import casts_first
from omniattn.ops import rope as ops
from omniattn.ops.norm_rope import norm_rope
from omniattn.reference.positions.rope import OptionalTensor
from omniattn.reference.precision import compute_dtype

__all__ = ["apply_rotary", "qk_norm_rotary"]


@token_wise("k", batched=True)
def apply_rotary(
    q: Tensor,
    k: OptionalTensor,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor | int | None = None,
    rotary_start: int = 0,
    interleaved: bool = False,
    inverse: bool = False,
    inplace: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, OptionalTensor]:
    """Rotary position embedding of queries and keys.

    Pairs of Dr dimensions are rotated by the angles of their token: ``(x, y) -> (x cos - y sin, x
    sin + y cos)``; the other dimensions are copied.

    Args:
        q: (B, T, Hq, D), float64, float32, bfloat16 or float16. Any strides; copied only where the
            last stride is not 1.
        k: (B, T, Hkv, D) of q's dtype, to which autocast brings it, or None. Both may be jagged
            nested tensors (B, j, H, D) of the same boundaries: T is then the number of tokens in
            q.values(), and B is 1 for the tables.
        cos: (T, Dr / 2) or (B, T, Dr / 2), one row for each token; with `positions` (P, Dr / 2).
            Any floating-point dtype, see :func:`rotary_tables`. Dr may be less than D.
        sin: of cos's shape, dtype and device.
        positions: row of the tables for each token: (T,) or (B, T), any integer dtype; an int p for
            rows p, p + 1, ...; None for row t.
        rotary_start: the rotated dimensions are rotary_start, ..., rotary_start + Dr - 1.
        interleaved: pairs are (2i, 2i + 1) (GPT-J, Meta's Llama) instead of (i, i + Dr / 2)
            (GPT-NeoX, Hugging Face's Llama), counted from rotary_start.
        inverse: rotate by the negative angle.
        inplace: write the results over q and k, which need unit stride in D.
        backend: None for the native kernel of q's device, "cpu" or "cuda" to insist on it,
            "reference" for the eager definition.

    Returns:
        q and k rotated, of their shapes and dtypes: new tensors, or q and k themselves. None for a
        k of None.

    Raises:
        TypeError: a dtype is unsupported or does not match.
        ValueError: a shape, device, stride or offset is invalid.
        RuntimeError: a position outside the tables. On CUDA the kernel finds it and stops: torch
            raises at its next call that waits for the GPU.
        NotImplementedError: no native kernel for the device; tables that need a gradient.

    Note:
        Half inputs are rotated in fp32 and rounded once. The gradient is the rotation by the
        negative angle, differentiable any number of times; cos and sin get none.

    Reference:
        Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021,
        arXiv:2104.09864.

    Example:
        >>> from omniattn.functional import rope_frequencies, rotary_tables
        >>> cos, sin = rotary_tables(rope_frequencies(2), torch.arange(2))
        >>> q, _ = apply_rotary(torch.ones(1, 2, 1, 2), None, cos, sin)
        >>> q.flatten()
        tensor([ 1.0000,  1.0000, -0.3012,  1.3818])
    """
    op = "apply_rotary"
    given, k = k, _checked(op, q, k, cos, sin, positions, rotary_start, interleaved)
    require_bool(op, "inverse", inverse)
    require_bool(op, "inplace", inplace)
    if inplace and given is not None:
        require_like(op, "k", given, q, "q")  # not a cast copy, which nobody would read
    run = implementation(op, backend, q, ops.rope)
    cos, sin, rows = _tables(op, q, cos, sin, positions, native=run is ops.rope)
    rest = (cos, sin, rows, rotary_start, interleaved, inverse)
    if inplace and run is ops.rope:
        ops.rope_inplace(q, k, *rest)
    elif inplace:
        for x in (q, k):
            if x is not None:
                x.copy_(run(x, None, *rest)[0])
    if inplace:
        return q, k
    q_out, k_out = run(q, k, *rest)
    return q_out, None if k is None else k_out


@token_wise("k", batched=True)
def qk_norm_rotary(
    q: Tensor,
    k: OptionalTensor,
    cos: Tensor,
    sin: Tensor,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "fp32",
    positions: Tensor | int | None = None,
    rotary_start: int = 0,
    interleaved: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, OptionalTensor]:
    """RMSNorm of each head of queries and keys, then rotary embedding, in one pass.

    ``apply_rotary(rms_norm(q, q_weight), rms_norm(k, k_weight), cos, sin)``

    Args:
        q: (B, T, Hq, D), see :func:`apply_rotary`.
        k: (B, T, Hkv, D) of q's dtype, or None.
        cos, sin: see :func:`apply_rotary`.
        q_weight, k_weight: (D,) of q's dtype, shared by the heads, or None for no scale. Under
            autocast they are cast to q's dtype.
        eps: added to the mean square.
        offset: added to the weights: 1.0 for the Gemma form.
        casting: where half inputs are rounded: "fp32" once, at the end; "llama" where the two calls
            with that casting round them (Qwen3), which doubles the error.
        positions, rotary_start, interleaved: see :func:`apply_rotary`.
        backend: see :func:`apply_rotary`.

    Returns:
        q and k normalised and rotated, of their shapes and dtypes; None for a k of None.

    Raises:
        TypeError, ValueError, RuntimeError, NotImplementedError: see :func:`apply_rotary`.

    Note:
        Half inputs are computed in fp32 and rounded as `casting` specifies; gradients ignore the
        rounding. Saves the inputs and one number per head. cos and sin get no gradient. Second and
        forward-mode derivatives go through the eager definition.

    Reference:
        Henry et al., Query-Key Normalization for Transformers, 2020, arXiv:2010.04245; this form:
        Qwen3 Technical Report, 2025, arXiv:2505.09388.

    Example:
        >>> from omniattn.functional import rope_frequencies, rotary_tables
        >>> cos, sin = rotary_tables(rope_frequencies(2), torch.arange(1))
        >>> qk_norm_rotary(torch.tensor([[[[3.0, 4.0]]]]), None, cos, sin, eps=0.0)[0]
        tensor([[[[0.8485, 1.1314]]]])
    """
    op = "qk_norm_rotary"
    k = _checked(op, q, k, cos, sin, positions, rotary_start, interleaved)
    require_number(op, "eps", eps, 0)
    require_number(op, "offset", offset)
    cast_first = casts_first(op, casting)
    q_weight = _head_weight(op, "q_weight", q_weight, q)
    k_weight = _head_weight(op, "k_weight", k_weight, q)
    run = implementation(op, backend, q, norm_rope)
    cos, sin, rows = _tables(op, q, cos, sin, positions, native=run is norm_rope)
    rest = (cos, sin, rows, rotary_start, interleaved, eps, offset, cast_first)
    return run(q, q_weight, *rest), None if k is None else run(k, k_weight, *rest)


def _tables(
    op: str, q: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | int | None, native: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Converts cos, sin and positions for the ops; the definition accepts tables of any dtype."""
    if isinstance(positions, int):
        tokens = slice(positions, positions + q.shape[1])
        cos, sin, positions = cos[..., tokens, :], sin[..., tokens, :], None
    elif positions is not None and positions.dtype != torch.int64:
        positions = positions.to(torch.int64)
    if not native:
        return cos, sin, positions
    require_constant_tables(op, cos, sin)
    dtype = compute_dtype(q)
    if cos.dtype != dtype or sin.dtype != dtype:
        cos, sin = cos.to(dtype), sin.to(dtype)
    return cos, sin, positions


def require_constant_tables(op: str, cos: Tensor, sin: Tensor) -> None:
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise NotImplementedError(
            f'{op}: cos and sin get no gradient; detach them or use backend="reference"'
        )


def _head_weight(op: str, name: str, weight: Tensor | None, q: Tensor) -> Tensor | None:
    if weight is None:
        return None
    weight = cast_like(op, name, weight, q, "q")
    require_shape(op, name, weight, q.shape[3:])
    return weight


def _checked(
    op: str,
    q: Tensor,
    k: OptionalTensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | int | None,
    rotary_start: int,
    interleaved: bool,
) -> OptionalTensor:
    """Checks all arguments; returns k."""
    require_bool(op, "interleaved", interleaved)
    require_float(op, "q", q)
    sizes = q.shape
    if len(sizes) != 4:
        raise ValueError(f"{op}: q must have shape (B, T, H, D), got q.shape={tuple(sizes)}")
    batch, tokens, _, dim = sizes
    if k is not None:
        k = cast_like(op, "k", k, q, "q")
        if k.dim() != 4 or (*k.shape[:2], k.shape[3]) != (batch, tokens, dim):
            raise ValueError(
                f"{op}: k must have shape ({batch}, {tokens}, Hkv, {dim}) as q has, "
                f"got k.shape={tuple(k.shape)}"
            )
    table = table_shape(op, cos, sin, batch, dim)
    require_device(op, "cos", cos, q, "q")
    free = dim - 2 * table[-1]
    require_int(op, "rotary_start", rotary_start)
    if not 0 <= rotary_start <= free:
        raise ValueError(
            f"{op}: rotary_start must be in [0, D - Dr] = [0, {free}], "
            f"got rotary_start={rotary_start}"
        )
    if isinstance(positions, Tensor):
        require_device(op, "positions", positions, q, "q")
    _check_positions(op, positions, batch, tokens, table)
    return k


def table_shape(op: str, cos: Tensor, sin: Tensor, batch: int, dim: int) -> torch.Size:
    """Checks and returns the shape of the tables, since reading a shape takes 0.2 us."""
    require_float(op, "cos", cos)
    cast_like(op, "sin", sin, cos, "cos")
    shape = cos.shape
    if sin.shape != shape:
        raise ValueError(
            f"{op}: cos and sin must have the same shape, got cos.shape={tuple(shape)}, "
            f"sin.shape={tuple(sin.shape)}"
        )
    if len(shape) not in (2, 3) or (len(shape) == 3 and not is_one_of(shape[0], 1, batch)):
        raise ValueError(
            f"{op}: cos must have shape (T, Dr / 2) or ({batch}, T, Dr / 2), "
            f"got cos.shape={tuple(shape)}"
        )
    if 2 * shape[-1] > dim:
        raise ValueError(
            f"{op}: cos must have at most D / 2 columns, got cos.shape={tuple(shape)}, D={dim}"
        )
    return shape


def _check_positions(
    op: str, positions: Tensor | int | None, batch: int, tokens: int, table: torch.Size
) -> None:
    """Checks the table rows of the tokens."""
    rows = table[-2]
    if positions is None:
        if rows != tokens:
            raise ValueError(
                f"{op}: cos must have one row for each token, "
                f"got cos.shape={tuple(table)}, T={tokens}"
            )
    elif isinstance(positions, int):
        if positions < 0 or positions + tokens > rows:
            raise ValueError(
                f"{op}: positions must start at >= 0 and end within the tables, "
                f"got positions={positions}, T={tokens}, cos.shape={tuple(table)}"
            )
    else:
        require_integers(op, "positions", positions)
        if not is_one_of(positions.shape, (tokens,), (1, tokens), (batch, tokens)):
            raise ValueError(
                f"{op}: positions must have shape ({tokens},) or ({batch}, {tokens}), "
                f"got positions.shape={tuple(positions.shape)}"
            )
        if len(table) != 2:
            raise ValueError(
                f"{op}: cos must have shape (P, Dr / 2) where positions choose its rows, "
                f"got cos.shape={tuple(table)}"
            )
