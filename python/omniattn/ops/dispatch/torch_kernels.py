"""Kernels of torch that paths of our ops call, and paths that are left out.

The tables of paths (csrc/ops/path.h) name kernels of torch with "torch_". Such a path is left out
until `find` has seen that torch has the kernel for the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from omniattn import config
from omniattn.ops.dispatch import library as _library

#: Op and path -> op of torch that the path calls.
KERNELS = {
    ("attention", "torch_cudnn"): "_scaled_dot_product_cudnn_attention",
    ("attention", "torch_flash"): "_flash_attention_forward",
    ("attention_backward", "torch_flash"): "_flash_attention_backward",
    ("moe_experts", "torch_grouped_mm"): "_grouped_mm",
}
# cuDNN's attention returns tensors and numbers. torch_call_dispatcher (torch 2.13), by which our
# library calls ops of torch, reads the results of such an op by each other's types. This op returns
# the tensors; without Python the path is left out.
_shims = torch.library.Library("omniattn_torch", "FRAGMENT")
_shims.define(
    "cudnn_attention(Tensor q, Tensor k, Tensor v, bool causal, float scale) -> (Tensor, Tensor)"
)


def _cudnn_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Returns out (B, H, Tq, Dv) and lse (B, H, Tq, 1) of heads (B, H, T, D)."""
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    return found[0], found[1]


_shims.impl("cudnn_attention", _cudnn_attention, "CompositeExplicitAutograd")

#: Kernels whose results differ from run to run, except under torch.use_deterministic_algorithms.
IN_ANY_ORDER = ("_flash_attention_backward",)
_KEYS = {"cpu": "CPU", "cuda": "CUDA"}


def find(device: str) -> None:
    """Uses the kernels that torch has for a device, except paths that config leaves out."""
    for op, names in _library.paths(device).items():
        for name in names:
            path, kernel = f"{op}:{name}", KERNELS.get((op, name), "")
            if path in config.OMIT_PATHS:
                omit(device, op, name, "OMNIATTN_OMIT_PATHS names it")
            elif kernel in IN_ANY_ORDER and path not in config.TAKE_PATHS:
                omit(device, op, name, f"it adds in any order; OMNIATTN_TAKE_PATHS={path} takes it")
            elif kernel:
                omit(device, op, name, _why_missing(kernel, device))


def _why_missing(kernel: str, device: str) -> str:
    """Returns why a kernel of torch cannot run on a device; "" if it can."""
    cuda = device == "cuda"
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{kernel}", _KEYS[device]):
        return f"torch {torch.__version__} has no {kernel} for device {device}"
    if cuda and "flash" in kernel and not torch.backends.cuda.is_flash_attention_available():
        return f"torch {torch.__version__} was built without flash attention"
    if cuda and "cudnn" in kernel and not torch.backends.cudnn.is_available():
        return f"torch {torch.__version__} has no cuDNN"
    return ""


def omit(device: str, op: str, path: str, reason: str) -> None:
    """Leaves out a path of an op for a reason, or restores it if the reason is ""."""
    if not getattr(torch.ops.omniattn, f"omit_path_{device}")(op, path, reason):
        known = ", ".join(_library.paths(device).get(op, [])[:-1])
        raise ValueError(f"{op}: path must be one of {known or 'none'}, got path={path!r}")


def omitted(device: str) -> dict[tuple[str, str], str]:
    """Returns the op and name of each path that is left out, and why."""
    lines = getattr(torch.ops.omniattn, f"omitted_paths_{device}")().splitlines()
    parts = (line.split(": ", 2) for line in lines)
    return {(op, path): reason for op, path, reason in parts}


@contextlib.contextmanager
def beginning_with(device: str, op: str, path: str) -> Iterator[None]:
    """Leaves out the paths before one of them, for all threads: for tests and benchmarks.

    The path itself is taken even if it adds in any order, but not if torch lacks its kernel.
    """
    before = omitted(device)
    names = _library.paths(device)[op]
    changed = {name: "a later path is wanted" for name in names[: names.index(path)]}
    if (op, path) in before:
        changed[path] = _why_missing(KERNELS[op, path], device)
    for name, reason in changed.items():
        omit(device, op, name, reason)
    try:
        yield
    finally:
        for name in changed:
            omit(device, op, name, before.get((op, name), ""))


def _check_names() -> None:
    known = {
        f"{op}:{p}" for d in _library.loaded for op, ps in _library.paths(d).items() for p in ps
    }
    unknown = sorted({*config.OMIT_PATHS, *config.TAKE_PATHS} - known)
    if unknown and "cuda" in _library.loaded:  # without it, its names are unknown
        raise ImportError(
            "omniattn: OMNIATTN_OMIT_PATHS and OMNIATTN_TAKE_PATHS must name paths of `python -m "
            f'omniattn info`, as "attention:mma", got {", ".join(unknown)}'
        )


_check_names()
for _device in _library.loaded:
    find(_device)
