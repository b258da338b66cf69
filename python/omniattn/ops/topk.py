"""top_k: indices of the largest scores of each row."""

from __future__ import annotations

import torch
from torch import Tensor

from omniattn.ops import _library
from omniattn.ops._autograd import loop_over_vmap

__all__ = ["top_k"]

#: (scores, k, mask) -> index (..., k) int64; no gradient
top_k = torch.ops.omniattn.top_k.default


@_library.register_fake("top_k")
def _fake(scores: Tensor, k: int, mask: Tensor | None) -> Tensor:
    return scores.new_empty((*scores.shape[:-1], k), dtype=torch.int64)


loop_over_vmap("top_k")
