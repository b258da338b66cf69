"""Checks an op's properties on a user's function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError

from omniattn.suggestions import did_you_mean
from omniattn.testing.check import require_properties, require_sizes, spec_named
from omniattn.testing.properties import PROPERTIES, Property, assert_all_same, outputs_and_gradients
from omniattn.testing.spec import FLOATS, Call, Case, Function, OpSpec, Random, outputs_of

__all__ = ["OWN_PROPERTIES", "check_function"]

Inputs: TypeAlias = Callable[..., Mapping[str, Tensor]]


@dataclass(frozen=True)
class OwnSpec(OpSpec):
    """Spec of an op with a user's function, and optionally a user's definition."""

    like: OpSpec = field(kw_only=True)
    own: Function = field(kw_only=True)
    definition: Function = field(kw_only=True)

    @property
    def public(self) -> Function:
        return self.own

    @property
    def function(self) -> Function:
        return self.own

    @property
    def reference(self) -> Function:
        return self.definition


def own_gradcheck(spec: OpSpec, case: Case, dtype: torch.dtype) -> None:
    """First derivatives equal finite differences in fp64; second ones do, or are refused."""
    call = spec.call(case, dtype).requiring_grad()

    def function(*leaves: Tensor) -> tuple[Tensor, ...]:
        tensors = {**call.tensors, **dict(zip(call.differentiable, leaves, strict=True))}
        return Call(tensors, call.options).run(spec.function)

    try:
        torch.autograd.gradcheck(function, call.leaves)
        torch.autograd.gradgradcheck(function, call.leaves)
    except GradcheckError as error:
        raise AssertionError(str(error).strip()) from None
    except NotImplementedError:
        return
    except RuntimeError as error:
        if "once_differentiable" not in str(error):
            raise


def repeatable(spec: OpSpec, case: Case, dtype: torch.dtype) -> None:
    """Two calls give the same bits."""
    assert_all_same(
        spec, outputs_and_gradients(spec, case, dtype), outputs_and_gradients(spec, case, dtype)
    )


def packed(spec: OpSpec, case: Case, dtype: torch.dtype) -> None:
    """Each packed sequence gives what it gives alone, outputs and gradients (fp64)."""
    call = spec.call(case, dtype)
    bounds = call.tensors["cu_seqlens"].tolist()
    whole = call.run(spec.function)
    gradients = call.gradients(spec.function, tuple(map(torch.ones_like, whole)))
    of_all = dict(zip(call.differentiable, gradients, strict=True))
    for i in range(len(bounds) - 1):
        tensors = {n: _part(t, i, bounds, n) for n, t in call.tensors.items() if n != "cu_seqlens"}
        names = tuple(n for n in of_all if tensors[n].shape != call.tensors[n].shape)
        alone = Call(tensors, call.options, names)
        outputs = alone.run(spec.function)
        found = alone.gradients(spec.function, tuple(map(torch.ones_like, outputs)))
        for j, (one, every) in enumerate(zip(outputs, whole, strict=True)):
            _assert_alone(f"output {j} of sequence {i}", _part(every, i, bounds), one)
        for name, one in zip(names, found, strict=True):
            every = _part(of_all[name], i, bounds, name)
            _assert_alone(f"gradient of {name} of sequence {i}", every, one)


def _part(t: Tensor, i: int, bounds: list[int], name: str = "state") -> Tensor:
    """Returns sequence i's part of a tensor of all tokens (1, total, ...) or states (N, ...)."""
    if t.shape[:2] == (1, bounds[-1]):
        return t[:, bounds[i] : bounds[i + 1]]
    return t[i : i + 1] if name.endswith("state") else t


def _assert_alone(what: str, packed: Tensor, alone: Tensor) -> None:
    try:
        torch.testing.assert_close(packed, alone, equal_nan=True)
    except AssertionError as error:
        raise AssertionError(f"{what} must be that of the sequence alone: {error}") from None


#: Properties that `check_function` can check: all properties of ops, and three defined here.
OWN_PROPERTIES: dict[str, Property] = {
    **{
        name: PROPERTIES[name]
        for name in (
            *("forward", "backward", "expanded_gradient", "strided", "poisoned", "deterministic"),
            *("compiled", "checkpointed", "transforms"),
        )
    },
    "gradcheck": own_gradcheck,
    "repeatable": repeatable,
    "packed": packed,
}
_DEFAULT = (
    *("forward", "backward", "gradcheck", "strided", "expanded_gradient", "packed"),
    *("poisoned", "repeatable"),
)
#: Properties checked in every case and dtype, and those checked in fp64.
_EVERYWHERE = ("forward", "backward")
_IN_FP64 = ("gradcheck", "packed")
#: Maximum number of steps of a case; definitions that loop over more take seconds.
_LONGEST = 150


