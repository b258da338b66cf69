"""Records of a run: JSON and CSV, a plot from the CSV, the table of the README from the JSON."""

from __future__ import annotations

import csv
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from omniattn.testing.table import replace_block

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
Row = dict[str, Any]


def machine(threads: int, isa: str) -> dict[str, Any]:
    model = next(
        (line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if "model name" in line),
        platform.processor(),
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "threads": threads,
        "isa": isa,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
        "wait_policy": os.environ.get("OMP_WAIT_POLICY", ""),
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def commit() -> str:
    """The checked-out commit; "unknown" of a copy without its repository, or where git is not."""
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
    """Writes <name>.json, .csv and .png; called after each task, so that a stopped run is kept."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    rows = record["rows"]
    with open(RESULTS / f"{name}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def other_rows(name: str, ops: list[str]) -> list[Row]:
    """What an earlier record of this name says about ops that are not in `ops`."""
    rows: list[Row] = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return [row for row in rows if row["op"] not in ops]


def label(row: Row) -> str:
    return f"{row['op']} {row['case']} {row['dtype']} {SHORT_PASS[row['pass']]}"


SHORT_PASS = {"forward": "fwd", "backward": "bwd", "forward+backward": "fwd+bwd", "step": "step"}


def plot(name: str) -> None:
    """Speed-up over each rival, one line per task; left of 1 is a loss."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with open(RESULTS / f"{name}.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["provider"] != "ours"]
    labels = list(dict.fromkeys(label(row) for row in rows))
    providers = sorted({row["provider"] for row in rows})
    figure, axes = pyplot.subplots(figsize=(9, 0.28 * len(labels) + 1.5))
    for color, provider in enumerate(providers):
        points = [row for row in rows if row["provider"] == provider]
        x = [float(row["ratio"]) for row in points]
        low = [value - float(row["ratio_low"]) for value, row in zip(x, points, strict=True)]
        high = [float(row["ratio_high"]) - value for value, row in zip(x, points, strict=True)]
        y = [labels.index(label(row)) for row in points]
        axes.errorbar(x, y, xerr=(low, high), fmt="o", ms=4, color=f"C{color}", label=provider)
    axes.axvline(1, color="black", lw=0.8)
    axes.set_xscale("log")
    axes.set_yticks(range(len(labels)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.grid(axis="x", which="both", alpha=0.3)
    axes.set_xlabel("times faster than the rival")
    axes.legend(loc="best", fontsize=7)
    figure.tight_layout()
    figure.savefig(RESULTS / f"{name}.png", dpi=110)


def readme_table(name: str) -> str:
    record = json.loads((RESULTS / f"{name}.json").read_text())
    info, rows = record["machine"], record["rows"]
    lines = [
        f"{info['cpu']}, {info['isa']}, torch {info['torch']}, threads: {info['threads']}, load "
        f"before the run: {info['load']}. Ceilings probed in the same process: "
        f"{_ceilings(rows, 'compute')} GFLOP/s, {_ceilings(rows, 'memory')} GB/s from memory. "
        "Ratio: time of the rival over ours, median of interleaved rounds with its 95 % interval; "
        "above 1 we are faster.",
        "",
        "| op, case | dtype | pass | ours | rate | of ceiling | best rival | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for ours in (row for row in rows if row["provider"] == "ours"):
        rivals = [r for r in rows if label(r) == label(ours) and r is not ours]
        best = min(rivals, key=lambda r: r["ratio"], default=None)
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
    return "\n".join([*lines, "", f"![speed-up over each rival](benchmarks/results/{name}.png)"])


def _ceilings(rows: list[Row], bound: str) -> str:
    found = [row["ceiling"] for row in rows if row["bound"] == bound]
    low, high = (f"{f(found):.3g}" for f in (min, max))
    return low if low == high else f"{low} to {high}"


def _rate(row: Row) -> str:
    if row["bound"] == "memory":
        return f"{row['gbytes_per_s']:.3g} GB/s"
    return f"{row['gflops']:.3g} GFLOP/s" if row["gflops"] else "-"


def _share(row: Row) -> str:
    return f"{row['of_ceiling']:.0%}" if row["of_ceiling"] else "-"


def update_readme(name: str) -> None:
    path = ROOT / "README.md"
    path.write_text(replace_block(path.read_text(), "benchmark table", readme_table(name)))
