"""Graph of a program's steps: its adjoint, and register allocation.

A node is (op, arguments): an op of encoding/score_program.py with ids of earlier nodes, tables and
constants; or ("score",), ("gradient",), which is the gradient of the result, or ("detach", id).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from omniattn.encoding.score_program import Node, ProgramOp


@dataclass
class Graph:
    """Nodes, without duplicates."""

    nodes: list[Node] = field(default_factory=list)
    known: dict[Node, int] = field(default_factory=dict)

    def add(self, *node: Any) -> int:
        if node not in self.known:
            self.known[node] = len(self.nodes)
            self.nodes.append(node)
        return self.known[node]

    def number(self, x: float) -> int:
        return self.add("number", x)


def reads_of(node: Node) -> tuple[int, ...]:
    """Returns the nodes that a step reads."""
    op, *args = node
    if op in ("score", "gradient", "number", "integer", "read"):
        return ()
    if op == "place":
        return tuple(n for n in args[:2] if n >= 0)
    return tuple(args[:1]) if op == "gather" else tuple(args)


def closure(nodes: Sequence[Node], roots: Sequence[int]) -> set[int]:
    found, left = set(), list(roots)
    while left:
        n = left.pop()
        if n not in found and n >= 0:
            found.add(n)
            left += reads_of(nodes[n])
    return found


#: Contribution to the gradient of a table: (op, value, place or -1, table).
Give = tuple[str, int, int, int]


@dataclass
class Adjoint:
    """Backward steps of a program: the gradient of the score, and contributions to tables."""

    gradient: int
    gives: list[Give]
    #: Node of the program -> nodes and gives that its gradient propagates to.
    of_node: dict[int, tuple[range, list[Give]]]


def adjoint_of(steps: Graph, result: int, tables: dict[int, int]) -> Adjoint:
    """Differentiates the steps in reverse, from the gradient of node `result`."""
    matters: set[int] = set()
    for n in range(result + 1):
        node = steps.nodes[n]
        own = node[0] == "score" or n in tables
        if own or (node[0] != "detach" and any(a in matters for a in reads_of(node))):
            matters.add(n)
    first = len(steps.nodes)
    gradients = {result: steps.add("gradient")}
    of_node: dict[int, tuple[range, list[Give]]] = {}
    for n in range(result, -1, -1):
        gives: list[Give] = []
        if n in gradients and n in matters:
            gives = _turn(steps, n, gradients, matters, tables)
        of_node[n] = range(first, len(steps.nodes)), gives
        first = len(steps.nodes)
    score = steps.known.get(("score",))
    found = None if score is None else gradients.get(score)
    gradient = steps.number(0.0) if found is None else found
    return Adjoint(gradient, [give for _, gives in of_node.values() for give in gives], of_node)


def _turn(
    steps: Graph, n: int, gradients: dict[int, int], matters: set[int], tables: dict[int, int]
) -> list[Give]:
    """Propagates the gradient of node n to its arguments, or gives it to a table."""
    g, (op, *args) = gradients[n], steps.nodes[n]
    if n in tables:
        if op == "read":
            return [("give", g, -1, tables[n])]
        return [("give_at", g, args[0], tables[n])]
    for argument, part in _parts(steps, n, g):
        if argument in matters:
            known = gradients.get(argument)
            gradients[argument] = part if known is None else steps.add("add", known, part)
    return []


def _parts(s: Graph, y: int, g: int) -> list[tuple[int, int]]:
    """Returns arguments of node y, each with its gradient contribution from y's gradient g."""
    op, *args = s.nodes[y]
    add, number = s.add, s.number
    x = args[0] if args else -1
    if op == "where":
        condition, a, b = args
        nothing = number(0.0)
        return [(a, add("where", condition, g, nothing)), (b, add("where", condition, nothing, g))]
    if op in ("add", "sub"):
        return [(x, g), (args[1], g if op == "add" else add("neg", g))]
    if op == "mul":
        return [(x, add("mul", g, args[1])), (args[1], add("mul", g, x))]
    if op == "div":
        part = add("div", g, args[1])
        return [(x, part), (args[1], add("neg", add("mul", part, y)))]
    if op in ("min", "max"):
        a, b = args
        tie, half, nothing = add("equal", a, b), add("mul", g, number(0.5)), number(0.0)
        first = add("less", a, b) if op == "min" else add("less", b, a)
        return [
            (a, add("where", tie, half, add("where", first, g, nothing))),
            (b, add("where", tie, half, add("where", first, nothing, g))),
        ]
    if op == "pow":
        a, b = args
        power = add("pow", a, add("sub", b, number(1.0)))
        at_zero = add("equal", a, number(0.0))
        by_exponent = add("where", at_zero, number(0.0), add("mul", y, add("log", a)))
        return [(a, add("mul", g, add("mul", b, power))), (b, add("mul", g, by_exponent))]
    slope = _slope(s, op, x, y)
    return [] if slope is None else [(x, add("mul", g, slope))]


