"""Properties that every op promises, as functions of (spec, case, dtype) that raise AssertionError.

`PROPERTIES` maps the name of each to its function; tests/ops/test_specs.py runs them over the
registry, and the `omniattn_check` fixture runs them on a user's own sizes.
"""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from omniattn.testing.autocast import KEPT, LEADERS, rule_of
from omniattn.testing.batches import batch_invariant
from omniattn.testing.environment import current_device, isa, isas, threads
from omniattn.testing.errors import assert_as_exact, assert_same, assert_within_budget, references
from omniattn.testing.memory import LAYOUTS, poisoned_memory
from omniattn.testing.spec import Call, Case, Function, OpSpec, output_gradients
from omniattn.testing.wanted import wanted_gradients

__all__ = ["PROPERTIES", "Property", "assert_all_same", "outputs_and_gradients", "recorded_ops"]

Property: TypeAlias = Callable[[OpSpec, Case, torch.dtype], None]


def forward(spec: OpSpec, case: Case, dtype: torch.dtype) -> None:
    """Outputs are within budget of fp64."""
    assert_within_budget(spec, case, dtype, "forward")


def derivatives(spec: OpSpec, case: Case, dtype: torch.dtype) -> None:
    """Gradients are within budget of fp64."""
    assert_within_budget(spec, case, dtype, "backward")


def each_gradient(spec: OpSpec, case: Case, dtype: torch.dtype) -> None:
    """The gradient of each input alone has the bits of all together."""
    call = spec.call(case, dtype)
    every = call.gradients(spec.function)
    for name, expected in zip(call.differentiable, every, strict=True):
        alone = Call(call.tensors, call.options, (name,)).gradients(spec.function)[0]
        assert_same(f"{spec.name}: gradient of {name} alone", alone, expected)


def backward(spec: OpSpec, case: Case, dtype: torch.dtype) -> None:
    """Gradients are within budget of fp64, and each alone has the bits of all together."""
    derivatives(spec, case, dtype)
    each_gradient(spec, case, dtype)


def expanded_gradient(spec: OpSpec, case: Case, dtype: torch.dtype) -> None:
    """An incoming gradient with stride 0, as sum() makes it, gives what a dense one gives."""
    call = spec.call(case, dtype)
    outputs = call.run(spec.function)
    scalars = tuple(o.new_full((), 0.5) for o in outputs)
    dense = tuple(s.expand(o.shape).contiguous() for s, o in zip(scalars, outputs, strict=True))
    expanded = tuple(s.expand(o.shape) for s, o in zip(scalars, outputs, strict=True))
    assert_all_same(
        spec, call.gradients(spec.function, expanded), call.gradients(spec.function, dense)
    )


