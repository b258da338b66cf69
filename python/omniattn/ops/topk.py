"""top_k: indices of the largest scores of each row."""

from __future__ import annotations

import torch
from torch import Tensor

from omniattn import reference
from omniattn.ops.dispatch.autograd import Op

__all__ = ["top_k"]


def _index(scores: Tensor, k: int) -> Tensor:
    return scores.new_empty((*scores.shape[:-1], k), dtype=torch.int64)


#: (scores, k, mask) -> index (..., k) int64; no gradient
top_k = Op(
    "top_k",
    fakes={"y": _index},
    formula=lambda scores, k, mask: reference.top_k(scores, k, mask=mask)[1],
)
