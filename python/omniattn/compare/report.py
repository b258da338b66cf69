"""Tables of a comparison."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from omniattn.compare.budget import Sized
from omniattn.compare.cells import Cell, Result
from omniattn.compare.norms import WARMUPS
from omniattn.compare.settings import Settings

Results = Sequence[tuple[Cell, Result]]


@dataclass(frozen=True)
class Table:
    """Table of a report.

    Args:
        title: heading.
        note: sentence below the heading.
        columns: heads of the columns.
        rows: cells of the rows.
    """

    title: str
    note: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @property
    def markdown(self) -> str:
        """The heading, the note and the table in Markdown."""
        lines = [f"## {self.title}", "", self.note, "", _row(self.columns)]
        lines += [_row(["---"] * len(self.columns)), *map(_row, self.rows)]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Report:
    """Result of a comparison.

    Args:
        folder: folder of the files.
        tables: name -> table.
        results: all cells with their results.
        markdown: text of compare.md.
    """

    folder: Path
    tables: dict[str, Table]
    results: Results
    markdown: str


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def of_part(results: Results, part: str) -> dict[tuple[str, str], list[Result]]:
    """Returns (model, task) -> results of all seeds of a part."""
    found: dict[tuple[str, str], list[Result]] = {}
    for cell, result in results:
        if cell.part == part:
            found.setdefault((cell.model, cell.task), []).append(result)
    return found


def names(pairs: Iterable[tuple[str, str]], place: int) -> list[str]:
    """Returns the models (0) or tasks (1) of pairs, each once."""
    return list(dict.fromkeys(pair[place] for pair in pairs))


def spread(values: Sequence[float], form: str = ".3f") -> str:
    """Formats the mean, and with several values the standard deviation."""
    mean = format(statistics.fmean(values), form)
    return f"{mean} ± {statistics.stdev(values):{form}}" if len(values) > 1 else mean


def report(folder: Path, sized: Sequence[Sized], settings: Settings, results: Results) -> Report:
    """Returns the tables of all results."""
    tables = {"models": _models(sized)}
    for part, make in _TABLES.items():
        if found := of_part(results, part):
            tables |= make(found, settings)
    machine = f"{processor()}, threads: {torch.get_num_threads()}, torch {torch.__version__}"
    head = [
        "# Comparison",
        "",
        f"Budget: {settings.budget}. Text: {settings.steps} steps of {settings.batch} x "
        f"{settings.length} bytes; {settings.layers} layers; seeds: "
        f"{', '.join(map(str, settings.seeds))}. {machine}.",
        "",
        "![figures](compare.png)",
        "",
    ]
    if len(settings.seeds) > 1:
        head += ["Numbers are means over the seeds ± their standard deviations.", ""]
    markdown = "\n".join([*head, *(table.markdown for table in tables.values())])
    return Report(folder, tables, results, markdown)


def processor() -> str:
    """Returns the name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    known = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(known, platform.processor() or platform.machine())


def _models(sized: Sequence[Sized]) -> Table:
    rows = []
    for model in sized:
        config: Any = model.config
        block = config.block(0)
        hidden = "-" if block.mlp is None else f"{getattr(block.mlp, 'hidden_dim', '-')}"
        rows.append(
            (
                model.name,
                f"{model.parameters:,}",
                f"{model.flops / 1e6:.3f}",
                f"{config.dim}",
                hidden,
            )
        )
    return Table(
        "Models",
        "Operations are those of training, per token, in 10^6.",
        ("model", "parameters", "operations", "width", "hidden width"),
        tuple(rows),
    )


Found = dict[tuple[str, str], list[Result]]


def _billions(count: float) -> str:
    """Formats a count in 10^9, with three digits below 100."""
    return f"{count / 1e9:,.0f}" if count >= 1e11 else f"{count / 1e9:.3g}"


def _losses(found: Found, settings: Settings) -> dict[str, Table]:
    rows = []
    for (model, _), results in found.items():
        steps = len(results[0]["losses"])
        rows.append(
            (
                model,
                spread([r["held_out"][-1][1] for r in results]),
                spread([r["tokens_per_second"] for r in results], ",.0f"),
                spread([sum(r["seconds"]) for r in results], ".1f"),
                _billions(results[0]["flops_per_step"] * steps),
            )
        )
    table = Table(
        "Loss",
        "Held-out loss in nats per byte after the last step; operations in 10^9.",
        ("model", "loss", "tokens/s", "seconds", "operations"),
        tuple(rows),
    )
    return {"loss": table}


