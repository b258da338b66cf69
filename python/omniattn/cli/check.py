"""omniattn check: errors of all ops against fp64, and their speed."""

from __future__ import annotations

import argparse
from typing import NamedTuple

import torch

from omniattn.cli.errors import CommandError
from omniattn.suggestions import did_you_mean
from omniattn.testing import Measured, OpSpec, Pass, measure_error, prepare, registry, time_call
from omniattn.testing.spec import SHORT_DTYPE

_PASSES: tuple[Pass, ...] = ("forward", "backward")
_ROW = "{:<28} {:<5} {:<9} {:>9} {:>9} {:>6}  {:>9} {:>9} {:>7}  {}"


class _Parity(NamedTuple):
    """Case of an op that comes closest to its budget, or the failure of a case."""

    worst: Measured
    case: str
    failure: str

    @property
    def passed(self) -> bool:
        return not self.failure


def run(args: argparse.Namespace) -> int:
    """Prints one line per op, dtype and pass, and returns the exit code."""
    specs = registry()
    unknown = [name for name in args.ops if name not in specs]
    if unknown:
        hint = did_you_mean(unknown[0], specs)
        raise CommandError(f"no op {', '.join(unknown)}; there are {', '.join(specs)}{hint}")
    failures = []
    print("error: against fp64, in the case closest to its budget; ratio: error / budget;")
    print("speed: ms of the definition in plain torch / ms")
    print(
        _ROW.format(
            "op", "dtype", "pass", "error", "budget", "ratio", "ms", "plain ms", "speed", "case"
        )
    )
    for name in args.ops or specs:
        spec = specs[name]
        for dtype in spec.dtypes:
            for pass_ in _PASSES if spec.differentiable else _PASSES[:1]:
                parity = _parity(spec, dtype, pass_)
                if not parity.passed:
                    failures.append(f"{name} {SHORT_DTYPE[dtype]} {pass_}: {parity.failure}")
                speed = ("", "", "") if args.no_speed else _speed(spec, dtype, pass_)
                _print(spec, dtype, pass_, parity, speed)
    for failure in failures:
        print(f"FAILED {failure}")
    print(f"{len(failures)} out of budget" if failures else "all within budget")
    return 1 if failures else 0


def _parity(spec: OpSpec, dtype: torch.dtype, pass_: Pass) -> _Parity:
    worst, at = Measured(-1.0, 1.0, ""), ""
    for case in spec.cases:
        try:
            m = measure_error(spec, case, dtype, pass_)
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            return _Parity(worst, case.name, f"{case.name}: {error}")
        if _ratio(m) > _ratio(worst):
            worst, at = m, case.name
        if m.error > m.budget:
            return _Parity(m, at, f"{at}: error {m.error:.2g} of {m.tensor}, budget {m.budget:.2g}")
    return _Parity(worst, at, "")


def _ratio(m: Measured) -> float:
    if m.budget > 0:
        return m.error / m.budget
    return float("inf") if m.error > 0 else 0.0


def _speed(spec: OpSpec, dtype: torch.dtype, pass_: Pass) -> tuple[str, str, str]:
    """Returns ms of the op and of the definition, and their ratio; empty without a benchmark."""
    wanted = {pass_, "forward+backward"}
    timed = [b for b in spec.benchmarks if dtype in b.dtypes and wanted.intersection(b.passes)]
    if not timed:
        return "", "", ""
    call = spec.call(timed[0].case, dtype)
    ours = time_call(prepare(call, spec.function, pass_), seconds=0.1)
    theirs = time_call(prepare(call, spec.reference, pass_), seconds=0.1)
    return f"{ours * 1e3:.3f}", f"{theirs * 1e3:.3f}", f"{theirs / ours:.2f}x"


def _print(
    spec: OpSpec, dtype: torch.dtype, pass_: Pass, parity: _Parity, speed: tuple[str, str, str]
) -> None:
    m = parity.worst
    row = _ROW.format(
        spec.name,
        SHORT_DTYPE[dtype],
        pass_,
        f"{m.error:.1e}",
        f"{m.budget:.1e}",
        f"{_ratio(m):.2f}" if parity.passed else "FAILED",
        *speed,
        parity.case,
    )
    print(row, flush=True)
