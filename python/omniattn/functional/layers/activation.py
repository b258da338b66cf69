"""The GLU family: gated products of two halves, from two tensors or one packed tensor."""

from __future__ import annotations

from torch import Tensor

from omniattn import reference
from omniattn.checks.arguments import (
    cast_like,
    implementation,
    require_choice,
    require_float,
    require_number,
    require_shape,
)
from omniattn.checks.jagged import token_wise
from omniattn.ops import activation as ops
from omniattn.ops.dispatch.plain import is_plain

__all__ = ["bilinear", "clamped_swiglu", "geglu", "glu", "reglu", "swiglu"]


@token_wise("up")
def swiglu(gate: Tensor, up: Tensor | None = None, *, backend: str | None = None) -> Tensor:
    """Gated linear unit with SiLU.

    ``y = gate * sigmoid(gate) * up``

    Args:
        gate: (..., F), float64, float32, bfloat16 or float16; or packed (..., 2F), whose first F
            columns are the gate and whose last F are up; or a jagged nested tensor (B, j, F) or
            (B, j, 2F). Any strides; copied only where the leading dimensions cannot be walked with
            one stride or the last stride is not 1.
        up: of gate's shape and dtype, or None where gate is packed. Under autocast it is cast to
            gate's dtype.
        backend: None for the native kernel of gate's device, "cpu" or "cuda" to insist on it,
            "reference" for the eager definition.

    Returns:
        (..., F) of gate's dtype.

    Raises:
        TypeError: a dtype is unsupported or differs from gate's.
        ValueError: a shape or device that does not fit; an odd last size of a packed gate.
        NotImplementedError: no native kernel for the device.

    Note:
        Half inputs are computed in fp32 and rounded once. The backward recomputes the activation,
        so that only the inputs are kept; a packed gate gets one packed gradient. Second and
        forward-mode derivatives go through the eager definition.

    Reference:
        Shazeer, GLU Variants Improve Transformer, 2020, arXiv:2002.05202.

    Example:
        >>> swiglu(torch.tensor([0.0, 1.0]), torch.tensor([5.0, 2.0]))
        tensor([0.0000, 1.4621])
    """
    return _gated("swiglu", backend, gate, up, "silu")


@token_wise("up")
def geglu(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    approximate: str = "none",
    backend: str | None = None,
) -> Tensor:
    """Gated linear unit with GELU.

    ``y = gate * Phi(gate) * up`` with the normal distribution function ``Phi(g) = (1 + erf(g /
    sqrt(2))) / 2`` or its approximation ``(1 + tanh(sqrt(2 / pi) (g + 0.044715 g^3))) / 2``.

    Args:
        gate: see :func:`swiglu`.
        up: see :func:`swiglu`.
        approximate: "none" for erf, "tanh" for the approximation (Gemma, T5 v1.1).
        backend: see :func:`swiglu`.

    Returns:
        (..., F) of gate's dtype.

    Raises:
        ValueError: an `approximate` that is neither; otherwise see :func:`swiglu`.
        TypeError, NotImplementedError: see :func:`swiglu`.

    Note:
        Precision and gradients as for :func:`swiglu`.

    Reference:
        Shazeer, GLU Variants Improve Transformer, 2020, arXiv:2002.05202.

    Example:
        >>> geglu(torch.tensor([0.0, 1.0, 5.0, 2.0]))
        tensor([0.0000, 1.6827])
    """
    require_choice("geglu", "approximate", approximate, ("none", "tanh"))
    return _gated("geglu", backend, gate, up, "gelu" if approximate == "none" else "gelu_tanh")


@token_wise("up")
def reglu(gate: Tensor, up: Tensor | None = None, *, backend: str | None = None) -> Tensor:
    """Gated linear unit with ReLU.

    ``y = max(gate, 0) * up``; the derivative at 0 is 0.

    Args:
        gate: see :func:`swiglu`.
        up: see :func:`swiglu`.
        backend: see :func:`swiglu`.

    Returns:
        (..., F) of gate's dtype.

    Raises:
        TypeError, ValueError, NotImplementedError: see :func:`swiglu`.

    Note:
        Precision and gradients as for :func:`swiglu`.

    Reference:
        Shazeer, GLU Variants Improve Transformer, 2020, arXiv:2002.05202.

    Example:
        >>> reglu(torch.tensor([-1.0, 3.0]), torch.tensor([5.0, 2.0]))
        tensor([0., 6.])
    """
    return _gated("reglu", backend, gate, up, "relu")


