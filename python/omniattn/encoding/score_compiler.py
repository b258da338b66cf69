"""From the nodes of a traced score_mod to a program: what torch computes before, the steps of the
kernels, and the adjoint of these.

A node is (op, arguments): those of encoding/score_program.py, and

- ("input", name) of score, b, h, q and k; ("number", x) and ("integer", n)
- ("affine", a, c, n): a q + c k + n, which all sums of positions become
- ("tensor", index, ids of one node for each dimension): a read of a captured tensor
- ("detach", id)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from omniattn.encoding.score_program import (
    MAX_DIMS,
    MAX_STEPS,
    MAX_TABLES,
    Node,
    TableKind,
    arguments_of,
)
from omniattn.encoding.score_steps import Allocator, Graph, adjoint_of, closure, reads_of

_LINEAR = {"int_add", "int_sub", "int_mul"}
_COMPARISONS = {"int_less", "int_less_equal", "int_equal"}


@dataclass(frozen=True)
class Compiled:
    """A program without its tables."""

    nodes: tuple[Node, ...]  # for `evaluate`
    code: tuple[int, ...]
    constants: tuple[float, ...]
    #: One for each table: ("node", id, axis) to be evaluated, ("grid", node) a tensor that is read
    #: by position, or ("tensor", index) as it is.
    tables: tuple[tuple[int | str, ...], ...]


class _Trace(Graph):
    """Nodes in which positions are affine."""

    def add(self, *node: Any) -> int:
        if node[0] in _LINEAR or node[0] in _COMPARISONS:
            node = self._simpler(node)
        return super().add(*node)

    def _affine(self, n: int) -> tuple[int, ...] | None:
        node = self.nodes[n]
        if node[0] == "affine":
            return node[1:]
        return (0, 0, node[1]) if node[0] == "integer" else None

    def _simpler(self, node: Node) -> Node:
        """Sums of positions as one node, and comparisons of them as those of a difference."""
        op, x, y = node
        a, b = self._affine(x), self._affine(y)
        if a is None or b is None:
            return node
        if op in _COMPARISONS:
            difference = tuple(m - n for m, n in zip(a, b, strict=True))
            if difference[:2] == (0, 0) or y == self.known.get(("integer", 0)):
                return node
            return (op, self.add("affine", *difference), self.add("integer", 0))
        if op == "int_mul":
            if a[:2] == (0, 0):
                a, b = b, a
            if b[:2] != (0, 0):
                return node
            return ("affine", *(m * b[2] for m in a))
        sign = 1 if op == "int_add" else -1
        return ("affine", *(m + sign * n for m, n in zip(a, b, strict=True)))


def compile_program(
    trace: Sequence[Node],
    output: int,
    wants: Sequence[bool],
    by_position: Sequence[int],
) -> Compiled:
    """The program of the node `output` of a trace.

    `wants`: captured tensors whose gradient is wanted; `by_position`: nodes of the trace that read
    a tensor at bare positions, inside it.
    """
    graph = _Trace()
    new: dict[int, int] = {}
    for n, node in enumerate(trace):
        new[n] = _normalised(graph, node, new)
    return _Compiler(graph, wants, {new[n] for n in by_position}).compile(new[output])


def _normalised(graph: _Trace, node: Node, new: dict[int, int]) -> int:
    op, *args = node
    if op == "input" and args[0] in ("q", "k"):
        return graph.add("affine", *((1, 0, 0) if args[0] == "q" else (0, 1, 0)))
    if op in ("input", "number", "integer"):
        return graph.add(op, *args)
    if op == "tensor":
        return graph.add(op, args[0], *(new[n] for n in args[1:]))
    return graph.add(op, *(new[n] for n in args))


class _Compiler:
    def __init__(
        self,
        graph: _Trace,
        wants: Sequence[bool],
        by_position: set[int],
    ) -> None:
        self.graph = graph
        self.wants = wants
        self.by_position = by_position
        self.axes: dict[int, str] = {}  # "1", "q", "k", "d", "2" or "s", where the score is
        self.trained: dict[int, bool] = {}  # whether a node depends on a tensor that `wants`
        self.tables: list[tuple[int | str, ...]] = []
        self.kinds: list[TableKind] = []
        self.lowered: dict[int, int] = {}  # nodes as nodes of steps
        self.steps = Graph()  # of program ops, and ("score",) and ("gradient",)
        self.from_table: dict[int, int] = {}  # nodes of steps that read a table, and which

    def compile(self, output: int) -> Compiled:
        result = self._lower(output)
        forward = sorted(closure(self.steps.nodes, [result]))
        constants: list[float] = []
        one = Allocator(self.steps.nodes, constants, first_free=1)
        value = one.run(forward, result, keep=())
        two = Allocator(self.steps.nodes, constants, first_free=2)
        gradient, gives = adjoint_of(self.steps, result, self.from_table)
        rest = closure(self.steps.nodes, [gradient, *(n for give in gives for n in give[1:3])])
        later = sorted(n for n in rest if n not in set(forward))
        kept = {a for n in later for a in reads_of(self.steps.nodes[n])}
        kept |= {gradient, *(n for give in gives for n in give[1:3])}
        again = two.run(forward, result, keep=kept)
        adjoint = two.run(later, gradient, keep=(), gives=gives)
        for runs in ((value,), (again, adjoint)):
            if sum(len(steps) for steps, _ in runs) > MAX_STEPS:
                raise ValueError(f"score_mod: a program may have {MAX_STEPS} steps")
        header = [one.registers, value[1], len(value[0]), two.registers]
        header += [again[1], len(again[0]), adjoint[1], len(adjoint[0])]
        code = [len(self.kinds), *self.kinds, len(constants), *header]
        for steps, _ in (value, again, adjoint):
            code += [n for step in steps for n in step]
        return Compiled(
            tuple(self.graph.nodes),
            tuple(int(n) for n in code),
            tuple(constants),
            tuple(self.tables),
        )

    def _axis(self, n: int) -> str:
        """What a node depends on beside b and h."""
        if n not in self.axes:
            op, *args = self.graph.nodes[n]
            if op == "input":
                found = "s" if args[0] == "score" else "1"
            elif op == "affine":
                of_q, of_k = args[:2]
                names = {(False, False): "1", (True, False): "q", (False, True): "k"}
                found = names.get((of_q != 0, of_k != 0), "d" if of_q == -of_k else "2")
            else:
                axes = {self._axis(a) for a in arguments_of(self.graph.nodes[n])} - {"1"}
                found = "1" if not axes else axes.pop() if len(axes) == 1 else "2"
                if "s" in axes:
                    found = "s"
            self.axes[n] = found
        return self.axes[n]

    def _is_trained(self, n: int) -> bool:
        if n not in self.trained:
            op, *args = self.graph.nodes[n]
            own = op == "tensor" and self.wants[args[0]]
            arguments = () if op == "detach" else arguments_of(self.graph.nodes[n])
            self.trained[n] = own or any(self._is_trained(a) for a in arguments)
        return self.trained[n]

    def _lower(self, n: int) -> int:
        if n not in self.lowered:
            self.lowered[n] = self._step(n)
        return self.lowered[n]

    def _step(self, n: int) -> int:
        op, *args = self.graph.nodes[n]
        axis = self._axis(n)
        if op == "input" and args[0] == "score":
            return self.steps.add("score")
        if op in ("number", "integer"):
            return self.steps.add(op, args[0])
        if axis in ("1", "q", "k", "d"):
            kind = TableKind.DISTANCE if axis == "d" else TableKind.GRID
            return self._read(n, kind, ("node", n, axis))
        if op == "affine":
            of_q, of_k, offset = args
            rows = self._lower(self.graph.add("affine", of_q, 0, 0))
            columns = self._lower(self.graph.add("affine", 0, of_k, offset))
            return self.steps.add("int_add", rows, columns)
        if op == "tensor":
            if n in self.by_position:
                return self._read(n, TableKind.GRID, ("grid", n))
            return self._gather(n, args[0], args[1:])
        if op == "detach":
            return self.steps.add("detach", self._lower(args[0]))
        return self.steps.add(op, *(self._lower(a) for a in args))

    def _new_table(self, kind: TableKind, what: tuple[int | str, ...]) -> int:
        if what not in self.tables:
            if len(self.tables) == MAX_TABLES:
                raise ValueError(f"score_mod: a program may read {MAX_TABLES} tables")
            self.tables.append(what)
            self.kinds.append(kind)
        return self.tables.index(what)

    def _read(self, n: int, kind: TableKind, what: tuple[int | str, ...]) -> int:
        table = self._new_table(kind, what)
        step = self.steps.add("read", table)
        if self._is_trained(n):
            self.from_table[step] = table
        return step

    def _gather(self, n: int, tensor: int, index: Sequence[int]) -> int:
        if len(index) > MAX_DIMS:
            raise ValueError(
                f"score_mod: a tensor that is read at a function of both q and k may have "
                f"{MAX_DIMS} dimensions, got {len(index)}"
            )
        table = self._new_table(TableKind.GATHERED, ("tensor", tensor))
        at = -1
        for dim, i in enumerate(index):
            at = self.steps.add("place", at, self._lower(i), MAX_DIMS * table + dim)
        step = self.steps.add("gather", at, table)
        if self.wants[tensor]:
            self.from_table[step] = table
        return step
