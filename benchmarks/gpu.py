"""All that needs a GPU, in one command: tests, compute-sanitizer, benchmark.

    python benchmarks/gpu.py [--only tests sanitizer benchmark] [--op attention ...] [--quick]

Runs tests/cuda (every kernel against the CPU and fp64, graphs, wrappers of the PTX), the OpSpecs
under each tool of compute-sanitizer where it is installed, then times the ops against what users of
torch run on a GPU and against the copy and product speeds of this one. Results go to
benchmarks/results/cuda.{json,csv,png}. --dry-run does all of it on the CPU with small sizes.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import report
import run
import torch
from tqdm import tqdm

from omniattn.ops import _library
from omniattn.testing import Benchmark, Case, on_device, registry, rivals, threads
from omniattn.testing.timing import once

F32, BF16 = torch.float32, torch.bfloat16
EACH = ("forward", "backward")
STEPS = ("tests", "sanitizer", "benchmark")
SANITIZERS = ("memcheck", "racecheck", "synccheck", "initcheck")
#: Sizes that are compared with fp64 on the CPU before a provider is timed.
LONGEST_CHECK = {"B": 2, "T": 320, "Tq": 320, "Tk": 320, "M": 64, "V": 5003, "K": 512}
DRY_SIZE = 8


def case(label: str, *tensors: str, **sizes_and_options: Any) -> Case:
    sizes = {k: v for k, v in sizes_and_options.items() if k[0].isupper()}
    options = {k: v for k, v in sizes_and_options.items() if not k[0].isupper()}
    return Case(label, sizes, tensors, options)


def attention(label: str, tokens: int, dim: int, **options: Any) -> Case:
    """16384 tokens and a width of 2048 in all, as in the figures of FlashAttention-2 and -3."""
    heads = {"H": 2048 // dim, "G": 2048 // dim, "D": dim}
    return case(label, B=16384 // tokens, Tq=tokens, Tk=tokens, **heads, **options)


def benchmarks() -> dict[str, list[Benchmark]]:
    """Sizes of models in use; the data of memory-bound ops is far larger than an L2 cache."""
    heads = {"H": 32, "G": 8, "D": 128}
    return {
        "attention": [
            *(
                Benchmark(attention("causal", tokens, dim, causal=True), (BF16,), EACH, "compute")
                for tokens, dim in [(2048, 64), (2048, 128), (16384, 64), (16384, 128)]
            ),
            Benchmark(attention("full", 16384, 128), (BF16,), EACH, "compute"),
            Benchmark(
                attention("window", 16384, 128, causal=True, window_size=(1023, 0)),
                (BF16,),
                EACH,
                "compute",
            ),
            Benchmark(case("decode", B=64, Tq=1, Tk=8192, **heads), (BF16,), ("forward",)),
            Benchmark(case("decode", B=1, Tq=1, Tk=131072, **heads), (BF16,), ("forward",)),
        ],
        "rms_norm": [
            Benchmark(case("plain", "weight", M=16384, N=8192), (BF16, F32), EACH),
            Benchmark(case("residual", "weight", "residual", M=16384, N=8192), (BF16,), EACH),
        ],
        "layer_norm": [
            Benchmark(case("plain", "weight", "bias", M=16384, N=8192), (BF16,), EACH),
        ],
        "group_norm": [
            Benchmark(case("heads", "weight", "bias", M=16384, N=8192, num_groups=8), (BF16,), EACH)
        ],
        "rms_norm_gated": [
            Benchmark(case("after", "gate", "weight", M=16384, N=8192), (BF16,), EACH)
        ],
        "dropout": [Benchmark(case("tenth", M=16384, N=8192, p=0.1), (BF16,), EACH)],
        "apply_rotary": [Benchmark(case("half", B=8, T=4096, **heads), (BF16,), ("forward",))],
        "qk_norm_rotary": [Benchmark(case("half", "weights", B=8, T=4096, **heads), (BF16,), EACH)],
        "top_k": [Benchmark(case("experts", M=65536, N=64, k=6), (F32,), ("forward",))],
        "moe_experts": [
            Benchmark(case("mixtral", M=8192, E=8, S=2, K=2048, N=8192), (BF16,), EACH, "compute")
        ],
        "swiglu": [Benchmark(case("pair", M=16384, N=14336), (BF16,), EACH)],
        "geglu": [Benchmark(case("pair", M=16384, N=14336), (BF16,), EACH)],
        "linear": [Benchmark(case("square", M=8192, N=8192, K=8192), (BF16,), EACH, "compute")],
        "cross_entropy": [
            Benchmark(case("plain", M=8192, V=128256), (BF16, F32), EACH),
            Benchmark(case("odd", M=8192, V=50257), (BF16,), EACH),
        ],
        "linear_cross_entropy": [
            Benchmark(
                case("plain", M=8192, V=128256, K=4096), (BF16,), ("forward+backward",), "compute"
            ),
        ],
    }


def shrunk(benchmark: Benchmark) -> Benchmark:
    sizes = {k: min(n, DRY_SIZE) for k, n in benchmark.case.sizes.items()}
    return dataclasses.replace(benchmark, case=dataclasses.replace(benchmark.case, sizes=sizes))


# tests --------------------------------------------------------------------------------------------


def pytest(arguments: list[str], device: str, prefix: list[str]) -> str:
    """Runs pytest and tells how it ended."""
    env = os.environ | {
        "OMNIATTN_TEST_DEVICE": device,
        # Each tensor is an allocation of its own, whose bounds the sanitizer knows.
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1" if prefix else "0",
        "PYTHONPATH": os.pathsep.join([str(report.ROOT / "tests/cuda"), *filter(None, sys.path)]),
    }
    command = [*prefix, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    code = subprocess.run(command, env=env, cwd=report.ROOT).returncode
    return "passed" if code == 0 else f"failed with exit code {code}"


def specs(selection: str) -> list[str]:
    return ["-p", "on_device", "-k", selection, "tests/ops/test_specs.py"]


def run_tests(device: str) -> dict[str, str]:
    arguments = ["tests/cuda"] if device == "cuda" else specs("forward and -swiglu-")
    return {"tests": pytest(arguments, device, [])}


def run_sanitizer(device: str) -> dict[str, str]:
    """Our kernels only: torch's read uninitialised memory on purpose."""
    path = shutil.which("compute-sanitizer")
    if path is None:
        return dict.fromkeys(SANITIZERS, "compute-sanitizer is not installed")
    kernels = ["--kernel-regex", "kns=omniattn", "--error-exitcode", "9"]
    native = [f"-{name}-" for name, spec in registry().items() if spec.cuda != "planned"]
    selection = f"(forward or backward or strided) and (bf16 or f32) and ({' or '.join(native)})"
    return {
        tool: pytest(specs(selection), device, [path, "--tool", tool, *kernels])
        for tool in SANITIZERS
    }


