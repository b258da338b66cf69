"""Encodes attention's options as arguments of its op, and decodes them.

csrc/ops/attention/attention_rules.cpp decodes them, too:

- mask: per rule its kind, a, b and the index of its first side tensor in aux, or -1. A layout is
  the first rule, OWN_KERNELS the last one.
- score: per rule its kind, the index of its tensor in aux, or -1, and the index of its first
  parameter in params, or -1. A program is the last rule, followed by its code.
- params: scale, dropout_p and the parameters of the score rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from omniattn.encoding.masks import LAYOUTS, PARTS, MaskKind, Rule, Rules
from omniattn.encoding.options import (
    ALL_NORMALIZERS,
    TABLES,
    TRANSFORMS,
    EncodedRows,
    ScoreKind,
    ScoreRule,
    Table,
)
from omniattn.encoding.score_program import Domain, Program, domain_of

#: aux, mask, score, params
Codes: TypeAlias = tuple[list[Tensor], Sequence[int], Sequence[int], Sequence[float]]

_MASK_INTS, _SCORE_INTS = 4, 3


def encode(
    rules: Sequence[Rule],
    terms: Sequence[ScoreRule],
    scale: float,
    dropout_p: float,
    program: Program | None = None,
) -> Codes:
    aux: list[Tensor] = []
    mask: list[int] = []
    for kind, a, b, tensors in rules:
        mask += [kind, a, b, len(aux) if tensors else -1]
        aux += tensors
    score: list[int] = []
    params = [scale, dropout_p]
    for kind, side, parameters in terms:
        score += [kind, -1 if side is None else len(aux), len(params) if parameters else -1]
        aux += () if side is None else (side,)
        params += parameters
    if program is not None:
        score += [ScoreKind.PROGRAM, len(aux), len(params), *program.code]
        aux += program.tables
        params += program.constants
    return aux, mask, score, params


def after_layout(layout: Rule, mask: Sequence[int]) -> list[int]:
    """Prepends a layout to codes of rules without tensors; aux has only the layout's tensors."""
    kind, a, b, _ = layout
    return [kind, a, b, 0, *mask]


def with_own_kernels(mask: Sequence[int]) -> list[int]:
    """Makes the codes of a call that takes no kernel of torch."""
    return [*mask, MaskKind.OWN_KERNELS, 0, 0, -1]


def decode(
    aux: Sequence[Tensor],
    mask: Sequence[int],
    score: Sequence[int],
    params: Sequence[float],
    sizes: tuple[int, int],
) -> tuple[Rule | None, dict[str, Any]]:
    """Returns the layout, or None, and the reference's options except dropout.

    `sizes`: Tq and Tk of the tensors.
    """
    rules: list[Rule] = [
        (kind, a, b, tuple(aux[i : i + 2]) if i >= 0 else ())
        for kind, a, b, i in _groups(mask, _MASK_INTS)
        if kind != MaskKind.OWN_KERNELS
    ]
    layout = rules.pop(0) if rules and rules[0][0] in LAYOUTS else None
    options: dict[str, Any] = {"scale": params[0], "mask": Rules(rules)}
    domain = _domain(layout, *sizes)
    for n in range(0, len(score), _SCORE_INTS):
        kind, i, at = score[n : n + _SCORE_INTS]
        if kind == ScoreKind.PROGRAM:
            code = score[n + _SCORE_INTS :]
            tables = tuple(aux[i : i + code[0]])
            program = Program(tuple(code), tuple(params[at:]), tables, domain)
            return layout, options | {"score_mod": program}
        options |= _option(ScoreKind(kind), aux[i] if i >= 0 else None, params[at : at + 2])
    return layout, options


def split_parts(mask: Sequence[int]) -> tuple[dict[int, tuple[int, int]], Sequence[int]]:
    """Splits off the leading part rules: returns (first, whole) by kind, and the other codes."""
    parts: dict[int, tuple[int, int]] = {}
    while mask and mask[0] in PARTS:
        parts[mask[0]], mask = (mask[1], mask[2]), mask[_MASK_INTS:]
    return parts, mask


def score_sides(score: Sequence[int]) -> dict[int, ScoreKind]:
    """Returns the kinds of the score rules that have a tensor, by its index in aux, except those of
    a program."""
    found: dict[int, ScoreKind] = {}
    for kind, index, _ in _groups(score, _SCORE_INTS):
        if kind == ScoreKind.PROGRAM:
            break  # the program's code follows
        if index >= 0:
            found[index] = ScoreKind(kind)
    return found


def bias_index(score: Sequence[int]) -> int | None:
    """Returns the index of the bias in aux, or None."""
    sides = score_sides(score).items()
    return next((index for index, kind in sides if kind == ScoreKind.BIAS), None)


def _domain(layout: Rule | None, tq: int, tk: int) -> Domain:
    if layout is None:
        return domain_of(tq, tk, None)
    kind, longest_q, longest_k, side = layout
    if kind == MaskKind.PACKED:
        return domain_of(longest_q, longest_k, kind)
    return domain_of(tq, tk * side[0].shape[1] if kind == MaskKind.PAGED else tk, kind)


def pages_of(mask: Sequence[int], aux: Sequence[Tensor]) -> Tensor | None:
    """Returns the block table of a paged call, else None."""
    return aux[mask[3]] if mask and mask[0] == MaskKind.PAGED else None


def as_cached(mask: Sequence[int]) -> list[int]:
    """Returns a paged call's codes for gathered pages; in aux, lengths follow the block table."""
    return [MaskKind.CACHED, 0, 0, mask[3] + 1, *mask[4:]]


def _groups(codes: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (codes[i : i + size] for i in range(0, len(codes), size))


def _option(kind: ScoreKind, tensor: Tensor | None, parameters: Sequence[float]) -> dict[str, Any]:
    """Converts a score rule to an option of the reference."""
    name = kind.name.lower()
    if name in TRANSFORMS:
        return {name: parameters[0]}
    if name in ALL_NORMALIZERS:
        return {"normalizer": name}
    if kind in TABLES:
        return {"relative": Table(kind, tensor, tuple(parameters))}
    if kind in (ScoreKind.RELATIVE_KEYS, ScoreKind.RELATIVE_QUERIES):
        assert tensor is not None
        return {name: EncodedRows(tensor, int(parameters[0]))}
    return {name: tensor}
