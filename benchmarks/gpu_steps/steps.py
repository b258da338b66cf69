"""Steps of benchmarks/gpu.py on a GPU: the items of each step, and the timing of one item."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Any

import harness
import report
import run
import torch
import torch._dynamo  # used by prepare(); imported once, before forking
from baselines import ON_GPU

from gpu_steps import sizes
from gpu_steps.peers import PEERS
from omniattn.ops.dispatch import library as _library
from omniattn.ops.dispatch import torch_kernels
from omniattn.testing import Case, OpSpec, on_device, registry, threads
from omniattn.testing.properties import PROPERTIES
from omniattn.testing.spec import SHORT_DTYPE
from omniattn.testing.timing import once

sys.path += [str(report.ROOT / "tests" / folder) for folder in ("cuda", "ops")]
import test_gpu
import test_specs

F32, BF16 = torch.float32, torch.bfloat16
SANITIZERS = ("memcheck", "racecheck", "synccheck", "initcheck")
#: Properties of the OpSpecs that concern kernels and need only torch.
CHECKED = (
    *("forward", "derivatives", "each_gradient", "poisoned", "deterministic", "strided"),
    "expanded_gradient",
)
#: Maximum sizes of the comparison with fp64 on the CPU, before a provider is timed.
LONGEST_CHECK = {"B": 2, "T": 320, "Tq": 320, "Tk": 320, "M": 64, "V": 5003, "K": 512}
SHORT_CHECK = LONGEST_CHECK | {"T": 96, "Tq": 96, "Tk": 96, "H": 2, "G": 2, "Hv": 2}
#: Error that baselines may have on a GPU, where other libraries multiply states in 16 bits.
TOLERANCE = 2e-2
COMPILED = ("compiled", "flex")
TOOL_SECONDS = 180.0
MESSAGE, OUTPUT = 3_000, 50_000  # maximum number of characters in a row


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a run, which determine the items of each step in every process."""

    ops: tuple[str, ...]
    properties: tuple[str, ...] = CHECKED
    dry_run: bool = False
    here: bool = False
    compiled: bool = False
    seconds: float = 1.0
    timeout: float = 60.0
    workers: int = 1
    sanitizers: tuple[str, ...] = SANITIZERS
    first: bool = False  # only the first case and dtype of each op, compared with fp64 on less

    @property
    def device(self) -> str:
        return "cpu" if self.dry_run else "cuda"

    @property
    def specs(self) -> list[OpSpec]:
        return [registry()[name] for name in self.ops]

    def processes(self, step: str) -> int:
        return self.workers if step in SHARED else 1


@dataclasses.dataclass(frozen=True)
class Item:
    """A task to run. Items of one group share a process until one fails."""

    labels: dict[str, str]
    run: Callable[[], list[report.Row]]
    group: str
    seconds: float


# tests --------------------------------------------------------------------------------------------


def check(options: Options, function: Callable[..., None], *args: Any, **labels: str) -> Item:
    def passes() -> list[report.Row]:
        function(*args)
        return []

    return Item(labels, passes, labels.get("op", ""), options.timeout)


def wrappers(options: Options) -> Iterator[Item]:
    """Checks the PTX wrappers, then that each op launches and is correct on a tiny case."""
    if not options.dry_run:
        for kernel in test_gpu.FIXTURES:
            test = test_gpu.test_wrappers_synchronise_and_copy
            yield check(options, test, kernel, case=kernel)
        for kind in ("bf16", "f16", "tf32"):
            yield check(options, test_gpu.test_matrix_wrappers_multiply, kind, case=kind)
    for spec in options.specs:
        for dtype in spec.dtypes:
            for name in ("forward", "backward"):
                if name == "forward" or spec.differentiable:
                    yield property_check(options, name, spec, spec.cases[0], dtype)


def property_check(
    options: Options, name: str, spec: OpSpec, case: Case, dtype: torch.dtype
) -> Item:
    labels = {"op": spec.name, "case": case.name, "dtype": SHORT_DTYPE[dtype], "pass": name}
    return check(options, PROPERTIES[name], spec, case, dtype, **labels)


def specs(options: Options) -> Iterator[Item]:
    """Yields the checks of tests/ops/test_specs.py by property, the most general first."""
    rows = [parameters.values for parameters in test_specs.matrix()]
    for name in options.properties:
        for function, spec, case, dtype in rows:
            if function is PROPERTIES[name] and spec.name in options.ops:
                yield property_check(options, name, spec, case, dtype)


def graphs(options: Options) -> Iterator[Item]:
    if options.dry_run:  # cannot capture
        return
    for spec in options.specs:
        for dtype in (F32, BF16):
            test = test_gpu.test_forward_and_backward_are_captured_in_a_graph
            labels = {"op": spec.name, "case": spec.cases[1].name, "dtype": SHORT_DTYPE[dtype]}
            yield check(options, test, spec, dtype, **labels)
    yield check(options, test_gpu.test_a_replay_reads_the_seed_of_dropout_again, case="seed")
    for message in test_gpu.OUT_OF_RANGE:
        yield check(
            options, test_gpu.test_a_value_out_of_range_stops_the_kernel, message, case=message
        )


