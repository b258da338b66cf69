"""score_mod functions as programs of the op: traced, compiled, with the tables that they read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from omniattn.encoding.masks import Rule
from omniattn.encoding.score_compiler import Compiled, compile_program
from omniattn.encoding.score_program import Domain, Node, Program, domain_of, evaluate
from omniattn.functional._checks import require_device
from omniattn.functional._traced import trace_function
from omniattn.ops._autograd import may_need_gradient
from omniattn.reference.precision import compute_dtype

_ARGUMENTS = ("score", "b", "h", "q", "k")


_cached = lru_cache(maxsize=256)(compile_program)


@torch.compiler.assume_constant_result
def _compiled(
    nodes: tuple[Node, ...],
    output: int,
    wants: tuple[bool, ...],
    by_position: tuple[int, ...],
) -> Compiled:
    return _cached(nodes, output, wants, by_position)


def encode_score_mod(
    op: str,
    score_mod: Any,
    q: Tensor,
    full: Sequence[int],
    layout: Rule | None,
) -> Program:
    if not callable(score_mod):
        raise TypeError(
            f"{op}: score_mod must be a function of (score, b, h, q, k), got score_mod={score_mod}"
        )
    dtype = compute_dtype(q)
    domain = domain_of(full[2], full[3], None if layout is None else layout[0])
    trace, found = trace_function(f"{op}: score_mod", score_mod, dtype, _ARGUMENTS)
    if found.kind != "f":
        found = found.float()
    tensors = []
    for t in trace.tensors:
        require_device(op, "a tensor of score_mod", t, q)
        tensors.append(_readable(op, t, dtype))
    nodes = tuple(trace.nodes)
    by_position = tuple(
        n for n, node in enumerate(nodes) if _positions(nodes, node, tensors, full, domain)
    )
    wants = tuple(t.is_floating_point() and may_need_gradient(t) for t in trace.tensors)
    made = _compiled(nodes, found.node, wants, by_position)
    tables = tuple(_tables(made, tensors, full, domain, q))
    return Program(made.code, made.constants, tables, domain)


def _readable(op: str, t: Tensor, dtype: torch.dtype) -> Tensor:
    """In a dtype that kernels read."""
    if t.dtype == torch.float64 and dtype == torch.float32:
        return t.to(dtype)
    if t.dtype == torch.int64 and dtype == torch.float32 and t.numel() > 0:
        low, high = _unwrapped(t).aminmax()
        torch._assert_async(
            (low >= -(2**31)) & (high < 2**31),
            f"{op}: int64 tensors of score_mod must fit in 32 bits where q is not float64",
        )
    if t.is_floating_point() and t.dtype.itemsize < 2:
        raise TypeError(f"{op}: tensors of score_mod cannot be {t.dtype}")
    if t.is_floating_point() or t.dtype in (torch.bool, torch.uint8, torch.int32, torch.int64):
        return t
    return t.to(torch.int32)


def _unwrapped(t: Tensor) -> Tensor:
    """Without the wrappers of torch.func, of which torch.compile knows nothing."""
    if torch.compiler.is_compiling():
        return t
    while torch._C._functorch.is_functorch_wrapped_tensor(t):
        t = torch._C._functorch.get_unwrapped(t)
    return t


def _positions(
    nodes: Sequence[Node],
    node: Node,
    tensors: Sequence[Tensor],
    full: Sequence[int],
    domain: Domain,
) -> tuple[str, ...]:
    """What indexes the dimensions of a tensor that is read at bare q and k, inside it."""
    op, *args = node
    if op != "tensor":
        return ()
    names = tuple(nodes[n][1] if nodes[n][0] == "input" else "" for n in args[1:])
    if not {"q", "k"} <= set(names) or len(set(names)) < len(names) or "" in names:
        return ()
    if domain.first_q != 0:
        return ()
    extents = dict(zip(("b", "h", "q", "k"), full, strict=True))
    shape = tensors[args[0]].shape
    return names if all(n >= extents[x] for n, x in zip(shape, names, strict=True)) else ()


def _tables(
    made: Compiled, tensors: Sequence[Tensor], full: Sequence[int], domain: Domain, q: Tensor
) -> list[Tensor]:
    wanted = [(int(what[1]), str(what[2])) for what in made.tables if what[0] == "node"]
    sizes = (full[0], full[1])
    values = evaluate(made.nodes, wanted, tensors, sizes, domain, compute_dtype(q), q.device)
    evaluated = iter(values)
    tables = []
    for what in made.tables:
        if what[0] == "node":
            tables.append(next(evaluated))
        elif what[0] == "tensor":
            tables.append(tensors[int(what[1])])
        else:
            tables.append(_grid(made.nodes, made.nodes[int(what[1])], tensors, full))
    return tables


def _grid(
    nodes: Sequence[Node], node: Node, tensors: Sequence[Tensor], full: Sequence[int]
) -> Tensor:
    """A tensor read by position, as (B | 1, Hq | 1, Tq, Tk)."""
    _, tensor, *index = node
    t = tensors[tensor]
    axes = [_axis(nodes[n]) for n in index]
    for dim, axis in enumerate(axes):
        t = t.narrow(dim, 0, full[axis])
    t = t.permute(sorted(range(len(axes)), key=lambda dim: axes[dim]))
    for axis in range(4):
        if axis not in axes:
            t = t.unsqueeze(axis)
    return t


def _axis(node: Node) -> int:
    if node[0] == "affine":
        return 2 if node[1] else 3
    return 0 if node[1] == "b" else 1
