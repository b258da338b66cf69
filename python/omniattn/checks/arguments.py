"""Checks shared by the public functions; errors read "<op>: <what must hold>, got <name>=..."."""

from __future__ import annotations

import contextlib
import math
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C import _get_tracing_state, _len_torch_dispatch_stack
from torch._C._functorch import peek_interpreter_stack
from torch.compiler import is_compiling
from typing_extensions import TypeIs

from omniattn.ops.dispatch import library as _library
from omniattn.ops.dispatch.autograd import Op
from omniattn.ops.dispatch.plain import PLAIN
from omniattn.ops.dispatch.ranks import ACTIVE
from omniattn.reference.layers.philox import new_seed as new_seed
from omniattn.reference.limits import clamp as clamp
from omniattn.reference.precision import unit as unit
from omniattn.reference.precision import widen as widen
from omniattn.suggestions import did_you_mean

if TYPE_CHECKING:
    from torch.nn.attention.bias import CausalBias

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
BACKENDS = (None, "cpu", "cuda", "reference")
_INTS = (int, torch.SymInt)
_NUMBERS = (float, int, torch.SymFloat, torch.SymInt)
_LARGEST = sys.float_info.max
_LINE = 100  # maximum number of characters of a value in an error


def use_reference(op: str, backend: str | None, x: Tensor) -> bool:
    """Returns True if `backend` selects the eager definition; raises if its kernel cannot run."""
    if backend is None and x.is_cpu:
        return False
    if backend is not None and (not isinstance(backend, str) or backend not in BACKENDS):
        raise ValueError(f"{op}: backend must be one of {BACKENDS}, got backend={shown(backend)}")
    if backend == "reference":
        if ACTIVE.region is not None:
            raise NotImplementedError(
                f"{op}: in context_parallel backend must not be 'reference', whose definition has "
                "no parts"
            )
        return True
    device = x.device.type
    if backend is not None and backend != device:
        raise ValueError(
            f"{op}: backend must match the device of the tensors, got backend={shown(backend)}, "
            f"device={shown(device)}"
        )
    if device not in _library.loaded and device != "meta":
        reason = _library.cuda_unavailable if device == "cuda" else "no kernels for this device"
        raise NotImplementedError(
            f"{op}: no native kernel for device={shown(device)} ({reason}); "
            'backend="reference" runs the eager definition'
        )
    return False


def implementation(op: str, backend: str | None, x: Tensor, native: Op) -> Callable[..., Any]:
    """Returns the op, or its formula if `backend` selects the eager definition."""
    if (backend is None and x.is_cpu) or not use_reference(op, backend, x):
        return native
    assert native.formula is not None
    return native.formula


def takes_own_kernels(backend: str | None, x: Tensor) -> bool:
    """Returns True if no kernel of torch may compute a call. The CPU has none."""
    if x.is_cpu:
        return False
    return backend == "cuda" or torch.are_deterministic_algorithms_enabled()


def shown(value: Any) -> str:
    """Formats a value for an error: shapes of tensors and arrays, one line of anything else."""
    if isinstance(value, Tensor) and value.is_nested:
        return f"a nested tensor of {value.dtype}"
    if _is_array(value) and (math.prod(value.shape) > 4 or value.dtype == object):
        return f"{type(value).__name__} of shape {tuple(value.shape)} and {value.dtype}"
    if isinstance(value, (list, tuple)) and any(map(_is_array, value)):
        text = f"[{', '.join(map(shown, value[:4]))}]"
    elif isinstance(value, dict) and any(map(_is_array, value.values())):
        text = ", ".join(f"{key!r}: {shown(each)}" for key, each in list(value.items())[:4])
        text = f"{{{text}}}"
    else:
        text = " ".join(repr(value).split())
    return text if len(text) <= _LINE else f"{text[:_LINE]}..."


def _is_array(value: Any) -> bool:
    if isinstance(value, _NUMBERS):  # torch.compile cannot read attributes of a symbol
        return False
    return hasattr(value, "shape") and hasattr(value, "dtype")


def holds_arrays(value: Any) -> bool:
    """Returns True if `value` is or contains a tensor or array with at least one dimension."""
    if isinstance(value, (list, tuple)):
        return any(map(holds_arrays, value))
    return _is_array(value) and len(value.shape) > 0


def require_tensor(op: str, name: str, x: Tensor) -> None:
    """Requires a tensor with values; a CausalBias has uninitialised memory."""
    if type(x) in PLAIN:
        return
    if not isinstance(x, Tensor):
        raise TypeError(f"{op}: {name} must be a torch.Tensor, got {name}={shown(x)}")
    if is_causal_bias(x):
        raise TypeError(
            f"{op}: {name} must be a tensor with values (attention takes a CausalBias as its "
            f"mask), got type({name})=CausalBias"
        )