# benchmark ----------------------------------------------------------------------------------------


def gpu_clock(function: Callable[[], object], repeats: int) -> float:
    """Seconds per call on the GPU's own clock."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        function()
    end.record()
    end.synchronize()
    return 1e-3 * start.elapsed_time(end) / repeats


def gpu_memory(function: Callable[[], object]) -> float:
    """MiB that one call adds to the allocated memory at its highest."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / harness.MIB


@dataclasses.dataclass(frozen=True)
class Machine:
    """What times and describes a device."""

    device: str
    clock: Callable[[Callable[[], object], int], float]
    memory: Callable[[Callable[[], object]], float]
    size: int  # of the matrices and, in MiB, of the copy that give the ceilings

    def ceilings(self) -> harness.Ceilings:
        """GB/s of a copy, read and written; GFLOP/s of torch's product of square matrices."""
        a = torch.randint(0, 255, (self.size * harness.MIB,), dtype=torch.uint8).to(self.device)
        b = torch.empty_like(a)
        bandwidth = 2e-9 * a.numel() / self.best(lambda: b.copy_(a))
        compute = {}
        for name, dtype in (("f32", F32), ("bf16", BF16)):
            x = torch.randn(self.size, self.size, device=self.device).to(dtype)
            compute[name] = 2e-9 * self.size**3 / self.best(lambda x=x: x @ x)
        return harness.Ceilings(compute, bandwidth, {name: name for name in compute})

    def best(self, function: Callable[[], object]) -> float:
        self.clock(function, 3)
        return min(self.clock(function, 3) for _ in range(5))

    def describe(self) -> dict[str, Any]:
        info: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda}
        if self.device != "cuda":
            return info | {"gpu": "none (dry run)"}
        properties = torch.cuda.get_device_properties()
        return info | {
            "gpu": properties.name,
            "compute capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
        }


