"""docs/accuracy.md says what is measured: every recurrence, within its budgets, at any length."""

import re

import accuracy
import pytest
import torch

from omniattn import testing

SPECS = testing.registry()
LINES = [line for page in accuracy.PAGES.values() for line in page.read_text().splitlines()]
ROWS = [line for line in LINES if line.startswith("| `")]


def rows(columns: int) -> dict[str, list[list[str]]]:
    """By op, the cells of the table with this many."""
    found: dict[str, list[list[str]]] = {}
    for line in ROWS:
        name, *cells = (cell.strip(" `") for cell in line.strip("|").split("|"))
        if len(cells) == columns:
            found.setdefault(name, []).append(cells)
    return found


def test_every_recurrence_is_in_both_tables():
    assert set(rows(5)) == set(rows(3)) == set(accuracy.OPS)
    assert {"gated_linear_attention", "rwkv4", "mlstm", "slstm"} <= set(accuracy.OPS)


def test_errors_are_within_their_budgets():
    for op in rows(3).values():
        for _, *cells in op:
            for cell in cells:
                error, budget = re.fullmatch(r"(\S+) / (\S+)", cell).groups()
                assert 0 < float(error) <= float(budget)


@pytest.mark.parametrize("name", accuracy.OPS)
def test_errors_after_many_tokens(name, tokens=4096):
    """Errors after a sixteenth of the page's tokens do not exceed the errors on the page."""
    ((_, last, loop, *halves),) = rows(5)[name]
    with testing.threads(1):
        measured = accuracy.measure_long(SPECS[name], torch.float32, tokens)
        assert measured.last <= 2 * max(float(last), float(loop))
        for dtype, cell in zip(accuracy.HALVES, halves, strict=True):
            assert accuracy.measure_long(SPECS[name], dtype, tokens).last <= 1.5 * float(cell)


@pytest.mark.slow
@pytest.mark.parametrize("name", accuracy.OPS)
def test_errors_after_65536_tokens(name):
    test_errors_after_many_tokens(name, accuracy.TOKENS)
