"""Records of benchmark runs as JSON and CSV, and pages and figures made from them.

    python benchmarks/report.py [--check]

In benchmarks/results, each record <name>.json has a figure and a page <name>.md of all its rows,
and goals.csv the page goals.md. docs/benchmarks.md and docs/goals.md summarize them. --check
reports those that are out of date and writes none.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from omniattn.ops.dispatch.cpu import cpuinfo
from omniattn.testing import registry
from omniattn.testing.table import replace_block

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
GOALS_PAGE = ROOT / "docs" / "goals.md"
Row = dict[str, Any]


def machine(threads: int, isa: str) -> dict[str, Any]:
    return {
        "cpu": cpuinfo().get("model name", platform.processor()),
        "cores": os.cpu_count(),
        "threads": threads,
        "isa": isa,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
        "wait_policy": os.environ.get("OMP_WAIT_POLICY", ""),
    }


def commit() -> str:
    """Returns the commit: OMNIATTN_COMMIT, or the checked-out one, or "unknown" without either."""
    if given := os.environ.get("OMNIATTN_COMMIT"):
        return given
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        )
    except FileNotFoundError:
        return "unknown"
    if head.returncode:
        return "unknown"
    dirty = subprocess.run([*git, "diff", "--quiet", "HEAD"], capture_output=True)
    return head.stdout.strip() + ("-dirty" if dirty.returncode else "")


def save(name: str, record: dict[str, Any]) -> None:
    """Writes <name>.json and .csv; called after each task, so that an aborted run is kept."""
    record["machine"]["date"] = time.strftime("%Y-%m-%d")
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    rows = record["rows"]
    with open(RESULTS / f"{name}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def other_rows(name: str, ops: list[str]) -> list[Row]:
    """Returns the rows of ops not in `ops` from an earlier record of this name, if there is one."""
    if not (RESULTS / f"{name}.json").exists():
        return []
    return [row for row in read(name)["rows"] if row["op"] not in ops]


def label(row: Row) -> str:
    return f"{row['op']} {row['case']} {row['dtype']} {SHORT_PASS[row['pass']]}"


SHORT_PASS = {"forward": "fwd", "backward": "bwd", "forward+backward": "fwd+bwd", "step": "step"}


#: Kind of baseline -> providers. A provider that is not listed is a kind of its own.
KINDS = {
    "torch's op": ("aten", "chunked", "cudnn", "flash", "grouped"),
    "torch.compile, flex_attention": ("compiled", "flex"),
    "eager formula or model": ("eager", "hf", "loop", "math", "sort"),
}
#: Titles of families, and of ops shown separately from their family.
TITLES = {
    "attention_varlen": "attention, packed sequences",
    "attention_cached": "attention, decoding on a cache",
    "attention_int8": "attention, decoding on a cache",
    "attention_weights": "attention, weights and selection",
    "select_attention": "attention, weights and selection",
    "dsa_indexer": "attention, selected blocks of keys",
    "dsa_indexer_loss": "attention, selected blocks of keys",
    "moba_attention": "attention, selected blocks of keys",
    "nsa_attention": "attention, selected blocks of keys",
    "routed_block_attention": "attention, selected blocks of keys",
    "selected_attention": "attention, selected blocks of keys",
    "selective_attention": "attention, weights and selection",
    "forgetting_attention": "attention, weights and selection",
    "path_attention": "attention, weights and selection",
    "wall_attention": "attention, weights and selection",
    "stick_breaking_attention": "attention, weights and selection",
    "softpick_attention": "attention, weights and selection",
    "sparsemax_attention": "attention, weights and selection",
    "multi_token_attention": "attention, weights and selection",
    "parallax_attention": "attention, weights and selection",
    "norm": "norms",
    "rope": "rotary embeddings",
    "activation": "gated activations",
    "ffn": "feed-forward layers",
    "gemm": "linear",
    "loss": "losses",
    "moe": "mixture of experts",
    "topk": "top-k",
    "random": "dropout and noise",
    "system": "layers and compositions",
}


def by_family(rows: list[Row]) -> dict[tuple[str, str], list[float]]:
    """Returns the speed-ups by family and kind of baseline, one per case and baseline."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row["provider"] == "ours":
            continue
        provider = row["provider"]
        kind = next((kind for kind, names in KINDS.items() if provider in names), provider)
        found.setdefault((title(row["op"]), kind), []).append(row["ratio"])
    return found


