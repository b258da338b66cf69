"""Numbers that C++ and Python share are the same."""

import re
from pathlib import Path

import pytest

from omniattn import config
from omniattn.cli import info
from omniattn.encoding.masks import BLOCK, LAYOUTS, MAX_RULES, PARTS, MaskKind
from omniattn.encoding.options import ScoreKind
from omniattn.encoding.score_program import ProgramOp
from omniattn.functional.attention import _common as _attention
from omniattn.functional.masks import base as _mask
from omniattn.ops.activation import ACTIVATIONS
from omniattn.ops.dispatch import level_choice
from omniattn.ops.gated_norm import GATE_PLACES
from omniattn.ops.recurrence import FEATURE_MAPS

CSRC = Path(__file__).parents[2] / "csrc"


def source(path):
    return re.sub(r"//.*", "", (CSRC / path).read_text())


def enumerators(path, name):
    body = re.search(rf"enum class {name} [^{{]*{{(.*?)}}", source(path), re.S)[1]
    return {key: int(number) for key, number in re.findall(r"(\w+) = (\d+)", body)}


def constant(path, name):
    expression = re.search(rf"constexpr int\d+_t {name} = (.*?);", source(path))[1]
    return eval(re.sub(r"int64_t{(\d+)}", r"\1", expression))


def rules(path):
    """Reads the numbers of an X-macro list such as OMNIATTN_MASK_RULES."""
    found = re.findall(r"rule\([\s\\]*(\w+), (\d+), ", source(path))
    return {name: int(number) for name, number in found}


def program_ops():
    found = re.findall(r"\bop\((\w+), (\d+), \d,", source("semantics/score_program.h"))
    return {name: int(number) for name, number in found}


def isa_levels():
    table = re.findall(r"\blevel\((\w+), [^,]+,[^,]+,[^)]*\)", source("runtime/isa.h"))
    return {name: number for number, name in enumerate(table)}


def by_name(kinds):
    renamed = {"window": "window_bottom_right"}
    return {renamed.get(kind.name.lower(), kind.name.lower()): int(kind) for kind in kinds}


@pytest.mark.parametrize(
    ("native", "python"),
    [
        (
            rules("semantics/mask_rules.h"),
            by_name(set(MaskKind) - {*LAYOUTS, *PARTS, MaskKind.OWN_KERNELS}),
        ),
        (enumerators("semantics/sequences.h", "LayoutKind"), by_name(LAYOUTS)),
        (enumerators("semantics/sequences.h", "PartKind"), by_name(PARTS)),
        (
            rules("semantics/score_rules.h"),
            {kind.name.lower(): int(kind) for kind in ScoreKind},
        ),
        (program_ops(), {op.name.lower(): int(op) for op in ProgramOp}),
        (rules("semantics/activation_rules.h"), ACTIVATIONS),
        (enumerators("kernels/norm/gated_norm.h", "GatePlace"), GATE_PLACES),
        (
            enumerators("semantics/linear_attention.h", "FeatureMap"),
            {name: number for number, name in enumerate(FEATURE_MAPS)},
        ),
        (
            enumerators("runtime/measured_isa.h", "MeasuredOp"),
            {name: number for number, name in enumerate(level_choice.OPS)},
        ),
        (
            isa_levels(),
            {name: number for number, name in enumerate(config.CPU_ISAS)},
        ),
    ],
    ids=[
        "masks",
        "layouts",
        "parts",
        "scores",
        "programs",
        "activations",
        "gates",
        "features",
        "measured",
        "isas",
    ],
)
def test_enums_match(native, python):
    assert native == python


def test_the_rule_that_wants_our_kernels_matches():
    assert constant("ops/attention/attention.h", "kOwnKernels") == MaskKind.OWN_KERNELS


def test_every_isa_is_explained():
    assert tuple(info._MEANING) == config.CPU_ISAS


def test_constants_match():
    assert constant("semantics/mask_rules.h", "kPatternBlock") == BLOCK
    assert constant("semantics/mask.h", "kMaxMaskRules") == MAX_RULES
    assert constant("semantics/mask_rule.h", "kMaskParamLimit") == _attention.LONGEST + 1
    tile = [
        constant("kernels/attention/attention_sizes_cpu.h", name)
        for name in ("kQueryBlock", "kKeyBlock")
    ]
    assert tuple(tile) == _mask.TILE
