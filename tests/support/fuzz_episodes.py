"""Random calls of everything in the registry, in episodes that a seed names.

An episode draws one op, sizes, dtype and instruction set, and makes about ten calls of one kind.
`KINDS` has a function of each kind. tools/fuzz.py makes millions of calls, and
tests/ops/test_episodes.py a few hundred.
"""

import contextlib
import functools
import math
import os
import random
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from fuzz_raw import ERRORS, check_raw_call, mutate, mutated_call, valid_calls
from torch import Tensor
from torch.utils._pytree import tree_map_only

from omniattn import testing
from omniattn.testing.errors import assert_same, distance
from omniattn.testing.spec import Call, Case, OpSpec, Random, output_gradients

SPECS = testing.registry()
SIZES = (0, 1, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 48, 63, 64, 65, 66, 70, 100, 127, 130)
#: Letters of sizes that count heads; later ones are multiples of those before.
HEADS = ("G", "H", "Hv")
#: Elements, times features, of a call: most are small, so that many calls fit into a second.
SMALL, LARGE = 30_000, 600_000
#: Errors of gross mistakes, in budgets of the specs, which are for the sizes of their cases.
GROSS = 8.0
#: Differences of logs, which have rounded also where their difference is 0, and the budget with it:
#: budgets are relative to the results, and one class or one key has no other result than 0.
LOSSES = {name for name, spec in SPECS.items() if spec.family == "loss"} | {"dsa_indexer_loss"}
#: How much a result may change with its strides or with the cut of a sequence, in largest values.
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.01}
Results = tuple[Tensor, ...]
SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")


def has_gradients(spec: OpSpec, case: Case) -> bool:
    return len(spec.differentiable) > 1


def is_packed(spec: OpSpec, case: Case) -> bool:
    return "cu_seqlens" in case.tensors or spec.name == "attention_varlen"


def states_of(spec: OpSpec) -> tuple[str, ...]:
    """Arguments that are states, in the order of the results after the first."""
    return ("C", "n", "m") if spec.name == "mlstm" else ("initial_state",)


def has_state(spec: OpSpec, case: Case) -> bool:
    """Whether the state after the last step is a result, and an argument of the same form."""
    return (
        set(states_of(spec)) <= set(spec.differentiable)
        and "cu_seqlens" not in case.tensors
        and case.options.get("causal", True)
        and case.options.get("return_final_state", True)
        and not any(name.endswith("_imag") for name in case.tensors)
    )


class Refused(Exception):
    """Sizes that the op or its inputs do not have."""


@dataclass
class Count:
    """How many calls were made and refused, and the last call that was drawn."""

    calls: int = 0
    refused: int = 0
    last: object = None


@dataclass
class Drawn:
    """A valid call, and the spec and case that it came from."""

    spec: OpSpec
    case: Case
    dtype: torch.dtype
    call: Call
    count: Count

    def __str__(self) -> str:
        options = {n: v for n, v in self.case.options.items() if isinstance(v, (int, float, str))}
        layouts = {n: (*t.shape, t.stride()) for n, t in self.call.tensors.items()}
        return f"{self.spec.name}[{self.case.name}] {self.dtype} {options} {layouts}"

    def run(self, call: Call | None = None) -> Results:
        self.count.calls += 1
        return (call or self.call).run(self.spec.function)

    def gradients(self, call: Call | None = None, grads: Results = ()) -> Results:
        """Outputs, then gradients by the names that the call differentiates."""
        call = call or self.call
        self.count.calls += 1
        leaves = call.requiring_grad()
        outputs = leaves.run(self.spec.function)
        found: Results = ()
        used = [i for i, o in enumerate(outputs) if o.requires_grad]
        if used and leaves.leaves:
            grads = grads or output_gradients(outputs)
            # An input of no tokens may have no part in the results.
            found = torch.autograd.grad(
                [outputs[i] for i in used],
                leaves.leaves,
                [grads[i] for i in used],
                materialize_grads=True,
            )
        return (*(o.detach() for o in outputs), *found)


