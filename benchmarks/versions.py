"""Times two versions of the package against each other, case by case.

    python benchmarks/versions.py OLD_TREE OLD_LIBRARIES NEW_TREE NEW_LIBRARIES [--op attention]

Each version runs in its own process, and the two alternate; a round's ratio is old / new. Times the
OpSpecs' benchmarks that both versions have and, for the overhead of a call, the first case of each
op. Writes a CSV to stdout; the exit code is 1 if a row is slower by more than --threshold.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SAMPLE_SECONDS = 5e-3
LEAST_ROUNDS = 5


class Version:
    """A process that prepares and times tasks of one tree; `ask` sends a command."""

    def __init__(self, tree: Path, libraries: Path, threads: int) -> None:
        environment = dict(
            os.environ,
            PYTHONPATH=str(tree / "python"),
            OMNIATTN_LIBRARY_DIR=str(libraries),
            OMP_NUM_THREADS=str(threads),
        )
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def ask(self, *command: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(command), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args} ended at {command}")
        return json.loads(line)


def worker() -> None:
    """Answers the commands tasks, prepare and time, one JSON line each."""
    import torch

    from omniattn.testing import prepare, registry
    from omniattn.testing.spec import SHORT_DTYPE
    from omniattn.testing.timing import once

    dtypes = {short: dtype for dtype, short in SHORT_DTYPE.items()}

    def tasks() -> Iterator[tuple[str, str, str, str]]:
        for spec in registry().values():
            for b in spec.benchmarks:
                for dtype in b.dtypes:
                    yield from ((spec.name, b.case.name, SHORT_DTYPE[dtype], p) for p in b.passes)
            yield spec.name, spec.cases[0].name, "f32", "forward"

    answers = sys.stdout
    sys.stdout = sys.stderr
    run: Any = None
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        if verb == "tasks":
            answer: Any = sorted(set(tasks()))
        elif verb == "prepare":
            op, name, dtype, pass_ = arguments
            spec = registry()[op]
            cases = (*(b.case for b in spec.benchmarks), *spec.cases)
            case = next(c for c in cases if c.name == name)
            torch.manual_seed(0)
            run = None
            run = prepare(spec.call(case, dtypes[dtype]), spec.public, pass_)
            try:
                run()
                answer = once(run, 1)
            except (TypeError, ValueError) as error:  # arguments of another version
                print(f"{op} {name}: {error}")
                answer = None
        else:
            answer = once(run, arguments[0])
        print(json.dumps(answer), file=answers, flush=True)


def compare(
    old: Version, new: Version, task: list[str], seconds: float
) -> tuple[float, float] | None:
    """Returns the new version's seconds per call and speed-up, as medians of rounds; None where a
    version refuses the arguments of the other.

    Both are prepared twice, in both orders: the version that allocates first tends to get better
    pages, which changes the ratio for tensors larger than the caches by up to 10 %.
    """
    times, ratios = [], []
    for pair in ((old, new), (new, old)):
        prepared = [version.ask("prepare", *task) for version in pair]
        if None in prepared:
            return None
        slowest = max(prepared)
        repeats = max(1, round(SAMPLE_SECONDS / slowest))
        rounds, end = 0, time.perf_counter() + seconds / 2
        while rounds < LEAST_ROUNDS or time.perf_counter() < end:
            order = pair if rounds % 2 == 0 else pair[::-1]
            found = {version: version.ask("time", repeats) for version in order}
            times.append(found[new])
            ratios.append(found[old] / found[new])
            rounds += 1
    return statistics.median(times), statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("old_tree", "old_libraries", "new_tree", "new_libraries"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--op", nargs="*", help="ops to time (default: all)")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each row")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--threshold", type=float, default=0.03, help="relative loss that fails")
    args = parser.parse_args()
    old = Version(args.old_tree, args.old_libraries, args.threads)
    new = Version(args.new_tree, args.new_libraries, args.threads)
    known = old.ask("tasks")
    tasks = [t for t in new.ask("tasks") if t in known and (not args.op or t[0] in args.op)]
    rows = csv.writer(sys.stdout)
    rows.writerow(["op", "case", "dtype", "pass", "microseconds", "old / new"])
    slower = 0
    for task in tasks:
        found = compare(old, new, task, args.seconds)
        if found is not None and found[1] < 1 - args.threshold:
            # Repeated, since a disturbance may outlast a row.
            found = compare(old, new, task, 4 * args.seconds)
        if found is None:
            continue
        seconds, ratio = found
        slower += ratio < 1 - args.threshold
        rows.writerow([*task, f"{seconds * 1e6:.1f}", f"{ratio:.3f}"])
        sys.stdout.flush()
    sys.exit(1 if slower else 0)


if __name__ == "__main__":
    worker() if "--worker" in sys.argv else main()
