"""Functions of `liger_kernel.transformers.functional` that compute layers.

`in_place` has no effect: inputs keep their values.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as nnf

from omniattn import functional
from omniattn.checks.arguments import (
    require_choice,
    require_int,
    require_integers,
    require_number,
    require_shape,
)
from omniattn.compat._errors import errors_of, require_optional, require_real
from omniattn.reference.precision import widen

#: casting_mode -> casting of `functional.rms_norm`.
_CASTING = {"llama": "llama", "gemma": "fp32", "none": "fp32"}


def liger_rms_norm(
    X: Tensor,
    W: Tensor | None,
    eps: float,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = True,
) -> Tensor:
    """Computes :func:`functional.rms_norm` of X (..., N) with the factor W + offset.

    `casting_mode` is "llama", "gemma" or "none", which is "gemma" here: in Liger, sums of half
    types have their dtype with it, and larger errors.
    """
    op = "liger_rms_norm"
    require_real(op, X=X)
    casting = _casting(op, casting_mode)
    with errors_of(op, x="X", weight="W"):
        return functional.rms_norm(X, W, eps=eps, offset=offset, casting=casting)


def liger_fused_add_rms_norm(
    X: Tensor,
    R: Tensor,
    W: Tensor,
    eps: float,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = True,
) -> tuple[Tensor, Tensor]:
    """Computes h = X + R and its norm, see :func:`liger_rms_norm`; returns (y, h)."""
    op = "liger_fused_add_rms_norm"
    require_real(op, X=X, R=R)
    casting = _casting(op, casting_mode)
    with errors_of(op, x="X", weight="W", residual="R"):
        return functional.rms_norm(X, W, eps=eps, offset=offset, casting=casting, residual=R)


def liger_layer_norm(X: Tensor, W: Tensor, B: Tensor, eps: float) -> Tensor:
    """Computes :func:`functional.layer_norm` of X (..., N)."""
    with errors_of("liger_layer_norm", x="X", weight="W", bias="B"):
        return functional.layer_norm(X, W, B, eps=eps)


def liger_group_norm(
    X: Tensor,
    affine_scaling_weight: Tensor,
    affine_shifting_bias: Tensor,
    num_channels: int,
    num_groups: int,
    eps: float,
) -> Tensor:
    """Computes torch's group norm of X (B, num_channels, ...)."""
    op = "liger_group_norm"
    require_real(op, X=X, affine_scaling_weight=affine_scaling_weight)
    require_real(op, affine_shifting_bias=affine_shifting_bias)
    require_int(op, "num_groups", num_groups, 1)
    if X.ndim < 2 or X.shape[1] != num_channels or num_channels % num_groups:
        raise ValueError(
            f"{op}: X must have shape (B, {num_channels}, ...), and num_groups must divide "
            f"num_channels, got X.shape={tuple(X.shape)}, {num_groups=}"
        )
    return nnf.group_norm(X, num_groups, affine_scaling_weight, affine_shifting_bias, eps)


def liger_swiglu(a: Tensor, b: Tensor) -> Tensor:
    """Computes ``silu(a) b``."""
    with errors_of("liger_swiglu", gate="a", up="b"):
        return functional.swiglu(a, b)


def liger_geglu(a: Tensor, b: Tensor) -> Tensor:
    """Computes ``gelu(a) b`` with the tanh approximation of GELU."""
    with errors_of("liger_geglu", gate="a", up="b"):
        return functional.geglu(a, b, approximate="tanh")


def liger_rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    unsqueeze_dim: int = 1,
) -> tuple[Tensor, Tensor]:
    """Rotates q (B, Hq, T, D) and k (B, Hkv, T, D).

    Args:
        q, k: queries and keys.
        cos: (T, D), (1, T, D) or (B, T, D), whose halves are equal.
        sin: of the shape of cos.
        position_ids: has no effect, as there.
        unsqueeze_dim: has no effect, as there.

    Returns:
        New tensors of the shapes of q and k.
    """
    op = "liger_rope"
    require_real(op, q=q, k=k, cos=cos, sin=sin)
    if q.ndim != 4 or cos.ndim not in (2, 3) or cos.shape != sin.shape:
        raise ValueError(
            f"{op}: q must have shape (B, H, T, D), and cos and sin (T, D), (1, T, D) or (B, T, D),"
            f" got q.shape={tuple(q.shape)}, cos.shape={tuple(cos.shape)}, "
            f"sin.shape={tuple(sin.shape)}"
        )
    half, shared = cos.shape[-1] // 2, cos.ndim == 3 and len(cos) == 1
    tables = [(t[0] if shared else t)[..., :half] for t in (cos, sin)]
    with errors_of(op):
        turned, other = functional.apply_rotary(q.transpose(1, 2), k.transpose(1, 2), *tables)
    return turned.transpose(1, 2), other.transpose(1, 2)


def liger_rotary_pos_emb(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    unsqueeze_dim: int = 1,
) -> tuple[Tensor, Tensor]:
    """Computes :func:`liger_rope`."""
    return liger_rope(q, k, cos, sin, position_ids, unsqueeze_dim)


def liger_softmax(x: Tensor) -> Tensor:
    """Computes the softmax over the last dimension."""
    require_real("liger_softmax", x=x)
    return x.softmax(-1)


