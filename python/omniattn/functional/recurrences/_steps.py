"""Single-token steps of Mamba's recurrences in eager inference, with states updated in place.

In decoding, argument checks and copies of states cost more than the token itself. Layers, whose
arguments are known to be valid, call the ops directly; the ops still check sizes and indices that
memory accesses depend on.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from omniattn.checks.arguments import is_traced
from omniattn.ops.conv import causal_conv1d_inplace
from omniattn.ops.dispatch import library as _library
from omniattn.ops.scan import selective_scan_inplace, ssd_inplace
from omniattn.reference.precision import compute_dtype

__all__ = [
    "causal_conv1d_inplace",
    "compute_dtype",
    "decay_rates",
    "in_place",
    "selective_scan_inplace",
    "ssd_inplace",
]

#: The emulated kernels of CUDA, which tests run on the CPU, have no single steps.
_PRESENT = _library.has_kernel("ssd_", "cpu")
_PLAIN = frozenset((Tensor, torch.nn.Parameter))


def in_place(*tensors: Tensor) -> bool:
    """True if an eager call without gradients may update states in place.

    States and inputs must be plain CPU tensors, not subclasses such as DTensor."""
    if torch.is_grad_enabled() or not _PRESENT or forward_ad._current_level >= 0:
        return False
    for t in tensors:
        if type(t) not in _PLAIN or not t.is_cpu:
            return False
    return not is_traced() and not torch.is_autocast_enabled("cpu")


def decay_rates(A_log: Tensor) -> Tensor:
    """Computes A from its logarithm, without gradient."""
    return -A_log.detach().exp()
