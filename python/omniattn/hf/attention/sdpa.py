"""Replaces torch's scaled_dot_product_attention in layers that call it (Falcon, SAM)."""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from omniattn import functional
from omniattn.hf.common.probe import Finding

__all__ = ["find_sdpa", "sdpa_forward"]

_SDPA = nn.functional.scaled_dot_product_attention
_SETTING = "_attn_implementation"


class _Ours(TorchFunctionMode):
    """Replaces torch's function by this package's while active; leaves all others alone."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        called = functional.scaled_dot_product_attention if func is _SDPA else func
        return called(*args, **(kwargs or {}))


def sdpa_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs the layer's own forward with our attention."""
    with _Ours():
        return self.omniattn_original.forward(self, *args, **kwargs)


def find_sdpa(module: nn.Module) -> Finding:
    """Returns :func:`sdpa_forward` for a layer whose own forward calls torch's function."""
    kind: Any = type(module)
    forward = inspect.unwrap(kind.forward)
    if "Attention" not in kind.__name__ or not isinstance(forward, FunctionType):
        return None
    config = getattr(module, "config", None)
    calls = _SDPA.__name__ in forward.__code__.co_names
    return sdpa_forward if calls and getattr(config, _SETTING, "sdpa") == "sdpa" else None
