"""Linear layer, by this package's kernel or torch's, whichever was measured to be faster."""

from __future__ import annotations

import torch
from torch import Tensor

from omniattn import config
from omniattn.checks.arguments import (
    autocast_linear,
    has_own_ops,
    implementation,
    require_float,
    require_like,
    require_shape,
    require_strided,
)
from omniattn.checks.jagged import token_wise
from omniattn.ops import gemm as ops
from omniattn.ops.dispatch.calls import compiled
from omniattn.ops.dispatch.gemm_choice import CHOICE, native_is_faster
from omniattn.ops.dispatch.plain import is_eager, is_plain
from omniattn.ops.dispatch.precision import split_bf16_of

__all__ = ["linear"]


@token_wise()
def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: str | None = None
) -> Tensor:
    """Linear layer.

    ``y = x weight^T + bias``

    Args:
        x: (..., K), float64, float32, bfloat16 or float16, any strides; or a jagged nested tensor
            (B, j, ..., K), and then so is y. Under autocast all tensors are cast to its dtype.
        weight: (N, K) of x's dtype; or a subclass of torch.Tensor that wraps other tensors, such as
            a quantised weight, which goes to torch's linear and so to the subclass's own.
        bias: (N,) of x's dtype, or None.
        backend: None for the kernel measured to be faster on this CPU family, this package's or
            torch's (as `omniattn info` prints); "cpu" for this
            package's, "cuda" for torch's cuBLAS as an op of this package; "reference" for the eager
            definition.

    Returns:
        y (..., N) of x's dtype.

    Raises:
        TypeError: a dtype is unsupported or differs from x's.
        ValueError: a shape, device or value is invalid.
        NotImplementedError: no native kernel for the device.

    Note:
        The native kernel multiplies and adds in fp32 (fp64 for fp64) and rounds once; its results
        and gradients do not depend on the number of threads. With AMX, fp32 products of more than
        four rows use split bf16 if `torch.set_float32_matmul_precision("high")` or
        `omniattn.config.FP32_PIECES` allows it (docs/precision.md). On CUDA torch's settings
        apply (`torch.backends.cuda.matmul`).

    Reference:
        Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication, 2008.

    Example:
        >>> linear(torch.tensor([1.0, 2.0]), torch.tensor([[3.0, 5.0], [0.0, 1.0]]))
        tensor([13.,  2.])
    """
    if backend is None and is_eager():
        y = _attempt(x, weight, bias)
        if y is not None:
            return y
    if backend is None and isinstance(weight, Tensor) and has_own_ops(weight):
        return torch.nn.functional.linear(x, weight, bias)
    x, weight, bias = autocast_linear(x, weight, bias)
    require_float("linear", "x", x)
    require_like("linear", "weight", weight, x)
    shape, weight_shape = x.shape, weight.shape
    if not shape or len(weight_shape) != 2 or weight_shape[1] != shape[-1]:
        raise ValueError(
            "linear: x must have shape (..., K) and weight (N, K), "
            f"got x.shape={tuple(shape)}, weight.shape={tuple(weight_shape)}"
        )
    if bias is not None:
        require_like("linear", "bias", bias, x)
        require_strided("linear", "bias", bias)
        require_shape("linear", "bias", bias, weight_shape[:1])
    run = implementation("linear", backend, x, ops.linear)
    split_bf16 = split_bf16_of(x)
    torchs = backend is None and not native_is_faster(x, weight, split_bf16)
    if torchs and x.layout == weight.layout == torch.strided:  # the native op rejects others
        return torch.nn.functional.linear(x, weight, bias)
    result: Tensor = run(x, weight, bias, split_bf16)
    return result


def _attempt(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """Computes y of plain tensors by the faster kernel, or returns None if it refuses one of them:
    the checks of `linear` then name it."""
    if compiled is not None:
        settings = (config.FP32_PIECES, config.BATCH_INVARIANT)
        y: Tensor | None = compiled.linear(x, weight, bias, CHOICE, *settings)
        if y is not None:
            return y
    if weight is None or not is_plain(x, weight, bias) or x.dtype not in CHOICE or x.ndim == 0:
        return None
    split_bf16 = split_bf16_of(x)
    if native_is_faster(x, weight, split_bf16):
        y = ops.linear.attempt(x, weight, bias, split_bf16)
        return y
    return _torch_linear(x, weight, bias)


def _torch_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """Calls torch's linear, or returns None if it refuses an argument or would broadcast one."""
    if weight.ndim != 2 or not (bias is None or bias.shape == weight.shape[:1]):
        return None
    if not x.layout == weight.layout == torch.strided:
        return None
    try:
        return torch.nn.functional.linear(x, weight, bias)
    except RuntimeError:
        return None