CPU = Machine("cpu", once, lambda function: 0.0, 64)
GPU = Machine("cuda", gpu_clock, gpu_memory, 8192)


def tasks(names: list[str], machine: Machine) -> Iterator[Callable[[], run.Task]]:
    for name in names:
        spec = registry()[name]
        found = rivals.ON_GPU.get(name, spec.rivals)
        for benchmark in benchmarks()[name]:
            if machine is CPU:  # compiling and flash kernels are not what a dry run tests
                benchmark, found = shrunk(benchmark), dict(list(spec.rivals.items())[:1])
            for dtype in benchmark.dtypes:
                for pass_ in benchmark.passes:
                    yield lambda s=spec, b=benchmark, d=dtype, p=pass_, r=found: run.op_task(
                        s, b, d, p, r, LONGEST_CHECK
                    )


def run_benchmark(names: list[str], machine: Machine, seconds: float) -> dict[str, Any]:
    ceilings, commit = machine.ceilings(), report.commit()
    print(f"copy {ceilings.bandwidth:.0f} GB/s, products {dict(ceilings.compute)} GFLOP/s")
    record: dict[str, Any] = {"rows": [], "failures": []}
    for make in tqdm(list(tasks(names, machine)), unit="case"):
        try:
            task = make()
        except (run.WrongProvider, NotImplementedError, torch.OutOfMemoryError) as error:
            tqdm.write(f"FAILED: {error}")
            record["failures"].append(str(error))
            continue
        timing = harness.interleave(task.providers, seconds, lambda: 1.0, machine.clock)
        record["rows"] += run.rows_of(task, timing, ceilings, commit, machine.memory)
        line = ", ".join(f"{n} {1e3 * s:.3g} ms" for n, s in timing.seconds.items())
        tqdm.write(f"{task.op} {task.case} {task.dtype} {task.pass_}: {line}")
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=STEPS, default=STEPS, metavar="STEP")
    parser.add_argument("--op", nargs="+", choices=benchmarks(), default=list(benchmarks()))
    parser.add_argument("--quick", action="store_true", help="a third of the time per case")
    parser.add_argument("--results", type=Path, default=report.RESULTS, help="folder")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with small sizes")
    args = parser.parse_args()
    if not args.dry_run and _library.cuda_unavailable is not None:
        sys.exit(f"nothing to run on: {_library.cuda_unavailable}")
    report.RESULTS = args.results
    machine = CPU if args.dry_run else GPU

    checks: dict[str, str] = {}
    if "tests" in args.only:
        checks |= run_tests(machine.device)
    if "sanitizer" in args.only:
        checks |= run_sanitizer(machine.device)
    record: dict[str, Any] = {"machine": machine.describe() | {"checks": checks}, "rows": []}
    if "benchmark" in args.only:
        seconds = 0.01 if args.dry_run else run.QUICK_SECONDS if args.quick else run.SECONDS
        with on_device(machine.device), threads(1 if args.dry_run else os.cpu_count() or 1):
            record |= run_benchmark(args.op, machine, seconds)
    for name, outcome in checks.items():
        print(f"{name}: {outcome}")
    if record["rows"]:
        report.save("cuda", record)
        report.plot("cuda")
    failed = any(outcome.startswith("failed") for outcome in checks.values())
    sys.exit(1 if failed or record.get("failures") else 0)


if __name__ == "__main__":
    main()
