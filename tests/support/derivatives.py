"""Derivatives of a loss by every transform, compared with those of the definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

from omniattn.ops.derivatives.tangent_kernels import KernelPieces, _Gradients, _Tangents

F64 = torch.float64


def normal(*shapes: tuple[int, ...]) -> list[Tensor]:
    make = torch.Generator().manual_seed(3)
    return [torch.randn(s, generator=make, dtype=F64) for s in shapes]


def directions(inputs: list[Tensor]) -> tuple[Tensor, ...]:
    make = torch.Generator().manual_seed(4)
    return tuple(torch.randn(t.shape, generator=make, dtype=F64) for t in inputs)


def product(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> Tensor:
    return torch.stack([(x * y).sum() for x, y in zip(a, b, strict=True)]).sum()


Loss = Callable[..., Tensor]


def twice(loss: Loss, inputs: list[Tensor], along: tuple[Tensor, ...]) -> Any:
    leaves = [t.clone().requires_grad_() for t in inputs]
    first = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
    return torch.autograd.grad(product(first, along), leaves)


def thrice(loss: Loss, inputs: list[Tensor], along: tuple[Tensor, ...]) -> Any:
    leaves = [t.clone().requires_grad_() for t in inputs]
    first = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
    second = torch.autograd.grad(product(first, along), leaves, create_graph=True)
    return torch.autograd.grad(product(second, along), leaves)


def dual(loss: Loss, inputs: list[Tensor], along: tuple[Tensor, ...], leaf: bool = False) -> Any:
    with forward_ad.dual_level():
        leaves = [t.clone().requires_grad_(leaf) for t in inputs]
        duals = [forward_ad.make_dual(*pair) for pair in zip(leaves, along, strict=True)]
        found = torch.autograd.grad(loss(*duals), duals) if leaf else (loss(*duals),)
        return [forward_ad.unpack_dual(t).tangent for t in found]


def penalty_in_checkpoint(loss: Loss, inputs: list[Tensor], along: tuple[Tensor, ...]) -> Any:
    leaves = [t.clone().requires_grad_() for t in inputs]

    def penalty(*leaves: Tensor) -> Tensor:
        return product(torch.autograd.grad(loss(*leaves), leaves, create_graph=True), along)

    return torch.autograd.grad(checkpoint(penalty, *leaves, use_reentrant=False), leaves)


def gradient(loss: Loss, count: int) -> Callable[..., tuple[Tensor, ...]]:
    return grad(loss, tuple(range(count)))


DERIVATIVES: dict[str, Callable[[Loss, list[Tensor], tuple[Tensor, ...]], Any]] = {
    "twice": twice,
    "thrice": thrice,
    "dual": dual,
    "gradient of dual": lambda f, x, t: dual(f, x, t, leaf=True),
    "penalty in checkpoint": penalty_in_checkpoint,
    "jvp": lambda f, x, t: jvp(f, tuple(x), t)[1],
    "jvp of grad": lambda f, x, t: jvp(gradient(f, len(x)), tuple(x), t)[1],
    "grad of jvp": lambda f, x, t: gradient(lambda *x: jvp(f, x, t)[1], len(x))(*x),
    "vjp of grad": lambda f, x, t: vjp(gradient(f, len(x)), *x)[1](t),
    "grad of grad": lambda f, x, t: gradient(
        lambda *x: product(gradient(f, len(x))(*x), t), len(x)
    )(*x),
    "jvp of jvp of grad": lambda f, x, t: jvp(
        lambda *x: jvp(gradient(f, len(x)), x, t)[1], tuple(x), t
    )[1],
    "grad of tangents": lambda f, x, t: gradient(lambda *t: jvp(f, tuple(x), t)[1], len(x))(*t),
    "vmap of tangents": lambda f, x, t: vmap(lambda *t: jvp(gradient(f, len(x)), tuple(x), t)[1])(
        *(torch.stack((a, 2 * a)) for a in t)
    ),
    "vmap of inputs": lambda f, x, t: vmap(
        lambda *x: vjp(gradient(f, len(x)), *x)[1](t), in_dims=(1, 1, *(0,) * (len(x) - 2))
    )(*(torch.stack((a, 2 * a), 1 if i < 2 else 0) for i, a in enumerate(x))),
}


def assert_as_definition(
    name: str, loss: Callable[[str | None], Loss], inputs: list[Tensor], rtol: float
) -> None:
    """Requires derivative `name` of the loss of a backend to be that of the definition."""
    derive, along = DERIVATIVES[name], directions(inputs)
    found, wanted = (derive(loss(backend), inputs, along) for backend in (None, "reference"))
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=1e-12)


#: Derivatives whose values a kernel for tangents computes.
OF_KERNELS = ("jvp", "dual", "vjp of grad", "jvp of grad", "grad of jvp", "grad of tangents")


def refuse_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets kernels for tangents compute all values: pieces of a definition raise an error."""

    def refuse(self: Any, tensors: Any) -> Any:
        raise AssertionError("the pieces were evaluated")

    for kind in (KernelPieces, _Gradients, _Tangents):
        monkeypatch.setattr(kind, "run", refuse)
