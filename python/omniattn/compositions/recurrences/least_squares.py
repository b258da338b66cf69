"""Solutions of one linear system for each token, by conjugate gradients for all tokens together.

The matrix of token t is ``H_t + diag(lamb_t)``, ``H_t = exp(g_t) H_{t-1} + beta_t k_t k_t^T``. The
op `recurrence` multiplies the matrices of all tokens with a vector each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from omniattn.compositions._python_ops import define, implement
from omniattn.ops.dispatch.autograd import DifferentiableOp
from omniattn.ops.dispatch.backward import BackwardOp, private_op
from omniattn.ops.dispatch.library import register_fake
from omniattn.reference.recurrences.least_squares import mesa_solve as definition

__all__ = ["mesa_solve"]

#: Rows are solved at residuals of so many roundings, relative to the length of q.
_ROUNDINGS = 4
_product = private_op("recurrence_only")
_product_and_states = private_op("recurrence_raw")
_product_backward = private_op("recurrence_backward")
_step = private_op("mesa_step")


def _arguments(
    x: Tensor,
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Any, ...]:
    """Returns the arguments of `recurrence` for H_t x_t and the last H."""
    return (
        *(x, k, k, g, beta, None, None, None, None, None, None, initial_state, cu_seqlens),
        *(1.0, False, 0, False, 0.0, False),
    )


def _forward(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    lamb: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    max_iterations: int,
) -> tuple[Tensor, Tensor]:
    given = k, g, beta, initial_state, cu_seqlens
    tolerance = _ROUNDINGS * torch.finfo(q.dtype).eps
    if q.shape[1] == 1 and cu_seqlens is None:  # H is that of the only token
        final = _product(*_arguments(q, *given))[1]
        return _step(q, lamb, final, max_iterations, tolerance), final
    right, scale = _scaled(q)
    y, final = _product(*_arguments(right, *given))

    def times(p: Tensor) -> Tensor:
        return y if p is right else _product(*_arguments(p, *given))[0]

    return _solve(right, lamb, times, max_iterations, tolerance).mul_(scale), final


def _scaled(q: Tensor) -> tuple[Tensor, Tensor]:
    """Returns q with rows whose largest number is 1, and what the rows were divided by.

    Squares of residuals would overflow or vanish for large and small q.
    """
    if q.numel() == 0:
        return q, q.new_ones(())
    largest = torch.linalg.vector_norm(q, torch.inf, -1, keepdim=True)
    scale = torch.where((largest > 0) & largest.isfinite(), largest, 1)
    return q / scale, scale


def _solve_step(
    q: Tensor, lamb: Tensor, initial_state: Tensor, max_iterations: int, tolerance: float
) -> Tensor:
    def times(p: Tensor) -> Tensor:
        return (initial_state @ p[:, 0, :, :, None])[:, None, ..., 0]

    right, scale = _scaled(q)
    return _solve(right, lamb, times, max_iterations, tolerance).mul_(scale)


def _solve(
    q: Tensor,
    lamb: Tensor,
    times: Callable[[Tensor], Tensor],
    max_iterations: int,
    tolerance: float,
) -> Tensor:
    """Solves the systems of all tokens, whose matrices `times` multiplies by a vector each."""
    x, r, p = torch.zeros_like(q), q.clone(), q
    left = torch.linalg.vecdot(r, r)
    enough = left * tolerance**2
    for _ in range(max(1, max_iterations)):
        solved = left <= enough  # False where q holds NaN
        if q.numel() == 0 or bool(solved.all()):
            break
        y = torch.addcmul(times(p), lamb, p)
        length = (left / torch.linalg.vecdot(p, y)).masked_fill_(solved, 0)[..., None]
        x.addcmul_(length, p)
        r.addcmul_(length, y, value=-1)
        before, left = left, torch.linalg.vecdot(r, r)
        turn = (left / before).masked_fill_(solved, 0)[..., None]
        p = torch.addcmul(r, turn, p)
    return x


def _backward(
    grad_x: Tensor | None,
    grad_final_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    lamb: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    max_iterations: int,
    x: Tensor,
) -> tuple[Tensor, ...]:
    """Solves for dq, as ``x_t = (H_t + diag(lamb_t))^-1 q_t``; that of H_t is ``-dq_t x_t^T``.

    The op `recurrence` has such gradients for rows -dq_t and gradients x_t of its outputs.
    """
    given = k, g, beta, initial_state, cu_seqlens
    dq = torch.zeros_like(q)
    if grad_x is not None:
        dq, _ = _forward(
            grad_x.contiguous(), k, g, beta, lamb, initial_state, cu_seqlens, max_iterations
        )
    _, _, states = _product_and_states(*_arguments(x, *given))
    _, dk, dv, dg, dbeta, *_, dinitial_state = _product_backward(
        *(x, grad_final_state, -dq, k, k, g, beta, None, None, None, None, None, None),
        *(initial_state, cu_seqlens, states, 1.0, False, 0, False, 0.0, False),
        *(True, True, False, False, False, False, initial_state is not None),
    )
    return dq, dk + dv, dg, dbeta, -dq * x, dinitial_state


#: N sequences.
_TENSORS = {"q": "B T H K", "k": "B T H K", "g": "B T H", "beta": "B T H", "lamb": "B T H K"}
_OPTIONAL = {"initial_state": "N H K K", "cu_seqlens": "N+1"}
_ARGUMENTS = ", ".join(
    [
        *(f"Tensor {name}" for name in _TENSORS),
        *(f"Tensor? {name}" for name in _OPTIONAL),
        "int max_iterations",
    ]
)
register_fake("mesa_step")(lambda q, *_: q.new_empty(q.shape))
implement("mesa_step", _solve_step, {"q": "B T H K", "lamb": "B T H K", "initial_state": "B H K K"})
define(
    "mesa_net",
    _ARGUMENTS,
    "Tensor x, Tensor final_state",
    _forward,
    _TENSORS | _OPTIONAL,
    differentiable=True,
)
define(
    "mesa_net_backward",
    f"Tensor? grad_x, Tensor? grad_final_state, {_ARGUMENTS}, Tensor x",
    ", ".join(f"Tensor d{name}" for name in (*_TENSORS, "initial_state")),
    _backward,
    {
        **{"grad_x": "B T H K", "grad_final_state": "N H K K"},
        **_TENSORS,
        **_OPTIONAL,
        **{"max_iterations": "", "x": "B T H K"},
    },
)


def _state(q: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    count = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return q.new_empty((count, q.shape[2], q.shape[3], q.shape[3]))


#: (q, k, g, beta, lamb, initial_state, cu_seqlens, max_iterations) -> (x, final_state)
mesa_solve = DifferentiableOp(
    "mesa_net",
    fakes={"final_state": _state},
    backward_op=BackwardOp("mesa_net_backward"),
    formula=lambda *args: definition(*args[:5], initial_state=args[5], cu_seqlens=args[6]),
)
