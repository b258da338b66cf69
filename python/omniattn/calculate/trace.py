"""Runs a model on the meta device and records the cost of every op, without data or arithmetic."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.flop_counter import flop_registry

from omniattn.calculate.op_costs import Cost, op_cost
from omniattn.checks.arguments import shown
from omniattn.models import Model, ModelConfig
from omniattn.modules import DecoderBlock

#: Functions that draw initial values.
_DRAWS = {"normal_", "uniform_", "trunc_normal_", "exponential_"}
#: Largest tensor of integers whose values are followed.
_FOLLOWED = 2**24


@dataclass(frozen=True)
class Call:
    """One call of an op.

    Args:
        module: name of the innermost module that called it, as in `named_modules`.
        op: name of the op.
        cost: see :class:`omniattn.calculate.op_costs.Cost`.
    """

    module: str
    op: str
    cost: Cost


class _Undrawn(TorchFunctionMode):
    """Skips the initial values of parameters, which a model on the meta device does not have."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _DRAWS:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


@functools.lru_cache(maxsize=4)
def meta_model(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Model:
    """Builds a model on the meta device, in eval mode."""
    with _Undrawn(), torch.device("cpu"):
        return config.build(device="meta", dtype=dtype).eval()


class _FromData(TorchFunctionMode):
    """Lets `torch.tensor` on the meta device copy from the CPU, so that its values are followed."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.tensor or torch.device(kwargs.get("device") or "cpu").type != "meta":
            return func(*args, **kwargs)
        return func(*args, **kwargs | {"device": "cpu"}).to("meta")


class _Recorder(TorchDispatchMode):
    """Records the cost of ops, and follows the values of small tensors of integers.

    Values of masks on the meta device are needed to count their pairs. So ops without
    floating-point inputs whose other inputs are known run on the CPU as well.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.modules: list[str] = []
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        namespace, name = func._schema.name.split("::")
        if namespace == "omniattn":
            self._record(name, op_cost(name, self._given(func, args, kwargs)))
        elif func._overloadpacket in flop_registry:
            count = flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
            self._record(name, Cost(int(count), int(count)))
        elif name in ("_fft_r2c", "_fft_c2r"):
            self._record(name, _fft(args[0] if name == "_fft_r2c" else out))
        elif isinstance(out, Tensor):
            self._follow(func, args, kwargs, out)
        return out

    def _record(self, op: str, cost: Cost) -> None:
        if cost.flops or cost.reach is not None:
            self.calls.append(Call(self.modules[-1] if self.modules else "", op, cost))

    def _given(self, func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments by name, with known values in place of side tensors."""
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        if given.get("aux"):
            codes = [*(given.get("mask") or ())]
            needed = {place for i in codes[3::4] if i >= 0 for place in (i, i + 1)}
            given["aux"] = [
                self._value(t) if place in needed else t for place, t in enumerate(given["aux"])
            ]
            first = [place for place in codes[3::4] if place >= 0]
            if any(given["aux"][place].is_meta for place in first):
                raise NotImplementedError(
                    "calculate: a mask that is not a rule of positions is counted up to "
                    f"{_FOLLOWED:,} pairs, got q.shape={tuple(given['q'].shape)}, "
                    f"k.shape={tuple(given['k'].shape)} in {self.modules[-1]}"
                )
        return given

    def _value(self, t: Tensor) -> Tensor:
        return self._known[id(t)][1] if id(t) in self._known else t

    def _follow(self, func: Any, args: Any, kwargs: dict[str, Any], out: Tensor) -> None:
        inputs = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        self._known.pop(id(out), None)
        small = out.is_meta and not out.is_floating_point() and not out.is_complex()
        known = all(not t.is_meta or id(t) in self._known for t in inputs)
        if not small or not known or out.numel() > _FOLLOWED:
            return
        args, kwargs = tree_map_only(Tensor, self._value, (args, kwargs))
        on_meta = kwargs.get("device") is not None
        kwargs = kwargs | ({"device": torch.device("cpu")} if on_meta else {})
        self._known[id(out)] = (out, func(*args, **kwargs))


def _fft(real: Tensor) -> Cost:
    """2.5 n log2 n operations for each real transform of n numbers, the last dimension."""
    n = real.shape[-1]
    flops = int(2.5 * real.numel() * math.log2(max(n, 2)))
    return Cost(flops, flops, reach=-1)


def trace(model: Model, run: Callable[[], object], *, each: bool = False) -> list[Call]:
    """Returns the calls of `run`, which calls a model on the meta device.

    Blocks of one list with equal configs cost the same, so that only the first of them runs, unless
    `each` is true.
    """
    recorder = _Recorder()
    with ExitStack() as stack:
        stack.enter_context(_named(model, recorder))
        for names in [] if each else _repeats(model):
            stack.enter_context(_replayed(model, names, recorder))
        stack.enter_context(torch.no_grad())
        stack.enter_context(_FromData())
        stack.enter_context(recorder)
        run()
    return recorder.calls


@contextmanager
def _named(model: nn.Module, recorder: _Recorder) -> Iterator[None]:
    """Lets the recorder know which module runs.

    The hooks are global, as a layer with hooks of its own may take another path.
    """
    names = {id(module): name for name, module in model.named_modules()}

    def before(module: nn.Module, _: Any) -> None:
        recorder.modules.append(names.get(id(module), ""))

    def after(*_: Any) -> None:
        recorder.modules.pop()

    hooks = [register_module_forward_pre_hook(before), register_module_forward_hook(after)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _repeats(model: nn.Module) -> list[list[str]]:
    """Returns the names of blocks with equal configs, list by list."""
    found = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList):
            continue
        groups: dict[Any, list[str]] = {}
        for index, block in enumerate(module):
            if type(block) is DecoderBlock:
                groups.setdefault(block.config, []).append(f"{name}.{index}")
        found += [names for names in groups.values() if len(names) > 1]
    return found


@contextmanager
def _replayed(model: nn.Module, names: Sequence[str], recorder: _Recorder) -> Iterator[None]:
    """Lets all but the first of these blocks repeat its calls and outputs for equal shapes."""
    first, *others = (model.get_submodule(name) for name in names)
    run, known = first.forward, {}

    def shapes(args: Any) -> Any:
        return [tuple(t.shape) for t in args if isinstance(t, Tensor)][:1]

    def recorded(*args: Any, **kwargs: Any) -> Any:
        begin = len(recorder.calls)
        out = run(*args, **kwargs)
        known["shapes"], known["out"], known["calls"] = shapes(args), out, recorder.calls[begin:]
        return out

    def replay(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def repeated(*args: Any, **kwargs: Any) -> Any:
            if known.get("shapes") != shapes(args):
                return own(*args, **kwargs)
            calls = known["calls"]
            recorder.calls += [replace(c, module=name + c.module[len(names[0]) :]) for c in calls]
            return known["out"]

        return repeated

    first.forward = recorded
    for name, block in zip(names[1:], others, strict=True):
        block.forward = replay(name, block.forward)
    try:
        yield
    finally:
        for block in (first, *others):
            del block.forward


class _OfImages(Protocol):
    """Config of a model of square images."""

    @property
    def image(self) -> int:
        """Side of an image."""

    @property
    def channels(self) -> int:
        """Channels of an image."""


def reads_source(model: Model) -> bool:
    """True if a model is an encoder-decoder, whose encoder reads a source."""
    return "source" in inspect.signature(model.forward).parameters


def inputs_of(
    config: ModelConfig, model: Model, batch: int, tokens: int, source_tokens: int | None
) -> list[Tensor]:
    """Returns inputs on the meta device for the forward of a model, by the names of its arguments.

    Raises:
        ValueError: more tokens than the model has positions.
        NotImplementedError: the model takes another input.
    """
    if config.longest is not None and tokens > config.longest:
        raise ValueError(
            f"calculate: tokens must be at most {config.longest}, the number of positions of the "
            f"model, got tokens={tokens}"
        )
    inputs = []
    for name, parameter in inspect.signature(model.forward).parameters.items():
        if parameter.default is not parameter.empty:
            break
        if name == "images":
            sizes = cast(_OfImages, config)
            shape = (batch, sizes.channels, sizes.image, sizes.image)
            inputs.append(torch.empty(shape, device="meta", dtype=next(model.parameters()).dtype))
        elif name in ("tokens", "source"):
            length = source_tokens if name == "source" and source_tokens is not None else tokens
            inputs.append(torch.zeros(batch, length, dtype=torch.long, device="meta"))
        else:
            raise NotImplementedError(
                f"calculate: inputs must be tokens, source or images, got {name} of "
                f"{shown(type(model).__name__)}"
            )
    return inputs


@functools.lru_cache(maxsize=16)
def forward_calls(
    config: ModelConfig, tokens: int, batch: int = 1, source_tokens: int | None = None
) -> tuple[Call, ...]:
    """Returns the calls of one forward without a cache."""
    model = meta_model(config)
    inputs = inputs_of(config, model, batch, tokens, source_tokens)
    return tuple(trace(model, lambda: model(*inputs)))
