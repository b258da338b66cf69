"""Rows of goals.py for second derivatives and tangents, against a backward of the call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as nnf

from goal_rows.goal import Provider, Row, tensors
from omniattn import functional

LENGTH, HEADS, DIM = 2048, 8, 64
_HEADS, _ROWS = (1, LENGTH, HEADS), (1, LENGTH, HEADS, DIM)
_SELECTIVE = ((1, LENGTH, 512), (1, LENGTH, 512), (512, 16), (1, LENGTH, 16), (1, LENGTH, 16))
#: Name -> shapes of inputs, and a function of them; gates are made from any numbers.
CASES: dict[str, tuple[tuple[tuple[int, ...], ...], Callable[..., Tensor]]] = {
    "attention": ((_ROWS,) * 3, partial(functional.attention, causal=True)),
    "linear_attention": ((_ROWS,) * 3, lambda *x: functional.linear_attention(*x)[0]),
    "gated_linear_attention": (
        (_ROWS,) * 4,
        lambda q, k, v, g: functional.gated_linear_attention(q, k, v, nnf.logsigmoid(g))[0],
    ),
    "gated_delta_rule": (
        (*(_ROWS,) * 3, _HEADS, _HEADS),
        lambda q, k, v, g, b: functional.gated_delta_rule(
            q, k, v, nnf.logsigmoid(g), b.sigmoid(), l2norm=True
        )[0],
    ),
    "kimi_delta_attention": (
        (*(_ROWS,) * 4, _HEADS),
        lambda q, k, v, g, b: functional.kimi_delta_attention(
            q, k, v, nnf.logsigmoid(g), b.sigmoid(), l2norm=True
        )[0],
    ),
    "rwkv7": (
        (_ROWS,) * 6,
        lambda q, k, v, g, a, b: functional.rwkv7(q, nnf.logsigmoid(g), k, v, a / 64, b / 8)[0],
    ),
    "linear_scan": (
        ((1, LENGTH, 512),) * 2,
        lambda x, g: functional.linear_scan(x, nnf.logsigmoid(g))[0],
    ),
    "selective_scan": (
        _SELECTIVE,
        lambda u, dt, A, B, C: functional.selective_scan(u, dt.sigmoid(), -A.abs(), B, C)[0],
    ),
}


def rows() -> Iterator[Row]:
    for name, (shapes, function) in CASES.items():
        inputs = [t.requires_grad_() for t in tensors(*shapes)]
        case = f"{name} N{LENGTH}"
        for kind, run in (
            ("second derivatives", _gradients_of_penalty(function, inputs)),
            ("tangents", partial(_tangents, function, [t.detach() for t in inputs])),
        ):
            yardstick = _gradients(function(*inputs).square().sum(), inputs)
            yield Row(f"{kind} of {case}", "backward", run, yardstick, "its backward", 4)


def _gradients(loss: Tensor, inputs: list[Tensor]) -> Provider:
    return lambda: torch.autograd.grad(loss, inputs, retain_graph=True)


def _gradients_of_penalty(function: Callable[..., Tensor], inputs: list[Tensor]) -> Provider:
    """Returns a function that computes the gradients of the squares of the gradients."""
    loss = function(*inputs).square().sum()
    first = torch.autograd.grad(loss, inputs, create_graph=True)
    return _gradients(torch.stack([g.square().sum() for g in first]).sum(), inputs)


def _tangents(function: Callable[..., Tensor], inputs: list[Tensor]) -> object:
    return torch.func.jvp(function, tuple(inputs), tuple(inputs))
