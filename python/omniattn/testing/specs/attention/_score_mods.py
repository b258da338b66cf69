"""score_mod functions for the OpSpecs of attention, with flex_attention's signature."""

from __future__ import annotations

import torch
from torch import Tensor


def softcap(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return 20 * torch.tanh(s / 20)


def alibi(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return s - (q - k).abs() * torch.exp2(-(h + 1).to(s.dtype))


def t5_bucket(distance: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns T5's bidirectional bucket of k - q: 32 buckets up to a distance of 128."""
    far = distance.abs()
    share = torch.log(torch.maximum(far, far * 0 + 1).to(dtype) / 8) / 2.772588722239781  # ln 16
    large = torch.clamp((8 + 8 * share).to(torch.int64), max=15)
    return torch.where(distance > 0, 16, 0) + torch.where(far < 8, far, large)


def t5(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Adds a term that depends on T5's bucket, as a table does."""
    return s + torch.sin((t5_bucket(k - q, s.dtype) + 3 * h).to(s.dtype))


def gate(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Reduces the scores of distant keys."""
    return s * torch.sigmoid(1 - (q - k).abs().to(s.dtype) / 16)


def tiles(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Depends on the positions in ways that no kernel table can represent."""
    turn = torch.cos((q * k % 7 + b).to(s.dtype))
    return torch.where((q // 5 - k // 3) % 4 == h % 4, torch.minimum(s, turn), s * turn)
