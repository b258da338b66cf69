"""Processes that alternate: each runs a step on request, so that all share the conditions."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple


class Turns(NamedTuple):
    """Median seconds of a step, MiB used beyond the weights, and the note of `serve`."""

    seconds: float
    mib: float
    note: str


def serve(step: Callable[[], object], note: object = "") -> None:
    """Runs `step` for each line of stdin; prints its seconds, and the MiB at the end."""
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak memory
    step()  # the first call allocates, compiles and selects kernels
    step()
    print(note, flush=True)
    for _ in sys.stdin:
        begin = time.perf_counter()
        step()
        print(time.perf_counter() - begin, flush=True)
    print(_status("VmHWM") - before, flush=True)


def _status(field: str) -> float:
    """Returns the MiB in a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


class _Worker:
    def __init__(self, command: list[str], env: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **env},
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"turns: a process ended with code {self.process.wait()}")
        return line.strip()

    def ask(self) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        return float(self.line())

    def end(self) -> float:
        assert self.process.stdin is not None
        self.process.stdin.close()
        mib = float(self.line())
        self.process.wait()
        return mib


def take_turns(
    commands: Mapping[str, tuple[list[str], Mapping[str, str]]], rounds: int
) -> dict[str, Turns]:
    """Maps name -> (Python's arguments, environment) to name -> measurements."""
    workers = {name: _Worker(*command) for name, command in commands.items()}
    notes = {name: worker.line() for name, worker in workers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in workers}
    for i in range(rounds):
        for name in list(workers)[:: 1 if i % 2 == 0 else -1]:
            seconds[name].append(workers[name].ask())
    return {
        name: Turns(statistics.median(seconds[name]), worker.end(), notes[name])
        for name, worker in workers.items()
    }
