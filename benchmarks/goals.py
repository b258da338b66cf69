"""Times variants against yardsticks, and says which goals are met.

    python benchmarks/goals.py [--group masks scores ...] [--threads 2] [--keep-memory] [--force]

A row is a call and a yardstick, timed in turns by harness.interleave: the dense call times the
share of the area that its mask visits, the kernel without the term, the contiguous cache, torch.
The goal is the most that the call may take of the yardstick's time. Results are merged by name into
benchmarks/results/goals.csv.

glibc gives blocks of more than 32 MiB back to the system when they are freed, which clears the
pages of the next ones. --keep-memory keeps them, as jemalloc and tcmalloc do, for both sides of
each row.
"""

from __future__ import annotations

import argparse
import csv
import os
from collections.abc import Callable, Iterator

import goal_caches
import goal_rows
import goal_scans
import goal_tiles
import harness
import report
from goal_rows import Row
from goal_steps import llama_groups
from tqdm import tqdm

from omniattn.testing.spec import SHORT_DTYPE

SECONDS = 1.0
GROUPS: dict[str, Callable[[], Iterator[Row]]] = {
    "masks": goal_rows.mask_rows,
    "window": goal_rows.window_rows,
    "varlen": goal_rows.varlen_rows,
    "scores": goal_rows.score_rows,
    "score_mod": goal_rows.score_mod_rows,
    "normalisers": goal_rows.normaliser_rows,
    "mla": goal_rows.mla_rows,
    "caches": goal_rows.cache_rows,
    "eviction": goal_caches.eviction_rows,
    "experts": goal_rows.expert_rows,
    "state space": goal_rows.state_space_rows,
    "scans": goal_scans.rows,
    "tiles": goal_tiles.rows,
    **llama_groups(),
}


def result(
    row: Row, ceilings: harness.Ceilings, speed: Callable[[], float], memory: str
) -> report.Row:
    timing = harness.interleave({"ours": row.run, "yardstick": row.yardstick}, SECONDS, speed)
    seconds, dtype = timing.seconds["ours"], SHORT_DTYPE[row.dtype]
    rate = 1e-9 * (row.flops or row.bytes) / seconds
    ratio = 1 / (timing.ratios["yardstick"].median * row.share)
    ceiling = ceilings.of(dtype) * timing.speed if row.flops else ceilings.bandwidth
    of_ceiling = rate / ceiling
    return {
        "row": row.name,
        "dtype": dtype,
        "pass": row.pass_,
        "against": row.against,
        "memory": memory,
        "milliseconds": round(1e3 * seconds, 4),
        "rate": round(rate, 2),
        "unit": "GFLOP/s" if row.flops else "GB/s",
        "of_ceiling": round(of_ceiling, 3),
        "share": round(row.share, 4),
        "ratio": round(ratio, 3),
        "goal": round(row.goal, 3),
        "least": row.least,
        "met": ratio <= row.goal and of_ceiling >= row.least,
        "commit": report.commit(),
    }


def save(rows: list[report.Row]) -> None:
    """Merges rows into the record."""
    path = report.RESULTS / "goals.csv"

    def key(row: report.Row) -> tuple[str, ...]:
        return tuple(row[name] for name in ("row", "dtype", "pass", "against", "memory"))

    old: dict[tuple[str, ...], report.Row] = {}
    if path.exists():
        with open(path, newline="") as file:
            old = {key(row): row for row in csv.DictReader(file)}
    merged = old | {key(row): row for row in rows}
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(merged.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--group", nargs="*", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--keep-memory", action="store_true", help="of freed blocks")
    parser.add_argument("--force", action="store_true", help="run although the machine is busy")
    args = parser.parse_args()
    if args.keep_memory:
        harness.keep_memory()
    isa, ceilings = harness.start(args.threads, args.force)
    speed = harness.cpu_speed(ceilings, args.threads, isa)
    for group in args.group:
        for row in GROUPS[group]():
            found = result(row, ceilings, speed, "kept" if args.keep_memory else "returned")
            save([found])
            tqdm.write(
                f"{found['row']} {found['dtype']} {report.SHORT_PASS[row.pass_]}: "
                f"{found['milliseconds']:.3g} ms, {found['rate']:.3g} {found['unit']}, "
                f"{found['of_ceiling']:.0%} of the ceiling, {found['ratio']:.2f} of "
                f"{found['against']} (goal {found['goal']}: {'met' if found['met'] else 'MISSED'})"
            )


if __name__ == "__main__":
    main()
