"""Rotary position embedding and its tables."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from omniattn import reference
from omniattn.functional._checks import FLOATS, require_float, require_like, use_reference
from omniattn.ops import rope as ops
from omniattn.reference.rope import LinearScaling, Llama3Scaling, RopeScaling

__all__ = ["apply_rotary", "rope_frequencies", "rotary_tables"]


def rope_frequencies(
    rotary_dim: int,
    *,
    base: float = 10000.0,
    scaling: RopeScaling | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """The angle per position of every pair.

    ``theta_i = base^(-2 i / Dr)`` for ``i = 0 .. Dr / 2 - 1``, then scaled.

    Args:
        rotary_dim: Dr, the number of dimensions that turn; even.
        base: > 0; a larger one gives longer wavelengths.
        scaling: None, `LinearScaling` or `Llama3Scaling`, for contexts longer than trained on.
        device: of the result.

    Returns:
        theta (Dr / 2,), float64.

    Raises:
        ValueError: an odd or negative rotary_dim, a base or a scaling out of range.
        TypeError: a scaling of another type.

    Reference:
        Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021,
        arXiv:2104.09864.

    Example:
        >>> rope_frequencies(4)
        tensor([1.0000, 0.0100], dtype=torch.float64)
    """
    op = "rope_frequencies"
    if rotary_dim < 0 or rotary_dim % 2 != 0:
        raise ValueError(f"{op}: rotary_dim must be even and >= 0, got rotary_dim={rotary_dim}")
    if not 0.0 < base < math.inf:
        raise ValueError(f"{op}: base must be finite and > 0, got base={base}")
    if scaling is not None:
        if not isinstance(scaling, (LinearScaling, Llama3Scaling)):
            raise TypeError(
                f"{op}: scaling must be None, a LinearScaling or a Llama3Scaling, "
                f"got scaling={scaling!r}"
            )
        if not 0.0 < scaling.factor < math.inf:
            raise ValueError(f"{op}: scaling.factor must be finite and > 0, got {scaling!r}")
        if isinstance(scaling, Llama3Scaling) and not (
            0.0 < scaling.low_freq_factor < scaling.high_freq_factor
        ):
            raise ValueError(
                f"{op}: scaling must have 0 < low_freq_factor < high_freq_factor, got {scaling!r}"
            )
    return reference.rope_frequencies(rotary_dim, base=base, scaling=scaling, device=device)


def rotary_tables(
    theta: Tensor, positions: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles ``positions * theta``.

    Args:
        theta: (Dr / 2,), as :func:`rope_frequencies` gives it.
        positions: (...,), integer; on theta's device.
        dtype: of the tables. float32 (float64 for float64 q) is what :func:`apply_rotary` computes
            with; it converts others at each call.

    Returns:
        cos, sin (..., Dr / 2) of `dtype`; the angles are taken in float64.

    Raises:
        TypeError: a dtype that does not fit.
        ValueError: theta is not a vector.

    Example:
        >>> cos, sin = rotary_tables(rope_frequencies(2), torch.arange(2))
        >>> sin
        tensor([[0.0000],
                [0.8415]])
    """
    op = "rotary_tables"
    require_float(op, "theta", theta)
    if theta.dim() != 1:
        raise ValueError(f"{op}: theta must have 1 dimension, got theta.shape={tuple(theta.shape)}")
    _require_integers(op, "positions", positions)
    if dtype not in FLOATS:
        raise TypeError(f"{op}: dtype must be a floating-point dtype, got dtype={dtype}")
    return reference.rotary_tables(theta, positions, dtype)


