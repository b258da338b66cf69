"""Hard attention: selects one key instead of averaging."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from omniattn import reference
from omniattn.checks.arguments import require_bool, require_choice, require_number, use_reference
from omniattn.encoding.options import Options
from omniattn.functional.attention._common import autocast, check_shapes
from omniattn.functional.attention._options import checked_codes
from omniattn.functional.attention.attention import attention
from omniattn.functional.masks import Mask
from omniattn.functional.masks.base import require_bool_mask
from omniattn.ops import attention as ops
from omniattn.ops.dispatch.plain import may_need_gradient
from omniattn.reference.attention.attention import default_scale
from omniattn.reference.precision import widen

__all__ = ["select_attention"]


def select_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    energy: Literal["l2", "dot"] = "l2",
    theta: float = math.inf,
    tau: float = 1.0,
    ste: bool = True,
    scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    mask: Tensor | Mask | None = None,
    backend: str | None = None,
) -> Tensor:
    """Returns the value of the key with the lowest energy, without normalisation.

    ``O_i = v_j*`` with ``j* = argmin_j E_ij`` over the allowed keys, the first of equal ones, and 0
    where ``E_ij* > theta`` or is +inf. ``E_ij = scale |q_i - k_j|^2 / 2`` ("l2") or
    ``-scale q_i . k_j`` ("dot"). ``attention(normalizer="sigmoid")`` is the counterpart that
    selects all relevant keys.

    Args:
        q: (B, Tq, Hq, D), float64, float32, bfloat16 or float16; as in :func:`attention`.
        k: (B, Tk, Hkv, D).
        v: (B, Tk, Hkv, Dv).
        energy: "l2" or "dot".
        theta: maximum energy of a selected key.
        tau: > 0, temperature of the gradient.
        ste: q and k get the gradient of ``softmax(-E / tau) v`` (straight through); otherwise none.
        scale: None is 1 / sqrt(D).
        causal, window_size, mask, backend: see :func:`attention`; `mask` takes no function, but
            what :func:`from_predicate` makes of one.

    Returns:
        O (B, Tq, Hq, Dv) of q's dtype; 0 for a query without a selected key.

    Raises:
        TypeError, ValueError, NotImplementedError: see :func:`attention`.

    Note:
        v gets the gradients of the queries that selected it, summed in fp32; a query without a
        selected key gives no gradient. If q or k need a gradient, the soft attention is computed,
        too, in fp32 for half inputs. A key whose energy is NaN is never selected.

    Reference:
        Straight-through gradients: Bengio et al., Estimating or Propagating Gradients Through
        Stochastic Neurons, 2013, arXiv:1308.3432. Selection itself has no paper.

    Example:
        >>> q = torch.tensor([0.9, 4.0]).view(1, 2, 1, 1)
        >>> k = v = torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1, 1)
        >>> select_attention(q, k, v).flatten()
        tensor([1., 3.])
    """
    op = "select_attention"
    q, k, v = autocast(op, q, k, v)
    full = check_shapes(op, q, k, v)
    require_choice(op, "energy", energy, ("l2", "dot"))
    require_number(op, "tau", tau, above=0)
    require_bool(op, "ste", ste)
    if not (isinstance(theta, float) and math.isinf(theta)):
        require_number(op, "theta", theta)
    if scale is not None:
        require_number(op, "scale", scale)
    if isinstance(mask, Tensor):
        require_bool_mask(op, "mask", mask)
    if use_reference(op, backend, q):
        return reference.select_attention(
            q,
            k,
            v,
            energy=energy,
            theta=theta,
            tau=tau,
            ste=ste,
            scale=scale,
            causal=causal,
            window_size=window_size,
            mask=mask,
        )
    scale = default_scale(q.shape[3]) if scale is None else scale
    # -E = scale (q . k - |k|^2 / 2) - scale |q|^2 / 2 of "l2"
    wide_k = widen(k)  # once: the gradients of q . k and of |k|^2 nearly cancel
    bias = _key_squares(q, wide_k, scale) if energy == "l2" else None
    options = Options(window_size, causal, scale, mask=mask, bias=bias)
    codes = checked_codes(op, q, full, options._replace(bias=_detached(bias)))
    index, top = ops.attention_select(q.detach(), k.detach(), *codes)
    least = -top if energy == "dot" else _squares(q, scale) - top
    out = _gather(v, index)
    if ste and (may_need_gradient(q) or may_need_gradient(k)):
        soft = _soft(q, wide_k, v, options, tau)
        out = out + (soft - soft.detach()).to(out.dtype)
    chosen = (index >= 0) & (least <= theta)
    return out.masked_fill(~chosen.transpose(1, 2)[..., None], 0)


def _detached(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.detach()


def _soft(q: Tensor, k: Tensor, v: Tensor, options: Options, tau: float) -> Tensor:
    """Computes softmax(-E / tau) v in fp32, without a gradient of v."""
    assert options.scale is not None
    return attention(
        widen(q),
        k,
        widen(v.detach()),
        causal=options.causal,
        window_size=options.window_size,
        mask=options.mask,
        bias=None if options.bias is None else options.bias / tau,
        scale=options.scale / tau,
    )


def _key_squares(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Computes -scale |k|^2 / 2, (B, Hq, 1, Tk)."""
    group = q.shape[2] // k.shape[2] if k.shape[2] else 1
    squares = k.square().sum(-1).mul(-scale / 2).transpose(1, 2)[:, :, None]
    return squares.repeat_interleave(group, 1)


def _squares(q: Tensor, scale: float) -> Tensor:
    """Computes scale |q|^2 / 2, (B, Hq, Tq)."""
    return widen(q.detach()).square().sum(-1).mul(scale / 2).transpose(1, 2)


def _gather(v: Tensor, index: Tensor) -> Tensor:
    """Gathers v (B, Tk, Hkv, Dv) at index (B, Hq, Tq): (B, Tq, Hq, Dv), arbitrary for -1."""
    group = index.shape[1] // v.shape[2] if v.shape[2] else 1
    if v.shape[1] == 0:
        v = torch.nn.functional.pad(v, (0, 0, 0, 0, 0, 1))
    # The gradient accumulates in the dtype that it flows through.
    wide = widen(v) if may_need_gradient(v) else v
    rows = index.clamp(min=0).unflatten(1, (v.shape[2], group)).flatten(2)[..., None]
    found = wide.transpose(1, 2).gather(2, rows.expand(-1, -1, -1, v.shape[3]))
    return found.unflatten(2, (group, index.shape[2])).flatten(1, 2).transpose(1, 2).to(v.dtype)
