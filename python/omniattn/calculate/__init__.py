"""Calculators: parameters, operations, memory and times of models, without running them."""

from omniattn.calculate.costs import Flops, StepCost, flops, step_cost
from omniattn.calculate.memory import CacheBytes, ScoreBytes, cache_bytes, kv_bytes, score_bytes
from omniattn.calculate.pairs import keys_of, pairs
from omniattn.calculate.parallel import Parallel, parallel
from omniattn.calculate.parameters import Parameters, param_count, parameters
from omniattn.calculate.patterns import PatternCount, pattern_counts, selected_pairs
from omniattn.calculate.roofline import Roofline, decode, prefill, roofline
from omniattn.calculate.sources import config_of
from omniattn.calculate.structure import Capacity, ReceptiveField, capacity, receptive_field
from omniattn.calculate.table import report

__all__ = [
    "CacheBytes",
    "Capacity",
    "Flops",
    "Parallel",
    "Parameters",
    "PatternCount",
    "ReceptiveField",
    "Roofline",
    "ScoreBytes",
    "StepCost",
    "cache_bytes",
    "capacity",
    "config_of",
    "decode",
    "flops",
    "keys_of",
    "kv_bytes",
    "pairs",
    "parallel",
    "param_count",
    "parameters",
    "pattern_counts",
    "prefill",
    "receptive_field",
    "report",
    "roofline",
    "score_bytes",
    "selected_pairs",
    "step_cost",
]