def liger_sparsemax(input: Tensor, dim: int = -1) -> Tensor:
    """Computes the projection on the simplex (Martins and Astudillo, 2016, arXiv:1602.02068).

    ``p_i = max(x_i - tau, 0)``, with tau such that the sum over `dim` is 1.
    """
    op = "liger_sparsemax"
    require_real(op, input=input)
    require_int(op, "dim", dim, -input.ndim, input.ndim - 1)
    x = widen(input).movedim(dim, -1)
    ordered = x.sort(-1, descending=True).values
    ranks = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=x.dtype)
    sums = ordered.cumsum(-1) - 1
    count = (ordered * ranks > sums).sum(-1, keepdim=True)
    tau = sums.gather(-1, count - 1) / count
    return (x - tau).relu().to(input.dtype).movedim(-1, dim)


def liger_relu_squared(x: Tensor) -> Tensor:
    """Computes ``max(x, 0)^2``."""
    require_real("liger_relu_squared", x=x)
    return x.relu().square()


def liger_dyt(x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
    """Computes ``tanh(alpha x) gamma + beta``; alpha has one element, gamma and beta are (N,)."""
    op = "liger_dyt"
    require_real(op, x=x, alpha=alpha, gamma=gamma)
    require_optional(op, beta=beta)
    require_shape(op, "gamma", gamma, tuple(x.shape[-1:]))
    if alpha.numel() != 1:
        raise ValueError(f"{op}: alpha must have one element, got alpha.shape={tuple(alpha.shape)}")
    y = (widen(alpha).reshape(()) * widen(x)).tanh() * widen(gamma)
    return (y if beta is None else y + widen(beta)).to(x.dtype)


def liger_poly_norm(
    X: Tensor, W: Tensor, B: Tensor, eps: float = 1e-6, in_place: bool = True
) -> Tensor:
    """Computes ``W_0 norm(X^3) + W_1 norm(X^2) + W_2 norm(X) + B`` with root mean square norms.

    W has shape (3,), and B has one element.
    """
    op = "liger_poly_norm"
    require_real(op, X=X, W=W, B=B)
    require_shape(op, "W", W, (3,))
    require_number(op, "eps", eps, 0.0)
    x, weight = widen(X), widen(W)
    powers = (x.square() * x, x.square(), x)
    parts = (
        w * nnf.rms_norm(p, p.shape[-1:], eps=eps) for w, p in zip(weight, powers, strict=True)
    )
    return (sum(parts, start=widen(B).reshape(()))).to(X.dtype)


def liger_modulated_rms_norm(
    X: Tensor,
    W: Tensor | None,
    scale: Tensor,
    shift: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = True,
) -> Tensor:
    """Computes ``norm(X) (1 + scale) + shift``, see :func:`liger_rms_norm`.

    With N the last size of X, scale has n N elements for n parts of equally many rows of X, such as
    (B, N) and (N,) for X (B, T, N). The shift has as many, or is None.
    """
    op = "liger_modulated_rms_norm"
    require_real(op, X=X, scale=scale)
    require_optional(op, shift=shift)
    casting = _casting(op, casting_mode)
    with errors_of(op, x="X", weight="W"):
        y = functional.rms_norm(X, W, eps=eps, offset=offset, casting=casting)
    width, count = max(1, X.shape[-1]), scale.numel()
    if count % width or X.numel() % count if count else X.numel():
        raise ValueError(
            f"{op}: scale must have n N elements, where n divides the rows of X (.., N), got "
            f"scale.shape={tuple(scale.shape)}, X.shape={tuple(X.shape)}"
        )
    if shift is not None and shift.numel() != count:
        raise ValueError(
            f"{op}: shift must have as many elements as scale, got shift.shape="
            f"{tuple(shift.shape)}, scale.shape={tuple(scale.shape)}"
        )
    if X.numel() == 0:
        return y
    parts = count // width, 1, width
    rows = widen(y).reshape(parts[0], -1, width) * (1 + widen(scale).reshape(parts))
    if shift is not None:
        rows = rows + widen(shift).reshape(parts)
    return rows.view(X.shape).to(X.dtype)


def liger_tvd(
    input: Tensor,
    target: Tensor,
    shift_labels: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
) -> Tensor:
    """Computes the total variation distance ``|p - q| / 2`` of probabilities (N, V).

    Args:
        input: p; it alone gets a gradient.
        target: q.
        shift_labels: (N,) int, compared with `ignore_index` only, or None.
        reduction: "batchmean" divides the sum by the number of kept rows, "mean" by that of their
            elements; "sum", or "none" for (N, V).
        ignore_index: label of rows that do not count.
    """
    op = "liger_tvd"
    require_real(op, input=input, target=target)
    require_choice(op, "reduction", reduction, ("batchmean", "mean", "sum", "none"))
    if input.ndim != 2:
        raise ValueError(f"{op}: input must have shape (N, V), got {tuple(input.shape)}")
    require_shape(op, "target", target, tuple(input.shape))
    distance = 0.5 * (widen(input) - widen(target.detach())).abs()
    rows: Tensor | int = len(input)
    if shift_labels is not None:
        require_integers(op, "shift_labels", shift_labels)
        require_shape(op, "shift_labels", shift_labels, (len(input),))
        kept = shift_labels != ignore_index
        distance, rows = distance.masked_fill(~kept[:, None], 0.0), kept.sum()
    if reduction == "none":
        return distance
    total = distance.sum()
    if reduction == "sum":
        return total
    return total / (rows if reduction == "batchmean" else rows * input.shape[1])


def _casting(op: str, casting_mode: str) -> str:
    require_choice(op, "casting_mode", casting_mode, _CASTING)
    return _CASTING[casting_mode]