def is_causal_bias(x: object) -> TypeIs[CausalBias]:
    """Returns True for a CausalBias, by class name: its import loads torch.compile (2 s)."""
    return type(x).__name__ == "CausalBias"


def require_float(op: str, name: str, x: Tensor) -> None:
    if type(x) not in PLAIN:
        require_tensor(op, name, x)
    if x.dtype not in FLOATS:
        raise TypeError(
            f"{op}: {name} must be float64, float32, bfloat16 or float16, "
            f"got {name}.dtype={x.dtype}"
        )
    if x.is_nested:
        refuse_nested(op, name, x)


def has_own_ops(x: Tensor) -> bool:
    """Returns True if `x` wraps other tensors (quantised, sharded).

    Such a class implements torch's ops but not the ops of this package.
    """
    return type(x) not in PLAIN and hasattr(x, "__tensor_flatten__") and not x.is_nested


def refuse_nested(op: str, name: str, x: Tensor) -> None:
    raise TypeError(
        f"{op}: {name} must not be nested (its values() are packed rows, and its offsets() the "
        f"cu_seqlens of functions that take these), got {name}.layout={x.layout}"
    )


def require_strided(op: str, name: str, x: Tensor) -> None:
    """Requires a strided layout, for tensors that do not reach a native op that checks it."""
    if x.is_nested:
        refuse_nested(op, name, x)
    if x.layout != torch.strided:
        raise TypeError(f"{op}: {name} must be strided, got {name}.layout={x.layout}")


def require_integers(op: str, name: str, x: Tensor) -> None:
    require_tensor(op, name, x)
    if x.dtype.is_floating_point or x.dtype.is_complex or x.dtype == torch.bool:
        raise TypeError(f"{op}: {name} must be integers, got {name}.dtype={x.dtype}")
    require_strided(op, name, x)


def require_rows(op: str, name: str, index: Tensor, rows: int) -> None:
    """Requires `index` in [0, rows), if readable without a device synchronisation."""
    if not index.is_cpu or is_traced() or index.numel() == 0:
        return
    low, high = (int(t) for t in index.long().aminmax())  # not implemented for uint16
    if low < 0 or high >= rows:
        raise ValueError(f"{op}: {name} must be in [0, {rows}), got {name} from {low} to {high}")


def require_decaying(op: str, name: str, A: Tensor) -> None:
    """Requires a real part of `A` of at most 0, if readable without a device synchronisation.

    Growing states overflow after some hundred steps, and then all gradients are NaN.
    """
    require_strided(op, name, A)
    if not A.is_cpu or is_traced() or A.numel() == 0:
        return
    real = A.detach() if A.requires_grad else A
    real = real.real if A.is_complex() else real
    if not real.max().item() <= 0 and (real > 0).any():
        largest = float(real[real > 0].max())
        part = f"Re {name}" if A.is_complex() else name
        raise ValueError(f"{op}: {part} must be at most 0, got max({part})={largest}")


def require_distinct(op: str, name: str, index: Tensor) -> None:
    """Requires distinct rows in `index`, if readable without a device synchronisation."""
    if not index.is_cpu or is_traced():
        return
    rows = index.flatten().tolist()
    if len(set(rows)) < len(rows):
        raise ValueError(f"{op}: {name} must have no row twice, got {name}={shown(rows)}")


def require_range(
    op: str, name: str, x: Tensor, least: float = -math.inf, most: float = math.inf
) -> None:
    """Requires values in [least, most], if readable without synchronisation or a graph break.

    NaN passes: results show it, and a GradScaler relies on that.
    """
    if type(x) not in PLAIN or not x.is_cpu or is_traced() or x.numel() == 0:
        return
    require_strided(op, name, x)
    # min and max propagate NaN. Comparing only them is faster than comparing all elements.
    if least > -math.inf and not x.min().item() >= least and (x < least).any():
        low = x[x < least].amin().item()
        raise ValueError(f"{op}: {name} must be >= {least:g}, got {name}.min()={low:g}")
    if most < math.inf and not x.max().item() <= most and (x > most).any():
        high = x[x > most].amax().item()
        raise ValueError(f"{op}: {name} must be <= {most:g}, got {name}.max()={high:g}")


def is_traced() -> bool:
    """Returns True inside a trace or a torch.func transform."""
    return (
        is_compiling()
        or _get_tracing_state() is not None
        or _len_torch_dispatch_stack() > 0
        or peek_interpreter_stack() is not None
    )


