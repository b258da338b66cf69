"""GLU family (Shazeer 2020, arXiv 2002.05202): act(gate) * up.

Gate and up are two tensors (..., F), or one packed (..., 2F) whose first F columns are the gate.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from omniattn.reference.limits import clamp
from omniattn.reference.precision import widen

#: Activations by name, on fp32 or fp64, in the order of csrc/semantics/activation_rules.h.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity": lambda x: x,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu_squared": lambda x: F.relu(x).square(),
}


def log_sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Computes ln(1 / (1 + e^-x)).

    The backward of torch's logsigmoid branches on numel(), which compiled graphs of unpadded tokens
    do not know.
    """
    return -F.softplus(-x, threshold=40)  # beyond 40, softplus(-x) equals -x in fp64


def activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """Computes act(x), with act from `ACTIVATIONS`."""
    return ACTIVATIONS[activation](widen(x)).to(x.dtype)


def gated_activation(gate: torch.Tensor, up: torch.Tensor | None, activation: str) -> torch.Tensor:
    """Computes act(gate) * up, with act from `ACTIVATIONS`."""
    if up is None:
        gate, up = gate.chunk(2, -1)
    return (ACTIVATIONS[activation](widen(gate)) * widen(up)).to(gate.dtype)


def clamped_swiglu(
    gate: torch.Tensor,
    up: torch.Tensor | None = None,
    *,
    alpha: float = 1.702,
    limit: float = 7.0,
) -> torch.Tensor:
    """g sigmoid(alpha g) (u + 1), g = min(gate, limit), u = clamp(up, -limit, limit) (gpt-oss)."""
    if up is None:
        gate, up = gate.chunk(2, -1)
    g, u = clamp(widen(gate), most=limit), clamp(widen(up), -limit, limit)
    return (g * torch.sigmoid(alpha * g) * (u + 1)).to(gate.dtype)


def swiglu(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) * up."""
    return gated_activation(gate, up, "silu")


def geglu(
    gate: torch.Tensor, up: torch.Tensor | None = None, *, approximate: str = "none"
) -> torch.Tensor:
    """gelu(gate) * up; `approximate` as in torch.nn.functional.gelu: "none" (erf) or "tanh"."""
    return gated_activation(gate, up, "gelu_tanh" if approximate == "tanh" else "gelu")


def reglu(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    """relu(gate) * up."""
    return gated_activation(gate, up, "relu")


def bilinear(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    """gate * up."""
    return gated_activation(gate, up, "identity")


def glu(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    """sigmoid(gate) * up."""
    return gated_activation(gate, up, "sigmoid")
