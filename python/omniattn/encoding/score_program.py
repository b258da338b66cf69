"""Programs that a score_mod compiles to, interpreted in plain torch.

csrc/semantics/score_program.h is the counterpart for kernels. Steps are (op, to, a, b, c) over
registers, which hold a value per key of a row. A program reads the score, constants and tables.
Values that depend on b, h and only one of q, k and k - q are tables, which torch computes
beforehand (`evaluate`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from omniattn.encoding.masks import MaskKind
from omniattn.encoding.options import Indices, PairMod


class ProgramOp(IntEnum):
    """Ops of steps, numbered as in csrc/semantics/score_program.h."""

    NEG = 0
    ABS = 1
    SIGN = 2
    ADD = 3
    SUB = 4
    MUL = 5
    DIV = 6
    MIN = 7
    MAX = 8
    EXP = 10
    LOG = 11
    SQRT = 12
    TANH = 13
    SIGMOID = 14
    FLOOR = 15
    ROUND = 16
    TRUNC = 20
    SIN = 21
    COS = 22
    ERF = 23
    LOG1P = 24
    EXPM1 = 25
    POW = 26
    LESS = 30
    LESS_EQUAL = 31
    EQUAL = 32
    INT_ADD = 40
    INT_SUB = 41
    INT_MUL = 42
    INT_MIN = 43
    INT_MAX = 44
    INT_AND = 45
    INT_OR = 46
    INT_XOR = 47
    INT_LESS = 48
    INT_LESS_EQUAL = 49
    INT_EQUAL = 50
    INT_FLOOR_DIV = 51
    INT_MOD = 52
    WHERE = 60  # a ? b : c
    TO_FLOAT = 61
    TO_INT = 62
    NUMBER = 63  # constant a
    INTEGER = 64  # constant a
    READ = 65  # reads table a, by position
    PLACE = 66  # place a (0 for -1) plus the offset of index b in dimension c % 4 of table c / 4
    GATHER = 67  # reads table b at place a
    GIVE = 68  # adds a to the gradient of table b, by position
    GIVE_AT = 69  # adds a to the gradient of table c at place b


class TableKind(IntEnum):
    """How a program reads a table."""

    GRID = 0  # (B | 1, Hq | 1, Q | 1, Tk | 1) by position
    DISTANCE = 1  # (B | 1, Hq | 1, 1, Q + Tk - 1) by k - q
    GATHERED = 2  # at places that the program computes


MAX_TABLES, MAX_REGISTERS, MAX_STEPS, MAX_DIMS = 16, 64, 32768, 4
STEP_INTS, _HEADER_INTS = 5, 9


class Domain(NamedTuple):
    """Positions that a program may run at: queries from first_q on, keys from 0 on."""

    first_q: int
    queries: int
    keys: int

    @property
    def distances(self) -> int:
        return max(self.queries + self.keys - 1, 0)

    @property
    def last_q(self) -> int:
        return self.first_q + self.queries - 1


def domain_of(tq: int, tk: int, layout: int | None) -> Domain:
    """Returns the positions of a call, or of its longest sequences; `layout`: a MaskKind."""
    if layout in (MaskKind.CACHED, MaskKind.PAGED):
        return Domain(-tq, tq + tk, tk)
    return Domain(0, tq, tk)


def _floor_div(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(b == 0, 0, a.div(torch.where(b == 0, 1, b), rounding_mode="floor"))


def _mod(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(b == 0, 0, a.remainder(torch.where(b == 0, 1, b)))


#: Eager definition of each op, on lanes. Truth values are bool here.
MEANING: dict[str, Callable[..., Tensor]] = {
    "neg": torch.neg,
    "abs": torch.abs,
    "sign": torch.sign,
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "min": torch.minimum,
    "max": torch.maximum,
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "floor": torch.floor,
    "round": torch.round,
    "trunc": torch.trunc,
    "sin": torch.sin,
    "cos": torch.cos,
    "erf": torch.erf,
    "log1p": torch.log1p,
    "expm1": torch.expm1,
    "pow": torch.pow,
    "less": torch.lt,
    "less_equal": torch.le,
    "equal": torch.eq,
    "int_add": torch.add,
    "int_sub": torch.sub,
    "int_mul": torch.mul,
    "int_min": torch.minimum,
    "int_max": torch.maximum,
    "int_and": torch.bitwise_and,
    "int_or": torch.bitwise_or,
    "int_xor": torch.bitwise_xor,
    "int_less": torch.lt,
    "int_less_equal": torch.le,
    "int_equal": torch.eq,
    "int_floor_div": _floor_div,
    "int_mod": _mod,
}


@dataclass(frozen=True)
class Program(PairMod):
    """Program with its constants and tables, in the form that the op takes."""

    code: tuple[int, ...]  # see csrc/ops/attention/attention_program.cpp
    constants: tuple[float, ...]
    tables: tuple[Tensor, ...]
    domain: Domain

    def of_pairs(self, score: Tensor, first: Indices) -> Tensor:
        """Runs the program on all pairs of score (B, Hq, Tq, Tk)."""
        code = list(self.code)
        kinds = code[1 : 1 + code[0]]
        result, count = code[3 + code[0] : 5 + code[0]]
        at = 1 + code[0] + _HEADER_INTS
        registers: dict[int, Tensor] = {0: score}
        rows = _Rows(self, kinds, first, score)
        for n in range(count):
            op, to, a, b, c = code[at + n * STEP_INTS : at + (n + 1) * STEP_INTS]
            registers[to] = rows.step(ProgramOp(op), a, b, c, registers)
        return registers[result].expand(score.shape)


@dataclass(frozen=True)
class _Rows:
    """Inputs of a program's steps other than registers."""

    program: Program
    kinds: Sequence[int]
    first: Indices
    score: Tensor

    def step(self, op: ProgramOp, a: int, b: int, c: int, registers: dict[int, Tensor]) -> Tensor:
        device, dtype = self.score.device, self.score.dtype
        if op == ProgramOp.NUMBER:
            return torch.tensor(self.program.constants[a], dtype=dtype, device=device)
        if op == ProgramOp.INTEGER:
            return torch.tensor(int(self.program.constants[a]), device=device)
        if op == ProgramOp.READ:
            return as_lanes(self.read(a), dtype)
        if op == ProgramOp.PLACE:
            before = torch.zeros((), dtype=torch.int64, device=device) if a < 0 else registers[a]
            shape = self.program.tables[c // MAX_DIMS].shape
            return place(before, registers[b], shape, c % MAX_DIMS)
        if op == ProgramOp.GATHER:
            return as_lanes(gather(self.program.tables[b], registers[a]), dtype)
        if op == ProgramOp.TO_FLOAT:
            return registers[a].to(dtype)
        if op == ProgramOp.TO_INT:
            return registers[a].to(torch.int64)
        if op == ProgramOp.WHERE:
            return torch.where(registers[a] != 0, registers[b], registers[c])
        meaning = MEANING[op.name.lower()]
        x = registers[a]
        if op.name.startswith("INT_") and x.dtype == torch.bool:
            x = x.to(torch.int64)
        if op in UNARY:
            return meaning(x)
        y = registers[b]
        if op.name.startswith("INT_") and y.dtype == torch.bool:
            y = y.to(torch.int64)
        return meaning(x, y)

    def read(self, n: int) -> Tensor:
        """Returns table n for all pairs of the score."""
        t, (tq, tk) = self.program.tables[n], self.score.shape[2:]
        b, h, q, k = self.first
        t = _narrowed(_narrowed(t, 0, b, self.score), 1, h, self.score)
        if self.kinds[n] == TableKind.GRID:
            t = _narrowed(t, 2, q - self.program.domain.first_q, self.score)
            return _narrowed(t, 3, k, self.score)
        if t.shape[3] == 1:
            return t
        rows = torch.arange(q, q + tq, device=t.device)[:, None]
        columns = torch.arange(k, k + tk, device=t.device)
        return t[:, :, 0][..., columns - rows + self.program.domain.last_q]


def _narrowed(t: Tensor, dim: int, first: int, score: Tensor) -> Tensor:
    """Returns the part of t for the score's entries of `dim`, the first of which is `first`."""
    return t if t.shape[dim] == 1 else t.narrow(dim, first, score.shape[dim])


#: Ops that read one register.
UNARY = frozenset(
    ProgramOp[name.upper()]
    for name in (
        *("neg", "abs", "sign", "exp", "log", "sqrt", "tanh", "sigmoid", "floor", "round"),
        *("trunc", "sin", "cos", "erf", "log1p", "expm1", "to_float", "to_int"),
    )
)


def as_lanes(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts elements of a table to the dtype of registers."""
    if t.dtype == torch.bool:
        return t
    return t.to(dtype) if t.is_floating_point() else t.to(torch.int64)


def place(before: Tensor, index: Tensor, shape: Sequence[int], dim: int) -> Tensor:
    """Adds the offset of `index` in dimension `dim` to places; -1 where out of bounds."""
    size, stride = shape[dim], math.prod(shape[dim + 1 :])
    index = index.to(torch.int64)
    inside = torch.where(index < 0, index + size, index)
    has_place = (before >= 0) & (inside >= 0) & (inside < size)
    return torch.where(has_place, before + inside * stride, -1)


def gather(t: Tensor, at: Tensor) -> Tensor:
    """Reads elements of t at places `at`; gives NaN, or 0 for integers, where a place is -1."""
    outside: Any = math.nan if t.is_floating_point() else 0
    if t.numel() == 0:
        return torch.full(at.shape, outside, dtype=t.dtype, device=t.device)
    # On the CPU, index_select's backward adds in order; that of indexing does not.
    found = t.reshape(-1).index_select(0, at.clamp(min=0).reshape(-1)).reshape(at.shape)
    return torch.where(at < 0, torch.full_like(found, outside), found)


#: (op, *arguments): ids of earlier nodes, or constants of the op.
Node = tuple[Any, ...]


def arguments_of(node: Node) -> tuple[int, ...]:
    """Returns the nodes that a node reads."""
    op, *args = node
    if op in ("input", "affine", "number", "integer"):
        return ()
    return tuple(args[1:]) if op == "tensor" else tuple(args)