@token_wise("up")
def bilinear(gate: Tensor, up: Tensor | None = None, *, backend: str | None = None) -> Tensor:
    """Gated linear unit without an activation.

    ``y = gate * up``

    Args:
        gate: see :func:`swiglu`.
        up: see :func:`swiglu`.
        backend: see :func:`swiglu`.

    Returns:
        (..., F) of gate's dtype.

    Raises:
        TypeError, ValueError, NotImplementedError: see :func:`swiglu`.

    Note:
        Precision and gradients as for :func:`swiglu`.

    Reference:
        Shazeer, GLU Variants Improve Transformer, 2020, arXiv:2002.05202.

    Example:
        >>> bilinear(torch.tensor([2.0, 3.0, 5.0, 7.0]))
        tensor([10., 21.])
    """
    return _gated("bilinear", backend, gate, up, "identity")


@token_wise("up")
def glu(gate: Tensor, up: Tensor | None = None, *, backend: str | None = None) -> Tensor:
    """Gated linear unit.

    ``y = sigmoid(gate) * up``. In torch.nn.functional.glu the gate is the *second* packed half.

    Args:
        gate: see :func:`swiglu`.
        up: see :func:`swiglu`.
        backend: see :func:`swiglu`.

    Returns:
        (..., F) of gate's dtype.

    Raises:
        TypeError, ValueError, NotImplementedError: see :func:`swiglu`.

    Note:
        Precision and gradients as for :func:`swiglu`.

    Reference:
        Dauphin et al., Language Modeling with Gated Convolutional Networks, 2016, arXiv:1612.08083.

    Example:
        >>> glu(torch.tensor([0.0, 1.0]), torch.tensor([5.0, 2.0]))
        tensor([2.5000, 1.4621])
    """
    return _gated("glu", backend, gate, up, "sigmoid")


@token_wise("up")
def clamped_swiglu(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    alpha: float = 1.702,
    limit: float = 7.0,
    backend: str | None = None,
) -> Tensor:
    """Gated linear unit of gpt-oss, with clamped inputs.

    ``y = g * sigmoid(alpha * g) * (u + 1)`` with ``g = min(gate, limit)`` and u = up within
    [-limit, limit]; clamped elements have a derivative of 0.

    Args:
        gate: see :func:`swiglu`. gpt-oss's weights interleave the columns of gate and up: pass
            ``x[..., ::2], x[..., 1::2]``.
        up: see :func:`swiglu`.
        alpha, limit: positive numbers.
        backend: see :func:`swiglu`.

    Returns:
        (..., F) of gate's dtype.

    Raises:
        TypeError, ValueError, NotImplementedError: see :func:`swiglu`.

    Note:
        Precision and gradients as for :func:`swiglu`.

    Reference:
        OpenAI, gpt-oss-120b and gpt-oss-20b Model Card, 2025, arXiv:2508.10925.

    Example:
        >>> clamped_swiglu(torch.tensor([1.0, 9.0]), torch.tensor([0.0, 9.0]))
        tensor([ 0.8458, 55.9996])
    """
    for name, value in (("alpha", alpha), ("limit", limit)):
        require_number("clamped_swiglu", name, value, above=0)
    return _gated("clamped_swiglu", backend, gate, up, ops.CLAMPED, alpha, limit)


def _gated(
    op: str,
    backend: str | None,
    gate: Tensor,
    up: Tensor | None,
    activation: str,
    alpha: float = 0.0,
    limit: float = 0.0,
) -> Tensor:
    act, clamp = ops.encode(activation, alpha, limit)
    if backend is None and is_plain(gate, up):
        found: Tensor | None = ops.glu.attempt(gate, up, act, clamp)
        if found is not None:
            return found
    require_float(op, "gate", gate)
    shape = gate.shape
    if not shape:
        raise ValueError(f"{op}: gate must have at least 1 dimension, got gate.shape=()")
    if up is not None:
        up = cast_like(op, "up", up, gate, "gate")
        require_shape(op, "up", up, shape)
    elif shape[-1] % 2 != 0:
        raise ValueError(
            f"{op}: packed gate must have an even last size, got gate.shape={tuple(shape)}"
        )
    run = implementation(op, backend, gate, ops.glu)
    y: Tensor = run(gate, up, act, clamp)
    return y


@token_wise("up")
def activated(
    gate: Tensor,
    up: Tensor | None,
    *,
    activation: str,
    alpha: float = 0.0,
    limit: float = 0.0,
    backend: str | None = None,
) -> Tensor:
    """Computes the hidden layer of `mlp` and `glu_mlp`: act(gate) * up, or act(gate) without up."""
    if up is None:
        return reference.activate(gate, activation)
    return _gated("glu_mlp", backend, gate, up, activation, alpha, limit)