def require_derivative(op: str, **complex_terms: Tensor | None) -> None:
    """No gradient of complex arithmetic may be wanted in a program of torch.jit.trace, since
    TorchScript takes derivatives of real numbers for it."""
    if is_compiling() or not torch._C._is_tracing() or not torch.is_grad_enabled():
        return
    for name, t in complex_terms.items():
        if t is not None and t.requires_grad:
            raise NotImplementedError(
                f"{op}: {name} must not require a gradient under torch.jit.trace, whose programs "
                "have no right derivatives of complex numbers, or only under torch.no_grad(); "
                f"torch.compile and torch.export have them, got {name}.requires_grad=True"
            )


def same_values(copy: Tensor, t: Tensor) -> bool:
    """Returns True if `t` still equals its earlier `copy`; NaN never does."""
    return copy.dtype == t.dtype and copy.device == t.device and torch.equal(copy, t)


def makes_graph() -> bool:
    """Returns True if the call is recorded in a graph.

    Python cannot read tensor values then, or reads only the example's.
    """
    modes = torch._C._TorchDispatchModeKey
    return (
        is_compiling()
        or torch._C._get_tracing_state() is not None
        or any(torch._C._get_dispatch_mode(key) for key in (modes.PROXY, modes.FAKE))
    )


def require_like(op: str, name: str, t: Tensor, x: Tensor, x_name: str = "x") -> None:
    """Requires a tensor `t` with the dtype and device of `x`."""
    if type(t) not in PLAIN:
        require_tensor(op, name, t)
    if t.dtype != x.dtype:
        raise TypeError(
            f"{op}: {name} must have the dtype of {x_name}, got {name}.dtype={t.dtype}, "
            f"{x_name}.dtype={x.dtype}"
        )
    if t.is_nested:
        refuse_nested(op, name, t)
    if not (t.is_cpu and x.is_cpu):
        require_device(op, name, t, x, x_name)


def cast_like(op: str, name: str, t: Tensor, x: Tensor, x_name: str = "x") -> Tensor:
    """Returns `t`, which must be like `x`; under autocast, casts it to the dtype of `x`."""
    if type(t) not in PLAIN:
        require_tensor(op, name, t)
    if t.dtype == x.dtype and t.is_cpu and x.is_cpu and not t.is_nested:
        return t
    if t.dtype in FLOATS and autocast_dtype(x) is not None:
        t = t.to(x.dtype)
    require_like(op, name, t, x, x_name)
    return t


def require_device(op: str, name: str, t: Tensor, x: Tensor, x_name: str = "x") -> None:
    if not (t.is_cpu and x.is_cpu) and t.device != x.device:
        raise ValueError(
            f"{op}: {name} must be on the device of {x_name}, got {name}.device={t.device}, "
            f"{x_name}.device={x.device}"
        )


def require_int(
    op: str, name: str, value: Any, least: int | None = None, most: int | None = None
) -> None:
    """Requires a 64-bit int in [least, most]; allows numpy integers and 0-d tensors, not bools."""
    error: type[Exception] = ValueError
    if isinstance(value, bool):
        error = TypeError
    elif not isinstance(value, _INTS):
        try:
            operator.index(value)
        except TypeError:
            error = TypeError
        if getattr(value, "dtype", None) == torch.bool:
            error = TypeError
    if (
        error is TypeError
        or (least is not None and value < least)
        or (most is not None and value > most)
    ):
        raise error(f"{op}: {name} must be an int{_limits(least, most)}, got {name}={shown(value)}")
    if not _fits_64_bits(value):
        raise ValueError(f"{op}: {name} must fit into 64 bits, got {name}={shown(value)}")


def require_pair(op: str, name: str, value: Any, least: int, most: int | None = None) -> None:
    """Requires two ints in [least, most]."""
    error: type[Exception] | None = None
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        error = TypeError
    else:
        for each in value:
            require_int(op, name, each)
            if each < least or (most is not None and each > most):
                error = ValueError
    if error is not None:
        limits = _limits(least, most)
        raise error(f"{op}: {name} must be two ints{limits}, got {name}={shown(value)}")


