"""OpSpec: describes an op for tests, benchmarks, `omniattn check` and the support table."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from omniattn import functional, reference
from omniattn.testing.environment import current_device
from omniattn.testing.memory import Layout, relayout

__all__ = [
    "Benchmark",
    "Call",
    "Case",
    "Function",
    "OpSpec",
    "Pass",
    "Random",
    "Variant",
    "outputs_of",
]

Pass: TypeAlias = Literal["forward", "backward", "forward+backward"]
Function: TypeAlias = Callable[..., Any]

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SHORT_DTYPE = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
}

#: Options that equal a size.
_REPEATED = {"max_seqlen_q": "Tq", "max_seqlen_k": "Tk", "length": "L"}


@dataclass(frozen=True)
class Case:
    """One call of an op: sizes by letter, optional tensors to pass, and options.

    `constant` names differentiable arguments that have no gradient with these options. The name of
    the case, for example "window-B2Tq63Tk100H4G2D64", seeds the random inputs.
    """

    label: str
    sizes: Mapping[str, int]
    tensors: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    constant: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def name(self) -> str:
        return f"{self.label}-{''.join(f'{k}{n}' for k, n in self.sizes.items())}"

    def resized(self, sizes: Mapping[str, int]) -> Case:
        """Returns the case with other sizes; adjusts options that equal a size."""
        options = {n: sizes.get(_REPEATED.get(n, ""), v) for n, v in self.options.items()}
        return replace(self, sizes=sizes, options=options)


@dataclass(frozen=True)
class Benchmark:
    """A case to time, with its dtypes and passes; `bound` names the roofline limit."""

    case: Case
    dtypes: tuple[torch.dtype, ...]
    passes: tuple[Pass, ...]
    bound: Literal["compute", "memory"] = "memory"


@dataclass(frozen=True)
class Call:
    """Arguments of one call. Tensors are passed by name, so that no op needs its own caller."""

    tensors: Mapping[str, Tensor]
    options: Mapping[str, Any]
    differentiable: tuple[str, ...] = ()

    def map(self, f: Callable[[Tensor], Tensor]) -> Call:
        return replace(self, tensors={name: f(t) for name, t in self.tensors.items()})

    def to(self, dtype: torch.dtype) -> Call:
        return self.map(lambda t: t.to(dtype) if t.is_floating_point() else t)

    def requiring_grad(self) -> Call:
        """Returns the call on fresh leaves, with requires_grad on the differentiable ones."""
        leaves = {n: t.detach() for n, t in self.tensors.items()}
        for name in self.differentiable:
            leaves[name].requires_grad_()
        return replace(self, tensors=leaves)

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return tuple(self.tensors[name] for name in self.differentiable)

    def run(self, function: Function) -> tuple[Tensor, ...]:
        tensors = dict(self.tensors)
        if self.options.get("inplace"):  # keeps the inputs for the next run
            tensors = {n: t.clone() for n, t in tensors.items()}
        return outputs_of(function(**tensors, **self.options))

    def gradients(self, function: Function, grads: tuple[Tensor, ...] = ()) -> tuple[Tensor, ...]:
        """Returns the gradients of the leaves; `grads` default to `output_gradients`."""
        if not self.differentiable:
            return ()
        call = self.requiring_grad()
        outputs = call.run(function)
        grads = grads or output_gradients(outputs)
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if o.requires_grad]
        return torch.autograd.grad([o for o, _ in pairs], call.leaves, [g for _, g in pairs])


def outputs_of(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def output_gradients(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Returns fixed random gradients of the shapes, dtypes and devices of `outputs`."""
    random = Random("gradients", torch.float64)
    return tuple(random.normal(*o.shape).to(o) for o in outputs)


class Random:
    """Makes the random inputs of a case, which depend on the case's name but not on the dtype.

    Values are drawn on torch's default device, the CPU, so that every device gets equal values;
    benchmarks with large inputs set another default device.
    """

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.dtype = dtype
        generator = torch.Generator(torch.get_default_device())
        self.generator = generator.manual_seed(zlib.crc32(name.encode()))

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(max(high, 1), shape, generator=self.generator)


