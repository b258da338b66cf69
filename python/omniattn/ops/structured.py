"""vandermonde and cauchy: kernels of structured state-space models as sums over modes."""

from __future__ import annotations

from torch import Tensor

from omniattn import reference
from omniattn.ops.dispatch.autograd import DifferentiableOp
from omniattn.ops.dispatch.vmap import Fold

__all__ = ["cauchy", "refuse_point_gradient", "vandermonde"]


def refuse_point_gradient(z_grad: bool) -> None:
    if z_grad:
        raise NotImplementedError(
            'cauchy: z gets no gradient; detach it or use backend="reference"'
        )


#: (c, x, length) -> y
vandermonde = DifferentiableOp(
    "vandermonde",
    fakes={"y": lambda c, length: c.new_empty((c.shape[0], length))},
    formula=reference.vandermonde,
    fold=Fold(("c", "x")),
)


def _sums(v: Tensor, z: Tensor) -> Tensor:
    return v.new_empty((v.shape[0], *z.shape))


#: (v, z, w) -> y
cauchy = DifferentiableOp(
    "cauchy",
    fakes={"y": _sums},
    formula=reference.cauchy,
    refuse=refuse_point_gradient,
    fold=Fold(("v", "w")),
)
