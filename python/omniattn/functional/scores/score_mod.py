"""score_mod functions: traced and compiled to programs of the op, with the tables they read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from omniattn.checks.arguments import is_traced, require_device, shown
from omniattn.encoding.masks import Rule
from omniattn.encoding.options import MaskMod as MaskMod
from omniattn.encoding.options import ScoreMod as ScoreMod
from omniattn.encoding.options import masked_by as masked_by
from omniattn.encoding.score_compiler import Compiled, compile_program
from omniattn.encoding.score_program import Node, Program, domain_of
from omniattn.encoding.score_tables import Extents, as_table, at_positions, bare, evaluate
from omniattn.functional.scores import traced_nn as traced_nn  # it adds functions
from omniattn.functional.scores.traced import trace_function
from omniattn.ops.dispatch.compile import assume_constant_result
from omniattn.ops.dispatch.plain import may_need_gradient
from omniattn.reference.precision import compute_dtype

_ARGUMENTS = ("score", "b", "h", "q", "k")


#: Cache of compiled programs by trace. The function cannot be the key, since it may read globals,
#: attributes and numbers that change between calls.
_cached = lru_cache(maxsize=256)(compile_program)


@lru_cache(maxsize=16)
def _kept(made: Compiled, extents: Extents) -> dict[int, Tensor]:
    with torch.inference_mode(False):
        values = evaluate(made.nodes, made.untied, (), extents, made.by_position, {})
    return {n: values[n] for n in made.untied}


def _untied(made: Compiled, extents: Extents) -> dict[int, Tensor]:
    """Returns the values of nodes that depend on no tensor, cached between calls if small.

    Never cached in a trace, or on CUDA, where their memory could belong to a CUDA graph.
    """
    domain = extents.domain
    if (
        extents.device.type != "cpu"
        or is_traced()
        or extents.batch * extents.heads * (domain.queries + domain.keys) > 1 << 16
    ):
        return {}
    return _kept(made, extents)


@assume_constant_result
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
            f"{op}: score_mod must be a function of (score, b, h, q, k), "
            f"got score_mod={shown(score_mod)}"
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
    extents = Extents(full[0], full[1], domain, dtype, q.device)
    by_position = tuple(
        n
        for n, node in enumerate(nodes)
        if node[0] == "tensor" and _is_by_position(nodes, node, tensors, extents)
    )
    wants = tuple(t.is_floating_point() and may_need_gradient(t) for t in trace.tensors)
    made = _compiled(nodes, found.node, wants, by_position)
    return Program(made.code, made.constants, _tables(made, tensors, extents), domain)


def _readable(op: str, t: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts a captured tensor to a dtype that kernels read."""
    if t.dtype == torch.float64 and dtype == torch.float32:
        return t.to(dtype)
    if t.dtype == torch.int64 and dtype == torch.float32 and t.numel() > 0:
        low, high = _unwrapped(t).aminmax()
        torch._assert_async(
            (low >= -(2**31)) & (high < 2**31),
            f"{op}: int64 tensors of score_mod must fit in 32 bits where q is not float64",
        )
    if t.is_floating_point() and t.dtype.itemsize < 2:
        raise TypeError(
            f"{op}: tensors of score_mod must be integers, bool or floats of 16 bits and more, "
            f"got dtype={t.dtype}"
        )
    if t.is_floating_point() or t.dtype in (torch.bool, torch.uint8, torch.int32, torch.int64):
        return t
    return t.to(torch.int32)


def _unwrapped(t: Tensor) -> Tensor:
    """Removes the wrappers of torch.func, which torch.compile does not support."""
    if torch.compiler.is_compiling():
        return t
    while torch._C._functorch.is_functorch_wrapped_tensor(t):
        t = torch._C._functorch.get_unwrapped(t)
    return t


def _is_by_position(
    nodes: Sequence[Node], node: Node, tensors: Sequence[Tensor], extents: Extents
) -> bool:
    """Returns True if a tensor is indexed by plain positions, each at most once, in bounds."""
    names = [bare(nodes[n]) for n in node[2:]]
    if not names or "" in names or len(set(names)) < len(names):
        return False
    if "q" in names and extents.domain.first_q != 0:
        return False
    shape = tensors[node[1]].shape
    return all(n >= extents.of(name) for n, name in zip(shape, names, strict=True))


def _tables(made: Compiled, tensors: Sequence[Tensor], extents: Extents) -> tuple[Tensor, ...]:
    roots = [int(what[1]) for what in made.tables if what[0] == "node"]
    known = _untied(made, extents) if roots else {}
    values = evaluate(made.nodes, roots, tensors, extents, made.by_position, known)
    tables = []
    for kind, n, *axis in made.tables:
        if kind == "node":
            tables.append(as_table(values[int(n)], str(axis[0]), extents.dtype))
        elif kind == "tensor":
            tables.append(tensors[int(n)])
        else:
            _, tensor, *index = made.nodes[int(n)]
            names = [bare(made.nodes[m]) for m in index]
            tables.append(at_positions(tensors[tensor], names, extents))
    return tuple(tables)
