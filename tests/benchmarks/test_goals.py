"""Goals: rows by family of CPUs, yardsticks that are held against ours, and what is counted."""

import csv

import goals
import harness
import pytest
import report
import torch
from goal_rows import goal
from goal_rows import products as goal_products
from goal_rows import recurrences as goal_recurrences
from goal_rows import sparse as goal_sparse


def row(**fields):
    run = fields.pop("run", lambda: torch.ones(2))
    yardstick = fields.pop("yardstick", lambda: torch.ones(2))
    return goal.Row("case", "forward", run, yardstick, "other", 1.0, **fields)


@pytest.fixture
def found():
    ceilings = harness.Ceilings({"f32": 100.0}, 10.0, {"f32": "f32"})
    return lambda row: goals.result(row, ceilings, lambda: 1.0, "returned", 1)


def test_a_row_takes_the_place_of_its_own_family_only(found, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    for family in ("ice_lake", "zen3", "zen3"):
        monkeypatch.setattr(goals, "cpu_family", lambda family=family: family)
        goals.save([found(row(flops=1.0))])
    assert [kept["family"] for kept in report.goals()] == ["ice_lake", "zen3"]


def test_every_recorded_row_is_named_once_and_of_a_family():
    rows = report.goals()
    assert len({goals.key(row) for row in rows}) == len(rows)
    assert all(row["family"] for row in rows)
    with open(report.RESULTS / "goals.csv", newline="") as file:
        assert {len(line) for line in csv.reader(file)} == {len(rows[0])}


def test_a_yardstick_with_other_results_is_not_timed(found):
    wrong = row(yardstick=lambda: torch.zeros(2), same=True)
    with pytest.raises(AssertionError):
        found(wrong)
    assert found(row(same=True))["ratio"] > 0


def test_a_yardstick_that_takes_long_is_called_once(found):
    calls = []
    fields = goal.called_once(lambda: calls.append(1) or torch.ones(2))
    assert found(row(same=True, **fields))["ratio"] > 0
    assert calls == [1]


def test_a_row_without_a_bound_has_no_rate(found):
    assert found(row())["rate"] == found(row())["of_ceiling"] == ""


def test_memory_is_a_goal_too(found):
    large = row(run=lambda: torch.ones(1 << 22), memory=0.5)
    kept = found(large)
    assert kept["mib"] >= 15.5  # Linux adds up to 64 pages a thread to its count late
    assert not kept["met"]


def test_products_of_the_chunk_form():
    """The multiply-adds of RECURRENCE's derivation, of one token."""
    shape, k, v, c = (1, 1, 1, 48), 16, 48, 8
    forward, both = goal_products.delta(shape, k, c).values()
    assert forward == 2 * (3 * k * v + c * (k + v))
    assert both - forward == 2 * (7 * k * v + 3 * c * k + 2.5 * c * v)
    assert goal_products.plain(shape, k, c)["forward"] == 2 * (2 * k * v + c * (k + v) / 2)


@pytest.mark.parametrize("op", ["rwkv6", "rwkv7", "gated_linear_attention"])
def test_loops_over_tokens_compute_the_same(op):
    from omniattn import functional

    names = {"rwkv6": ("w", "u"), "rwkv7": ("a", "b", "w")}.get(op, ("channels",))
    token = {"rwkv6": goal_recurrences.rwkv6_token, "rwkv7": goal_recurrences.rwkv7_token}
    named = goal_recurrences.inputs(5, 8, *names, batch=2, heads=3)
    scale = {"scale": 1.0}
    if op.startswith("rwkv"):
        named, scale = goal_recurrences._read(named), {}
    loop = goal_recurrences.loop(
        token.get(op, goal_recurrences.gated_token), *[n for n in names if n == "u"]
    )
    torch.testing.assert_close(loop(**named), getattr(functional, op)(**named, **scale))


ONE_SOFTMAX = [name for name in goal_sparse.patterns() if not name.startswith("local 256 and")]


@pytest.mark.parametrize("name", ONE_SOFTMAX)
def test_patterns_see_what_their_masks_say(name):
    pattern, length = goal_sparse.patterns()[name], 1024
    q = torch.zeros(1, length, 4, 64)
    identity = torch.eye(length)[None, :, None].expand(1, length, 4, length)
    seen = pattern.call(q, q, identity, **pattern.options) > 0
    assert int(seen.sum()) == pattern.pairs(length, 4)
