"""Times calls against yardsticks and reports which goals are met.

    python benchmarks/goals.py [--group masks scores ...] [--threads 2] [--keep-memory] [--force]
    python benchmarks/goals.py --quick    # one round of each row, nothing is recorded

A row is a call and a yardstick, timed alternately by harness.interleave. A yardstick is, for
example, the dense call times the share of the area that a mask visits, the kernel without the term,
the contiguous cache, or torch. The goal is the maximum ratio of times, or of added memory. Results
are merged by name and CPU family into goals.csv in benchmarks/results; goals.md shows them.

glibc returns freed blocks of more than 32 MiB to the system, so later blocks get cleared pages.
--keep-memory keeps them, as jemalloc and tcmalloc do, for both sides of each row.
"""

from __future__ import annotations

import argparse
import csv
import os
from collections.abc import Callable, Iterator

import harness
import report
import torch
from goal_rows import attention as goal_rows
from goal_rows import caches as goal_caches
from goal_rows import calls as goal_calls
from goal_rows import derivatives as goal_derivatives
from goal_rows import mixers as goal_mixers
from goal_rows import recurrences as goal_recurrences
from goal_rows import scans as goal_scans
from goal_rows import slow_paths as goal_slow_paths
from goal_rows import sparse as goal_sparse
from goal_rows import state_space as goal_state_space
from goal_rows import tiles as goal_tiles
from goal_rows.goal import Row
from goal_rows.models import model_groups
from goal_rows.steps import llama_groups
from system_rows.system import same_results
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from omniattn.ops.dispatch.cpu import cpu_family
from omniattn.testing.spec import SHORT_DTYPE

SECONDS = 1.0
#: Smallest amount of memory that counts.
PAGE_MIB = 1 / 256
GROUPS: dict[str, Callable[[], Iterator[Row]]] = {
    "call": goal_calls.rows,
    "dense": goal_rows.dense_rows,
    "masks": goal_rows.mask_rows,
    "window": goal_rows.window_rows,
    "varlen": goal_rows.varlen_rows,
    "scores": goal_rows.score_rows,
    "score_mod": goal_rows.score_mod_rows,
    "normalizers": goal_rows.normalizer_rows,
    "mla": goal_rows.mla_rows,
    "caches": goal_rows.cache_rows,
    "cache kinds": goal_caches.kind_rows,
    "eviction": goal_caches.eviction_rows,
    "int8 caches": goal_caches.int8_rows,
    "experts": goal_rows.expert_rows,
    "state space": goal_state_space.rows,
    "scans": goal_scans.rows,
    "scan lengths": goal_scans.length_rows,
    "recurrences": goal_recurrences.rows,
    "mixers": goal_mixers.rows,
    "derivatives": goal_derivatives.rows,
    "ranks": goal_recurrences.rank_rows,
    "recurrence lengths": goal_recurrences.length_rows,
    "recurrence tiles": goal_recurrences.tile_rows,
    "patterns": goal_sparse.pattern_rows,
    "pattern lengths": goal_sparse.length_rows,
    "selected": goal_sparse.selected_rows,
    "indexer": goal_sparse.indexer_rows,
    "sparse layers": goal_sparse.layer_rows,
    "sparse decoding": goal_sparse.decode_rows,
    "slow paths": goal_slow_paths.rows,
    "tiles": goal_tiles.rows,
    **llama_groups(),
    **model_groups(),
}


def result(
    row: Row, ceilings: harness.Ceilings, speed: Callable[[], float], memory: str, rounds: int
) -> report.Row:
    share, seconds, machine_speed = timed(row, speed, rounds)
    dtype = SHORT_DTYPE[row.dtype]
    rate = 1e-9 * (row.flops or row.exponentials or row.bytes) / seconds
    ratio = share / row.share
    unit, ceiling = bound(row, ceilings, machine_speed)
    of_ceiling = rate / ceiling if rate else 0.0  # 0: a row without a bound
    mib, of_memory = used_memory(row)
    return {
        "row": row.name,
        "dtype": dtype,
        "pass": row.pass_,
        "against": row.against,
        "memory": memory,
        "family": cpu_family(),
        "milliseconds": round(1e3 * seconds, 4),
        "rate": round(rate, 2) or "",
        "unit": unit,
        "of_ceiling": round(of_ceiling, 3) if rate else "",
        "share": round(row.share, 4),
        "ratio": round(ratio, 5),
        "goal": round(row.goal, 5),
        "least": row.least,
        "mib": mib,
        "memory_ratio": of_memory,
        "memory_goal": row.memory or "",
        "met": ratio <= row.goal
        and of_ceiling >= row.least
        and (not row.memory or of_memory <= row.memory),
        "commit": report.commit(),
    }


