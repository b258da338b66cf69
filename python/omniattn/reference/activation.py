"""GLU family (Shazeer 2020, arXiv 2002.05202): act(gate) * up.

From two tensors (..., F), or from one packed (..., 2F) whose first F columns are the gate.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from omniattn.reference.precision import widen


def _glu(
    act: Callable[[torch.Tensor], torch.Tensor], gate: torch.Tensor, up: torch.Tensor | None
) -> torch.Tensor:
    if up is None:
        gate, up = gate.chunk(2, -1)
    return (act(widen(gate)) * widen(up)).to(gate.dtype)


def swiglu(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) * up."""
    return _glu(F.silu, gate, up)


def geglu(
    gate: torch.Tensor, up: torch.Tensor | None = None, *, approximate: str = "none"
) -> torch.Tensor:
    """gelu(gate) * up, with erf or with `approximate="tanh"` (as torch.nn.functional.gelu)."""
    return _glu(lambda g: F.gelu(g, approximate=approximate), gate, up)


def reglu(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    """relu(gate) * up."""
    return _glu(F.relu, gate, up)


def bilinear(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    """gate * up."""
    return _glu(lambda g: g, gate, up)
