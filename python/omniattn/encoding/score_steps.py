"""The steps of a program as nodes: their adjoint, and the registers that they get.

A node is (op, arguments): ops of encoding/score_program.py with ids of earlier nodes, tables and
constants as they are, and ("score",), ("gradient",), that of the value, and ("detach", id).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from omniattn.encoding.score_program import MAX_REGISTERS, Node, ProgramOp


@dataclass
class Graph:
    """Nodes without repetition."""

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
    """Nodes that a step reads."""
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


#: A value that is added to the gradient of a table: op, value, place or -1, table.
Give = tuple[str, int, int, int]


def adjoint_of(steps: Graph, result: int, tables: dict[int, int]) -> tuple[int, list[Give]]:
    """The gradient of the score, and what tables get, by that of `result`."""
    matters: set[int] = set()
    for n in range(result + 1):
        node = steps.nodes[n]
        own = node[0] == "score" or n in tables
        if own or (node[0] != "detach" and any(a in matters for a in reads_of(node))):
            matters.add(n)
    gradients = {result: steps.add("gradient")}
    gives: list[Give] = []
    for n in range(result, -1, -1):
        if n not in gradients or n not in matters:
            continue
        g = gradients[n]
        if n in tables:
            op, *args = steps.nodes[n]
            if op == "read":
                gives.append(("give", g, -1, tables[n]))
            else:
                gives.append(("give_at", g, args[0], tables[n]))
            continue
        for argument, part in _parts(steps, n, g):
            if argument not in matters:
                continue
            known = gradients.get(argument)
            gradients[argument] = part if known is None else steps.add("add", known, part)
    score = steps.known.get(("score",))
    found = None if score is None else gradients.get(score)
    return (steps.number(0.0) if found is None else found), gives


def _parts(s: Graph, y: int, g: int) -> list[tuple[int, int]]:
    """The arguments of node y with what they get of its gradient g."""
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
    """dy / dx; None: there is no gradient."""
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
    return None  # floor, round, trunc, sign, detach and what makes integers


Step = tuple[int, int, int, int, int]


class Allocator:
    """Gives registers to nodes; those before `first_free` belong to the score and its gradient."""

    def __init__(self, nodes: list[Node], constants: list[float], first_free: int) -> None:
        self.nodes = nodes
        self.constants = constants
        self.first_free = self.registers = first_free
        self.free: list[int] = []
        self.place: dict[int, int] = {}

    def run(
        self,
        order: Sequence[int],
        result: int,
        keep: Sequence[int] | set[int],
        gives: Sequence[Give] = (),
    ) -> tuple[list[Step], int]:
        """The steps of nodes in order, then of `gives`; the register of `result` after them.

        What is in `keep` stays in its register for the next run.
        """
        order = [n for n in order if n not in self.place]
        # The step after which a value is not needed, and half a step later for `gives`.
        last: dict[int, float] = {}
        for i, n in enumerate(order):
            last |= dict.fromkeys((n, *reads_of(self.nodes[n])), i)
        last |= dict.fromkeys((result, *keep), len(order))
        pending: dict[int, list[Give]] = {}
        for give in gives:
            ready = max((order.index(n) for n in give[1:3] if n in order), default=-1)
            pending.setdefault(ready, []).append(give)
            for n in give[1:3]:
                last[n] = max(last.get(n, -1), ready + 0.5)
        steps = [self._give(give) for give in pending.get(-1, ())]
        for i, n in enumerate(order):
            steps += self._step(n, last, i)
            steps += [self._give(give) for give in pending.get(i, ())]
            for m in [m for m in self.place if i <= last.get(m, -1) < i + 1]:
                self._release(m)
        return steps, self.place[result]

    def _step(self, n: int, last: dict[int, float], i: int) -> list[Step]:
        op, *args = self.nodes[n]
        if op in ("score", "gradient"):
            self.place[n] = 0 if op == "score" else 1
            return []
        read = reads_of(self.nodes[n])
        at = [self.place[a] for a in read]
        for a in set(read):
            if last[a] == i:
                self._release(a)
        to = self.place[n] = self.free.pop() if self.free else self._new()
        if op in ("number", "integer"):
            operands = [self._constant(float(args[0]))]
        elif op == "read":
            operands = [args[0]]
        elif op == "place":
            operands = [-1 if args[0] < 0 else at[0], at[-1], args[2]]
        elif op == "gather":
            operands = [at[0], args[1]]
        elif op == "detach":
            op, operands = "max", [at[0], at[0]]
        else:
            operands = at
        a, b, c = (*operands, -1, -1, -1)[:3]
        return [(ProgramOp[op.upper()], to, a, b, c)]

    def _give(self, give: Give) -> Step:
        op, value, at, table = give
        if op == "give":
            return (ProgramOp.GIVE, -1, self.place[value], table, -1)
        return (ProgramOp.GIVE_AT, -1, self.place[value], self.place[at], table)

    def _constant(self, x: float) -> int:
        known = [repr(c) for c in self.constants]  # 0.0 is not -0.0, and NaN is NaN
        if repr(x) not in known:
            self.constants.append(x)
            known.append(repr(x))
        return known.index(repr(x))

    def _release(self, n: int) -> None:
        register = self.place.pop(n)
        if register >= self.first_free:
            self.free.append(register)

    def _new(self) -> int:
        if self.registers == MAX_REGISTERS:
            raise ValueError(f"score_mod: a program may keep {MAX_REGISTERS} values at once")
        self.registers += 1
        return self.registers - 1