def check_function(
    function: Function,
    like: str,
    *,
    reference: Function | None = None,
    inputs: Inputs | None = None,
    dtypes: Sequence[torch.dtype] = FLOATS,
    properties: Sequence[str] | None = None,
    cases: Sequence[str] | None = None,
    tensors: Sequence[str] = (),
    **sizes_and_options: Any,
) -> dict[str, list[str]]:
    """Checks a user's function like the op `like`.

    The function takes the tensors of `like` by name. The cases are those of the op whose optional
    tensors and options the function accepts, except empty and long ones, or one case of given
    sizes.

    Args:
        function: takes tensors and options of `like` by name, and returns a tensor or a tuple. If
            it returns fewer outputs than the reference, only these are compared.
        like: name of an op of `omniattn.functional`.
        reference: the definition, with the arguments of `function`; default: that of `like`. Its
            fp64 results are the truth, and its error in a lower dtype determines the budget.
        inputs: makes the tensors of `function` from the tensors of `like`, both by name; default:
            unchanged.
        dtypes: default all four.
        properties: names in `OWN_PROPERTIES`; default: all that need neither a compiler nor several
            threads.
        cases: labels of cases of `like` ("tiny", "packed", ...), also empty ones.
        tensors: optional tensors to pass if sizes are given.
        sizes_and_options: capitalised names are sizes (B, T, D, ...; see the registry), the others
            are options of `function` and `reference`.

    Returns:
        The names of the checked cases, by property.

    Raises:
        AssertionError: names each property that does not hold, with its first failing case.
        ValueError: a name is unknown, or no case fits the function.

    Example:
        >>> def mine(x, weight=None, eps=1e-6):
        ...     scale = torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps)
        ...     return (x * scale * (1 if weight is None else weight)).to(x.dtype)
        >>> checked = check_function(mine, "rms_norm", dtypes=[torch.float32], cases=["plain"])
        >>> checked["gradcheck"]
        ['plain-M3N1']
    """
    if not callable(function):
        kind = type(function).__name__
        raise TypeError(f"check_function: function must be callable, got function of type {kind}")
    spec = _spec(function, like, reference, inputs)
    options = {k: v for k, v in sizes_and_options.items() if not k[0].isupper()}
    fitting = _fitting(spec, options, cases)
    spec = _completed(spec, fitting[0])
    candidates = fitting
    if sizes := {k: v for k, v in sizes_and_options.items() if k[0].isupper()}:
        require_sizes("check_function", spec.like, sizes)
        candidates = [Case("user", sizes, tuple(tensors), options)]
        _require_taken(spec, candidates[0])
    checked: dict[str, list[str]] = {}
    failures: list[str] = []
    for name in _chosen_properties(spec, candidates, properties):
        # Finite differences call the function twice for each element.
        selected = _selected(spec, name, fitting if name == "gradcheck" else candidates)
        checked[name] = [case.name for case in selected]
        of = [torch.float64] if name in _IN_FP64 else [t for t in dtypes if t in spec.dtypes]
        failure = next(filter(None, (_failure(spec, name, c, t) for c in selected for t in of)), "")
        failures += [failure] if failure else []
    if failures:
        raise AssertionError("\n".join(failures))
    return checked


def _selected(spec: OwnSpec, name: str, cases: list[Case]) -> list[Case]:
    """Returns the cases to check a property on: all, packed ones, a few or the first."""
    if name == "packed":
        return [case for case in cases if "cu_seqlens" in case.tensors]
    if name in _EVERYWHERE:
        return cases
    if name in ("strided", "deterministic"):
        return [c for i, c in enumerate(cases) if i == 1 or c.label in spec.special] or cases
    return cases[:1]


def _failure(spec: OpSpec, name: str, case: Case, dtype: torch.dtype) -> str:
    """Returns a message that names the property and the case, or an empty string if it holds."""
    check = OWN_PROPERTIES[name]
    try:
        check(spec, case, dtype)
    except Exception as error:
        told = str(error) if isinstance(error, AssertionError) else f"raises {error!r}"
        meaning = (check.__doc__ or "").partition("\n")[0]
        return f"{spec.name}: {name} ({meaning}) fails in case {case.name}, {dtype}: {told}"
    return ""


