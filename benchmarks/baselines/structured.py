"""Baselines of structured state-space models: (H, N, L) complex terms in eager torch."""

from __future__ import annotations

import torch
from torch import Tensor


def _complex(pairs: Tensor) -> Tensor:
    return torch.view_as_complex(pairs.contiguous())


def vandermonde(c: Tensor, x: Tensor, *, length: int) -> Tensor:
    """Computes the sum as models/s4/s4d.py of state-spaces/s4."""
    powers = (_complex(x)[..., None] * torch.arange(length, device=x.device)).exp()
    return 2 * torch.einsum("hn,hnl->hl", _complex(c), powers).real


def cauchy(v: Tensor, z: Tensor, w: Tensor) -> Tensor:
    """Computes the sum as the eager form of state-spaces/s4, over both conjugates."""
    of, poles = (torch.cat((t, t.conj()), -1) for t in (_complex(v), _complex(w)))
    return torch.view_as_real((of[..., None] / (_complex(z) - poles[..., None])).sum(-2))


BASELINES = {"vandermonde": {"aten": vandermonde}, "cauchy": {"aten": cauchy}}
