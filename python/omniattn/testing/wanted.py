"""Properties with gradients that are not requested: frozen inputs and unused outputs."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from omniattn.testing.errors import assert_same
from omniattn.testing.spec import Call, Case, OpSpec, output_gradients

__all__ = ["enlarged", "subsets", "wanted_gradients"]

#: Length 1 above a multiple of 4 that exceeds blocks of 128 rows or keys, buffers of 64 rows and
#: chunks of 32 steps.
_LONG = 133
#: Batch sizes that exceed the 8 sequences processed in parallel, and the 64 of a single step.
_SEVERAL, _MANY = 9, 67
_LENGTHS = ("T", "Tq", "Tk", "M", "L", "X")


def enlarged(case: Case) -> Case:
    """Returns the case with sizes that exceed every internal buffer of the kernels.

    Empty dimensions, few queries and single steps stay, because they select the kernels. Batches
    keep their size if masks or packed sequences determine it.
    """
    sizes = dict(case.sizes)
    few = [n for n in ("T", "Tq") if 0 < sizes.get(n, 0) <= 4 and case.label != "tiny"]
    for name in set(_LENGTHS) & set(sizes):
        if sizes[name] > 0 and name not in few:
            sizes[name] = max(sizes[name], _LONG)
    if "Tq" in few:
        sizes["Tk"] = max(sizes["Tk"], 2 * _LONG) if sizes["Tk"] else 0
    fixed = case.sizes.keys() & {"N", "S"} and "cu_seqlens" in case.tensors
    if "T" in sizes and sizes["B"] > 0 and not fixed:
        sizes["B"] = max(sizes["B"], _MANY if "T" in few else _SEVERAL)
    return case.resized(sizes)


def subsets(names: Iterable[str], seed: str, drawn: int = 3) -> Iterator[tuple[str, ...]]:
    """Yields each name, all but one, and `drawn` random subsets of 2 or more, all distinct."""
    names = tuple(names)
    found: dict[tuple[str, ...], None] = {(name,): None for name in names}
    found |= {tuple(n for n in names if n != left_out): None for left_out in names}
    draw = random.Random(seed)
    if len(names) > 4:
        for _ in range(drawn):
            chosen = draw.sample(names, draw.randint(2, len(names) - 2))
            found[tuple(n for n in names if n in chosen)] = None
    return (subset for subset in found if 0 < len(subset) < len(names))


def wanted_gradients(spec: OpSpec, case: Case, dtype: torch.dtype) -> None:
    """Any subset of gradients has the bits of all; an unused output counts as a zero gradient."""
    call = spec.call(case, dtype)
    every = dict(zip(call.differentiable, call.gradients(spec.function), strict=True))
    for names in subsets(call.differentiable, case.name):
        found = replace(call, differentiable=names).gradients(spec.function)
        for name, actual in zip(names, found, strict=True):
            _assert_wanted(spec, case, f"gradient of {name} among {names}", actual, every[name])
    _check_unused_outputs(spec, case, call, every)


def _check_unused_outputs(
    spec: OpSpec, case: Case, call: Call, every: Mapping[str, Tensor]
) -> None:
    leaves = call.requiring_grad()
    outputs = leaves.run(spec.function)
    used = [i for i, output in enumerate(outputs) if output.requires_grad]
    if len(used) < 2:
        return
    grads = output_gradients(outputs)
    for i in used:
        found = torch.autograd.grad(
            outputs[i], leaves.leaves, grads[i], retain_graph=True, materialize_grads=True
        )
        zeros = [grads[j] if j == i else torch.zeros_like(grads[j]) for j in used]
        expected = torch.autograd.grad(
            [outputs[j] for j in used], leaves.leaves, zeros, retain_graph=True
        )
        for name, actual, wanted in zip(every, found, expected, strict=True):
            what = f"gradient of {name} where output {i} alone is used"
            _assert_wanted(spec, case, what, actual, wanted)


def _assert_wanted(spec: OpSpec, case: Case, what: str, actual: Tensor, expected: Tensor) -> None:
    assert_same(f"{spec.name}[{case.name}]: {what}", actual, expected)