def _slope(s: Graph, op: str, x: int, y: int) -> int | None:
    """Returns the node of dy / dx, or None for ops without a gradient."""
    add, number = s.add, s.number
    if op == "neg":
        return number(-1.0)
    if op == "abs":
        return add("sign", x)
    if op == "exp":
        return y
    if op == "expm1":
        return add("add", y, number(1.0))
    if op == "log":
        return add("div", number(1.0), x)
    if op == "log1p":
        return add("div", number(1.0), add("add", x, number(1.0)))
    if op == "sqrt":
        return add("div", number(0.5), y)
    if op == "tanh":
        return add("sub", number(1.0), add("mul", y, y))
    if op == "sigmoid":
        return add("mul", y, add("sub", number(1.0), y))
    if op == "sin":
        return add("cos", x)
    if op == "cos":
        return add("neg", add("sin", x))
    if op == "erf":
        bell = add("exp", add("neg", add("mul", x, x)))
        return add("mul", number(2 / math.sqrt(math.pi)), bell)
    return None  # floor, round, trunc, sign, detach and ops with integer results


Step = tuple[int, int, int, int, int]
#: Node to compute, possibly again; contribution to a table; or ("result", node), which ends a run.
Entry = int | Give | tuple[str, int]


def backward_order(
    order: Sequence[int], of_node: dict[int, list[Entry]], at_once: int
) -> list[Entry]:
    """Orders the nodes in `order`, then the entries of each, from the last node to the first.

    At most `at_once` nodes wait for their entries. Longer runs are halved recursively: the first
    half is recomputed after the second is done. A chain of n nodes thus keeps
    `at_once` + log2(n) values (Griewank, 1992, doi:10.1080/10556789208805505).
    """
    if len(order) <= max(at_once, 1):
        return [*order, *(entry for n in reversed(order) for entry in of_node.get(n, ()))]
    half = len(order) // 2
    before, after = order[:half], order[half:]
    return [
        *before,
        *backward_order(after, of_node, at_once),
        *backward_order(before, of_node, at_once),
    ]


def _read_by(nodes: Sequence[Node], entry: Entry) -> tuple[int, ...]:
    if isinstance(entry, int):
        return reads_of(nodes[entry])
    return tuple(n for n in entry[1:3] if isinstance(n, int) and n >= 0)


@dataclass
class Constants:
    """Numbers, without duplicates by repr: 0.0 differs from -0.0, NaN equals NaN."""

    values: list[float] = field(default_factory=list)
    known: dict[str, int] = field(default_factory=dict)

    def index(self, x: float) -> int:
        if repr(x) not in self.known:
            self.known[repr(x)] = len(self.values)
            self.values.append(x)
        return self.known[repr(x)]


@dataclass
class Runs:
    """Steps up to each result, registers of the results, and the number of registers."""

    steps: list[list[Step]]
    results: list[int]
    registers: int


def allocate(
    nodes: Sequence[Node], entries: Sequence[Entry], constants: Constants, first_free: int
) -> Runs:
    """Allocates a register to each value until its last read, and removes unused values.

    Registers before `first_free` belong to the score and its gradient.
    """
    needed: set[int] = set()
    kept: list[tuple[Entry, set[int]]] = []  # with values read for the last time
    for entry in reversed(entries):
        if isinstance(entry, int):
            if entry not in needed:
                continue
            needed.remove(entry)
        read = set(_read_by(nodes, entry))
        kept.append((entry, read - needed))
        needed |= read
    runs = Runs([[]], [], first_free)
    free: list[int] = []
    place = {-1: -1}
    for entry, ends in reversed(kept):
        at = [place[n] for n in _read_by(nodes, entry)]
        free += [place[n] for n in ends if place[n] >= first_free]
        if not isinstance(entry, int):
            if entry[0] == "result":
                runs.results.append(at[0])
                runs.steps.append([])
            else:
                runs.steps[-1].append(_give_step(entry, at))
            continue
        op = nodes[entry][0]
        if op in ("score", "gradient"):
            place[entry] = 0 if op == "score" else 1
            continue
        if not free:
            free.append(runs.registers)
            runs.registers += 1
        place[entry] = free.pop()
        runs.steps[-1].append(_step(nodes[entry], place[entry], at, constants))
    return runs


def _step(node: Node, to: int, at: Sequence[int], constants: Constants) -> Step:
    op, *args = node
    operands = list(at)
    if op in ("number", "integer"):
        operands = [constants.index(float(args[0]))]
    elif op == "read":
        operands = [args[0]]
    elif op == "place":
        operands = [-1 if args[0] < 0 else at[0], at[-1], args[2]]
    elif op == "gather":
        operands = [at[0], args[1]]
    elif op == "detach":
        op, operands = "max", [at[0], at[0]]
    a, b, c = (*operands, -1, -1, -1)[:3]
    return (ProgramOp[op.upper()], to, a, b, c)


def _give_step(give: Any, at: Sequence[int]) -> Step:
    op, _, place, table = give
    if place < 0:
        return (ProgramOp[op.upper()], -1, at[0], table, -1)
    return (ProgramOp[op.upper()], -1, at[0], at[1], table)