def bound(row: Row, ceilings: harness.Ceilings, speed: float) -> tuple[str, float]:
    """Returns the unit of a rate, and the ceiling at the machine's present speed."""
    if row.flops:
        return "GFLOP/s", ceilings.of(SHORT_DTYPE[row.dtype]) * speed
    if row.exponentials:
        return "Gexp/s", ceilings.exponentials * speed
    return "GB/s", ceilings.bandwidth


def timed(row: Row, speed: Callable[[], float], rounds: int) -> tuple[float, float, float]:
    """Returns our time relative to the yardstick's, our seconds, and the machine's speed."""
    if row.same:
        same_results(row.against, *(tensors_of(run()) for run in (row.yardstick, row.run)))
    providers = {"ours": row.run} | ({} if row.seconds else {"yardstick": row.yardstick})
    seconds = SECONDS if rounds > 1 else 0.0
    timing = harness.interleave(providers, seconds, speed, least_rounds=rounds)
    ours = timing.seconds["ours"]
    share = ours / row.seconds if row.seconds else 1 / timing.ratios["yardstick"].median
    return share, ours, timing.speed


def tensors_of(found: object) -> tuple[torch.Tensor, ...]:
    return tuple(t for t in tree_leaves(found) if isinstance(t, torch.Tensor))


def used_memory(row: Row) -> tuple[float | str, float | str]:
    """Returns the MiB that a call adds, also relative to the yardstick; only if it is a goal."""
    if not row.memory:
        return "", ""
    ours, theirs = (harness.peak_memory(run) for run in (row.run, row.yardstick))
    return round(ours, 2), round(ours / (max(theirs, PAGE_MIB) * row.share), 3)


def key(row: report.Row) -> tuple[str, ...]:
    """Returns a row's key: name and CPU family. A new row replaces the record with its key."""
    return tuple(row[name] for name in ("row", "dtype", "pass", "against", "memory", "family"))


def save(rows: list[report.Row]) -> None:
    """Merges rows into the records."""
    path = report.RESULTS / "goals.csv"
    merged = {key(row): row for row in [*report.goals(), *rows]}
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(merged.values())


def line(found: report.Row) -> str:
    rate = ""
    if found["rate"]:
        rate = f"{found['rate']:.3g} {found['unit']}, {found['of_ceiling']:.0%} of the ceiling, "
    memory = f", {found['mib']} MiB, {found['memory_ratio']} of its" if found["memory_goal"] else ""
    return (
        f"{found['row']} {found['dtype']} {report.SHORT_PASS[found['pass']]}: "
        f"{found['milliseconds']:.3g} ms, {rate}{found['ratio']:.4g} of "
        f"{found['against']} (goal {found['goal']:.4g}: {'met' if found['met'] else 'MISSED'})"
        f"{memory}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--group", nargs="*", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--keep-memory", action="store_true", help="of freed blocks")
    parser.add_argument("--force", action="store_true", help="run although the machine is busy")
    parser.add_argument("--quick", action="store_true", help="one round, nothing is recorded")
    parser.add_argument(
        "--rounds", type=int, default=harness.LEAST_ROUNDS, help="minimum rounds of slow rows"
    )
    args = parser.parse_args()
    if args.keep_memory:
        harness.keep_memory()
    isa, ceilings = harness.start(args.threads, args.force or args.quick)
    speed = harness.cpu_speed(ceilings, args.threads, isa)
    for group in args.group:
        for row in GROUPS[group]():
            memory = "kept" if args.keep_memory else "returned"
            found = result(row, ceilings, speed, memory, 1 if args.quick else args.rounds)
            if not args.quick:
                save([found])
            tqdm.write(line(found))


if __name__ == "__main__":
    main()