def require_number(
    op: str,
    name: str,
    value: Any,
    least: float = -_LARGEST,
    most: float = _LARGEST,
    *,
    above: float = -math.inf,
    below: float = math.inf,
) -> None:
    """Requires a finite number in [least, most] and in (above, below).

    Ints must fit into 64 bits, torch's limit. Allows 0-d tensors, not bools.
    """
    if type(value) is float and least <= value <= most and above < value < below:
        return
    is_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")
    known, number = isinstance(value, _NUMBERS) and not is_bool, value
    if not known and not is_bool and getattr(value, "ndim", None) == 0:
        if getattr(value, "requires_grad", False) and torch.is_grad_enabled():
            raise ValueError(
                f"{op}: {name} must be a number, which gets no gradient; detach it, "
                f"got {name}={shown(value)}"
            )
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            known, number = True, float(value)
    if not known or not (least <= number <= most and above < number < below):
        error = ValueError if known else TypeError
        limits = _limits(least, most, above, below)
        raise error(f"{op}: {name} must be a finite number{limits}, got {name}={shown(value)}")
    if not _fits_64_bits(value):
        raise ValueError(
            f"{op}: {name} must fit into 64 bits or be a float, got {name}={shown(value)}"
        )


def _fits_64_bits(value: Any) -> bool:
    """Returns True if torch can represent an int; symbols can, and comparing them adds a guard."""
    if not isinstance(value, int) or is_compiling():
        return True
    return -(2**63) <= value < 2**63


def _limits(
    least: float | None, most: float | None, above: float | None = None, below: float | None = None
) -> str:
    signs = ((">=", least), (">", above), ("<=", most), ("<", below))
    limits = [f"{sign} {n}" for sign, n in signs if n is not None and abs(n) < _LARGEST]
    return " " + " and ".join(limits) if limits else ""


def require_choice(op: str, name: str, value: Any, choices: Iterable[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        wanted = ", ".join(f'"{choice}"' for choice in choices)
        hint = did_you_mean(value, list(choices))
        raise ValueError(f"{op}: {name} must be one of {wanted}, got {name}={shown(value)}{hint}")


def require_bool(op: str, name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{op}: {name} must be True or False, got {name}={shown(value)}")


def require_seed(op: str, seed: Tensor | None, x: Tensor, name: str = "seed") -> Tensor:
    """Returns [seed, offset] of random draws for `x`; None takes them from torch's generator."""
    if seed is None:
        return new_seed()
    plain = isinstance(seed, Tensor) and not seed.is_nested
    if not plain or seed.dtype != torch.int64 or seed.shape != (2,):
        raise ValueError(
            f"{op}: {name} must be an int64 tensor [seed, offset], got {name}={shown(seed)}"
        )
    if seed.is_meta and not x.is_meta:
        raise ValueError(
            f"{op}: {name} must have values, got {name}.device=meta, x.device={x.device}"
        )
    return seed


def is_one_of(size: Any, *sizes: Any) -> bool:
    """Returns `size in sizes`, which torch.compile would evaluate to False for symbolic sizes."""
    for other in sizes:  # noqa: SIM110, a generator takes 0.6 us
        if size == other:
            return True
    return False


def require_one_shape(op: str, name: str, t: Tensor, shapes: Sequence[tuple[int, ...]]) -> None:
    """Requires that `t` has one of the shapes."""
    if not is_one_of(t.shape, *shapes):
        wanted = f"{tuple(shapes[0])}"
        for shape in shapes[1:]:  # torch.compile cannot join strings that contain symbols
            wanted = f"{wanted} or {tuple(shape)}"
        raise ValueError(
            f"{op}: {name} must have shape {wanted}, got {name}.shape={tuple(t.shape)}"
        )


def require_shape(op: str, name: str, t: Tensor, shape: tuple[int, ...]) -> None:
    if t.shape != shape:
        raise ValueError(
            f"{op}: {name} must have shape {tuple(shape)}, got {name}.shape={tuple(t.shape)}"
        )


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Returns autocast's dtype on x's device; None if it is off or the device is meta."""
    if not torch._C._is_any_autocast_enabled():  # cheaper than reading the device's name
        return None
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def full_precision(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Returns a context that disables autocast, so that products keep their operands' precision.

    It does nothing without autocast, as torch.export makes a graph of its own of each such block.
    """
    if autocast_dtype(x) is None:
        return contextlib.nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def autocast_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Casts as torch's linear does under autocast, which leaves fp64 unchanged."""
    if not torch._C._is_any_autocast_enabled():
        return x, weight, bias
    dtype = autocast_dtype(x) if isinstance(x, Tensor) else None
    if dtype is None:
        return x, weight, bias

    def cast(t: Any) -> Any:
        fits = isinstance(t, Tensor) and t.dtype in FLOATS and t.dtype != torch.float64
        return t.to(dtype) if fits else t

    return cast(x), cast(weight), cast(bias)
