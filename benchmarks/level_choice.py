"""Measures attention and experts on every ISA level, for ops/dispatch/level_choice.py.

    python benchmarks/level_choice.py [--threads 2] [--seconds 0.3]
    python benchmarks/level_choice.py --record    # adds this family of CPUs to what is installed

The bf16 levels and torch alternate, first the forward, then forward and backward. The best times
count, since other load only adds to them. Shapes for which torch is faster than the chosen level
are listed at the end.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from baselines.moe import experts_grouped, experts_loop
from goal_rows.goal import BF16, PASSES, provider, sdpa, tensors
from linear_choice import best_times

from omniattn import testing
from omniattn.functional import attention, moe_experts
from omniattn.ops.dispatch import level_choice
from omniattn.ops.dispatch.cpu import cpu_family
from omniattn.testing.spec import Function

ATTENTION = [  # (T, H, Hkv, D), causal
    (8, 8, 8, 64),
    (16, 8, 8, 64),
    (32, 8, 8, 64),
    (64, 8, 8, 64),
    (64, 8, 2, 128),
    (128, 8, 8, 64),
    (256, 8, 8, 128),
    (512, 8, 8, 64),
    (1152, 8, 8, 128),
]
EXPERTS = [  # (tokens, experts, experts per token, width, hidden)
    (16, 8, 2, 512, 352),
    (64, 8, 2, 512, 352),
    (128, 64, 6, 512, 352),
    (512, 64, 6, 512, 352),
    (2048, 64, 6, 512, 352),
    (1024, 8, 2, 512, 1792),
]


@dataclass(frozen=True)
class Problem:
    """Inputs of an op, and calls of the op and of torch."""

    shape: tuple[int, ...]
    madds: int  # multiply-adds per kv head, or per expert on average
    named: dict[str, torch.Tensor]
    ours: Function
    torchs: list[Function]


@dataclass(frozen=True)
class Measured:
    """Seconds of each level, slowest first, and of torch's fastest form."""

    shape: tuple[int, ...]
    madds: int
    levels: dict[str, float]
    torchs: float

    def gain(self, name: str) -> float:
        """Returns the speed-up of a level over the fastest one below it."""
        names = list(self.levels)
        return min(self.levels[n] for n in names[: names.index(name)]) / self.levels[name]

    def chosen(self, least: dict[str, int]) -> str:
        """Returns the level that the native library chooses (isa_for of runtime/measured_isa.h)."""
        return next(n for n in reversed(self.levels) if self.madds >= least.get(n, 0))


def attention_problems() -> Iterator[Problem]:
    for shape in ATTENTION:
        length, heads, kv_heads, dim = shape
        q, k, v = tensors(*((4, length, h, dim) for h in (heads, kv_heads, kv_heads)), dtype=BF16)
        yield Problem(
            shape,
            2 * heads // kv_heads * length * length * dim,
            {"q": q, "k": k, "v": v},
            lambda q, k, v: attention(q, k, v, causal=True),
            [lambda q, k, v: sdpa(q, k, v, is_causal=True, enable_gqa=True)],
        )


def expert_problems() -> Iterator[Problem]:
    for shape in EXPERTS:
        tokens, experts, slots, width, hidden = shape
        x, logits, up, down = tensors(
            *((tokens, width), (tokens, experts)),
            *((experts, 2 * hidden, width), (experts, width, hidden)),
            dtype=BF16,
        )
        weights, index = logits.softmax(-1).topk(slots)
        yield Problem(
            shape,
            math.ceil(tokens * slots / experts) * 3 * width * hidden,
            {"x": x, "index": index, "weights": weights, "up": up, "down": down},
            moe_experts,
            [experts_grouped, experts_loop],
        )


PROBLEMS: dict[str, Callable[[], Iterator[Problem]]] = {
    "attention": attention_problems,
    "moe_experts": expert_problems,
}


def on_level(name: str, run: Callable[[], object]) -> Callable[[], object]:
    def call() -> object:
        with testing.isa(name):
            return run()

    return call


def measure(problem: Problem, seconds: float) -> Measured:
    """Measures fp32 vectors and each matmul-only level above."""
    every, products = level_choice.product_levels(), level_choice.product_levels(BF16)
    levels = [next(n for n in reversed(testing.isas()) if n not in every), *products]
    times = [0.0] * (len(levels) + len(problem.torchs))
    for pass_ in PASSES:
        ours = provider(pass_, problem.named, problem.ours)
        runs = [on_level(name, ours) for name in levels]
        runs += [provider(pass_, problem.named, function) for function in problem.torchs]
        times = [a + b for a, b in zip(times, best_times(runs, seconds), strict=True)]
    by_level = dict(zip(levels, times, strict=False))
    return Measured(problem.shape, problem.madds, by_level, min(times[len(levels) :]))


def least_madds(measured: list[Measured], name: str) -> int:
    """Returns the threshold with the largest total gain of the level; NEVER without a gain."""
    order = sorted(measured, key=lambda m: m.madds)
    best, least = 0.0, level_choice.NEVER
    for m in order:
        total = sum(math.log(x.gain(name)) for x in order if x.madds >= m.madds)
        if total > best:
            best, least = total, m.madds
    return 0 if least == order[0].madds else least


def measure_op(op: str, seconds: float) -> dict[str, object]:
    """Measures, prints and returns the record of an op."""
    found = []
    for problem in PROBLEMS[op]():
        found.append(measure(problem, seconds))
        m = found[-1]
        times = "  ".join(f"{n} {t * 1e3:.3f} ms" for n, t in m.levels.items())
        print(f"{op} {m.shape} {m.madds:.1e}: {times}  torch {m.torchs * 1e3:.3f} ms", flush=True)
    least = {name: least_madds(found, name) for name in level_choice.product_levels(BF16)}
    gains = [[*m.shape, round(m.torchs / m.levels[m.chosen(least)], 2)] for m in found]
    for name, madds in least.items():
        print(f"{op} on {name} from {madds:.1e} multiply-adds on")
    for *shape, gain in gains:
        if gain < 1:
            print(f"{op} {tuple(shape)} loses to torch: {gain} of its speed")
    return {"least": least, "gains": gains}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.3, help="per measurement")
    parser.add_argument("--ops", nargs="*", choices=level_choice.OPS, default=level_choice.OPS)
    parser.add_argument(
        "--record", action="store_true", help=f"write {level_choice.RECORDS.name} for this family"
    )
    arguments = parser.parse_args()
    if arguments.record and set(arguments.ops) != set(level_choice.OPS):
        parser.error("--record needs all ops")
    torch.set_num_threads(arguments.threads)
    level_choice.install(None)
    ops = {op: measure_op(op, arguments.seconds) for op in arguments.ops}
    if arguments.record:
        records = json.loads(level_choice.RECORDS.read_text())
        records[cpu_family()] = {
            "torch": torch.__version__,
            "threads": arguments.threads,
            "ops": ops,
        }
        level_choice.RECORDS.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