def _spec(
    function: Function, like: str, reference: Function | None, inputs: Inputs | None
) -> OwnSpec:
    theirs = spec_named("check_function", "like", like)
    if theirs.adapted:
        raise ValueError(
            "check_function: like must be an op whose tensors are arguments and outputs of their "
            f"own, got like={like!r}"
        )
    makes = theirs.inputs

    def made(case: Case, random: Random) -> dict[str, Tensor]:
        tensors = makes(case, random)
        return tensors if inputs is None else dict(inputs(**tensors))

    values: dict[str, Any] = {f.name: getattr(theirs, f.name) for f in fields(OpSpec)}
    name = getattr(function, "__name__", type(function).__name__)
    values |= {"name": f"{name} (like {like})", "inputs": made}
    if reference is not None:
        values["eager"] = None
    return OwnSpec(**values, own=function, definition=reference or theirs.reference, like=theirs)


def _completed(spec: OwnSpec, case: Case) -> OwnSpec:
    """Completes a spec for a user's function.

    Tensors that only the function has become differentiable, and the definition returns only as
    many outputs as the function.
    """
    call = spec.call(case, torch.float64)
    theirs = spec.like.call(case, torch.float64).tensors
    for what, taken in (("function", spec.own), ("reference", spec.definition)):
        if missing := [n for n in (*call.tensors, *call.options) if not _takes(taken, n)]:
            raise ValueError(
                f"check_function: {what} must take {', '.join(call.tensors)} by name, got none for "
                f"{', '.join(missing)}; inputs= makes other tensors, reference= defines their use"
            )
    definition, count = spec.definition, len(call.run(spec.own))
    if count > (given := len(call.run(definition))):
        raise ValueError(
            f"check_function: function must have at most as many outputs as its reference, "
            f"got {count} and {given}"
        )

    def cut(**arguments: Any) -> tuple[Tensor, ...]:
        return outputs_of(definition(**arguments))[:count]

    new = [n for n, t in call.tensors.items() if n not in theirs and t.is_floating_point()]
    return replace(spec, definition=cut, differentiable=(*spec.differentiable, *new))


def _takes(function: Function, name: str) -> bool:
    target = function.forward if isinstance(function, nn.Module) else function
    parameters = inspect.signature(target).parameters.values()
    return any(p.name == name or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def _chosen_properties(
    spec: OwnSpec, cases: list[Case], properties: Sequence[str] | None
) -> list[str]:
    chosen = _DEFAULT if properties is None else tuple(properties)
    require_properties("check_function", chosen, OWN_PROPERTIES)
    impossible = [] if _selected(spec, "packed", cases) else ["packed"]
    impossible += [] if spec.differentiable else ["backward", "expanded_gradient", "gradcheck"]
    if properties is not None and (wrong := [name for name in chosen if name in impossible]):
        raise ValueError(
            f"check_function: properties must be of those that {spec.name} can have, got {wrong}"
        )
    return [name for name in chosen if name not in impossible]


def _fitting(spec: OwnSpec, options: Mapping[str, Any], labels: Sequence[str] | None) -> list[Case]:
    """Returns the cases in the op's order, with `options` added to their own."""
    known = [case.label for case in spec.cases]
    if unknown := sorted(set(labels or ()).difference(known)):
        raise ValueError(
            f"check_function: cases must be of {known}, "
            f"got {unknown}{did_you_mean(unknown[0], known)}"
        )
    cases = [replace(case, options={**case.options, **options}) for case in spec.cases]
    if labels is not None:
        cases = [case for case in cases if case.label in labels]
        for case in cases:
            _require_taken(spec, case)
        return cases
    usual = [c for c in cases if 0 < min(c.sizes.values()) <= max(c.sizes.values()) <= _LONGEST]
    fitting = [case for case in usual if not _not_taken(spec, case)]
    if not fitting:
        _require_taken(spec, usual[0])
    return fitting


def _not_taken(spec: OwnSpec, case: Case) -> list[str]:
    """Returns the optional tensors and options of a case that the function does not accept."""
    return [name for name in (*case.tensors, *case.options) if not _takes(spec.own, name)]


def _require_taken(spec: OwnSpec, case: Case) -> None:
    if missing := _not_taken(spec, case):
        raise ValueError(
            f"check_function: {spec.name} must take {', '.join(missing)} by name for the case "
            f"{case.name}{did_you_mean(missing[0], inspect.signature(check_function).parameters)}"
        )
