"""Checks and times ops: one OpSpec per op, error budgets, properties, machine state.

>>> spec = registry()["rms_norm"]
>>> error, budget, tensor = measure_error(spec, spec.cases[0], torch.float32)
>>> assert error <= budget
"""

from omniattn.functional._keywords import explain_keywords
from omniattn.testing.check import check_op
from omniattn.testing.environment import isa, isas, on_device, threads
from omniattn.testing.errors import Measured, assert_within_budget, measure_error
from omniattn.testing.memory import LAYOUTS, Layout, poisoned_memory, relayout
from omniattn.testing.own import OWN_PROPERTIES, check_function
from omniattn.testing.registry import registry
from omniattn.testing.spec import Benchmark, Call, Case, OpSpec, Pass, Random
from omniattn.testing.timing import prepare, time_call

__all__ = [
    "LAYOUTS",
    "OWN_PROPERTIES",
    "Benchmark",
    "Call",
    "Case",
    "Layout",
    "Measured",
    "OpSpec",
    "Pass",
    "Random",
    "assert_within_budget",
    "check_function",
    "check_op",
    "isa",
    "isas",
    "measure_error",
    "on_device",
    "poisoned_memory",
    "prepare",
    "registry",
    "relayout",
    "threads",
    "time_call",
]

explain_keywords(__name__, __all__)
