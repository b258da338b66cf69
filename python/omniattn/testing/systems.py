"""Rows of docs/systems.csv: each system of the specification, and where it is found.

A cell lists names, separated by spaces. It is "-" where the column cannot apply to this kind of
row, and empty where something is still to be made.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, fields
from pathlib import Path

__all__ = ["SECTIONS", "SystemRow", "read_systems", "system_table"]

_ALL = ("functions", "modules", "models", "tests", "benchmarks", "pages")
_COLUMNS: dict[str, tuple[str, ...]] = {
    "layer": _ALL,
    "stack": _ALL[1:],  # of layers, without a function of its own
    "tool": ("models", "tests", "pages"),  # calculator, part of the training, comparison
    "text": ("tests", "pages"),  # page or notebook
}
#: First letter of an id -> title and kind of its rows.
SECTIONS = {
    "A": ("Dense attention", "layer"),
    "S": ("Sparse attention and caches", "layer"),
    "L": ("Linear attention and recurrences", "layer"),
    "M": ("State-space models", "layer"),
    "P": ("Positions", "layer"),
    "F": ("Norms, feed-forward layers and experts", "layer"),
    "N": ("Models", "stack"),
    "C": ("Training, calculators, comparisons and pages", "tool"),
    "R": ("Newest mixers", "layer"),
}
#: Rows of another kind than that of their section.
_KINDS = {
    **dict.fromkeys(("S10", "M12", "R13", "R14"), "stack"),
    **dict.fromkeys(("A36", "R30"), "tool"),
    **dict.fromkeys(("C4", "C8", "C13", "C14"), "layer"),
    **dict.fromkeys(("C10", "C12", "C21", "C22", "C23", "C24", "C25"), "text"),
}
_HEADS = ("id", "system", "functions", "modules", "models, tools", "test", "benchmark", "page")


@dataclass(frozen=True)
class SystemRow:
    """Names of a system, by column.

    Args:
        id: id in the specification.
        system: title.
        functions: names in `omniattn.functional`, its masks and scores.
        modules: names in `omniattn.modules`.
        models: presets, names in `omniattn.models`, or dotted names below `omniattn`.
        tests: "file::function", below tests/.
        benchmarks: "op:label", the case of a row of benchmarks/system_rows, or "goals:group".
        pages: "file" or "file#heading", relative to docs/.
    """

    id: str
    system: str
    functions: tuple[str, ...]
    modules: tuple[str, ...]
    models: tuple[str, ...]
    tests: tuple[str, ...]
    benchmarks: tuple[str, ...]
    pages: tuple[str, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that apply to the kind of this row."""
        return _COLUMNS[_KINDS.get(self.id, SECTIONS[self.id[0]][1])]

    @property
    def lacking(self) -> tuple[str, ...]:
        """Columns that apply and are empty."""
        return tuple(name for name in self.columns if not getattr(self, name))


def read_systems(path: Path) -> list[SystemRow]:
    """Reads the rows.

    Raises:
        ValueError: the columns are others, or "-" is not where a column cannot apply.
    """
    names = [field.name for field in fields(SystemRow)]
    with open(path, encoding="utf-8", newline="") as file:
        lines = csv.DictReader(file, strict=True)
        if lines.fieldnames != names:
            raise ValueError(f"{path}: columns must be {names}, got {lines.fieldnames}")
        return [_row(line) for line in lines]


def _row(line: dict[str, str]) -> SystemRow:
    cells = {name: tuple(line[name].split()) for name in _ALL}
    row = SystemRow(
        line["id"],
        line["system"],
        **{name: () if cell == ("-",) else cell for name, cell in cells.items()},
    )
    absent = {name for name, cell in cells.items() if cell == ("-",)}
    if absent != set(_ALL) - set(row.columns):
        raise ValueError(f"row {row.id}: the columns {row.columns} apply, the others must be '-'")
    return row


def system_table(path: Path) -> str:
    """Returns a table for each section, with links to tests and pages."""
    rows = read_systems(path)
    parts = []
    for letter, (title, _) in SECTIONS.items():
        lines = [_line(row) for row in rows if row.id[0] == letter]
        head = (f"| {' | '.join(_HEADS)} |", "|" + "---|" * len(_HEADS))
        parts.append("\n".join((f"## {title}", "", *head, *lines)))
    return "\n\n".join(parts)


def _line(row: SystemRow) -> str:
    cells = (_cell(row, name) for name in _ALL)
    return f"| {row.id} | {row.system} | {' | '.join(cells)} |"


def _cell(row: SystemRow, name: str) -> str:
    found: tuple[str, ...] = getattr(row, name)
    if not found:
        return "awaited" if name in row.columns else "-"
    if name == "tests":
        return ", ".join(f"[`{_short(test)}`](../tests/{test.split('::')[0]})" for test in found)
    if name == "pages":
        return ", ".join(f"[{Path(page.split('#')[0]).stem}]({page})" for page in found)
    return ", ".join(f"`{each}`" for each in found)


def _short(test: str) -> str:
    return test.split("::")[1].removeprefix("test_")
