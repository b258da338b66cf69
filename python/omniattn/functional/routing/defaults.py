"""Default vectors, which replace unselected experts in the router's gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from omniattn.checks.arguments import require_device, require_float, require_number, require_shape
from omniattn.functional.routing._checks import require_float_on, require_integers_on
from omniattn.functional.routing.routing import Routing, expert_counts, require_routing


def default_vector_gradient(
    y: Tensor, routing: Routing, vectors: Tensor, *, scale: float = 1.0
) -> Tensor:
    """Returns y with a gradient to the scores of unselected experts.

    ``dp_e = scale <dy, v_e>`` for these, as if expert e returned its default vector v_e; the value
    is unchanged

    Args:
        y: (..., d), the weighted sum of the chosen experts.
        routing: (..., k), computed with router_grad="default_vector". Tokens without any expert,
            like padding, get no gradient.
        vectors: (E, d), moved by :func:`update_default_vectors`.
        scale: the scale given to the router.

    Returns:
        y, of its shape and dtype.

    Raises:
        TypeError: y or vectors that are not floating point, no :class:`Routing`.
        ValueError: vectors of another shape or on another device, a scale that is not finite.

    Note:
        The selected experts' scores get gradients through the weights, straight through a
        renormalisation. The forward uses only the selected experts.

    Reference:
        Panda et al., Dense Backpropagation Improves Training for Sparse Mixture-of-Experts, 2025,
        arXiv:2504.12463.

    Example:
        >>> g = torch.zeros(1, 2, requires_grad=True)
        >>> p = g.softmax(-1)
        >>> routing = Routing(torch.tensor([[0]]), p[:, :1], p)
        >>> y = default_vector_gradient(torch.zeros(1, 3), routing, torch.ones(2, 3))
        >>> torch.autograd.grad(y.sum(), routing.scores)[0]
        tensor([[0., 3.]])
    """
    op = "default_vector_gradient"
    require_float(op, "y", y)
    require_routing(op, routing)
    require_number(op, "scale", scale)
    scores = routing.scores
    require_device(op, "routing.scores", scores, y, "y")
    require_float_on(op, "vectors", vectors, y, "y")
    require_shape(op, "vectors", vectors, (scores.shape[-1], y.shape[-1]))
    experts = scores.shape[-1]
    there = routing.experts >= 0
    # One more column takes the slots without an expert.
    chosen = scores.new_zeros((*scores.shape[:-1], experts + 1), dtype=torch.bool)
    chosen = chosen.scatter(-1, routing.experts.masked_fill(~there, experts), 1)
    missing = ~chosen[..., :-1] & there.any(-1, keepdim=True)
    straight = scale * (scores - scores.detach()).masked_fill(~missing, 0.0)
    kept = vectors.detach().to(scores.dtype, copy=True)  # updated in place before the backward
    return y + (straight @ kept).to(y.dtype)


@torch.no_grad()
def update_default_vectors(
    vectors: Tensor, outputs: Tensor, index: Tensor, *, decay: float = 0.9
) -> None:
    """Moves the default vectors in place towards the mean output of each expert.

    ``v_e = decay v_e + (1 - decay) mean of f_e(x)`` over the tokens of expert e; unchanged without
    tokens

    Args:
        vectors: (E, d), zero before the first update.
        outputs: (..., k, d), of the expert in each slot, before the routing weight.
        index: (..., k), the experts; -1 for none.
        decay: in [0, 1].

    Raises:
        TypeError: vectors or outputs that are not floating point, an index that is not integers.
        ValueError: a decay out of range, a shape or device that does not fit.

    Reference:
        Panda et al., 2025, arXiv:2504.12463.

    Example:
        >>> vectors = torch.zeros(2, 1)
        >>> outputs = torch.tensor([[[2.0]], [[4.0]]])
        >>> update_default_vectors(vectors, outputs, torch.tensor([[1], [1]]))
        >>> vectors
        tensor([[0.0000],
                [0.3000]])
    """
    op = "update_default_vectors"
    require_number(op, "decay", decay, 0, 1)
    require_float(op, "vectors", vectors)
    require_float_on(op, "outputs", outputs, vectors, "vectors")
    require_integers_on(op, "index", index, vectors, "vectors")
    if vectors.dim() != 2:
        raise ValueError(
            f"{op}: vectors must have shape (E, d), got vectors.shape={tuple(vectors.shape)}"
        )
    experts, dim = vectors.shape
    require_shape(op, "outputs", outputs, (*index.shape, dim))
    flat = index.flatten().long()
    there = flat >= 0
    sums = vectors.new_zeros(experts, dim)
    rows = outputs.reshape(flat.numel(), dim).masked_fill(~there[:, None], 0.0)
    sums.index_add_(0, flat.clamp(min=0), rows.to(vectors.dtype))
    counts = expert_counts(index, experts)[:, None]
    moved = decay * vectors + (1 - decay) * sums / counts.clamp(min=1)
    vectors.copy_(torch.where(counts > 0, moved, vectors))