def title(op: str) -> str:
    """Returns the family of ops under which an op is shown."""
    family = registry()[op].family if op in registry() else op
    return TITLES.get(op, TITLES.get(family, family))


def read(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return record


def plot(name: str) -> None:
    """Plots the speed-ups of each family over each kind of baseline, a row per pair."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    record = read(name)
    found = by_family(record["rows"])
    kinds = list(dict.fromkeys([*KINDS, *(kind for _, kind in found)]))
    families = list(dict.fromkeys(family for family, _ in found))
    gap = 0.7  # between families, in rows
    height = len(found) + gap * len(families)
    figure, axes = pyplot.subplots(figsize=(9, 0.19 * height + 1.6))
    bottom, middles = 0.0, []
    for number, family in enumerate(families):
        rows = [kind for kind in kinds if (family, kind) in found]
        top, bottom = bottom, bottom + len(rows) + gap
        middles.append((top + bottom) / 2)
        if number % 2:
            axes.axhspan(top, bottom, color="0.95", zorder=0)
        for row, kind in enumerate(rows):
            y = top + row + (1 + gap) / 2
            _draw_row(axes, y, found[family, kind], f"C{kinds.index(kind)}")
    axes.axvline(1, color="black", lw=1)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(ticker.FormatStrFormatter("%gx"))
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.set_yticks(middles, families)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(bottom, 0)
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("speed-up, on a log scale (dot: median of the cases, thick bar: middle half)")
    axes.text(1.01, 1.008, "median (cases)", transform=axes.transAxes, fontsize=8, va="bottom")
    for i, kind in enumerate(kinds):
        axes.plot([], [], "o-", color=f"C{i}", label=f"over {kind}")
    axes.set_title(machine_line(record["machine"]), fontsize=8, loc="left")
    figure.legend(loc="outside upper center", ncols=len(kinds), fontsize=9, frameon=False)
    figure.set_layout_engine("constrained")
    figure.savefig(RESULTS / f"{name}.png", dpi=100, metadata={"Source": digest(record)})
    pyplot.close(figure)


def digest(record: dict[str, Any]) -> str:
    """Returns the digest of the plotted data, stored in the figure so that `--check` can detect a
    figure of another record."""
    shown = [machine_line(record["machine"]), list(by_family(record["rows"]).items())]
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()


def _draw_row(axes: Any, y: float, ratios: list[float], color: str) -> None:
    """Draws the range of the ratios, their middle half and their median."""
    ordered = sorted(ratios)
    median = statistics.median(ordered)
    quarter = len(ordered) // 4
    axes.hlines(y, ordered[0], ordered[-1], color=color, lw=1)
    axes.hlines(y, ordered[quarter], ordered[-1 - quarter], color=color, lw=5, alpha=0.4)
    axes.plot(median, y, "o", ms=6, color=color)
    text = f"{median:.1f}x ({len(ordered)})"
    place = axes.get_yaxis_transform()  # x in axes coordinates, y in data coordinates
    axes.text(1.01, y, text, transform=place, va="center", fontsize=8)


def machine_line(info: dict[str, Any]) -> str:
    parts = [info.get("gpu") or info.get("cpu"), info.get("isa"), f"torch {info['torch']}"]
    if "threads" in info:
        parts.insert(2, f"{info['threads']} threads")
    return ", ".join(str(part) for part in [*parts, info.get("date")] if part)


def record_page(name: str) -> str:
    """Returns benchmarks/results/<name>.md, which shows every row of a record."""
    record = read(name)
    rows = record["rows"]
    lines = [
        f"# `{name}`: {machine_line(record['machine'])}",
        "",
        f"Written by `python benchmarks/report.py` from `{name}.json`; [the columns](README.md). "
        f"Ceilings of this machine: {_ceilings(rows, 'compute')} GFLOP/s, "
        f"{_ceilings(rows, 'memory')} GB/s.",
        "",
        f"![Speed-up of each family over its baselines]({name}.png)",
        "",
        "| family | baseline | cases | median | least | greatest |",
        "|---|---|---|---|---|---|",
    ]
    for (family, kind), ratios in by_family(rows).items():
        low, median, high = (f"{f(ratios):.2f}" for f in (min, statistics.median, max))
        lines.append(f"| {family} | {kind} | {len(ratios)} | {median} | {low} | {high} |")
    lines += [
        "",
        "Every case with its fastest baseline:",
        "",
        "| op, case | dtype | pass | time | rate | of ceiling | fastest baseline | speed-up |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for ours, best in with_fastest(rows):
        against = (
            f"{best['provider']} | {best['ratio']:.2f} [{best['ratio_low']:.2f}, "
            f"{best['ratio_high']:.2f}]"
            if best
            else "- | -"
        )
        lines.append(
            f"| {ours['op']} {ours['case']} | {ours['dtype']} | {SHORT_PASS[ours['pass']]} | "
            f"{ours['milliseconds']:.3g} ms | {_rate(ours)} | {_share(ours)} | {against} |"
        )
    return "\n".join(lines) + "\n"


def with_fastest(rows: list[Row]) -> Iterator[tuple[Row, Row | None]]:
    """Yields our row of each case with the row of its fastest baseline, if it has one."""
    for ours in (row for row in rows if row["provider"] == "ours"):
        others = (row for row in rows if label(row) == label(ours) and row is not ours)
        yield ours, min(others, key=lambda row: row["ratio"], default=None)


def _ceilings(rows: list[Row], bound: str) -> str:
    found = [row["ceiling"] for row in rows if row["bound"] == bound]
    if not found:
        return "-"
    low, high = (f"{f(found):.3g}" for f in (min, max))
    return low if low == high else f"{low} to {high}"


def _rate(row: Row) -> str:
    if row["bound"] == "memory":
        return f"{row['gbytes_per_s']:.3g} GB/s"
    return f"{row['gflops']:.3g} GFLOP/s" if row["gflops"] else "-"


def _share(row: Row) -> str:
    return f"{row['of_ceiling']:.0%}" if row["of_ceiling"] else "-"


def headline(names: list[str]) -> str:
    """Returns the table of docs/benchmarks.md: a row per family of ops, a column per record."""
    ratios: dict[str, dict[str, list[float]]] = {}
    for name in names:
        for ours, best in with_fastest(read(name)["rows"]):
            if best:
                ratios.setdefault(title(ours["op"]), {}).setdefault(name, []).append(best["ratio"])
    lines = [
        f"| ops | {' | '.join(f'`{name}`' for name in names)} |",
        "|---|" + "---|" * len(names),
    ]
    for family, columns in ratios.items():
        cells = (_median(columns.get(name, [])) for name in names)
        lines.append(f"| {family} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _median(ratios: list[float]) -> str:
    if not ratios:
        return "-"
    return f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}], {len(ratios)}"


def goals() -> list[Row]:
    """Returns the rows of goals.csv, as text."""
    path = RESULTS / "goals.csv"
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


#: Kind of yardstick -> prefixes of its names; all others are calls of torch or transformers.
OTHER_CALLS = "torch's ops, transformers, loops"
YARDSTICKS = {
    "sparse attention against dense": ("dense ",),
    "cost per token or pair as sizes grow": ("the same ", "one sequence", "2 windows on"),
    "an option against the call without it": (
        *("a copy of", "as many in", "avx512", "contiguous", "gated_delta_rule", "no function"),
        *("no term", "softmax", "the option", "two calls"),
    ),
}


def _yardstick(row: Row) -> str:
    return next(
        (k for k, names in YARDSTICKS.items() if row["against"].startswith(names)), OTHER_CALLS
    )


def goals_headline(rows: list[Row]) -> str:
    """Returns the table of docs/goals.md: goals met by kind of yardstick and family of CPUs."""
    families = sorted({row["family"] for row in rows})
    lines = [f"| yardstick | {' | '.join(f'`{f}`' for f in families)} |"]
    lines.append("|---|" + "---|" * len(families))
    for kind in (OTHER_CALLS, *YARDSTICKS, "all"):
        found = [row for row in rows if kind in (_yardstick(row), "all")]
        cells = (_met([row for row in found if row["family"] == family]) for family in families)
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _met(rows: list[Row]) -> str:
    return f"{sum(row['met'] == 'True' for row in rows)} of {len(rows)}" if rows else "-"


def goals_rows(rows: list[Row]) -> str:
    """Returns benchmarks/results/goals.md with a table for each family of CPUs."""
    families = sorted({row["family"] for row in rows})
    head = (
        "# Goals by family of CPUs\n\nWritten by `python benchmarks/report.py` from `goals.csv`; "
        "[the columns](README.md).\n\n"
    )
    return head + "\n\n".join(_goals_of(family, rows) for family in families) + "\n"


def _goals_of(family: str, rows: list[Row]) -> str:
    own = [row for row in rows if row["family"] == family]
    lines = [
        f"## `{family}`: {_met(own)} met",
        "",
        "| row | dtype | pass | time | rate | of bound | memory | against | ratio | goal | met |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in own:
        kept = ", freed memory kept" if row["memory"] == "kept" else ""
        rate = f"{float(row['rate']):.3g} {row['unit']}" if row["rate"] else "-"
        bound = f"{float(row['of_ceiling']):.0%}" if row["of_ceiling"] else "-"
        lines.append(
            f"| {row['row']}{kept} | {row['dtype']} | {SHORT_PASS[row['pass']]} | "
            f"{_time(float(row['milliseconds']))} | {rate} | {bound}{_least(row)} | "
            f"{_memory(row)} | {row['against']} | {float(row['ratio']):.3g} | "
            f"{float(row['goal']):.3g} | {'yes' if row['met'] == 'True' else '**no**'} |"
        )
    return "\n".join(lines)


def _least(row: Row) -> str:
    least = float(row["least"])
    return f" [{least:.0%}]" if least else ""


def _memory(row: Row) -> str:
    if not row["memory_goal"]:
        return "-"
    ratio = f"{float(row['memory_ratio']):.2g} [{float(row['memory_goal']):.2g}]"
    return f"{float(row['mib']):.3g} MiB, {ratio}"


def _time(milliseconds: float) -> str:
    return f"{milliseconds:.3g} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.3g} s"


def pages() -> dict[Path, str]:
    """Returns the text of each page that shows records."""
    names = sorted(path.stem for path in RESULTS.glob("*.json"))
    rows = goals()
    return {
        **{RESULTS / f"{name}.md": record_page(name) for name in names},
        RESULTS / "goals.md": goals_rows(rows),
        PAGE: replace_block(PAGE.read_text(), "headline", headline(names)),
        GOALS_PAGE: replace_block(GOALS_PAGE.read_text(), "headline", goals_headline(rows)),
    }


def stale() -> list[Path]:
    """Returns the pages and figures that are out of date."""
    from PIL import Image

    found = [p for p, text in pages().items() if not p.exists() or p.read_text() != text]
    for path in sorted(RESULTS.glob("*.json")):
        figure = path.with_suffix(".png")
        drawn = Image.open(figure).info.get("Source") if figure.exists() else None
        if drawn != digest(read(path.stem)):
            found.append(figure)
    return found


def publish() -> None:
    for path, text in pages().items():
        path.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit 1 if any is out of date")
    if parser.parse_args().check:
        names = ", ".join(str(path.relative_to(ROOT)) for path in stale())
        sys.exit(f"out of date, run python benchmarks/report.py: {names}" if names else 0)
    for path in RESULTS.glob("*.json"):
        plot(path.stem)
    publish()


if __name__ == "__main__":
    main()
