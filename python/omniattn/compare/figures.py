"""Figure of a comparison: one row of plots for each part."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from omniattn.compare.norms import WARMUPS
from omniattn.compare.report import Found, Report, names, of_part, tests
from omniattn.figures import new_figure, save_figure


def draw(report: Report, path: Path) -> None:
    """Draws all parts of a report into one file."""
    found = {part: of_part(report.results, part) for part in _ROWS}
    rows = [(part, results) for part, results in found.items() if results]
    figure = new_figure(figsize=(11, 3.2 * len(rows)))
    groups = figure.subfigures(len(rows), 1, squeeze=False)[:, 0]
    for group, (part, results) in zip(groups, rows, strict=True):
        title = report.tables[part].title
        if (seeds := len(next(iter(results.values())))) > 1:
            title += f" ({seeds} seeds: means, and the range of all)"
        group.suptitle(title, fontsize="medium", fontweight="bold")
        _ROWS[part](group, results)
    save_figure(figure, path, dpi=80)


def _mean(curves: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.fmean(values) for values in zip(*curves, strict=True)]


def _band(axes: Any, x: Sequence[float], curves: Sequence[Sequence[float]], **style: Any) -> None:
    """Draws the mean, and between the least and largest value of the seeds a band."""
    (line,) = axes.plot(x, _mean(curves), lw=1.3, **style)
    if len(curves) > 1:
        columns = list(zip(*curves, strict=True))
        low, high = [min(c) for c in columns], [max(c) for c in columns]
        axes.fill_between(x, low, high, alpha=0.2, color=line.get_color(), lw=0)


def _ticks(axis: Any, places: Sequence[float]) -> None:
    """Marks these places with plain numbers, also on a logarithmic axis."""
    axis.set_ticks(places, [f"{place:.0f}" for place in places])
    axis.set_ticks([], minor=True)


def _plain(axis: Any) -> None:
    """Writes plain numbers on a logarithmic axis, within a decade also at the minor ticks."""
    low, high = axis.get_view_interval()
    axis.set_major_formatter("{x:,.4g}")
    if high < 10 * low:
        axis.set_minor_formatter("{x:,.4g}")


def _losses(figure: Any, found: Found) -> None:
    plots = figure.subplots(1, 3, sharey=True)
    for (model, _), results in found.items():
        steps = [step for step, _ in results[0]["held_out"]]
        curves = [[loss for _, loss in r["held_out"]] for r in results]
        time = _mean([[0.0, *accumulate(r["seconds"])] for r in results])
        per_step = results[0]["flops_per_step"] / 1e9
        _band(plots[0], steps, curves, label=model)
        _band(plots[1], [time[step] for step in steps], curves)
        _band(plots[2], [per_step * step for step in steps], curves)
    labels = "step", "seconds", "10^9 operations"
    for axes, label in zip(plots, labels, strict=True):
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    plots[0].set_ylabel("held-out loss (nats per byte)")
    plots[0].legend(fontsize="x-small")


def _decode(figure: Any, found: Found) -> None:
    memory, speed = figure.subplots(1, 2)
    lengths = [int(n) for n in names(found, 1)]
    for place, model in enumerate(names(found, 0)):
        cells = [found[model, str(n)] for n in lengths]
        if cells[0][0]["bytes"] is None:
            continue  # the next ones keep the colors that they have in the other plots
        style = {"color": f"C{place}", "marker": "o"}
        speeds = [[r["tokens_per_second"] for r in results] for results in cells]
        memory.plot(lengths, [r[0]["bytes"] / 1024 for r in cells], label=model, **style)
        _band(speed, lengths, list(zip(*speeds, strict=True)), **style)
    for axes, label in ((memory, "KiB of states"), (speed, "tokens per second")):
        axes.set(xscale="log", yscale="log", xlabel="tokens before", ylabel=label)
        _ticks(axes.xaxis, lengths)
        _plain(axes.yaxis)
        axes.grid(alpha=0.3)
    memory.legend(fontsize="x-small")


def _recall(figure: Any, found: Found) -> None:
    tasks, models = names(found, 1), names(found, 0)
    bars, hybrids = figure.subplots(1, 2, width_ratios=(3, 2))
    plain = [model for model in models if "@" not in model]
    width = 0.8 / len(plain)
    for place, model in enumerate(plain):
        values = [[100 * r["accuracy"] for r in found[model, task]] for task in tasks]
        at = [i + width * (place - len(plain) / 2 + 0.5) for i in range(len(tasks))]
        means = [statistics.fmean(v) for v in values]
        spans = [[m - min(v) for m, v in zip(means, values, strict=True)]]
        spans += [[max(v) - m for m, v in zip(means, values, strict=True)]]
        errors = spans if any(map(any, spans)) else None
        bars.bar(at, means, width, yerr=errors, label=model)
    bars.set_xticks(range(len(tasks)), tasks)
    for i, task in enumerate(tasks):
        chance = 100 * found[models[0], task][0]["chance"]
        ends = (i - 0.45, i + 0.45)
        bars.plot(ends, (chance, chance), "k:", lw=1.3, label=None if i else "chance")
    bars.set(ylabel="right answers (%)", ylim=(0, 105))
    bars.legend(fontsize="x-small")
    for task in tasks:
        points = sorted(
            (_share(model, models), [100 * r["accuracy"] for r in found[model, task]])
            for model in models
            if _share(model, models) >= 0
        )
        if points:
            curves = list(zip(*(values for _, values in points), strict=True))
            _band(hybrids, [share for share, _ in points], curves, marker="o", label=task)
    hybrids.set(xlabel="share of attention layers (%)", ylim=(-2, 102))
    hybrids.legend(fontsize="x-small")
    hybrids.grid(alpha=0.3)


def _share(model: str, models: Sequence[str]) -> float:
    """Returns the share of attention layers in percent, -1 for mixers of no hybrid."""
    mixed = {name.partition("@")[0] for name in models if "@" in name}
    base, at, ratio = model.partition("@")
    if not mixed:
        return -1
    if at:
        n, m = map(int, ratio.split(":"))
        return 100 * m / (n + m) if base == sorted(mixed)[0] else -1
    return 0 if base == sorted(mixed)[0] else 100 if base == "llama" else -1


def _positions(figure: Any, found: Found) -> None:
    plots = figure.subplots(1, 2, sharey=True)
    for name, runs in tests(found).items():
        scaled = name.startswith("RoPE, ")
        lengths = [length for length, _ in runs[0]]
        curves = [[loss for _, loss in points] for points in runs]
        for axes, drawn in zip(plots, (not scaled, scaled or name == "RoPE"), strict=True):
            if drawn:
                _band(axes, lengths, curves, marker="o", label=name)
    for axes in plots:
        axes.set(xscale="log", xlabel="bytes of context")
        _ticks(axes.xaxis, lengths)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small")
    plots[0].set_ylabel("loss of the last bytes")


def _norms(figure: Any, found: Found) -> None:
    before, after, losses = figure.subplots(1, 3)
    for place, model in enumerate(names(found, 0)):
        for warmup in WARMUPS:
            results, color = found[model, warmup], f"C{place}"
            style = {"color": color, "ls": "-" if warmup == WARMUPS[0] else "--"}
            if warmup == WARMUPS[0]:
                first = [r["first"] for r in results]
                _band(before, range(1, len(first[0]) + 1), first, label=model, **style)
            last = [r["last"] for r in results if r["last"] is not None]
            if last:
                _band(after, range(1, len(last[0]) + 1), last, **style)
                _band(
                    losses,
                    range(1, len(results[0]["losses"]) + 1),
                    [r["losses"] for r in results if r["last"] is not None],
                    **style,
                )
    before.set(xlabel="layer", yscale="log", title="gradient norm, before training")
    after.set(xlabel="layer", yscale="log", title="after; dashed: no warm-up")
    losses.set(xlabel="step", title="training loss")
    before.legend(fontsize="x-small")
    for axes in (before, after):
        _ticks(axes.xaxis, range(1, len(first[0]) + 1))
        _plain(axes.yaxis)
    for axes in (before, after, losses):
        axes.grid(alpha=0.3)
        axes.title.set_fontsize("small")


_ROWS: dict[str, Callable[[Any, Found], None]] = {
    "loss": _losses,
    "decode": _decode,
    "recall": _recall,
    "positions": _positions,
    "norms": _norms,
}
