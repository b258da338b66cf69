"""Runs all checks that need a GPU: launches, correctness, graph capture and speed of each op.

    python benchmarks/gpu.py [--only wrappers timing ...] [--op attention ...] [--budget 540]
    python benchmarks/gpu.py --lease 780 --results FOLDER

The steps, in this order: "wrappers" (PTX wrappers, and one tiny case per op and dtype), "specs"
(OpSpecs against fp64 on the CPU), "graphs" (capture in a CUDA graph), "timing" (against torch's
baselines and other libraries, and against the copy and product speeds of this GPU), "sanitizers"
(compute-sanitizer), "profile" (ncu, and the time of each kernel) and "choices" (each path of ops
that have several). --lease is for a GPU that is lent for some minutes: the stages of
gpu_steps/lease.py, in order of worth, each with a share of the time. Cases run in processes forked
from this one, which imports everything and never uses the GPU, so that a crash, a hang or a broken
GPU context ends only its own process. Each row is written to benchmarks/results/<name of the
GPU>.jsonl before the next case starts, with the commit that OMNIATTN_COMMIT names if there is no
git. --dry-run runs the CPU's part with small sizes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpu_steps.steps import Options

Row = dict[str, Any]


def main() -> None:
    # `import omniattn` looks for a GPU, by NVML: a process that has initialised CUDA cannot fork.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import report
    from gpu_steps import lease
    from gpu_steps import steps as gpu_steps

    steps = list(gpu_steps.STEPS)
    ops = [name for name, spec in gpu_steps.registry().items() if spec.cuda != "planned"]
    properties = gpu_steps.CHECKED
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=steps, default=steps, metavar="STEP")
    parser.add_argument("--op", nargs="+", choices=ops, default=ops, metavar="OP")
    parser.add_argument("--property", nargs="+", choices=properties, default=properties)
    parser.add_argument("--budget", type=float, default=540, help="seconds in all")
    parser.add_argument("--lease", type=float, help="seconds of a loan; plans all steps")
    parser.add_argument("--timeout", type=float, default=60, help="seconds per case")
    parser.add_argument("--seconds", type=float, default=1, help="seconds of timing per case")
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--compiled", action="store_true", help="time compiled baselines too")
    parser.add_argument("--first", action="store_true", help="only the first case of each op")
    parser.add_argument("--results", type=Path, default=report.RESULTS, help="folder")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with small sizes")
    parser.add_argument("--here", action="store_true", help="in this process: for ncu, cuda-gdb")
    args = parser.parse_args()
    options = gpu_steps.Options(
        ops=tuple(args.op),
        properties=tuple(args.property),
        dry_run=args.dry_run,
        here=args.here,
        compiled=args.compiled,
        seconds=0.01 if args.dry_run else args.seconds,
        timeout=args.timeout,
        workers=args.workers,
        first=args.first,
    )
    start = time.monotonic()
    chosen = [step for step in steps if step in args.only]
    if args.here:
        run_here(options, chosen)
    else:
        if args.lease:
            plan = list(lease.plan(options, start, args.lease))
        else:
            plan = [(step, options, start + args.budget) for step in chosen]
        code = run(options, plan, args.results)
        sys.stdout.flush()
        os._exit(code)  # waits for no process that a GPU holds


def run_here(options: Options, steps: list[str]) -> None:
    from gpu_steps import steps as gpu_steps

    for step in steps:
        with gpu_steps.ready(options, step):
            for item in gpu_steps.items(options, step):
                print(step, *item.labels.values(), flush=True)
                item.run()


def run(options: Options, plan: list[tuple[str, Options, float]], folder: Path) -> int:
    """Runs steps, each with its options until its end; returns 1 if anything failed, else 0."""
    from gpu_steps.workers import run_items

    for start in ("fork", "spawn"):
        context = multiprocessing.get_context(start)
        found: list[Row] = []
        run_items(context, options, "machine", plan[-1][2], found.append)
        if "forked subprocess" not in found[0].get("message", ""):
            break  # NVML did its part
    if "error" in found[0]:
        sys.exit(f"nothing to run on: {found[0]['message']}")
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub("[^a-z0-9]+", "-", found[0]["gpu"].lower())
    failed = 0
    with (folder / f"{name}.jsonl").open("a") as file:
        write(file, found[0] | {"start": start})
        for step, of_step, end in plan:
            begin = time.monotonic()
            counts: Counter[str] = Counter()

            def record(row: Row, counts: Counter[str] = counts) -> None:
                write(file, row)
                counts["failed" if "error" in row else "rows"] += 1

            counts["not reached"] = run_items(context, of_step, step, end, record)
            if counts["not reached"]:
                write(file, {"step": step, "not reached": counts["not reached"]})
            failed += counts["failed"]
            told = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
            print(f"{step}: {told or 'nothing to do'} in {time.monotonic() - begin:.0f} s")
    return 1 if failed else 0


def write(file: Any, row: Row) -> None:
    """Writes a row to disk, safe from a crash of the machine, and prints a summary."""
    file.write(json.dumps(row) + "\n")
    file.flush()
    os.fsync(file.fileno())
    label = " ".join(
        str(row[k]) for k in ("step", "op", "case", "dtype", "pass", "from") if k in row
    )
    if "error" in row:
        print(f"FAILED {label}: {row['error']}: {row['message'].strip()[:300]}", flush=True)
    elif "missing" in row:
        print(f"{label}: no {row['provider']}: {row['missing']}: {row['message'][:150]}")
    elif "milliseconds" in row:
        print(f"{label}: {row['provider']} {row['milliseconds']:.3g} ms, {row['of_ceiling']:.0%}")


if __name__ == "__main__":
    main()
