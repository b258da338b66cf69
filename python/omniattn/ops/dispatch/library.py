"""Finds and loads the native libraries."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import omniattn
from omniattn import config

MINIMUM_TORCH = (2, 11)
CUDA_LIBRARY = "libomniattn_cuda.so"

#: Device type -> path of the loaded library.
loaded: dict[str, Path] = {}
#: Reason why the CUDA library is not loaded; None if it is.
cuda_unavailable: str | None = None


def find(name: str) -> Path | None:
    """Returns the path of a library file of this package, or None.

    An editable install and OMNIATTN_LIBRARY_DIR keep libraries and Python files in different
    folders; the package's path includes both.
    """
    return next((Path(f) / name for f in omniattn.__path__ if (Path(f) / name).exists()), None)


def _load(device: str, name: str) -> None:
    path = find(name)
    if path is None:
        raise ImportError(
            f"omniattn: {name} not found in the package; install it with `pip install .`"
            f" (looked in {', '.join(omniattn.__path__)})"
        )
    torch.ops.load_library(path)
    loaded[device] = path
    if config.LOG_PATHS:
        getattr(torch.ops.omniattn, f"report_paths_{device}")(True)


def built_isas() -> tuple[str, ...]:
    """Returns the levels of `config.CPU_ISAS` that the CPU library has kernels for."""
    mask: int = torch.ops.omniattn.built_cpu_isas()
    return tuple(name for i, name in enumerate(config.CPU_ISAS) if mask >> i & 1)


def _check_levels() -> None:
    built = built_isas()
    rebuild = "pip install . -C cmake.define.OMNIATTN_LEVELS=all builds all levels"
    if config.CPU_ISA not in (None, *built):
        raise ImportError(
            f"omniattn: this build has no kernels for OMNIATTN_CPU_ISA={config.CPU_ISA!r}, only "
            f"for {', '.join(built)}; {rebuild}"
        )
    if torch.ops.omniattn.detected_cpu_isa() < 0:
        raise ImportError(
            f"omniattn: this build has kernels for {', '.join(built)} only, and this CPU has none "
            f"of these levels: it was built on another machine; {rebuild}"
        )


def paths(device: str) -> dict[str, list[str]]:
    """Returns op -> code paths on a device, in order of preference."""
    lines = getattr(torch.ops.omniattn, f"paths_{device}")().splitlines()
    return {op: names.split(", ") for op, names in (line.split(": ") for line in lines)}


def active_isa() -> int:
    """Returns the ISA level in use, an index of `config.CPU_ISAS`.

    Calls use this function instead of the library's op, which torch.jit.trace and other recorders
    of ops would record.
    """
    return _active_isa


def set_active_isa(isa: int) -> bool:
    """Sets the ISA level in use; returns False if this machine or build lacks it."""
    global _active_isa
    known: bool = torch.ops.omniattn.set_cpu_isa(isa)
    _active_isa = torch.ops.omniattn.cpu_isa()
    return known


def _load_cuda() -> str | None:
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device"
    if find(CUDA_LIBRARY) is None:
        return "this build of omniattn has no CUDA library"
    try:
        _load("cuda", CUDA_LIBRARY)
    except OSError as error:
        return f"{CUDA_LIBRARY} did not load: {error}"
    return None


def _check_torch() -> None:
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < MINIMUM_TORCH:
        raise ImportError(
            f"omniattn: needs torch >= {'.'.join(map(str, MINIMUM_TORCH))}, "
            f"got torch=={torch.__version__}; upgrade it with: pip install -U torch"
        )


def public_name(name: str, args: Sequence[Any]) -> str:
    """Returns an op's name in errors: its public function, or `<function>_backward`.

    csrc/ops uses the same names; tests/ops/test_op_errors.py compares both.
    """
    stem = name.removesuffix("_").removesuffix("_raw").removesuffix("_only")
    op = stem.removesuffix("_backward")
    given = dict(zip((a.name for a in arguments(name)), args, strict=False))
    public = op
    for place, (function, argument) in enumerate(_functions_of.get(op, ())):
        value = given.get(argument)
        if place == 0 or (value is not None and value is not False):
            public = function
    return public + stem.removeprefix(op)


def _read_functions() -> dict[str, list[tuple[str, str]]]:
    """Returns op -> its public functions, each with the argument that identifies its calls.

    Ops named like their only function are not listed; see csrc/ops/registry.h.
    """
    found = {}
    for line in torch.ops.omniattn.public_functions().splitlines():
        op, functions = line.split(": ")
        pairs = (function.partition("=") for function in functions.split(", "))
        found[op] = [(function, argument) for function, _, argument in pairs]
    return found


def _read_constants() -> dict[str, int]:
    lines = (line.split(": ") for line in torch.ops.omniattn.constants().splitlines())
    return {name: int(value) for name, value in lines}


def _public_functions(device: str) -> list[str]:
    """Returns the public functions of the ops with a kernel for this device."""
    helpers = ("_", "_only", "_backward")
    ops = (name for name in ops_of(device) if not name.endswith(helpers))
    return sorted({function for op in ops for function, _ in _functions_of.get(op, [(op, "")])})


def arguments(name: str) -> Sequence[Any]:
    """Returns the arguments in the schema of an op."""
    found: Sequence[Any] = getattr(torch.ops.omniattn, name).default._schema.arguments
    return found


_KEYS = {"cpu": "CPU", "cuda": "CUDA"}
_kernels = torch.library.Library("omniattn", "IMPL")
#: Ops whose implementation for a device is a function in Python; see `stand_in`.
_stand_ins: dict[str, set[str]] = {"cpu": set(), "cuda": set()}


def _registered(device: str) -> list[str]:
    names = torch._C._dispatch_get_registrations_for_dispatch_key(_KEYS[device])
    return sorted(n.removeprefix("omniattn::") for n in names if n.startswith("omniattn::"))


def ops_of(device: str) -> list[str]:
    """Returns the names of the ops with a kernel for this device, without their raw variants."""
    names = [n for n in _registered(device) if n not in _stand_ins[device]]
    return [n for n in names if not n.endswith("_raw")]


def has_kernel(name: str, device: str) -> bool:
    key = _KEYS[device]
    has: bool = torch._C._dispatch_has_kernel_for_dispatch_key(f"omniattn::{name}", key)
    return has


def _exporting_to_onnx() -> bool:
    onnx = sys.modules.get("torch.onnx")  # not imported, which would be slow
    return onnx is not None and bool(onnx.is_in_onnx_export())


def register_fake(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function as the fake kernel of an op.

    It also runs if any tensor is on the meta device. With other tensors on another device, results
    would be uninitialised memory; such calls raise, except that a seed may be on the CPU.
    """
    known = arguments(name)

    def decorate(fake: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fake)
        def checked(*args: Any, **kwargs: Any) -> Any:
            if _exporting_to_onnx():
                raise NotImplementedError(
                    f"{public_name(name, args)}: ONNX has no op for it; export the definition in "
                    'plain torch, with backend="reference" of the function, layer or model'
                )
            given = zip(known, args, strict=False)
            first, device = next((a.name, t.device) for a, t in given if isinstance(t, Tensor))
            is_meta = device.type == "meta"
            for argument, value in zip(known, args, strict=False):
                if argument.name == "seed" and is_meta:
                    continue
                for t in tree_leaves(value):
                    if isinstance(t, Tensor) and (t.device.type == "meta") != is_meta:
                        raise RuntimeError(
                            f"{public_name(name, args)}: {argument.name} must be on the device "
                            f"of {first}, got {argument.name}.device={t.device}, "
                            f"{first}.device={device}"
                        )
            return fake(*args, **kwargs)

        torch.library.register_fake(f"omniattn::{name}", checked)
        return fake

    return decorate


