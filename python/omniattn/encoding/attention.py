"""The options of attention as arguments of its op, and back.

csrc/ops/attention_decode.cpp decodes them:

- mask: kind, a, b and the index of the first side tensor in aux, or -1, of each rule; a layout
  comes first.
- score: kind, the index of the tensor in aux, or -1, and that of the first parameter in params, or
  -1, of each rule.
- params: scale, dropout_p and the parameters of the score rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from torch import Tensor

from omniattn.encoding.masks import LAYOUTS, PARTS, MaskKind, Rule, Rules
from omniattn.encoding.scores import TABLES, ScoreKind, ScoreRule, Table
from omniattn.reference.options import NORMALISERS, TRANSFORMS

#: aux, mask, score, params
Codes: TypeAlias = tuple[list[Tensor], list[int], list[int], list[float]]

_MASK_INTS, _SCORE_INTS = 4, 3


def encode(
    rules: Sequence[Rule], terms: Sequence[ScoreRule], scale: float, dropout_p: float
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
    return aux, mask, score, params


def decode(
    aux: Sequence[Tensor], mask: Sequence[int], score: Sequence[int], params: Sequence[float]
) -> tuple[Rule | None, dict[str, Any]]:
    """The layout, if there is one, and the other options, but for dropout, of the reference."""
    rules: list[Rule] = [
        (kind, a, b, tuple(aux[i : i + 2]) if i >= 0 else ())
        for kind, a, b, i in _groups(mask, _MASK_INTS)
    ]
    if any(rule[0] in PARTS for rule in rules):
        raise NotImplementedError("attention: parts have no second and no forward-mode derivatives")
    layout = rules.pop(0) if rules and rules[0][0] in LAYOUTS else None
    options: dict[str, Any] = {"scale": params[0], "mask": Rules(rules)}
    for kind, i, at in _groups(score, _SCORE_INTS):
        options |= _option(ScoreKind(kind), aux[i] if i >= 0 else None, params[at : at + 2])
    return layout, options


def pages_of(mask: Sequence[int], aux: Sequence[Tensor]) -> Tensor | None:
    """The block table of a paged call."""
    return aux[mask[3]] if mask and mask[0] == MaskKind.PAGED else None


def as_cached(mask: Sequence[int]) -> list[int]:
    """The codes of a paged call for gathered pages; the lengths lie after the block table."""
    return [MaskKind.CACHED, 0, 0, mask[3] + 1, *mask[4:]]


def _groups(codes: Sequence[int], size: int) -> list[Sequence[int]]:
    return [codes[i : i + size] for i in range(0, len(codes), size)]


def _option(kind: ScoreKind, tensor: Tensor | None, parameters: Sequence[float]) -> dict[str, Any]:
    """A score rule as an option of the reference."""
    name = kind.name.lower()
    if name in TRANSFORMS:
        return {name: parameters[0]}
    if name in NORMALISERS:
        return {"normaliser": name}
    if kind in TABLES:
        return {"relative": Table(kind, tensor, tuple(parameters))}
    return {name: tensor}
