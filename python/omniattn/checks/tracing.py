"""State of torch.jit.trace that decides what a call records."""

from __future__ import annotations

from torch import is_grad_enabled
from torch._C import _is_tracing as is_tracing
from torch.compiler import is_compiling

__all__ = ["may_train"]


def may_train() -> bool:
    """Returns True if a call must be ready for gradients.

    A program of torch.jit.trace serves with and without them: its graph must not depend on the
    mode, which the check of a trace changes.
    """
    return is_grad_enabled() or (not is_compiling() and is_tracing())
