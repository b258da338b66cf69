"""Fuzzes the whole registry with random calls.

    python tools/fuzz.py --calls 100000 [--seed 0] [--kinds values gradients raw] [--seconds 600]
    .ci/asan tools/fuzz.py --calls 100000     the same under ASan, UBSan and asserts

Each seed is an episode of about ten calls (tests/support/fuzz_episodes.py). The output names the
seed of each failure, and `--seed S --episodes 1` repeats it. Episodes run in a separate process. If
it dies, its seed counts as a failure and a new process continues. At the end, also after Ctrl-C, a
line is added to tests/fuzz_record.csv, whose last seed shows where to continue.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tests" / "fuzz_record.csv"
FIELDS = (
    *("date", "commit", "machine", "sanitizers", "kinds", "first_seed", "last_seed"),
    *("calls", "refused", "failures", "seconds"),
)
#: Makes large allocations fail, with an error that the ops report, and fills new memory with NaN.
ASAN = (
    "detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=4096"
    ":max_malloc_fill_size=1000000000:malloc_fill_byte=255"
)
MEMORY = 8 << 30  # limit of a process without sanitizers; these need more address space


def work(seed: int, episodes: int, kinds: list[str]) -> None:
    """Runs in a separate process: prints each episode's seed before it, and its findings after."""
    import resource

    if "libasan" not in os.environ.get("LD_PRELOAD", ""):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    import fuzz_episodes
    import torch

    torch.set_num_threads(1)
    count = fuzz_episodes.Count()
    for s in range(seed, seed + episodes):
        print(f"seed\t{s}", flush=True)
        try:
            fuzz_episodes.run_episode(s, kinds or list(fuzz_episodes.KINDS), count)
        except AssertionError as error:
            print(f"failure\t{str(error)!r}", flush=True)
        print(f"done\t{count.calls}\t{count.refused}", flush=True)


class Run:
    """Progress of all processes of one run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.first = self.seed = options.seed
        self.calls = self.refused = self.failures = 0
        self.start = time.monotonic()
        self.stopped = False

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start

    def goes_on(self) -> bool:
        o = self.options
        return not self.stopped and not (
            self.calls >= o.calls
            or (o.episodes is not None and self.seed >= self.first + o.episodes)
            or (o.seconds is not None and self.seconds >= o.seconds)
        )

    def fail(self, message: str) -> None:
        self.failures += 1
        print(f"\nFAILED seed {self.seed}: {message}", flush=True)


def run_process(run: Run) -> None:
    """Episodes in one process, until it dies or the run ends."""
    o = run.options
    count = 10**9 if o.episodes is None else run.first + o.episodes - run.seed
    command = [sys.executable, __file__, "--seed", str(run.seed), "--episodes", str(count)]
    command += ["--worker", *(["--kinds", *o.kinds] if o.kinds else [])]
    errors = ROOT / "build" / f"fuzz-{os.getpid()}.err"
    errors.parent.mkdir(exist_ok=True)
    with errors.open("w+") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
        beat = [time.monotonic()]
        watch = threading.Thread(target=_watch, args=(process, beat, o.timeout), daemon=True)
        watch.start()
        assert process.stdout is not None
        finished = _read(run, process.stdout, beat)
        process.kill() if finished else process.wait()
        process.wait()
        if not finished and not run.stopped:
            stderr.seek(0)
            told = stderr.read()[-6000:]
            run.fail(f"the process ended with {process.returncode}\n{told}")
            run.seed += 1
    errors.unlink()


def _read(run: Run, lines: IO[str], beat: list[float]) -> bool:
    """Follows a process; True if it did all that it was asked for."""
    calls, refused = run.calls, run.refused
    shown, pause = beat[0], 1 if sys.stdout.isatty() else 60
    for line in lines:
        beat[0] = time.monotonic()
        kind, *values = line.rstrip("\n").split("\t")
        if kind == "seed":
            run.seed = int(values[0])
        elif kind == "failure":
            run.fail(values[0])
        elif kind == "done":
            run.calls, run.refused = calls + int(values[0]), refused + int(values[1])
            run.seed += 1
            if not run.goes_on():
                return True
        if beat[0] - shown > pause:
            shown = beat[0]
            progress(run)
    return not run.goes_on()


def _watch(process: subprocess.Popen[str], beat: list[float], timeout: float) -> None:
    while process.poll() is None:
        time.sleep(1)
        if time.monotonic() - beat[0] > timeout:
            process.send_signal(signal.SIGABRT)
            return


def progress(run: Run) -> None:
    rate = run.calls / max(run.seconds, 1e-9)
    line = f"{run.calls:,} of {run.options.calls:,} calls, {rate:.0f}/s, seed {run.seed}"
    end = "\r" if sys.stdout.isatty() else "\n"
    print(f"{line}, {run.failures} failures", end=end, flush=True)


def record(run: Run, path: Path) -> None:
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    row = {
        "date": datetime.date.today().isoformat(),
        "commit": commit or "unknown",
        "machine": platform.processor() or platform.machine(),
        "sanitizers": "yes" if "libasan" in os.environ.get("LD_PRELOAD", "") else "no",
        "kinds": " ".join(run.options.kinds) or "all",
        "first_seed": run.first,
        "last_seed": run.seed - 1,
        "calls": run.calls,
        "refused": run.refused,
        "failures": run.failures,
        "seconds": round(run.seconds),
    }
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--calls", type=int, default=10**9, help="stop after so many calls")
    parser.add_argument("--seed", type=int, default=0, help="of the first episode")
    parser.add_argument("--episodes", type=int, help="stop after so many seeds")
    parser.add_argument("--seconds", type=float, help="stop after so long")
    parser.add_argument("--kinds", nargs="*", default=[], help="default: all")
    parser.add_argument("--timeout", type=float, default=300, help="seconds of an episode, at most")
    parser.add_argument("--record", type=Path, default=RECORD, help="where a line is added")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.seed, options.episodes, options.kinds)
        return 0
    asan = f"{ASAN}:{os.environ.get('ASAN_OPTIONS', '')}"
    os.environ |= {"OMP_NUM_THREADS": "1", "ASAN_OPTIONS": asan}
    run = Run(options)

    def stop(*_: object) -> None:
        run.stopped = True

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    while run.goes_on():
        run_process(run)
    progress(run)
    record(run, options.record)
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