def stand_in(name: str, device: str, function: Callable[..., Any]) -> None:
    """Registers `function` as an op's implementation for a device, unless it has one there."""
    if not has_kernel(name, device):
        _kernels.impl(name, function, _KEYS[device])
        _stand_ins[device].add(name)


def explain_missing() -> None:
    """Registers CUDA kernels that raise a clear error for ops that have none."""
    for name in _registered("cpu"):
        stand_in(name, "cuda", _explain(name))


def _explain(name: str) -> Callable[..., NoReturn]:
    def missing(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"{public_name(name, args)}: no native kernel for device='cuda' "
            f"({cuda_unavailable or 'there is one for ' + ', '.join(_public_functions('cuda'))}); "
            'backend="reference" runs the eager definition'
        )

    return missing


def explain_layouts() -> None:
    """Registers kernels that raise a clear error for unsupported layouts."""
    for name in _registered("cpu"):
        for layout in ("Sparse", "SparseCsr", "Mkldnn", "Quantized"):
            _kernels.impl(name, _refuse_layout(name), f"{layout}CPU")


def _refuse_layout(name: str) -> Callable[..., NoReturn]:
    def refused(*args: Any, **kwargs: Any) -> NoReturn:
        op = public_name(name, args)
        for argument, value in zip(arguments(name), args, strict=False):
            if isinstance(value, Tensor) and (value.layout != torch.strided or value.is_quantized):
                raise TypeError(
                    f"{op}: {argument.name} must be strided and not "
                    f"quantized, got {argument.name}.layout={value.layout}, "
                    f"{argument.name}.dtype={value.dtype}"
                )
        raise TypeError(f"{op}: all tensors must be strided and not quantized")

    return refused


_check_torch()
_load("cpu", config.CPU_LIBRARY)
_check_levels()
torch.ops.omniattn.set_batch_invariance(config.BATCH_INVARIANT)
_functions_of = _read_functions()
#: Numbers that shapes of results depend on, such as the tokens of a chunk; csrc/ops sets them.
CONSTANTS = _read_constants()
_active_isa: int = torch.ops.omniattn.cpu_isa()
cuda_unavailable = _load_cuda()