# tools --------------------------------------------------------------------------------------------


def tool(options: Options, command: list[str], step: str, op: str, **env: str) -> list[report.Row]:
    """Runs a step for one op in one process under a tool; returns the tool's output.

    The specs step is limited to properties that cover every layout, forward and backward, with the
    fewest cases.
    """
    command = [*command, sys.executable, str(Path(__file__).parents[1] / "gpu.py"), "--here"]
    command += ["--only", step, "--op", op, "--property", "strided"]
    command += ["--dry-run"] if options.dry_run else []
    command += ["--first"] if options.first else []
    result = subprocess.run(
        command, env=os.environ | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if result.returncode:
        raise RuntimeError(f"exit code {result.returncode}: {result.stdout[-MESSAGE:]}")
    return [{"output": result.stdout[-OUTPUT:]}]


def sanitizers(options: Options) -> Iterator[Item]:
    """Runs compute-sanitizer on our kernels only; torch's read uninitialised memory on purpose.

    Each tensor is a separate allocation, so that the sanitizer knows its bounds.
    """
    path = shutil.which("compute-sanitizer")
    if path is None:
        print("sanitizers: compute-sanitizer is not installed")
        return
    for op, name in itertools.product(sizes.by_worth(options.ops), options.sanitizers):
        command = [path, "--tool", name, "--kernel-regex", "kns=omniattn", "--error-exitcode", "9"]
        make = functools.partial(
            tool, options, command, "specs", op, PYTORCH_NO_CUDA_MEMORY_CACHING="1"
        )
        yield Item({"op": op, "case": name}, make, f"{name} {op}", TOOL_SECONDS)


def profile(options: Options) -> Iterator[Item]:
    """Reads hardware counters if ncu is installed, and measures each kernel by torch's profiler."""
    tasks = timed(options)
    path = None if options.here else shutil.which("ncu")
    if path is not None:
        command = [path, "--clock-control", "none", "--profile-from-start", "off", "--csv"]
        seconds = min(TOOL_SECONDS, options.timeout) if options.first else TOOL_SECONDS
        for op in dict.fromkeys(item.labels["op"] for item, _ in tasks):
            make = functools.partial(tool, options, command, "profile", op)
            yield Item({"op": op, "case": "ncu"}, make, f"ncu {op}", seconds)
    for item, make in tasks:
        yield dataclasses.replace(item, run=functools.partial(kernels, options, make))


def kernels(options: Options, make: Callable[..., run.Task]) -> list[report.Row]:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    ours = make(baselines={}).providers["ours"]
    ours()
    if options.here:  # under a profiler, which should see only this call
        with contextlib.nullcontext() if options.dry_run else torch.cuda.profiler.profile():
            ours()
        return []
    repeats = 3
    activity = ProfilerActivity.CPU if options.dry_run else ProfilerActivity.CUDA
    with record(activities=[activity]) as profiler:
        for _ in range(repeats):
            ours()
        if not options.dry_run:
            torch.cuda.synchronize()
    return [
        {"kernel": e.key[:200], "calls": e.count / repeats, "us": e.device_time_total / repeats}
        for e in profiler.key_averages()
        if options.dry_run or e.device_type != torch.autograd.DeviceType.CPU
    ]


# timing -------------------------------------------------------------------------------------------


def gpu_clock(function: Callable[[], object], repeats: int) -> float:
    """Returns seconds per call by the GPU's clock."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        function()
    end.record()
    end.synchronize()
    return 1e-3 * start.elapsed_time(end) / repeats


def gpu_memory(function: Callable[[], object]) -> float:
    """Returns the MiB that one call adds to the peak of allocated memory."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / harness.MIB


@dataclasses.dataclass(frozen=True)
class Machine:
    """Device under test, its clock and its description."""

    device: str
    clock: Callable[[Callable[[], object], int], float]
    memory: Callable[[Callable[[], object]], float]
    size: int  # of the matrices and, in quarters of a MiB, of the copy that measure the ceilings

    def ceilings(self, dtype: torch.dtype) -> harness.Ceilings:
        """Measures GB/s of a copy (read and write), and GFLOP/s of torch's square product."""
        a = torch.empty(
            self.size * harness.MIB // 4, dtype=torch.uint8, device=self.device
        ).random_()
        b = torch.empty_like(a)
        bandwidth = 2e-9 * a.numel() / self.best(lambda: b.copy_(a))
        x = torch.randn(self.size, self.size, device=self.device).to(dtype)
        compute = 2e-9 * self.size**3 / self.best(lambda: x @ x)
        name = SHORT_DTYPE[dtype]
        return harness.Ceilings({name: compute}, bandwidth, {name: name})

    def best(self, function: Callable[[], object]) -> float:
        self.clock(function, 3)
        return min(self.clock(function, 3) for _ in range(5))


CPU = Machine("cpu", once, lambda function: 0.0, 64)
GPU = Machine("cuda", gpu_clock, gpu_memory, 8192)


def timed(options: Options) -> list[tuple[Item, Callable[..., run.Task]]]:
    """Returns the timing tasks, ordered so that every op's first task precedes any second one.

    With `first`, the passes of an op share a process.
    """
    found = []
    for op in sizes.by_worth(options.ops):
        spec = registry()[op]
        baselines = {
            name: function
            for name, function in {**ON_GPU[op], **PEERS.get(op, {})}.items()
            if options.compiled or name not in COMPILED
        }
        tasks = [
            (b, d, p)
            for b in sizes.benchmarks(spec, options.dry_run)
            for d in b.dtypes
            for p in b.passes
        ]
        if options.first:
            tasks = [task for task in tasks if task[:2] == tasks[0][:2]]
        for rank, (benchmark, dtype, pass_) in enumerate(tasks):
            make = functools.partial(
                run.op_task,
                spec,
                benchmark,
                dtype,
                pass_,
                baselines=baselines,
                longest=SHORT_CHECK if options.first else LONGEST_CHECK,
                tolerance=TOLERANCE,
            )
            labels = {"op": op, "case": benchmark.case.name, "dtype": SHORT_DTYPE[dtype]}
            labels["pass"] = pass_
            measure = functools.partial(time_task, options, dtype, make)
            group = op if options.first else f"{op} {rank}"
            item = Item(labels, measure, group, options.timeout)
            found.append((0 if options.first else rank, item, make))
    return [(item, make) for _, item, make in sorted(found, key=lambda entry: entry[0])]


def timing(options: Options) -> Iterator[Item]:
    return (item for item, _ in timed(options))


def choices(options: Options) -> Iterator[Item]:
    """Times ops that have several paths, without the paths before each of them."""
    tables = _library.paths(options.device)
    for item, make in timed(options):
        table = table_of(item.labels["op"], item.labels["pass"], tables)
        for path in tables.get(table, ()):
            labels = item.labels | {"from": path}
            measure = functools.partial(time_path, options, table, labels, make)
            yield Item(labels, measure, f"{table} {path}", options.timeout)


def table_of(op: str, pass_: str, tables: Container[str]) -> str:
    """Returns the table of paths of a pass of an op: that of `recurrence` if it is a call of it."""
    if registry()[op].family in ("recurrence", "delta variant"):
        op = "recurrence"
    of_backward = f"{op}_backward"
    return of_backward if pass_ == "backward" and of_backward in tables else op


def time_path(
    options: Options, table: str, labels: dict[str, str], make: Callable[..., run.Task]
) -> list[report.Row]:
    """Times ours without the paths before one of them."""
    dtype = {name: dtype for dtype, name in SHORT_DTYPE.items()}[labels["dtype"]]
    with torch_kernels.beginning_with(options.device, table, labels["from"]):
        return time_task(options, dtype, functools.partial(make, baselines={}))


def time_task(
    options: Options, dtype: torch.dtype, make: Callable[[], run.Task]
) -> list[report.Row]:
    """Returns a row per provider: its times, or why it was not timed."""
    machine = CPU if options.dry_run else GPU
    task, ceilings = make(), machine.ceilings(dtype)
    times = harness.interleave(task.providers, options.seconds, lambda: 1.0, machine.clock)
    rows = run.rows_of(task, times, ceilings, report.commit(), machine.memory)
    missing = [
        {"provider": name, "missing": type(e).__name__, "message": str(e)[-MESSAGE:]}
        for name, e in task.missing.items()
    ]
    return [*rows, *missing]


# steps --------------------------------------------------------------------------------------------


def machine(options: Options) -> Iterator[Item]:
    """Describes the machine: the first row of every run, which names the file."""

    def describe() -> list[report.Row]:
        row = {"torch": torch.__version__, "cuda": torch.version.cuda, "commit": report.commit()}
        if options.dry_run:
            return [row | {"gpu": "dry run"}]
        if _library.cuda_unavailable is not None:
            raise RuntimeError(_library.cuda_unavailable)
        properties = torch.cuda.get_device_properties()
        row["gpu"] = properties.name
        row["compute capability"] = f"{properties.major}.{properties.minor}"
        row["multiprocessors"] = properties.multi_processor_count
        row["memory_gib"] = round(properties.total_memory / 2**30, 1)
        return [row]

    yield Item({}, describe, "", options.timeout)


#: Steps in the order in which they run; prerequisites come first.
STEPS = {f.__name__: f for f in (wrappers, specs, graphs, timing, sanitizers, profile, choices)}
#: Steps that share the GPU among processes.
SHARED = ("wrappers", "specs", "graphs", "sanitizers")


@functools.cache
def items(options: Options, step: str) -> list[Item]:
    return list((STEPS | {"machine": machine})[step](options))


@contextlib.contextmanager
def ready(options: Options, step: str) -> Iterator[None]:
    """Sets up an item's environment: an initialised device and a share of the CPU cores."""
    cores = os.cpu_count() or 1
    count = 1 if options.dry_run else max(1, cores // options.processes(step))
    with on_device(options.device), threads(count):
        if not options.dry_run:
            torch.cuda.init()
        yield