def gradcheck(spec: OpSpec, case: Case, dtype: torch.dtype) -> None:
    """Gradients equal finite differences (fp64), and second ones where the spec has them."""
    call = spec.call(case, dtype).requiring_grad()

    def function(*leaves: Tensor) -> tuple[Tensor, ...]:
        tensors = {**call.tensors, **dict(zip(call.differentiable, leaves, strict=True))}
        return Call(tensors, call.options).run(spec.function)

    assert torch.autograd.gradcheck(function, call.leaves)
    try:
        assert torch.autograd.gradgradcheck(function, call.leaves)
        second_order = True
    except NotImplementedError:
        second_order = False
    assert second_order == spec.second_order


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "omniattn":
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def recorded_ops(
    call: Call, function: Function
) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Returns the raw ops (op, args, kwargs) of inference, forward and backward, each once."""
    recorder = _Recorder()
    with recorder:
        call.run(function)
        call.gradients(function)
    return list({op: (op, args, kwargs) for op, args, kwargs in recorder.calls}.values())


def opcheck(spec: OpSpec, case: Case, dtype: torch.dtype) -> None:
    """Schema, fake kernel, autograd and AOT dispatch of every op that the call uses."""
    for op, args, kwargs in recorded_ops(spec.call(case, dtype), spec.function):
        name = op._schema.name.split("::")[1]
        public = getattr(torch.ops.omniattn, name.removesuffix("_raw")).default
        differentiable = name.endswith("_raw")
        torch.library.opcheck(public, _fresh(args, differentiable), kwargs)


def _fresh(args: tuple[Any, ...], requires_grad: bool) -> tuple[Any, ...]:
    def one(value: Any) -> Any:
        if isinstance(value, Tensor):
            leaf = value.detach().clone(memory_format=torch.preserve_format)
            return leaf.requires_grad_(requires_grad and leaf.is_floating_point())
        return [one(v) for v in value] if isinstance(value, list) else value

    return tuple(one(a) for a in args)


def strided(spec: OpSpec, case: Case, dtype: torch.dtype) -> None:
    """Any layout is correct, and memory between the elements (NaN here) is never read."""
    wanted = references(spec, case, dtype)
    for layout in LAYOUTS:
        assert_as_exact(spec, case, dtype, wanted, layout=layout)


def far(spec: OpSpec, case: Case, dtype: torch.dtype) -> None:
    """Strides beyond 2^31 elements do not overflow."""
    assert_within_budget(spec, case, dtype, layout="far")


def poisoned(spec: OpSpec, case: Case, dtype: torch.dtype) -> None:
    """Results do not depend on uninitialised memory."""
    clean = outputs_and_gradients(spec, case, dtype)
    with poisoned_memory():
        results = outputs_and_gradients(spec, case, dtype)
    assert_all_same(spec, results, clean)


def deterministic(spec: OpSpec, case: Case, dtype: torch.dtype) -> None:
    """Bitwise the same on 1, 2 and 3 threads, and twice in a row."""
    with threads(1):
        expected = outputs_and_gradients(spec, case, dtype)
    for count in (2, 2, 3):
        with threads(count):
            assert_all_same(spec, outputs_and_gradients(spec, case, dtype), expected)


def every_isa(spec: OpSpec, case: Case, dtype: torch.dtype) -> None:
    """Every instruction set of this machine is within budget."""
    wanted = references(spec, case, dtype)
    for name in isas():
        with isa(name):
            assert_as_exact(spec, case, dtype, wanted)


def compiled(spec: OpSpec, case: Case, dtype: torch.dtype) -> None:
    """torch.compile(fullgraph=True) gives the same outputs and gradients."""
    torch._dynamo.reset()
    function = torch.compile(spec.function, fullgraph=True, backend="aot_eager")
    assert_all_same(
        spec,
        outputs_and_gradients(spec, case, dtype, function),
        outputs_and_gradients(spec, case, dtype),
    )


def dynamic(spec: OpSpec, case: Case, dtype: torch.dtype) -> None:
    """torch.compile(fullgraph=True) makes one graph of symbolic and constant sizes."""
    names = list(spec.call(case, dtype).tensors)
    _assert_dynamic(spec, case, dtype, names[1::2])


def dynamic_each(spec: OpSpec, case: Case, dtype: torch.dtype) -> None:
    """Checks dynamic shapes with all sizes dynamic, then with the sizes of one tensor constant."""
    for name in (None, *spec.call(case, dtype).tensors):
        _assert_dynamic(spec, case, dtype, [name])


def _assert_dynamic(
    spec: OpSpec, case: Case, dtype: torch.dtype, constant: Sequence[str | None]
) -> None:
    torch._dynamo.reset()
    call = spec.call(case, dtype)
    for name, t in call.tensors.items():
        if name in constant:
            torch._dynamo.mark_static(t)
    function = torch.compile(spec.function, fullgraph=True, dynamic=True, backend="eager")
    assert_all_same(spec, call.run(function), call.run(spec.function))


class _Module(torch.nn.Module):
    def __init__(self, call: Call, function: Function) -> None:
        super().__init__()
        self.names, self.options, self.function = list(call.tensors), call.options, function

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return Call(dict(zip(self.names, tensors, strict=True)), self.options).run(self.function)


def exported(spec: OpSpec, case: Case, dtype: torch.dtype) -> None:
    """torch.export captures the call as omniattn ops and reproduces it."""
    call = spec.call(case, dtype)
    inputs = tuple(call.tensors.values())
    program = torch.export.export(_Module(call, spec.function), inputs)
    assert "omniattn" in str(program.graph), f"{spec.name}: not an omniattn op in the graph"
    assert_all_same(spec, program.module()(*inputs), call.run(spec.function))


def traced(spec: OpSpec, case: Case, dtype: torch.dtype) -> None:
    """torch.jit.trace records the call, which other values and gradients go through."""
    call = spec.call(case, dtype).requiring_grad()
    inputs = tuple(call.tensors.values())
    recorded = torch.jit.trace(_Module(call, spec.function), inputs, check_trace=False)
    file = io.BytesIO()
    torch.jit.save(recorded, file)
    file.seek(0)
    program = torch.jit.load(file)

    def function(**tensors: Any) -> Any:
        return program(*(tensors[name] for name in call.tensors))

    floats = {n: _other(n, t) for n, t in call.tensors.items() if t.is_floating_point()}
    for tensors in (call.tensors, {**call.tensors, **floats}):
        actual = replace(call, tensors=tensors, options={})
        expected = replace(call, tensors=tensors)
        for _ in range(3 if call.differentiable else 0):  # TorchScript optimizes later calls
            found, wanted = actual.gradients(function), expected.gradients(spec.function)
            torch.testing.assert_close(found, wanted, equal_nan=True)
        assert_all_same(spec, actual.run(function), expected.run(spec.function))


def checkpointed(spec: OpSpec, case: Case, dtype: torch.dtype) -> None:
    """Recomputation by torch.utils.checkpoint gives the same gradients."""

    def function(**arguments: Any) -> Any:
        return checkpoint(spec.function, use_reentrant=False, **arguments)

    assert_all_same(
        spec,
        outputs_and_gradients(spec, case, dtype, function),
        outputs_and_gradients(spec, case, dtype),
    )


def autocast(spec: OpSpec, case: Case, dtype: torch.dtype) -> None:
    """Tensors of mixed dtypes give the bits of a call whose tensors were cast by the rules."""
    low = spec.call(case, dtype)
    wide = low.map(lambda t: t.float() if t.is_floating_point() else t)
    names = [n for n, t in low.tensors.items() if t.is_floating_point() and n not in KEPT]
    changed = names
    if low.options.get("inplace"):  # a tensor updated in place cannot be a cast copy
        changed = [n for n in names if n not in ("q", "k")]
    for rest, other in ((low, wide), (wide, low)):
        for name in changed:
            one = other.tensors[name]
            if one.dtype == rest.tensors[name].dtype:  # always float32
                continue
            mixed = Call({**rest.tensors, name: one}, low.options)
            leader = mixed.tensors[LEADERS.get(spec.name, names[0])]
            by_rule = {
                "cast": low,
                "first": wide if leader.dtype == torch.float32 else low,
                "widest": wide,
            }[rule_of(spec.name)]
            expected = _with_own_dtypes(spec, by_rule, mixed, names)
            with torch.autocast(current_device().type, dtype=dtype):
                actual = mixed.run(spec.function)
            assert_all_same(spec, actual, expected)


def _with_own_dtypes(
    spec: OpSpec, by_rule: Call, mixed: Call, names: list[str]
) -> tuple[Tensor, ...]:
    """Returns the results without autocast; tensors keep their dtypes if a call accepts them."""
    tensors, results = dict(by_rule.tensors), by_rule.run(spec.function)
    for name in names:
        if mixed.tensors[name].dtype != tensors[name].dtype:
            own = {**tensors, name: mixed.tensors[name]}
            with contextlib.suppress(TypeError):
                results = Call(own, mixed.options).run(spec.function)
                tensors = own
    return results


def transforms(spec: OpSpec, case: Case, dtype: torch.dtype) -> None:
    """torch.func.grad equals autograd's gradients, bitwise."""
    call = spec.call(case, dtype)
    loss = _loss(spec, call)
    named = {name: call.tensors[name] for name in call.differentiable}
    found = torch.func.grad(loss)(named)
    leaves = {n: t.detach().requires_grad_() for n, t in named.items()}
    expected = torch.autograd.grad(loss(leaves), list(leaves.values()))
    for (name, actual), wanted in zip(found.items(), expected, strict=True):
        assert_same(f"{spec.name}: torch.func.grad of {name}", actual, wanted)


