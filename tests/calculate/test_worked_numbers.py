"""Every row of docs/worked_numbers.md: the calculators give its exact number."""

import functools
import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs/worked_numbers.md"
ROW = re.compile(r"^\| (\S+) \| (.*) \| (.*)\| `(.+)` \| ([^|`]+) \|$", re.MULTILINE)
ROWS = ROW.findall(PAGE.read_text(encoding="utf-8"))


@functools.cache
def names() -> dict[str, Any]:
    """Names that the code of the page defines."""
    found: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE):
        exec(block, found)
    return found


def agrees(value: Any, exact: Any) -> bool:
    """True if all digits of `exact` are those of `value`."""
    if isinstance(exact, list):
        return len(value) == len(exact) and all(map(agrees, value, exact))
    if isinstance(exact, int):
        return value == exact
    return round(value, len(repr(exact).partition(".")[2])) == exact


def test_every_row_is_read():
    table = [line for line in PAGE.read_text().splitlines() if re.match(r"\| (00\d|-) ", line)]
    assert len(ROWS) == len(table) > 70
    assert {row[0] for row in ROWS} == {"000", "001", "002", "003", "004", "-"}


@pytest.mark.parametrize("row", ROWS, ids=[f"{row[0]}-{row[3][:60]}" for row in ROWS])
def test_row(row):
    *_, expression, exact = row
    value = eval(expression, names())
    assert agrees(value, eval(exact)), f"{expression} is {value}, not {exact}"


@pytest.mark.parametrize(("value", "exact"), [(8, 9), (1.44, 1.5), ([1, 2], [1]), ([0.049], [0.1])])
def test_another_number_is_found(value, exact):
    assert not agrees(value, exact)
