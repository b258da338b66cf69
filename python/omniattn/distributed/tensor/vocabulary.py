"""Cross entropy of a head whose rows are divided among ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Shard

from omniattn import functional
from omniattn.checks.arguments import (
    autocast_linear,
    require_choice,
    require_integers,
    require_shape,
    shown,
    widen,
)
from omniattn.distributed.tensor.parts import WHOLE, move


def vocabulary_parallel_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    mesh: DeviceMesh,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    backend: str | None = None,
) -> Tensor:
    """:func:`omniattn.functional.linear_cross_entropy` of a head whose rows are on several ranks.

    ``lse - z_y + z_loss lse^2`` with ``lse = logsumexp over ranks of lse_r``. Each rank computes
    lse_r of its logits in chunks of tokens; the ranks exchange lse_r and z_y, two numbers for each
    token, and in the backward the gradient of x. No rank has logits of other ranks' rows.

    Args:
        x: (..., K), equal on all ranks, of a dtype of linear_cross_entropy.
        weight: (V / N, K), the rows of this rank r of N, from number r V / N on.
        target: (...) of any integer dtype, equal on all ranks: classes in [0, V), or ignore_index.
        mesh: mesh of one dimension with N ranks.
        bias: (V / N,) of this rank, or None.
        ignore_index, softcap, z_loss, reduction, backend: see functional.cross_entropy.

    Returns:
        float32 (float64 for float64), equal on all ranks: a scalar, or (...) without reduction.
        Each rank has the whole gradient of x, and that of its rows of weight and bias.

    Raises:
        ValueError: a shape or an option is invalid, or (CPU) a target is out of range.
        TypeError: an unsupported dtype.

    Reference:
        Shoeybi et al., Megatron-LM, 2019, arXiv:1909.08053.
    """
    op = "vocabulary_parallel_cross_entropy"
    require_choice(op, "reduction", reduction, ("mean", "sum", "none"))
    require_integers(op, "target", target)
    require_shape(op, "target", target, x.shape[:-1])
    rows, target = weight.shape[0], target.long()
    kept = target != ignore_index
    if target.is_cpu and bool((kept & ((target < 0) | (target >= rows * mesh.size()))).any()):
        raise ValueError(
            f"{op}: target must be in [0, {rows * mesh.size()}) or {ignore_index}, "
            f"got target={shown(target)}"
        )
    x, weight, bias = autocast_linear(x, weight, bias)
    x = move(x, mesh, WHOLE, WHOLE, Partial())
    local = target - mesh.get_local_rank() * rows
    inside = kept & (local >= 0) & (local < rows)
    # Each rank takes the log-probability of some row of its own, from which its lse follows; that
    # of a row whose bias is -inf would not do.
    row = torch.where(inside, local, 0 if bias is None else bias.argmax())
    log_prob = functional.linear_log_prob(
        x, weight, row, bias=bias, softcap=softcap, backend=backend
    )
    logit = (widen(x) * widen(weight[row])).sum(-1)
    if bias is not None:
        logit = logit + bias[row]
    if softcap:
        logit = softcap * (logit / softcap).tanh()
    parts = move((logit - log_prob)[None], mesh, Shard(0), WHOLE, WHOLE)
    lse = parts.logsumexp(0)
    loss = lse - move(logit.where(inside, 0.0), mesh, Partial(), WHOLE, WHOLE)
    if z_loss:
        loss = loss + z_loss * lse.square()
    loss = loss.where(kept, 0.0)
    if reduction == "none":
        return loss
    return loss.sum() / kept.sum().clamp(min=1) if reduction == "mean" else loss.sum()