def _loss(spec: OpSpec, call: Call) -> Callable[[dict[str, Tensor]], Tensor]:
    """Returns a scalar function of some tensors that depends on all outputs."""
    grads = output_gradients(call.run(spec.function))

    def loss(tensors: dict[str, Tensor]) -> Tensor:
        results = Call({**call.tensors, **tensors}, call.options).run(spec.function)
        pairs = zip(results, grads, strict=True)
        return torch.stack([(r * g).sum() for r, g in pairs if r.is_floating_point()]).sum()

    return loss


def mapped(spec: OpSpec, case: Case, dtype: torch.dtype) -> None:
    """vmap over any tensor alone, and over all, equals a loop; also in and around derivatives."""
    call = spec.call(case, dtype)
    for names in (*((name,) for name in call.tensors), tuple(call.tensors)):
        _assert_mapped(spec, call, names)


def mapped_pairs(spec: OpSpec, case: Case, dtype: torch.dtype) -> None:
    """Checks vmap over each pair of tensors."""
    call = spec.call(case, dtype)
    for names in itertools.combinations(call.tensors, 2):
        _assert_mapped(spec, call, names)


def _assert_mapped(spec: OpSpec, call: Call, names: tuple[str, ...]) -> None:
    """Compares vmap over `names` with a loop; accepts only an error that names one of them."""
    loss = _loss(spec, call)
    dims = {name: min(1, call.tensors[name].dim()) for name in names}
    pairs = {name: (call.tensors[name], _other(name, call.tensors[name])) for name in names}
    batch = {name: torch.stack(pair, dims[name]) for name, pair in pairs.items()}

    def results(tensors: dict[str, Tensor]) -> Any:
        return Call({**call.tensors, **tensors}, call.options).run(spec.function)

    def leaves_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensors.get(name, call.tensors[name]) for name in call.differentiable}

    def gradients(tensors: dict[str, Tensor]) -> Any:
        return torch.func.grad(lambda leaves: loss({**tensors, **leaves}))(leaves_of(tensors))

    def tangent(tensors: dict[str, Tensor]) -> Any:
        leaves = leaves_of(tensors)
        ones = {name: torch.ones_like(t) for name, t in leaves.items()}
        return torch.func.jvp(lambda leaves: loss({**tensors, **leaves}), (leaves,), (ones,))[1]

    def second_derivatives(tensors: dict[str, Tensor]) -> Any:
        def slope(leaves: dict[str, Tensor]) -> Tensor:
            return torch.stack([g.sum() for g in gradients({**tensors, **leaves}).values()]).sum()

        return torch.func.grad(slope)(leaves_of(tensors))

    functions: list[Callable[[dict[str, Tensor]], Any]] = [results]
    functions += [gradients] if call.differentiable else []
    if spec.second_order and len(names) > 1:  # plain torch, slow
        functions += [tangent, second_derivatives]
    for function in functions:
        try:
            together = torch.func.vmap(function, (dims,))(batch)
        except (NotImplementedError, ValueError) as error:
            told = str(error)
            assert "mapped over by vmap" in told and any(name in told for name in names), told
            continue
        each = [function({n: t.select(dims[n], i) for n, t in batch.items()}) for i in range(2)]
        expected = tree_map(lambda *one: torch.stack(one), *each)
        torch.testing.assert_close(together, expected, equal_nan=True)
    if call.differentiable and not call.options.get("inplace"):
        leaves = {name: batch.get(name, call.tensors[name]) for name in call.differentiable}

        def mapped_sum(leaves: dict[str, Tensor]) -> Tensor:
            tensors = {**batch, **leaves}
            return torch.func.vmap(loss, ({n: dims.get(n) for n in tensors},))(tensors).sum()

        def looped_sum(leaves: dict[str, Tensor]) -> Tensor:
            tensors = {**batch, **leaves}
            each = (
                {n: t.select(dims[n], i) if n in dims else t for n, t in tensors.items()}
                for i in range(2)
            )
            return torch.stack([loss(one) for one in each]).sum()

        found, expected = (torch.func.grad(f)(leaves) for f in (mapped_sum, looped_sum))
        torch.testing.assert_close(found, expected, equal_nan=True)


