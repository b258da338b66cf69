"""Compiles the nodes of a traced score_mod to a program: tables that torch computes beforehand,
steps for the kernels, and the adjoint of these steps.

A node is (op, arguments): an op of encoding/score_program.py, or

- ("input", name), with name score, b, h, q or k; ("number", x) and ("integer", n)
- ("affine", a, c, n): a q + c k + n, into which sums of positions are folded
- ("tensor", index, one node id per dimension): a read of a captured tensor
- ("detach", id)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from omniattn.encoding.score_program import (
    MAX_DIMS,
    MAX_REGISTERS,
    MAX_STEPS,
    MAX_TABLES,
    Node,
    TableKind,
    arguments_of,
)
from omniattn.encoding.score_steps import (
    Constants,
    Entry,
    Graph,
    Runs,
    adjoint_of,
    allocate,
    backward_order,
    closure,
)

_LINEAR = {"int_add", "int_sub", "int_mul"}
_COMPARISONS = {"int_less", "int_less_equal", "int_equal"}
#: Axes of values that torch computes before the kernels run.
_ONE_AXIS = ("1", "q", "k", "d")


@dataclass(frozen=True, eq=False)
class Compiled:
    """Compiled program without its tables, as the compiler's cache keeps it."""

    nodes: tuple[Node, ...]  # for `evaluate`
    code: tuple[int, ...]
    constants: tuple[float, ...]
    #: One per table: ("node", id, axis) is evaluated, ("grid", node) is a tensor read by position,
    #: ("tensor", index) is used unchanged.
    tables: tuple[tuple[int | str, ...], ...]
    by_position: tuple[int, ...]  # nodes that read a tensor at bare positions, within bounds
    untied: tuple[int, ...]  # nodes that tables need, independent of tensors


class _Fact(NamedTuple):
    """Properties of a node of the trace."""

    axis: str  # dependence other than on b and h: "1" none, "q", "k", "d", "2" or "s", score
    trained: bool  # True if it depends on a tensor whose gradient is wanted
    width: int  # number of registers that suffice to compute it