def apply_rotary(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor | int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Rotary position embedding of queries and keys.

    Each pair of the first Dr dimensions turns by its token's angle: ``(x, y) -> (x cos - y sin, x
    sin + y cos)``; the dimensions from Dr on pass through.

    Args:
        q: (B, T, Hq, D), float64, float32, bfloat16 or float16. Any strides; copied only where the
            last stride is not 1.
        k: (B, T, Hkv, D) of q's dtype, or None.
        cos: (T, Dr / 2) or (B, T, Dr / 2), one row for each token; with `positions` (P, Dr / 2).
            Any floating-point dtype, see :func:`rotary_tables`. Dr may be less than D.
        sin: of cos's shape, dtype and device.
        positions: which row of the tables a token takes: int64 (T,) or (B, T); an int p for rows p,
            p + 1, ...; None for row t.
        interleaved: pairs are (2i, 2i + 1) (GPT-J, Meta's Llama) instead of (i, i + Dr / 2)
            (GPT-NeoX, Hugging Face's Llama).
        inplace: write the results over q and k, which need unit stride in D.
        backend: None for the native kernel of q's device, "cpu" or "cuda" to insist on it,
            "reference" for the eager definition.

    Returns:
        q and k turned, of their shapes and dtypes: new tensors, or q and k themselves. None for a
        k of None.

    Raises:
        TypeError: a dtype that is unsupported or does not fit.
        ValueError: a shape, device, stride or offset that does not fit.
        RuntimeError: a position outside the tables.
        NotImplementedError: no native kernel for the device; tables that need a gradient.

    Note:
        Half inputs turn in fp32 and are rounded once. The gradient is the rotation by the negative
        angle, differentiable any number of times; cos and sin get none.

    Reference:
        Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021,
        arXiv:2104.09864.

    Example:
        >>> cos, sin = rotary_tables(rope_frequencies(2), torch.arange(2))
        >>> q, _ = apply_rotary(torch.ones(1, 2, 1, 2), None, cos, sin)
        >>> q.flatten()
        tensor([ 1.0000,  1.0000, -0.3012,  1.3818])
    """
    op = "apply_rotary"
    _check(op, q, k, cos, sin, positions)
    if use_reference(op, backend, q):
        return reference.apply_rotary(
            q, k, cos, sin, positions=positions, interleaved=interleaved, inplace=inplace
        )
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise NotImplementedError(
            f'{op}: cos and sin get no gradient; detach them or use backend="reference"'
        )
    if isinstance(positions, int):
        tokens = slice(positions, positions + q.shape[1])
        cos, sin, positions = cos[..., tokens, :], sin[..., tokens, :], None
    table = torch.float64 if q.dtype == torch.float64 else torch.float32
    if cos.dtype != table:
        cos, sin = cos.to(table), sin.to(table)
    if inplace:
        ops.rope_inplace(q, k, cos, sin, positions, interleaved)
        return q, k
    q_out, k_out = ops.rope(q, k, cos, sin, positions, interleaved, False)
    return q_out, None if k is None else k_out


def _require_integers(op: str, name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{op}: {name} must be a torch.Tensor, got {name}={x!r}")
    if x.dtype.is_floating_point or x.dtype.is_complex or x.dtype == torch.bool:
        raise TypeError(f"{op}: {name} must be integers, got {name}.dtype={x.dtype}")


def _check(
    op: str,
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | int | None,
) -> None:
    require_float(op, "q", q)
    if q.dim() != 4:
        raise ValueError(f"{op}: q must have shape (B, T, H, D), got q.shape={tuple(q.shape)}")
    batch, tokens, _, dim = q.shape
    if k is not None:
        require_like(op, "k", k, q, "q")
        if k.dim() != 4 or (*k.shape[:2], k.shape[3]) != (batch, tokens, dim):
            raise ValueError(
                f"{op}: k must have shape ({batch}, {tokens}, Hkv, {dim}) as q has, "
                f"got k.shape={tuple(k.shape)}"
            )
    require_float(op, "cos", cos)
    require_like(op, "sin", sin, cos, "cos")
    if cos.device != q.device:
        raise ValueError(
            f"{op}: cos must be on the device of q, got cos.device={cos.device}, "
            f"q.device={q.device}"
        )
    shape = cos.shape
    if sin.shape != shape:
        raise ValueError(
            f"{op}: cos and sin must have the same shape, got cos.shape={tuple(shape)}, "
            f"sin.shape={tuple(sin.shape)}"
        )
    if cos.dim() not in (2, 3) or (cos.dim() == 3 and shape[0] not in (1, batch)):
        raise ValueError(
            f"{op}: cos must have shape (T, Dr / 2) or ({batch}, T, Dr / 2), "
            f"got cos.shape={tuple(shape)}"
        )
    rows, half = shape[-2], shape[-1]
    if 2 * half > dim:
        raise ValueError(
            f"{op}: cos must have at most D / 2 columns, got cos.shape={tuple(shape)}, D={dim}"
        )
    if positions is None:
        if rows != tokens:
            raise ValueError(
                f"{op}: cos must have one row for each token, "
                f"got cos.shape={tuple(shape)}, T={tokens}"
            )
    elif isinstance(positions, int):
        if positions < 0 or positions + tokens > rows:
            raise ValueError(
                f"{op}: positions must start at >= 0 and end within the tables, "
                f"got positions={positions}, T={tokens}, cos.shape={tuple(shape)}"
            )
    else:
        _check_positions(op, positions, q, cos)


def _check_positions(op: str, positions: Tensor, q: Tensor, cos: Tensor) -> None:
    _require_integers(op, "positions", positions)
    if positions.dtype != torch.int64:
        raise TypeError(f"{op}: positions must be int64, got positions.dtype={positions.dtype}")
    if positions.device != q.device:
        raise ValueError(
            f"{op}: positions must be on the device of q, got "
            f"positions.device={positions.device}, q.device={q.device}"
        )
    batch, tokens = q.shape[:2]
    if positions.shape not in ((tokens,), (1, tokens), (batch, tokens)):
        raise ValueError(
            f"{op}: positions must have shape ({tokens},) or ({batch}, {tokens}), "
            f"got positions.shape={tuple(positions.shape)}"
        )
    if cos.dim() != 2:
        raise ValueError(
            f"{op}: cos must have shape (P, Dr / 2) where positions choose its rows, "
            f"got cos.shape={tuple(cos.shape)}"
        )