@dataclass(frozen=True)
class OpSpec:
    """One row of the registry.

    Args:
        name: name of the public function and of its reference.
        family: file of its kernels and functional.
        inputs: makes the tensor arguments of a case, by argument name.
        differentiable: arguments that have a gradient.
        flops: floating-point operations of (case, pass), as counted in the literature.
        cuda: "native" if benchmarks/results has results of a GPU run, "emulated" if the CUDA
            kernels have been verified only under emulation.
        eager: the op with every step in the dtype of its inputs, if the kernels also round between
            steps; its error then sets the budgets. By default the error of the reference, which
            rounds once, sets them.
        gradient_factor: ratio of the gradients' budget to eager's error.
        gradient_factors: ratios for single arguments.
        terms: size of the terms that outputs are differences of, whose rounding is larger than that
            of outputs near 0; in dtypes other than float64 the error of `eager` includes it.
        second_order: True if second derivatives exist; otherwise they must raise.
        special: labels of cases that exercise special features of the op. Properties too slow for
            every case are tested on these and on the second case.
        batch_invariant: False if a row's bits depend on the number of rows even with
            `config.batch_invariant`: torch's functions compute the last elements of a tensor in
            another way than the others, and random numbers depend on the index of an element.
        chooses: True if the function may call torch's kernel; checks force the native one.
        adapt: wraps the function so that all its tensors are separate arguments or results.
    """

    name: str
    family: str
    paper: str
    inputs: Callable[[Case, Random], dict[str, Tensor]]
    differentiable: tuple[str, ...]
    flops: Callable[[Case, Pass], float]
    cases: tuple[Case, ...]
    benchmarks: tuple[Benchmark, ...] = ()
    dtypes: tuple[torch.dtype, ...] = FLOATS
    cuda: Literal["planned", "emulated", "native"] = "planned"
    eager: Function | None = None
    gradient_factor: float = 3.0
    gradient_factors: Mapping[str, float] = field(default_factory=dict)
    terms: float = 0.0
    second_order: bool = False
    special: tuple[str, ...] = ()
    batch_invariant: bool = True
    chooses: bool = False
    adapt: Callable[[Function], Function] = lambda function: function

    @property
    def adapted(self) -> bool:
        """True if some arguments or results of the op are not single tensors."""
        return self.adapt is not OpSpec.adapt

    @property
    def public(self) -> Function:
        """Public function, as users call it."""
        return self.adapt(getattr(functional, self.name))

    @property
    def function(self) -> Function:
        """Function to check: the public one with its native kernel."""
        if not self.chooses:
            return self.public
        return functools.partial(self.public, backend=current_device().type)

    @property
    def reference(self) -> Function:
        return self.adapt(getattr(reference, self.name))

    def factor_of(self, name: str) -> float:
        return self.gradient_factors.get(name, self.gradient_factor)

    def case(self, label: str) -> Case:
        return next(c for c in self.cases if c.label == label)

    def call(
        self,
        case: Case,
        dtype: torch.dtype,
        layout: Layout = "contiguous",
        device: torch.device | None = None,
    ) -> Call:
        """Returns the arguments of a case, equal on each device; by default on the current one."""
        tensors = self.inputs(case, Random(case.name, dtype))
        where = device or current_device()
        tensors = {name: relayout(t.to(where), layout) for name, t in tensors.items()}
        named = tuple(
            n
            for n in self.differentiable
            if n in tensors and n not in case.constant and tensors[n].is_floating_point()
        )
        return Call(tensors, case.options, named)

    def bytes(self, call: Call, outputs: tuple[Tensor, ...], pass_: Pass) -> int:
        """Returns the minimum memory traffic: each input and output once."""
        inputs, results = (_bytes(t) for t in (call.tensors.values(), outputs))
        gradients = _bytes(call.leaves)
        forward, backward = inputs + results, inputs + results + gradients
        return {
            "forward": forward,
            "backward": backward,
            "forward+backward": forward + backward,
        }[pass_]


def _bytes(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


@dataclass(frozen=True)
class Variant:
    """A published form, with names in functional, its masks or scores, modules or reference."""

    form: str
    names: tuple[str, ...]
    paper: str
