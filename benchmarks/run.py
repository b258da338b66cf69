"""Times omniattn against torch and transformers, on the cases of the OpSpecs.

    python benchmarks/run.py [--op attention ...] [--quick] [--threads 2] [--name NAME] [--keep]

Every provider is first compared with the fp64 reference; a wrong one is not timed. Results go to
benchmarks/results/<name>.{json,csv,png}, named by the CPU family; --publish also writes report.py's
pages.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import harness
import report
import torch
from baselines import BASELINES
from system_rows.rows import SYSTEMS
from system_rows.system import System, same_results

from omniattn.functional import masks
from omniattn.ops.dispatch.cpu import cpu_family
from omniattn.testing import Case, OpSpec, measure_error, prepare, registry
from omniattn.testing.environment import current_device
from omniattn.testing.spec import SHORT_DTYPE, Function

#: Budget of a baseline in multiples of ours; baselines may round more often.
BASELINE_BUDGETS = 64
#: Longest sequences compared with fp64, which stores all scores or loops over tokens.
LONGEST_CHECK = {"T": 320, "Tq": 320, "Tk": 320}
#: Baselines without a backward on the CPU; compiling it would be useless.
FORWARD_ONLY = ("flex",)
SECONDS, QUICK_SECONDS = 3.0, 1.0


@dataclass(frozen=True)
class Task:
    """A line of the benchmark: equivalent providers, ours first, and why some are missing."""

    op: str
    case: str
    dtype: str
    pass_: str
    bound: str
    flops: float
    bytes: float
    providers: dict[str, Callable[[], object]]
    missing: dict[str, Exception] = dataclasses.field(default_factory=dict)


def op_tasks(names: list[str]) -> Iterator[Callable[[], Task]]:
    """Yields a maker of each task, so that only one task's tensors are alive at a time."""
    for spec in (registry()[name] for name in names):
        for benchmark in spec.benchmarks:
            for dtype in benchmark.dtypes:
                for pass_ in benchmark.passes:
                    yield lambda s=spec, b=benchmark, d=dtype, p=pass_: op_task(s, b, d, p)


def op_task(
    spec: OpSpec,
    benchmark,
    dtype: torch.dtype,
    pass_,
    baselines=None,
    longest=LONGEST_CHECK,
    tolerance: float = 0.0,
) -> Task:
    """Makes the task of an op and its baselines, by default all.

    `longest` limits the sizes of the comparison with fp64; `tolerance` is an error that baselines
    may have at least.
    """
    baselines = BASELINES[spec.name] if baselines is None else baselines
    torch._dynamo.reset()  # a compiled baseline would count this shape as a recompilation
    with current_device():  # draws the inputs there
        call = spec.call(benchmark.case, dtype)
    providers: dict[str, Callable[[], object]] = {}
    missing: dict[str, Exception] = {}
    for name, function in {"ours": spec.public, **baselines}.items():
        try:
            if name in FORWARD_ONLY and pass_ != "forward":
                raise NotImplementedError(f"{name} has no backward")
            check(spec, benchmark.case, dtype, pass_, name, function, longest, tolerance)
            with current_device():
                providers[name] = prepare(call, function, pass_)
        except Exception as reason:
            if name == "ours":
                raise
            missing[name] = reason.with_traceback(None)  # frames would keep tensors alive
    with torch.no_grad():
        outputs = call.run(spec.function)
    return Task(
        spec.name,
        benchmark.case.name,
        SHORT_DTYPE[dtype],
        pass_,
        benchmark.bound,
        spec.flops(benchmark.case, pass_),
        spec.bytes(call, outputs, pass_),
        providers,
        missing,
    )


class WrongProvider(Exception):
    """Raised for a provider whose results differ from the op's."""


def shortened(case: Case, longest: dict[str, int]) -> Case:
    """Limits a case to these sizes, unless its mask requires its own sizes."""
    if isinstance(case.options.get("mask"), masks.Blocks):
        return case
    sizes = {k: min(n, longest.get(k, n)) for k, n in case.sizes.items()}
    return dataclasses.replace(case, sizes=sizes)


def check(
    spec: OpSpec,
    case: Case,
    dtype: torch.dtype,
    pass_: str,
    name: str,
    function: Function,
    longest: dict[str, int],
    tolerance: float,
) -> None:
    found = measure_error(spec, shortened(case, longest), dtype, pass_, function=function)
    ours = name == "ours"
    if found.error > (found.budget if ours else max(BASELINE_BUDGETS * found.budget, tolerance)):
        raise WrongProvider(
            f"{name} is {found.error:.3g} from fp64 in {found.tensor}, budget {found.budget:.3g}"
        )


#: Names, for --op and in tables, of rows without an op.
OTHERS = {"systems": "system", "training": "training step"}


def system_task(system: System) -> Task:
    """Makes the task of a layer or composition; providers that differ from ours are not timed."""
    steps = system.steps()
    want = steps["ours"]()
    providers: dict[str, Callable[[], object]] = {}
    missing: dict[str, Exception] = {}
    for name, run in steps.items():
        try:
            same_results(name, run(), want)
            providers[name] = run
        except Exception as reason:
            missing[name] = reason.with_traceback(None)
    trained = any(leaves for _, leaves in system.make().values())
    pass_ = "forward+backward" if trained else "forward"
    return Task(
        OTHERS["systems"], system.case, "f32", pass_, "compute", 0.0, 0.0, providers, missing
    )


