"""Every published form has a row in the benchmark, whose providers compute the same."""

import pytest
from system_rows.rows import OF_OPS, SYSTEMS
from system_rows.system import System, same_results

from omniattn.testing import registry
from omniattn.testing.registry import variants

ROWS = [row for rows in SYSTEMS.values() for row in rows]


def test_every_form_has_a_row():
    assert OF_OPS.keys() | SYSTEMS.keys() == {variant.form for variant in variants()}
    assert not OF_OPS.keys() & SYSTEMS.keys()
    names = [row.case for row in ROWS]
    assert len(names) == len(set(names))


def test_every_op_has_a_row():
    assert not [name for name, spec in registry().items() if not spec.benchmarks]


def test_rows_of_forms_are_timed():
    timed = {(n, b.case.label) for n, spec in registry().items() for b in spec.benchmarks}
    assert not {row for rows in OF_OPS.values() for row in rows} - timed


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.case)
def test_providers_compute_the_same(row: System):
    steps = row.steps()
    want = steps.pop("ours")()
    assert steps
    for name, run in steps.items():
        same_results(name, run(), want)
