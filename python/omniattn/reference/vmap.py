"""Checks for torch.vmap, for definitions that read tensor values in Python."""

import torch
from torch._C import _functorch


def is_mapped(t: torch.Tensor) -> bool:
    """Returns True if torch.vmap maps over `t`, so that Python cannot read its values."""
    if torch.compiler.is_compiling():
        return False
    while _functorch.is_functorch_wrapped_tensor(t):
        if _functorch.is_batchedtensor(t):
            return True
        t = _functorch.get_unwrapped(t)
    return False


def require_not_mapped(op: str, name: str, t: torch.Tensor) -> None:
    """Requires that vmap does not map over t, whose values determine sizes."""
    if is_mapped(t):
        raise NotImplementedError(
            f"{op}: {name} must not be mapped over by vmap in the eager definition, which forward-"
            f"mode and second derivatives run and which reads its values, got {name}={t!r}"
        )
