"""omniattn calc: parameters, operations, memory and times of models, as tables, JSON or plots."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from omniattn.calculate.parallel import parallel
from omniattn.calculate.patterns import pattern_counts
from omniattn.calculate.roofline import DEVICES
from omniattn.calculate.table import DEFAULT_CONTEXT, binary, report, rows, scaled
from omniattn.cli.config_file import read_config
from omniattn.cli.errors import CommandError, require, writing
from omniattn.figures import new_figure, save_figure
from omniattn.models import ModelConfig
from omniattn.training import TrainConfig


def run(args: argparse.Namespace) -> int:
    """Prints the numbers of one model, of several side by side, or of patterns."""
    names = [*args.models, *args.compare]
    if not names and not args.patterns:
        raise CommandError("needs a model, --compare or --patterns")
    if args.plot is not None:
        require("matplotlib")
    if args.device is not None:
        device = DEVICES[args.device]
        args.peak = args.peak or device.peak_flops / 1e12
        args.bandwidth = args.bandwidth or device.bandwidth / 1e9
        args.link = args.link or device.link / 1e9
    if (args.peak is None) != (args.bandwidth is None):
        raise CommandError("--peak and --bandwidth must be given together")
    found = {name: _report(name, args) for name in dict.fromkeys(names)}
    if args.json:
        print(json.dumps(_json(found, args), indent=2))
    else:
        _print(found, args)
    if args.plot is not None:
        with writing(args.plot):
            plot_models(found, args.plot)
        if not args.json:
            print(f"wrote {args.plot}")
    return 0


def _report(name: str, args: argparse.Namespace) -> dict[str, Any]:
    ceilings = {}
    if args.peak is not None:
        ceilings = {"peak_flops": args.peak * 1e12, "bandwidth": args.bandwidth * 1e9}
    source: str | ModelConfig = name
    path, _, variable = name.rpartition(":")
    if path.endswith(".py"):
        found = read_config(Path(path), variable)
        source = found.model_config if isinstance(found, TrainConfig) else found
    try:
        result = report(
            source,
            args.context,
            batch=args.batch,
            source_tokens=args.source,
            dtype=args.dtype,
            **ceilings,
        )
        if args.mesh is not None:
            result["mesh"] = _of_mesh(source, result["context"], args)
        return result
    except (ValueError, NotImplementedError) as error:
        raise CommandError(f"{name}: {error}") from error


def _of_mesh(source: str | ModelConfig, context: int, args: argparse.Namespace) -> dict[str, Any]:
    """Returns the numbers of a rank of a mesh."""
    timed = args.peak is not None and args.link is not None
    cost = parallel(
        source,
        args.mesh,
        batch=args.batch,
        length=context,
        accumulate=args.accumulate,
        dtype=args.dtype,
        peak_flops=args.peak * 1e12 if timed else None,
        link=args.link * 1e9 if timed else None,
    )
    return dict(vars(cost))


def _json(found: dict[str, dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {"models": found}
    if args.patterns:
        counts = pattern_counts(args.context or DEFAULT_CONTEXT)
        result["patterns"] = [dict(vars(count)) for count in counts]
    return result


def _print(found: dict[str, dict[str, Any]], args: argparse.Namespace) -> None:
    if found:
        first = next(iter(found.values()))
        contexts = {one["context"] for one in found.values()}
        tokens = " to ".join(f"{n:,}" for n in sorted(contexts))
        print(f"{first['batch']} x {tokens} tokens, {first['dtype']}")
        _table(found)
    if args.patterns:
        length = args.context or DEFAULT_CONTEXT
        print(f"patterns of {length:,} tokens")
        print(f"{'pattern':<24}{'sizes':<30}{'pairs':>16}{'density':>10}{'last':>10}")
        for c in pattern_counts(length):
            print(f"{c.name:<24}{c.sizes:<30}{c.pairs:>16,}{c.density:>10.2%}{c.last:>10,}")


def _table(found: dict[str, dict[str, Any]]) -> None:
    """Prints one column for each model, with a row for each number that any of them has."""
    columns = [_keyed(rows(one)) for one in found.values()]
    labels: list[tuple[str, str]] = []
    for column in columns:
        for key in column:
            if key not in labels:
                place = max((labels.index(k) for k in labels if k[0] == key[0]), default=None)
                labels.insert(len(labels) if place is None else place + 1, key)
    width = max(len(label) for _, label in labels) + 2
    widths = [
        max(len(name), *(len(text) for text in column.values())) + 3
        for name, column in zip(found, columns, strict=True)
    ]
    heads = [f"{name:<{w}}" for name, w in zip(found, widths, strict=True)]
    print("".join([" " * width, *heads]).rstrip())
    for section, label in labels:
        cells = [
            f"{column.get((section, label), '-'):<{w}}"
            for column, w in zip(columns, widths, strict=True)
        ]
        print("".join([f"{label:<{width}}", *cells]).rstrip())


def _keyed(table: Any) -> dict[tuple[str, str], str]:
    """Returns the rows by section and label; an indented row belongs to the section above it."""
    found: dict[tuple[str, str], str] = {}
    section = ""
    for label, text in table:
        section = section if label.startswith(" ") else label
        found[section, label] = text
    return found


#: Plots of models: title, unit, and the number or None.
_BARS: tuple[tuple[str, Any, Any], ...] = (
    ("parameters", scaled, lambda r: r["parameters"]["total"]),
    ("operations of a forward", scaled, lambda r: r["flops"]["forward"]),
    ("bytes of weights", binary, lambda r: r["weight_bytes"]),
    ("bytes of caches", binary, lambda r: r.get("cache", {}).get("total")),
)


def plot_models(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Draws bars of parameters, operations and memory for each model, and of a rank of a mesh."""
    names = list(found)
    ranks = [one["mesh"] for one in found.values() if "mesh" in one]
    lines = 3 if ranks else 2
    figure = new_figure(figsize=(9, 0.8 * lines * (1 + len(found))))
    grid = figure.subplots(lines, 2).flatten()
    if ranks:
        _stacked(grid[4], names, [rank["traffic"] for rank in ranks], "bytes that a rank sends")
        grid[4].xaxis.set_major_formatter(lambda x, _: binary(x))
        timed = any(rank["seconds"] for rank in ranks)
        if timed:
            seconds = [rank["seconds"] for rank in ranks]
            _stacked(grid[5], names, seconds, "seconds of a step, nothing overlapped")
        else:
            states = [{"weights, gradients, moments": rank["state_bytes"]} for rank in ranks]
            _stacked(grid[5], names, states, "bytes of a rank's state")
            grid[5].xaxis.set_major_formatter(lambda x, _: binary(x))
    for axes, (title, unit, number) in zip(grid[:4], _BARS, strict=True):
        values = [number(one) or 0 for one in found.values()]
        bars = axes.barh(names, values, color="tab:blue")
        texts = [unit(value) if value else "none" for value in values]
        axes.bar_label(bars, texts, padding=3, fontsize="small")
        axes.set_title(title, fontsize="medium")
        axes.set_xlim(0, 1.35 * max(values) or 1)
        axes.set_xticks([])
        axes.invert_yaxis()
    save_figure(figure, path)


def _stacked(axes: Any, names: list[str], parts: list[dict[str, float]], title: str) -> None:
    """Draws a bar of parts for each name."""
    begins = [0.0] * len(names)
    for kind in sorted({kind for one in parts for kind in one}):
        values = [one.get(kind, 0) for one in parts]
        axes.barh(names, values, left=begins, label=kind)
        begins = [begin + value for begin, value in zip(begins, values, strict=True)]
    axes.set_title(title, fontsize="medium")
    axes.set_xlim(0, 1.4 * max(begins) or 1)  # with room for the legend
    axes.legend(fontsize="small", loc="upper right")
    axes.tick_params("x", labelsize="small")
    axes.locator_params("x", nbins=4)
    axes.invert_yaxis()
