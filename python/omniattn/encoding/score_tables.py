"""Tables of a score_mod's program, which torch computes before the kernels run.

Tables hold values that depend on b, h and only one of q, k and k - q, computed from the nodes of
encoding/score_compiler.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from omniattn.encoding.score_program import (
    MEANING,
    Domain,
    Node,
    arguments_of,
    as_lanes,
    gather,
    place,
)


@dataclass(frozen=True)
class Extents:
    """Sizes, dtype and device for the evaluation of nodes."""

    batch: int
    heads: int
    domain: Domain
    dtype: torch.dtype
    device: torch.device

    def of(self, name: str) -> int:
        """Returns the number of values of b, h, q or k."""
        domain = self.domain
        return {"b": self.batch, "h": self.heads, "q": domain.queries, "k": domain.keys}[name]

    def steps(self, first: int, step: int, count: int) -> Tensor:
        return torch.arange(first, first + step * count, step, device=self.device)


def evaluate(
    nodes: Sequence[Node],
    roots: Sequence[int],
    tensors: Sequence[Tensor],
    extents: Extents,
    by_position: Sequence[int],
    known: Mapping[int, Tensor],
) -> dict[int, Tensor]:
    """Evaluates nodes that depend on at most one of q, k and k - q, to (B | 1, Hq | 1, n).

    `by_position`: nodes that read a tensor at bare positions, within bounds. `known`: values of
    nodes already evaluated.
    """
    values = dict(known)
    found, left = set(known), list(roots)
    while left:
        n = left.pop()
        if n not in found:
            found.add(n)
            left += () if n in by_position else arguments_of(nodes[n])
    for n in sorted(found - set(known)):
        op, *args = nodes[n]
        if n in by_position:
            t = at_positions(tensors[args[0]], [bare(nodes[m]) for m in args[1:]], extents)
            values[n] = as_lanes(t.flatten(2), extents.dtype)
        elif op in ("affine", "input", "number", "integer"):
            values[n] = _constant(op, args, extents)
        else:
            values[n] = _value(op, args, values, tensors, extents.dtype)
    return values


def _constant(op: str, args: Sequence[Any], extents: Extents) -> Tensor:
    device, domain = extents.device, extents.domain
    if op == "number":
        return torch.full((1, 1, 1), args[0], dtype=extents.dtype, device=device)
    if op == "input":
        index = torch.arange(extents.of(args[0]), device=device)
        return index[:, None, None] if args[0] == "b" else index[None, :, None]
    if op == "integer" or args[0] == args[1] == 0:
        return torch.full((1, 1, 1), args[-1], device=device)
    of_q, of_k, offset = args
    if of_k == 0:
        found = extents.steps(of_q * domain.first_q + offset, of_q, domain.queries)
    elif of_q == 0:
        found = extents.steps(offset, of_k, domain.keys)
    else:
        found = extents.steps(offset - of_k * domain.last_q, of_k, domain.distances)
    return found[None, None]


def as_table(value: Tensor, axis: str, dtype: torch.dtype) -> Tensor:
    """Shapes a value of `evaluate` as (B | 1, Hq | 1, Q | 1, Tk | 1) or
    (B | 1, Hq | 1, 1, Q + Tk - 1).

    `axis` names its dependence other than on b and h: "1" (none), "q", "k" or "d", which is k - q.
    """
    if value.dtype == torch.int64 and dtype == torch.float32:
        value = value.to(torch.int32)  # integers of float32 programs
    return value.unsqueeze(3 if axis == "q" else 2)


def bare(node: Node) -> str:
    """Returns "b", "h", "q" or "k" if a node is only that position, else ""."""
    if node[0] == "affine":
        return {(1, 0, 0): "q", (0, 1, 0): "k"}.get(node[1:], "")
    return str(node[1]) if node[0] == "input" and node[1] != "score" else ""


def at_positions(t: Tensor, names: Sequence[str], extents: Extents) -> Tensor:
    """Arranges a tensor indexed by positions `names` as (B | 1, Hq | 1, Tq | 1, Tk | 1)."""
    for dim, name in enumerate(names):
        if t.shape[dim] != extents.of(name):
            t = t.narrow(dim, 0, extents.of(name))
    order = sorted(range(len(names)), key=lambda dim: "bhqk".index(names[dim]))
    if order != sorted(order):
        t = t.permute(order)
    for dim, name in enumerate("bhqk"):
        if name not in names:
            t = t.unsqueeze(dim)
    return t


def _value(
    op: str,
    args: Sequence[Any],
    values: dict[int, Tensor],
    tensors: Sequence[Tensor],
    dtype: torch.dtype,
) -> Tensor:
    if op == "tensor":
        t = tensors[args[0]]
        at = torch.zeros((1, 1, 1), dtype=torch.int64, device=t.device)
        for dim, n in enumerate(args[1:]):
            at = place(at, values[n], t.shape, dim)
        return as_lanes(gather(t, at), dtype)
    x = [values[n] for n in args]
    if op == "detach":
        return x[0].detach()
    if op == "to_float":
        return x[0].to(dtype)
    if op == "to_int":
        return x[0].to(torch.int64)
    if op == "where":
        return torch.where(x[0] != 0, x[1], x[2])
    if op.startswith("int_"):
        x = [t.to(torch.int64) for t in x]
    return MEANING[op](*x)
