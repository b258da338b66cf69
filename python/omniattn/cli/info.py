"""Show versions, instruction sets, loaded libraries, ops per device and thread settings."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterator

import torch

import omniattn
from omniattn import config
from omniattn.ops import _library, gemm_choice

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no options."""


def run(args: argparse.Namespace) -> int:
    """Prints the table."""
    for name, value in _rows():
        print(f"{name:<16} {value}")
    return 0


def _rows() -> Iterator[tuple[str, str]]:
    found = config.CPU_ISAS[torch.ops.omniattn.detected_cpu_isa()]
    chosen = config.CPU_ISAS[torch.ops.omniattn.cpu_isa()]
    capped = f", capped by OMNIATTN_CPU_ISA={config.CPU_ISA}" if config.CPU_ISA else ""
    yield "omniattn", omniattn.__version__
    yield "torch", torch.__version__
    yield "python", f"{platform.python_version()} on {platform.machine()}"
    yield "cpu", f"{found} found, {chosen} used{capped}"
    if _library.cuda_unavailable is None:
        yield "cuda", f"used, {torch.cuda.get_device_name()}"
    else:
        yield "cuda", f"not used: {_library.cuda_unavailable}"
    for device, path in _library.loaded.items():
        yield f"library {device}", str(path)
    for line in gemm_choice.describe():
        name, _, choice = line.partition(": ")
        yield name, choice
    for device in _library.loaded:
        yield f"ops {device}", ", ".join(_library.ops_of(device))
    variables = (f"{name}={os.environ[name]}" for name in _THREAD_VARIABLES if name in os.environ)
    yield (
        "threads",
        f"{torch.get_num_threads()} of {os.cpu_count()} CPUs {' '.join(variables)}".rstrip(),
    )