def training_task() -> Task:
    """Makes the task of a training step of the default model, against Hugging Face's Llama."""
    from omniattn.models import PRESETS, Llama
    from omniattn.training import TrainConfig

    training = TrainConfig()
    config = PRESETS[training.model]
    torch.manual_seed(training.seed)
    tokens = torch.randint(config.vocab_size, (training.batch, training.length + 1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    model = Llama(config)

    def step(module: torch.nn.Module, loss_of: Callable[[], torch.Tensor]) -> Callable[[], object]:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, fused=True)

        def run() -> None:
            module.zero_grad()
            loss_of().backward()
            optimizer.step()

        return run

    def hf_step(compiled: bool) -> Callable[[], object]:
        hf = model.to_hf().train()
        forward = torch.compile(hf) if compiled else hf

        def loss() -> torch.Tensor:
            logits = forward(inputs, use_cache=False).logits
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

        return step(hf, loss)

    return Task(
        OTHERS["training"],
        f"{training.model}-B{training.batch}T{training.length}",
        "f32",
        "step",
        "compute",
        6.0 * config.num_parameters * inputs.numel(),
        0.0,
        {
            "ours": step(model, lambda: model(inputs, targets)),
            "hf": hf_step(False),
            "compiled": hf_step(True),
        },
    )


def rows_of(
    task: Task,
    timing: harness.Timing,
    ceilings: harness.Ceilings,
    commit: str,
    peak_memory: Callable[[Callable[[], object]], float],
) -> list[report.Row]:
    rows = []
    for name, seconds in timing.seconds.items():
        ratio = timing.ratios.get(name, harness.Ratio(1.0, 1.0, 1.0))
        gflops, gbytes = 1e-9 * task.flops / seconds, 1e-9 * task.bytes / seconds
        compute_bound = task.bound == "compute"
        ceiling = ceilings.of(task.dtype) * timing.speed if compute_bound else ceilings.bandwidth
        share = (gflops if compute_bound else gbytes) / ceiling
        rows.append(
            {
                "op": task.op,
                "case": task.case,
                "dtype": task.dtype,
                "pass": task.pass_,
                "provider": name,
                "bound": task.bound,
                "milliseconds": round(1e3 * seconds, 6),
                "gflops": round(gflops, 3),
                "gbytes_per_s": round(gbytes, 3),
                "ceiling": round(ceiling, 2),
                "of_ceiling": round(share, 4),
                "ratio": round(ratio.median, 4),
                "ratio_low": round(ratio.low, 4),
                "ratio_high": round(ratio.high, 4),
                "memory_mib": round(peak_memory(task.providers[name]), 2),
                "rounds": timing.kept,
                "dropped": timing.rounds - timing.kept,
                "commit": commit,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    benchmarked = [name for name, spec in registry().items() if spec.benchmarks]
    choices = [*benchmarked, *OTHERS]
    parser.add_argument("--op", nargs="*", choices=choices, default=choices, metavar="OP")
    parser.add_argument("--quick", action="store_true", help="a third of the time per case")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument(
        "--name", default=cpu_family(), help="name of the result files (default: the CPU family)"
    )
    parser.add_argument("--keep", action="store_true", help="keep the record's rows of other ops")
    parser.add_argument("--publish", action="store_true", help="write the pages too")
    parser.add_argument("--force", action="store_true", help="run although the machine is busy")
    args = parser.parse_args()
    from tqdm import tqdm

    isa, ceilings = harness.start(args.threads, args.force)
    commit = report.commit()
    record = {
        "machine": report.machine(args.threads, isa),
        "rows": report.other_rows(args.name, [OTHERS.get(op, op) for op in args.op])
        if args.keep
        else [],
    }
    order = [*benchmarked, *OTHERS.values()]
    makers = list(op_tasks([op for op in args.op if op in benchmarked]))
    if "systems" in args.op:
        rows = (row for each in SYSTEMS.values() for row in each)
        makers += [functools.partial(system_task, row) for row in rows]
    if "training" in args.op:
        makers.append(training_task)
    speed = harness.cpu_speed(ceilings, args.threads, isa)
    failures = 0
    for make in tqdm(makers, unit="case"):
        try:
            task = make()
        except WrongProvider as error:
            tqdm.write(f"FAILED: {error}")
            failures += 1
            continue
        for name, reason in task.missing.items():
            tqdm.write(f"{task.op} {task.case}: no {name}: {reason}")
        seconds = QUICK_SECONDS if args.quick else SECONDS
        timing = harness.interleave(task.providers, seconds, speed)
        record["rows"] += rows_of(task, timing, ceilings, commit, harness.peak_memory)
        record["rows"].sort(key=lambda row: order.index(row["op"]))
        report.save(args.name, record)
        line = ", ".join(f"{n} {1e3 * s:.3g} ms" for n, s in timing.seconds.items())
        tqdm.write(f"{task.op} {task.case} {task.dtype} {task.pass_}: {line}")
    report.plot(args.name)
    if args.publish:
        report.publish()
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