def _decode(found: Found, settings: Settings) -> dict[str, Table]:
    rows = []
    lengths = names(found, 1)
    for model in names(found, 0):
        cells = [found[model, length] for length in lengths]
        states = [c[0]["bytes"] for c in cells]
        speeds = [[r["tokens_per_second"] for r in c] for c in cells]
        rows.append(
            (
                model,
                *("-" if n is None else f"{n / 1024:,.1f}" for n in states),
                *("-" if s[0] is None else spread(s, ",.0f") for s in speeds),
            )
        )
    stateless = "" if all(row[1] != "-" for row in rows) else " A mixer with - keeps no state."
    table = Table(
        "Memory and decoding",
        "KiB of the states of one sequence, and tokens per second of one sequence (the fastest of "
        f"some tokens), after so many tokens.{stateless}",
        ("model", *(f"KiB, {n}" for n in lengths), *(f"tokens/s, {n}" for n in lengths)),
        tuple(rows),
    )
    return {"decode": table}


def _recall(found: Found, settings: Settings) -> dict[str, Table]:
    tasks, models = names(found, 1), names(found, 0)
    rows = []
    for model in models:
        cells = []
        for task in tasks:
            results = found[model, task]
            steps = max(r["steps"] for r in results)
            accuracy = spread([100 * r["accuracy"] for r in results], ".1f")
            early = f" ({steps})" if steps < settings.recall_steps else ""
            cells.append(f"{accuracy}{early}")
        rows.append((model, *cells))
    chances = (f"{100 * found[models[0], task][0]['chance']:.1f}" for task in tasks)
    rows.append(("chance", *chances))
    note = (
        f"Right answers in percent after at most {settings.recall_steps} steps; in parentheses the "
        "step after which all answers were right."
    )
    tables = {"recall": Table("Recall", note, ("model", *tasks), tuple(rows))}
    if "needle" in tasks:
        tables["needle"] = _needle(found, models)
    return tables


def _needle(found: Found, models: Sequence[str]) -> Table:
    distances = [distance for distance, _ in found[models[0], "needle"][0]["distances"]]
    rows = []
    for model in models:
        results = found[model, "needle"]
        curves = zip(*([100 * a for _, a in r["distances"]] for r in results), strict=True)
        rows.append((model, *(spread(list(values), ".0f") for values in curves)))
    return Table(
        "Needle by distance",
        "Right answers in percent by the number of tokens between the needle and the question.",
        ("model", *(f"{distance:.0f}" for distance in distances)),
        tuple(rows),
    )


def tests(found: Found) -> dict[str, list[list[list[float]]]]:
    """Returns position encoding -> pairs of length and loss of all seeds."""
    curves: dict[str, list[list[list[float]]]] = {}
    for results in found.values():
        for result in results:
            for name, points in result["tests"].items():
                curves.setdefault(name, []).append(points)
    return curves


def _positions(found: Found, settings: Settings) -> dict[str, Table]:
    curves = tests(found)
    lengths = [length for length, _ in next(iter(curves.values()))[0]]
    rows = []
    for name, runs in curves.items():
        losses = zip(*([loss for _, loss in points] for points in runs), strict=True)
        rows.append((name, *(spread(list(values)) for values in losses)))
    table = Table(
        "Positions",
        f"Trained on {lengths[0]:.0f} bytes; loss of the same last {lengths[0]:.0f} bytes with "
        "contexts of other lengths.",
        ("positions", *(f"{length:.0f}" for length in lengths)),
        tuple(rows),
    )
    return {"positions": table}


def _norms(found: Found, settings: Settings) -> dict[str, Table]:
    def mean(results: Sequence[Result], key: str, layer: int) -> str:
        values = [r[key][layer] for r in results if r[key] is not None]
        return f"{statistics.fmean(values):.3g}" if values else "-"

    rows = []
    for placement in names(found, 0):
        for warmup in WARMUPS:
            results = found[placement, warmup]
            held_out = [r["held_out"] for r in results if r["held_out"] is not None]
            gradients = (mean(results, key, i) for key in ("first", "last") for i in (0, -1))
            rows.append(
                (placement, warmup, spread(held_out) if held_out else "diverged", *gradients)
            )
    table = Table(
        "Placement of norms",
        f"Held-out loss after {settings.norm_steps} steps of {settings.norm_layers} layers, and "
        "norms of the gradients of the first and the last layer, before training and after it.",
        (
            *("norm", "schedule", "loss", "first layer, before", "last layer, before"),
            *("first layer, after", "last layer, after"),
        ),
        tuple(rows),
    )
    return {"norms": table}


_TABLES: dict[str, Callable[[Found, Settings], dict[str, Table]]] = {
    "loss": _losses,
    "decode": _decode,
    "recall": _recall,
    "positions": _positions,
    "norms": _norms,
}
