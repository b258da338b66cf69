"""Stable top-k."""

import torch


def top_k(
    scores: torch.Tensor,
    k: int,
    *,
    mask: torch.Tensor | None = None,
    sorted_by_index: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns values, index (..., k) in descending order; ties go to the smaller index.

    NaN lies below -inf. Elements with mask False are never chosen: if fewer than k are left, the
    rest has index -1 and value -inf. `sorted_by_index` orders both by index, -1 last.
    """
    if mask is None:
        mask = torch.ones_like(scores, dtype=torch.bool)
    kind = torch.where(mask, scores.isnan().int(), 2)  # numbers, NaN, masked
    by_score = scores.nan_to_num(-torch.inf, torch.inf, -torch.inf)
    order = by_score.detach().sort(dim=-1, descending=True, stable=True).indices
    order = order.gather(-1, kind.gather(-1, order).sort(dim=-1, stable=True).indices)[..., :k]
    missing = kind.gather(-1, order) == 2
    values = scores.gather(-1, order).masked_fill(missing, -torch.inf)
    if sorted_by_index:
        place = order.masked_fill(missing, scores.shape[-1]).argsort(-1)
        values, order, missing = (t.gather(-1, place) for t in (values, order, missing))
    return values, order.masked_fill(missing, -1)
