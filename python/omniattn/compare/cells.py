"""Results of a comparison, one file each, so that a rerun continues where it stopped."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from omniattn.checks.arguments import shown

#: Values of JSON.
Result = dict[str, Any]


class FolderError(ValueError):
    """Raised if a folder holds results that do not belong to a comparison."""


@dataclass(frozen=True)
class Cell:
    """Unit of work: one model, task and seed.

    Args:
        part: part of the report.
        model: name of the model or variant.
        task: name of the task, or an empty string.
        seed: seed of weights and data.
        settings: everything else that determines the result; plain values.
        compute: returns the result, plain values.
    """

    part: str
    model: str
    task: str
    seed: int
    settings: Result
    compute: Callable[[], Result]

    @property
    def name(self) -> str:
        """Name of the file."""
        words = (self.part, self.task, self.model, str(self.seed))
        return "_".join(re.sub(r"[^\w@.-]+", "-", word) for word in words if word)

    def __str__(self) -> str:
        seed = f"seed {self.seed}"
        return ", ".join(word for word in (self.part, self.task, self.model, seed) if word)


def described(value: Any) -> str:
    """Formats a config by its type and the fields that differ from their defaults.

    Stored results stay valid if a later version of a config gains a field, and in another process:
    functions are given by their names, since their repr has an address.
    """
    if isinstance(value, tuple):
        return f"({', '.join(map(described, value))})"
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if not is_dataclass(value):
        return repr(value)
    given = []
    for field in fields(value):
        made = field.default_factory
        usual = field.default if made is MISSING else made()
        content = getattr(value, field.name)
        if field.repr and content != usual:
            given.append(f"{field.name}={described(content)}")
    return f"{type(value).__qualname__}({', '.join(given)})"


def read(folder: Path, cell: Cell) -> Result | None:
    """Returns the stored result of a cell, or None if there is none.

    Raises:
        FolderError: the result is of other settings, or the file is damaged.
    """
    path = folder / "cells" / f"{cell.name}.json"
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise FolderError(f"compare: {path} is damaged; delete it to compute it again") from error
    wanted = json.loads(json.dumps(cell.settings))
    if stored["settings"] != wanted:
        names = [n for n in wanted if stored["settings"].get(n) != wanted[n]]
        name = (names or ["settings"])[0]
        raise FolderError(
            f"compare: {folder} holds results of {cell} with "
            f"{name}={shown(stored['settings'].get(name))}, "
            f"got {name}={shown(wanted.get(name))}; give another folder"
        )
    result: Result = stored["result"]
    return result


def write(folder: Path, cell: Cell, result: Result) -> None:
    """Stores a result; an interruption leaves no part of a file."""
    path = folder / "cells" / f"{cell.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    text = json.dumps({"settings": cell.settings, "result": result}, indent=1)
    draft.write_text(text + "\n", encoding="utf-8")
    draft.replace(path)


def complete(
    folder: Path, cells: Sequence[Cell], *, progress: bool = True
) -> list[tuple[Cell, Result]]:
    """Computes all cells that the folder lacks, and returns all results in order."""
    from tqdm import tqdm

    names = [cell.name for cell in cells]
    assert len(set(names)) == len(names), "names of cells must differ"
    found = [read(folder, cell) for cell in cells]  # first, so that errors come before the work
    missing = [place for place, result in enumerate(found) if result is None]
    # disable=None: no bar if stdout is not a terminal; each cell prints a line instead
    with tqdm(
        total=len(cells),
        initial=len(cells) - len(missing),
        unit="cell",
        file=sys.stdout,
        disable=None if progress else True,
    ) as bar:
        for place in missing:
            cell = cells[place]
            bar.set_description_str(str(cell))
            if progress and bar.disable:
                print(f"{place + 1}/{len(cells)}: {cell}", flush=True)
            try:
                result = json.loads(json.dumps(cell.compute()))
            except FloatingPointError as error:
                raise FloatingPointError(
                    f"compare: {cell}: {error}; a lower lr may help"
                ) from error
            write(folder, cell, result)
            found[place] = result
            bar.update()
    return [(cell, result) for cell, result in zip(cells, found, strict=True) if result is not None]
