"""From where on a level of products is chosen, from measured times, and what records say."""

import json

import pytest
import torch
from level_choice import Measured, Problem, least_madds, measure

from omniattn import testing
from omniattn.config import CPU_ISAS
from omniattn.ops.dispatch import level_choice


def measured(gains):
    """Problems of 1, 10, 100 ... multiply-adds, with these gains of a level over that below."""
    return [
        Measured((10**i,), 10**i, {"avx512": gain, "amx_bf16": 1.0}, 2.0)
        for i, gain in enumerate(gains)
    ]


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ((2, 2, 2), 0),
        ((0.5, 0.9, 0.8), level_choice.NEVER),
        ((0.5, 1.5, 2), 10),
        ((0.5, 2, 0.9, 1.5), 10),  # a small loss between two gains
        ((0.5, 2, 0.2, 1.5), 1000),  # a large one
        ((1.1, 0.5, 2), 100),
    ],
)
def test_a_level_is_used_from_where_it_gains_most_in_total(gains, expected):
    found = measured(gains)
    assert least_madds(found, "amx_bf16") == expected
    for m in found:
        chosen = "amx_bf16" if m.madds >= expected else "avx512"
        assert m.chosen({"amx_bf16": expected}) == chosen


def test_all_levels_of_the_machine_and_torch_are_measured():
    named = {"x": torch.ones(3)}
    found = measure(Problem((3,), 3, named, lambda x: x.exp(), [lambda x: x.sin()] * 2), 0.001)
    assert list(found.levels)[1:] == level_choice.product_levels(torch.bfloat16)
    assert set(found.levels) <= set(testing.isas())
    assert min(*found.levels.values(), found.torchs) > 0


def test_records_are_of_all_ops_and_known_levels():
    for family, record in json.loads(level_choice.RECORDS.read_text()).items():
        assert level_choice.record_of(family) == record
        assert tuple(record["ops"]) == level_choice.OPS
        for op in record["ops"].values():
            assert set(op["least"]) < set(CPU_ISAS)


def test_info_names_what_was_measured(monkeypatch):
    monkeypatch.setattr(level_choice, "_levels_in_use", lambda: ["avx512_bf16", "amx_bf16"])
    assert level_choice.describe(None) == [
        f"{op} uses amx_bf16 (no record of this CPU)" for op in level_choice.OPS
    ]
    ops = {
        "attention": {"least": {"amx_bf16": 5000}},
        "moe_experts": {"least": {"amx_bf16": level_choice.NEVER}},
    }
    assert level_choice.describe({"torch": "2.13.0", "ops": ops}) == [
        f"{words} (measured with torch 2.13.0)"
        for words in (
            "attention uses avx512_bf16 always",
            "attention uses amx_bf16 from 5.0e+03 multiply-adds of a head on",
            "moe_experts uses avx512_bf16 always",
            "moe_experts uses amx_bf16 never",
        )
    ]
