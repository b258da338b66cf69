"""Interleaved timing of several providers of a task, with ratios robust to a drifting machine.

A round times every provider once, A B C in even rounds and C B A in odd ones, with samples long
enough for the clock. Ratios are taken within a round; their median and a bootstrap interval are
reported. On the CPU every round also probes the machine's multiply-add rate. A round whose rate is
10 % below the best is dropped, since another process was using a core. The ceiling of a task comes
from the probes of its own rounds.
"""

from __future__ import annotations

import ctypes
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from omniattn.config import CPU_ISAS
from omniattn.testing.timing import once

SAMPLE_SECONDS = 5e-3
LEAST_ROUNDS, MOST_ROUNDS = 4, 60
PROBE_SECONDS = 5e-3
LARGEST_LOAD = 0.5
QUIET = 0.9
MIB = 1 << 20


@dataclass(frozen=True)
class Ceilings:
    """Ceilings of this machine, probed in this process: GFLOP/s by operand dtype, memory GB/s."""

    compute: Mapping[str, float]
    bandwidth: float
    operand: Mapping[str, str]
    exponentials: float = 0.0  # 1e9 per second

    def of(self, dtype: str) -> float:
        return self.compute[self.operand[dtype]]

    @staticmethod
    def measure(threads: int, isa: str) -> Ceilings:
        from omniattn import _kernels  # not needed by GPU benchmarks

        probe = _kernels.Probe(isa)
        operand = {dtype: probe.operand(dtype) for dtype in ("f64", "f32", "bf16", "f16")}
        compute = {o: probe.peak(o, threads, 0.5) for o in sorted(set(operand.values()))}
        read = probe.read_bandwidth(256 * MIB, threads, 0.5)
        return Ceilings(compute, read, operand, probe.function_rate("exp2", threads, 0.5))


@dataclass(frozen=True)
class Ratio:
    """Speed-up of ours: median over rounds, and a 95 % interval."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Timing:
    """Seconds per call and ratio to "ours" of each provider.

    `speed` is the machine's speed during the rounds, relative to its ceiling; `kept` of `rounds`
    rounds counted.
    """

    seconds: Mapping[str, float]
    ratios: Mapping[str, Ratio]
    speed: float
    kept: int
    rounds: int


def start(threads: int, force: bool) -> tuple[str, Ceilings]:
    """Returns the ISA level and ceilings of this machine, which must be idle unless `force`."""
    if os.getloadavg()[0] > LARGEST_LOAD and not force:
        sys.exit(
            f"the load is {os.getloadavg()[0]:.2f}: wait until the machine is idle, or --force"
        )
    torch.set_num_threads(threads)
    isa = CPU_ISAS[torch.ops.omniattn.cpu_isa()]
    return isa, Ceilings.measure(threads, isa)


def keep_memory() -> None:
    """Makes glibc keep freed memory: no mmapped blocks, and a heap that never shrinks."""
    trim_threshold, mmap_max = -1, -4  # from malloc.h
    mallopt = ctypes.CDLL(None).mallopt
    if not (mallopt(mmap_max, 0) and mallopt(trim_threshold, -1)):
        raise RuntimeError("mallopt refused to keep memory")


def cpu_speed(ceilings: Ceilings, threads: int, isa: str) -> Callable[[], float]:
    """Returns a probe of the present multiply-add rate, relative to `ceilings`."""
    from omniattn import _kernels

    probe = _kernels.Probe(isa)
    return lambda: probe.peak("f32", threads, PROBE_SECONDS) / ceilings.compute["f32"]


def interleave(
    providers: Mapping[str, Callable[[], object]],
    seconds: float,
    speed: Callable[[], float],
    clock: Callable[[Callable[[], object], int], float] = once,
    least_rounds: int = LEAST_ROUNDS,
) -> Timing:
    """Runs rounds over all providers for about `seconds` in total, without warm-up.

    clock(run, n) returns the seconds per call of n calls; speed() the machine's present speed.
    """
    repeats = {}
    for name, run in providers.items():
        run()
        repeats[name] = max(1, round(SAMPLE_SECONDS / clock(run, 1)))
    samples: list[dict[str, float]] = []
    speeds: list[float] = []
    start = time.perf_counter()
    while len(samples) < MOST_ROUNDS:
        if len(samples) >= least_rounds and time.perf_counter() - start > seconds:
            break
        names = list(providers) if len(samples) % 2 == 0 else list(reversed(providers))
        samples.append({name: clock(providers[name], repeats[name]) for name in names})
        speeds.append(speed())
    quiet = [i for i, found in enumerate(speeds) if found >= QUIET * max(speeds)]
    kept = [samples[i] for i in quiet]
    times = {name: statistics.median(s[name] for s in kept) for name in providers}
    ratios = {
        name: _ratio([s[name] / s["ours"] for s in kept]) for name in providers if name != "ours"
    }
    typical = statistics.median(speeds[i] for i in quiet)
    return Timing(times, ratios, typical, len(kept), len(samples))


def _ratio(values: list[float]) -> Ratio:
    """Returns the median, and the 2.5 and 97.5 percentiles of medians of resampled rounds."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(500))
    return Ratio(statistics.median(values), medians[12], medians[487])


def peak_memory(run: Callable[[], object]) -> float:
    """Returns the MiB that one call adds to the peak of resident memory; nan if not available.

    Takes the minimum of three calls: a fragmented heap can make a call use more.
    """
    return min(_peak_memory(run) for _ in range(3))


def _peak_memory(run: Callable[[], object]) -> float:
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # resets the high-water mark
        before = _status("VmRSS")
        run()
        return (_status("VmHWM") - before) / 1024
    except OSError:
        return float("nan")


def _status(field: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field))
