"""Hub-and-spoke attention: a window, and hubs that all tokens see and that see all."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from omniattn import reference
from omniattn.checks.arguments import (
    require_bool,
    require_choice,
    require_int,
    shown,
    use_reference,
)
from omniattn.encoding.options import FormOptions, pack, spelled_out
from omniattn.functional.attention._common import autocast, check_shapes
from omniattn.functional.attention.attention import attention
from omniattn.functional.attention.lse import merge_attention
from omniattn.functional.masks import Causal, GlobalTokens, Mask, Not, SlidingWindow, hub_spoke
from omniattn.functional.masks.tokens import index_tuple, require_global_tokens
from omniattn.functional.sparse._common import score_options, second_set
from omniattn.ops.dispatch.ranks import ACTIVE

__all__ = ["hub_spoke_attention"]


@spelled_out(FormOptions, last=("backend",))
def hub_spoke_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_global: Tensor | None = None,
    k_global: Tensor | None = None,
    v_global: Tensor | None = None,
    *,
    window: int,
    global_index: tuple[int, ...] = (),
    global_every: int | None = None,
    causal: bool = True,
    dual: str | None = None,
    backend: str | None = None,
    **options: Unpack[FormOptions],
) -> Tensor:
    """Attention to the last `window` keys and to hubs, which may have separate projections.

    ``O_i = sum_j softmax_j(scale q_i . k_j) v_j`` over the j with i - window <= j, and all pairs of
    which one is a hub; causal, j <= i. With dual="disjoint" the pairs with a hub have q_global,
    k_global and v_global in the same softmax, so that each pair is of one kind or the other; with
    "longformer" the rows of hubs have them, for all of their keys.

    Args:
        q: (B, Tq, Hq, D), float64, float32, bfloat16 or float16.
        k: (B, Tk, Hkv, D), Hkv a divisor of Hq. Query q is at position q + Tk - Tq of the keys.
        v: (B, Tk, Hkv, Dv).
        q_global, k_global, v_global: second projections, as q, k and v, for `dual`.
        window: keys before the query, and if not causal after it.
        global_index, global_every: the hubs, as positions and as multiples of a number; positions
            beyond the keys are ignored.
        causal: only keys up to the query.
        dual: "disjoint", "longformer" or None.
        scale: None is 1 / sqrt(D).
        softcap, dropout_p, seed: see :func:`attention`.
        backend: see :func:`attention`.

    Returns:
        O (B, Tq, Hq, Dv) of q's dtype.

    Raises:
        TypeError, ValueError, NotImplementedError: see :func:`attention`; no hubs; projections
            without `dual` or the reverse.

    Note:
        The mask is `masks.hub_spoke`; the two kinds of pairs are two calls of :func:`attention` on
        disjoint masks, merged by their lse. Deterministic; gradients to all six tensors.

    Reference:
        The pattern of Child et al., 2019, arXiv:1904.10509 ("fixed") with chosen columns; second
        projections: Beltagy et al., 2020, arXiv:2004.05150.

    Example:
        >>> q = torch.ones(1, 6, 2, 4)
        >>> hub_spoke_attention(q, q, q, window=1, global_every=3).shape
        torch.Size([1, 6, 2, 4])
    """
    op = "hub_spoke_attention"
    record = pack(op, options, FormOptions)
    q, k, v = autocast(op, q, k, v)
    check_shapes(op, q, k, v)
    require_int(op, "window", window, 0)
    require_bool(op, "causal", causal)
    names = ("q_global", "k_global", "v_global")
    given = q_global is not None or k_global is not None or v_global is not None
    if dual is not None:
        require_choice(op, "dual", dual, ("disjoint", "longformer"))
    if given != (dual is not None):
        raise ValueError(
            f"{op}: {', '.join(names)} must be given if and only if dual is, got dual={shown(dual)}"
        )
    second = second_set(op, (q, k, v), (q_global, k_global, v_global), names)
    global_index = index_tuple(op, "global_index", global_index)
    require_global_tokens(op, global_index, global_every, ("global_index", "global_every"))
    hubs = GlobalTokens(global_index, global_every)
    how = score_options(op, q, k, record)
    if use_reference(op, backend, q):
        return reference.hub_spoke_attention(
            *(q, k, v),
            *(second if given else ()),
            window=window,
            global_index=global_index,
            global_every=global_every,
            causal=causal,
            dual=dual,
            **how,
        )
    how["backend"] = backend
    every = hub_spoke(window, hubs.index, global_every=global_every, causal=causal)
    if dual != "disjoint":
        out: Tensor = attention(q, k, v, mask=every, **how)
        if dual is None:
            return out
        other = attention(*second, mask=every, **how)
        if ACTIVE.region is None:
            position = torch.arange(q.shape[1], device=q.device) + k.shape[1] - q.shape[1]
        else:
            position = ACTIVE.region.positions(q.shape[1], q.device)
        return torch.where(hubs.among(position)[:, None, None], other, out)
    mine, theirs = _kinds(hubs, window, causal)
    near = attention(q, k, v, mask=mine, return_lse=True, **how)
    far = attention(*second, mask=theirs, return_lse=True, **how)
    return merge_attention(*zip(near, far, strict=True))[0]


def _kinds(hubs: GlobalTokens, window: int, causal: bool) -> tuple[Mask, Mask]:
    """Returns the masks of pairs without a hub and of pairs with a hub."""
    spokes = SlidingWindow(window, 0 if causal else window) & Not(hubs)
    return spokes, hubs & Causal() if causal else hubs