def _work(sizes: Mapping[str, int]) -> int:
    """Products of all sizes, those of grids twice: their tokens are queries and keys."""
    return math.prod(max(n, 1) ** (2 if name in "XYZ" else 1) for name, n in sizes.items())


def drawn_sizes(draw: random.Random, case: Case) -> dict[str, int]:
    """Each size kept or another one, and small enough."""
    sizes = dict(case.sizes)
    for name in sizes:
        if name not in HEADS and draw.random() < 0.6:
            sizes[name] = draw.choice(SIZES)
    heads = [name for name in HEADS if name in sizes]
    if len(heads) > 1 and draw.random() < 0.5:
        count = 1
        for name in heads:
            count *= draw.choice((1, 1, 2, 3))
            sizes[name] = count
    if case.sizes.get("Tq") == case.sizes.get("Tk") and draw.random() < 0.5 and "Tk" in sizes:
        sizes["Tq"] = sizes["Tk"]
    limit = LARGE if draw.random() < 0.05 else SMALL
    others = [name for name in sizes if name not in HEADS]
    while others and _work(sizes) > limit:
        largest = max(others, key=sizes.__getitem__)
        if sizes[largest] < 8:
            break
        sizes[largest] = draw.randint(1, sizes[largest] // 2)
    return sizes


@functools.cache
def _own_inputs(name: str) -> Callable[[Case, Random], dict[str, Tensor]]:
    return SPECS[name].inputs


def drawn_call(
    draw: random.Random, count: Count, chosen: Callable[[OpSpec, Case], bool] | None = None
) -> Drawn:
    """A call of any op, of those cases that are `chosen`."""
    while True:
        spec = SPECS[draw.choice(names_with(chosen))]
        cases = [c for c in spec.cases if chosen is None or chosen(spec, c)]
        case = draw.choice(cases)
        sizes = drawn_sizes(draw, case)
        dtype, salt = draw.choice(spec.dtypes), draw.getrandbits(32)
        for tried in (case.resized(sizes), case):
            if tried is case and _work(case.sizes) > 2 * LARGE:
                continue
            try:
                return _made(spec, tried, dtype, salt, count)
            except Refused:
                count.refused += 1


@functools.cache
def names_with(chosen: Callable[[OpSpec, Case], bool] | None) -> tuple[str, ...]:
    return tuple(
        name
        for name, spec in SPECS.items()
        if chosen is None or any(chosen(spec, case) for case in spec.cases)
    )


def _made(spec: OpSpec, case: Case, dtype: torch.dtype, salt: int, count: Count) -> Drawn:
    """The call, which runs; Refused where its inputs cannot be made or the op says why not."""

    def inputs(case: Case, random: Random) -> dict[str, Tensor]:
        return _own_inputs(spec.name)(case, Random(f"{case.name}/{salt}", random.dtype))

    salted = replace(spec, inputs=inputs)
    try:
        call = salted.call(case, dtype)
    except Exception as error:
        raise Refused from error
    try:
        count.calls += 1
        call.run(spec.function)
    except ERRORS as error:
        assert re.match(r"^[\w.]+: .*got", str(error), re.DOTALL), f"{spec.name}: {error!r}"
        raise Refused from error
    count.last = Drawn(salted, case, dtype, call, count)
    return count.last


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """New memory is not 0; ASan fills it itself (ASAN_OPTIONS of tools/fuzz.py)."""
    if SANITIZED:
        yield
        return
    with testing.poisoned_memory():
        yield


def assert_all_same(what: str, actual: Results, expected: Results) -> None:
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert_same(f"{what} {i}", a, e)


def assert_right(drawn: Drawn) -> None:
    """Within a multiple of the spec's budget of the definition in fp64."""
    measured = testing.measure_error(drawn.spec, drawn.case, drawn.dtype, "forward+backward")
    wide = torch.float64 if drawn.dtype == torch.float64 else torch.float32
    least = torch.finfo(wide).eps if drawn.spec.name in LOSSES else 0.0
    if drawn.spec.family == "attention":
        # The backward takes sum(grad * output) from the output, which has rounded to the dtype. For
        # one key or one query, gradients of scores and of scales consist of nothing else.
        least = torch.finfo(drawn.dtype).eps
    assert measured.error <= GROSS * max(measured.budget, least), f"{measured}"


def check_some(draw: random.Random, drawn: Drawn) -> None:
    """One in eight: the definition takes ten times as long as the rest of an episode."""
    if _work(drawn.case.sizes) <= SMALL and draw.random() < 0.125:
        assert_right(drawn)


def assert_finite(drawn: Drawn, results: Results) -> None:
    """Infinite only where the definition is."""
    if not all(bool(t.isfinite().all()) for t in results if t.is_floating_point()):
        assert_right(drawn)


def assert_close(dtype: torch.dtype, what: str, actual: Results, expected: Results) -> None:
    """Up to rounding, by the largest value of all."""
    finite = [t.double()[t.isfinite()].abs() for t in expected]
    largest = max((float(t.max()) for t in finite if t.numel()), default=0.0)
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert a.shape == e.shape and a.dtype == e.dtype, f"{what} {i}: {a.shape}, {a.dtype}"
        error = distance(a, e.double())
        assert error <= CLOSE[dtype] * largest, f"{what} {i}: {error:.3g} of {largest:.3g}"


def values(draw: random.Random, count: Count) -> None:
    """Checks that repeated calls give the same finite bits, whatever new memory holds."""
    drawn = drawn_call(draw, count)
    results = drawn.gradients()
    grads = output_gradients(results[: len(results) - len(drawn.call.leaves)])
    assert_finite(drawn, results)
    with poisoned():
        for _ in range(7):
            assert_all_same("the same call again", drawn.gradients(grads=grads), results)
        inference = drawn.run()
    assert_all_same("inference", inference, results[: len(inference)])
    check_some(draw, drawn)


def gradients(draw: random.Random, count: Count) -> None:
    """Any subset of wanted gradients has the bits of all."""
    drawn = drawn_call(draw, count, has_gradients)
    names = drawn.call.differentiable
    results = drawn.gradients()
    outputs = results[: len(results) - len(names)]
    every = dict(zip(names, results[len(outputs) :], strict=True))
    grads = output_gradients(outputs)
    with poisoned():
        for _ in range(7):
            chosen = tuple(n for n in names if draw.random() < 0.5) or (draw.choice(names),)
            found = drawn.gradients(replace(drawn.call, differentiable=chosen), grads)
            expected = (*outputs, *(every[n] for n in chosen))
            assert_all_same(f"wanted {chosen}:", found, expected)


def strides(draw: random.Random, count: Count) -> None:
    """Any layouts of inputs and of incoming gradients give the same up to rounding."""
    drawn = drawn_call(draw, count)
    results = drawn.gradients()
    outputs = results[: len(results) - len(drawn.call.leaves)]
    grads = output_gradients(outputs)
    layouts = ("contiguous", *testing.LAYOUTS)
    for _ in range(7):
        moved = drawn.call.map(lambda t: testing.relayout(t, draw.choice(layouts)))
        count.last = replace(drawn, call=moved)
        incoming = tuple(testing.relayout(g, draw.choice(layouts)) for g in grads)
        found = drawn.gradients(moved, incoming)
        try:
            assert_close(drawn.dtype, "strides", found, results)
        except AssertionError:
            assert_as_right(drawn, found, results, grads)


def assert_as_right(drawn: Drawn, found: Results, contiguous: Results, grads: Results) -> None:
    """No further from the definition in fp64 than eight times what contiguous tensors give."""
    exact, reference = drawn.call.to(torch.float64), drawn.spec.reference
    truth = exact.run(reference)
    truth += exact.gradients(reference, tuple(g.double() for g in grads))
    for i, (a, c, t) in enumerate(zip(found, contiguous, truth, strict=True)):
        error, usual = distance(a, t), distance(c, t)
        assert error <= GROSS * usual, f"strides {i}: {error:.3g}, contiguous {usual:.3g}"


def packed(draw: random.Random, count: Count) -> None:
    """Sequences of any lengths, none included, are right, and repeat their bits."""
    drawn = drawn_call(draw, count, is_packed)
    for _ in range(3):
        results = drawn.gradients()
        assert_finite(drawn, results)
        with poisoned():
            assert_all_same("the same call again", drawn.gradients(), results)
        salt, case, dtype = draw.getrandbits(32), drawn.case, drawn.dtype
        drawn = _made(SPECS[drawn.spec.name], case, dtype, salt, count)
    check_some(draw, drawn)


def states(draw: random.Random, count: Count) -> None:
    """A sequence in two calls, of which the second begins with the state of the first."""
    drawn = drawn_call(draw, count, has_state)
    call, (batch, steps) = drawn.call, (drawn.case.sizes[name] for name in "BT")
    if list(drawn.case.sizes.values()).count(steps) > 1:
        return  # which dimension has the steps is not clear
    whole = drawn.run()
    names = states_of(drawn.spec)
    kept = [n for n, t in call.tensors.items() if n in names or t.shape[:2] != (batch, steps)]
    for _ in range(3):
        cut = draw.randint(0, steps)
        first, second = (
            {n: t[:, at] if n not in kept else t for n, t in call.tensors.items()}
            for at in (slice(cut), slice(cut, None))
        )
        results = drawn.run(replace(call, tensors=first))
        state = dict(zip(names, results[1:], strict=True))
        rest = drawn.run(replace(call, tensors={**second, **state}))
        joined = (torch.cat((results[0], rest[0]), 1), *rest[1:])
        assert_close(drawn.dtype, f"cut at {cut}", joined, whole)


def arguments(draw: random.Random, count: Count) -> None:
    """One wrong argument of a public function: an error with a message, or results."""
    drawn = drawn_call(draw, count)
    tensors, options = dict(drawn.call.tensors), dict(drawn.call.options)
    for _ in range(8):
        changed = draw.choice([*tensors, *options])
        value = mutate(tensors[changed] if changed in tensors else options[changed], draw)
        call = replace(
            drawn.call,
            tensors={**tensors, changed: value} if changed in tensors else tensors,
            options={**options, changed: value} if changed in options else options,
        )
        count.last = (
            f"{drawn} with {changed}={value if not torch.is_tensor(value) else value.shape}"
        )
        try:
            count.calls += 1
            drawn.spec.function(**call.tensors, **call.options)
        except ERRORS as error:
            assert str(error)


@dataclass
class RawArguments:
    """A call of a raw op; shown by what its arguments are."""

    op: object
    args: tuple[object, ...]

    def __str__(self) -> str:
        shown = tree_map_only(Tensor, lambda t: (*t.shape, t.dtype, t.stride()), self.args)
        return f"{self.op}{shown}"


def raw(draw: random.Random, count: Count) -> None:
    """Raw ops with one or two wrong arguments."""
    calls = valid_calls(draw.choice((torch.float32, torch.float32, torch.bfloat16, torch.float64)))
    name = draw.choice(sorted(calls))
    for _ in range(16):
        op, args = mutated_call(calls[name], draw)
        count.calls += 1
        count.last = RawArguments(op, args)
        check_raw_call(op, args, compare=draw.random() < 0.02)


KINDS = {f.__name__: f for f in (values, gradients, strides, packed, states, arguments, raw)}


def run_episode(seed: int, kinds: Sequence[str], count: Count) -> None:
    """The episode of a seed; raises what is wrong, with the call in the message."""
    draw = random.Random(seed)
    kind, level = draw.choice(kinds), draw.choice(testing.isas())
    count.last = None
    try:
        with testing.isa(level), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            KINDS[kind](draw, count)
    except Exception as error:
        raise AssertionError(f"seed {seed}, {kind}, {level}: {count.last}: {error!r}") from error