class _Trace(Graph):
    """Graph that folds arithmetic of positions into affine nodes."""

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
        """Folds sums and multiples of positions into one node, and compares their difference with
        zero instead of two positions with each other."""
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
    """Compiles node `output` of a trace.

    `wants`: per captured tensor, True if its gradient is wanted. `by_position`: nodes of the trace
    that read a tensor at bare positions, within bounds.
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
        self.facts: list[_Fact] = []  # per node of the graph
        self.tables: list[tuple[int | str, ...]] = []
        self.kinds: list[TableKind] = []
        self.lowered: dict[int, int] = {}  # node of the trace -> node of steps
        self.steps = Graph()  # program ops, ("score",) and ("gradient",)
        self.from_table: dict[int, int] = {}  # node of steps that reads a trained table -> table

    def compile(self, output: int) -> Compiled:
        result = self._lower(output)
        nodes, constants = self.steps.nodes, Constants()
        order = sorted(closure(nodes, [result]))
        value = allocate(nodes, [*order, ("result", result)], constants, 1)
        both = self._backward(order, result, constants)
        counts = [len(steps) for steps in (value.steps[0], *both.steps[:2])]
        if max(counts[0], counts[1] + counts[2]) > MAX_STEPS:
            raise ValueError(
                f"score_mod: a program may have {MAX_STEPS} steps, got {counts[0]} for the value "
                f"and {counts[1] + counts[2]} for its gradient"
            )
        header = [value.registers, value.results[0], counts[0], both.registers]
        header += [both.results[0], counts[1], both.results[1], counts[2]]
        code = [len(self.kinds), *self.kinds, len(constants.values), *header]
        for steps in (value.steps[0], *both.steps[:2]):
            code += [n for step in steps for n in step]
        return Compiled(
            tuple(self.graph.nodes),
            tuple(int(n) for n in code),
            tuple(constants.values),
            tuple(self.tables),
            tuple(sorted(self.by_position)),
            self._untied(),
        )

    def _untied(self) -> tuple[int, ...]:
        nodes, tied = self.graph.nodes, set[int]()
        for n, node in enumerate(nodes):
            if node[0] == "tensor" or any(a in tied for a in arguments_of(node)):
                tied.add(n)
        found, left = set[int](), [int(what[1]) for what in self.tables if what[0] == "node"]
        while left:
            n = left.pop()
            if n not in tied:
                found.add(n)
            elif n not in self.by_position:
                left += arguments_of(nodes[n])
        return tuple(sorted(found))

    def _backward(self, order: Sequence[int], result: int, constants: Constants) -> Runs:
        """Allocates the steps of the value and its gradient, with values kept in registers between
        them as far as registers suffice, else recomputed."""
        nodes = self.steps.nodes
        adjoint = adjoint_of(self.steps, result, self.from_table)
        roots = [adjoint.gradient, *(n for give in adjoint.gives for n in give[1:3])]
        wanted = closure(nodes, roots) - set(order)
        of_node: dict[int, list[Entry]] = {
            n: [*(m for m in made if m in wanted), *gives]
            for n, (made, gives) in adjoint.of_node.items()
        }
        of_node[result].insert(0, ("result", result))
        if adjoint.gradient not in {m for made, _ in adjoint.of_node.values() for m in made}:
            of_node[order[0]].append(adjoint.gradient)
        at_once = len(order)
        while True:
            entries = backward_order(order, of_node, at_once)
            runs = allocate(nodes, [*entries, ("result", adjoint.gradient)], constants, 2)
            if runs.registers <= MAX_REGISTERS:
                return runs
            if at_once <= 1:
                raise ValueError(
                    f"score_mod: a program may keep {MAX_REGISTERS} values at once, got "
                    f"{runs.registers}"
                )
            at_once //= 2

    def _fact(self, n: int) -> _Fact:
        while len(self.facts) <= n:  # arguments precede their readers
            self.facts.append(self._find(len(self.facts)))
        return self.facts[n]

    def _find(self, n: int) -> _Fact:
        op, *args = self.graph.nodes[n]
        if op == "input":
            return _Fact("s" if args[0] == "score" else "1", False, 1)
        if op == "affine":
            of_q, of_k = args[:2]
            names = {(False, False): "1", (True, False): "q", (False, True): "k"}
            axis = names.get((of_q != 0, of_k != 0), "d" if of_q == -of_k else "2")
            return _Fact(axis, False, 1)
        facts = [self.facts[a] for a in arguments_of(self.graph.nodes[n])]
        axes = {fact.axis for fact in facts} - {"1"}
        axis = "s" if "s" in axes else "1" if not axes else axes.pop() if len(axes) == 1 else "2"
        trained = op != "detach" and any(fact.trained for fact in facts)
        widths = sorted((fact.width for fact in facts), reverse=True)
        width = 1 if axis in _ONE_AXIS else max((w + i for i, w in enumerate(widths)), default=1)
        return _Fact(axis, trained or (op == "tensor" and self.wants[args[0]]), width)

    def _lower(self, output: int) -> int:
        """Lowers `output` and its dependencies to nodes of steps.

        The argument that needs the most registers comes first (Sethi and Ullman, 1970,
        doi:10.1145/321607.321620).
        """
        left = [output]
        while left:
            n = left[-1]
            missing = [a for a in self._arguments(n) if a not in self.lowered]
            if missing:
                left += sorted(missing, key=lambda a: self._fact(a).width)
                continue
            left.pop()
            if n not in self.lowered:
                self.lowered[n] = self._step(n)
        return self.lowered[output]

    def _arguments(self, n: int) -> tuple[int, ...]:
        """Returns nodes to lower before node n; none if torch evaluates n before kernels run."""
        if self._fact(n).axis in _ONE_AXIS or n in self.by_position:
            return ()
        return arguments_of(self.graph.nodes[n])

    def _step(self, n: int) -> int:
        op, *args = self.graph.nodes[n]
        axis = self._fact(n).axis
        if op == "input" and args[0] == "score":
            return self.steps.add("score")
        if op in ("number", "integer"):
            return self.steps.add(op, args[0])
        if axis in _ONE_AXIS:
            kind = TableKind.DISTANCE if axis == "d" else TableKind.GRID
            return self._read(n, kind, ("node", n, axis))
        if op == "affine":
            of_q, of_k, offset = args
            parts = ("affine", of_q, 0, 0), ("affine", 0, of_k, offset)
            return self.steps.add("int_add", *(self._step(self.graph.add(*part)) for part in parts))
        if op == "tensor":
            if n in self.by_position:
                return self._read(n, TableKind.GRID, ("grid", n))
            return self._gather(args[0], args[1:])
        return self.steps.add(op, *(self.lowered[a] for a in args))

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
        if self._fact(n).trained:
            self.from_table[step] = table
        return step

    def _gather(self, tensor: int, index: Sequence[int]) -> int:
        if len(index) > MAX_DIMS:
            raise ValueError(
                f"score_mod: a tensor that is read at a function of both q and k may have "
                f"{MAX_DIMS} dimensions, got {len(index)}"
            )
        table = self._new_table(TableKind.GATHERED, ("tensor", tensor))
        at = -1
        for dim, i in enumerate(index):
            at = self.steps.add("place", at, self.lowered[i], MAX_DIMS * table + dim)
        step = self.steps.add("gather", at, table)
        if self.wants[tensor]:
            self.from_table[step] = table
        return step