def _other(name: str, t: Tensor) -> Tensor:
    """Returns other valid values in place of `t`."""
    if t.is_floating_point():
        return t / 2 + t.sign() / 8  # keeps the sign, which an op may require
    return t[-1] - t.flip(0) if name.startswith("cu_seqlens") else t.flip(0)


PROPERTIES: dict[str, Property] = {
    f.__name__: f
    for f in (
        forward,
        derivatives,
        each_gradient,
        backward,
        wanted_gradients,
        expanded_gradient,
        gradcheck,
        opcheck,
        strided,
        far,
        poisoned,
        deterministic,
        batch_invariant,
        every_isa,
        compiled,
        dynamic,
        dynamic_each,
        exported,
        traced,
        checkpointed,
        autocast,
        transforms,
        mapped,
        mapped_pairs,
    )
}


def outputs_and_gradients(
    spec: OpSpec, case: Case, dtype: torch.dtype, function: Function | None = None
) -> tuple[Tensor, ...]:
    """Returns outputs and gradients."""
    call = spec.call(case, dtype)
    function = function or spec.function
    outputs = call.run(function)
    return (*outputs, *(call.gradients(function) if call.differentiable else ()))


def assert_all_same(spec: OpSpec, actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert_same(f"{spec.name}: tensor {i} of outputs and gradients", a, e)
