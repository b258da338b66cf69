"""Show what runs here: CPU, instruction set, threads, CUDA, libraries and ops.

Where CUDA is not used, it says why and what to do.
"""

from __future__ import annotations

import argparse
import errno
import os
import platform
import textwrap
from collections.abc import Iterator
from pathlib import Path

import torch

import omniattn
from omniattn import config
from omniattn.ops import _library, gemm_choice, level_choice
from omniattn.ops._cpu import cpu_family, cpuinfo
from omniattn.ops._precision import pieces_of

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")

#: What each instruction set means; all of them support all dtypes.
_MEANING = {
    "baseline": "portable code for any CPU, much slower than the others; "
    "bfloat16 and float16 are computed in float32",
    "avx2": "256-bit vectors; bfloat16 and float16 are computed in float32",
    "avx512": "512-bit vectors; bfloat16 and float16 are computed in float32",
    "avx512_bf16": "512-bit vectors; matrix products multiply bfloat16 directly and sum in "
    "float32, all else of bfloat16, and float16, is computed in float32",
    "amx_bf16": "512-bit vectors; matrix products multiply bfloat16 in AMX tiles, which read "
    "denormals as 0, and sum in float32, all else is computed as by avx512_bf16",
    "amx_fp16": "512-bit vectors; matrix products multiply float16 and bfloat16 in AMX tiles, "
    "which read denormals of bfloat16 as 0, and sum in float32, all else is computed as by "
    "avx512_bf16",
}

#: How names of libraries begin that have no tiles of the hardware.
_SOFTWARE_TILES = "libomniattn_amx_"

#: Of `torch.ops.omniattn.tile_state`: the CPU has AMX, and nobody asked Linux for its tiles.
_NOT_ASKED_FOR = -2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no options."""


def run(args: argparse.Namespace) -> int:
    """Prints the table."""
    table = textwrap.TextWrapper(100, break_long_words=False, break_on_hyphens=False)
    table.subsequent_indent = " " * 14
    for name, value in _rows():
        table.initial_indent = f"{name:<14}"
        print(table.fill(value))
    print("`python -m omniattn check` compares every op with its definition on this machine.")
    return 0


def _rows() -> Iterator[tuple[str, str]]:
    yield "omniattn", f"{omniattn.__version__} in {Path(omniattn.__file__).parent}"
    yield "torch", f"{torch.__version__}, Python {platform.python_version()}"
    yield "CPU", _cpu()
    yield "kernels", _kernels()
    yield "linear", _linear()
    if levels := level_choice.describe(level_choice.record_of(cpu_family())):
        yield "levels", "; ".join(levels)
    yield "threads", _threads()
    yield "CUDA", _cuda()
    every = _library.ops_of("cpu")
    for device, path in _library.loaded.items():
        given = " (by OMNIATTN_LIBRARY_DIR)" if path.parent == config.LIBRARY_DIR else ""
        ops = _library.ops_of(device)
        missing = sorted(set(every).difference(ops))
        without = f", without {', '.join(missing)}" if missing else ""
        yield f"{device} library", f"{path}{given}, {len(ops)} native ops{without}"
        tables = "; ".join(f"{op}: {', '.join(n)}" for op, n in _library.paths(device).items())
        yield (
            f"{device} paths",
            f"{tables} (the first that takes a call; OMNIATTN_LOG_PATHS=1 logs it)",
        )


def _cpu() -> str:
    """The processor's name, and the numbers that distinguish models."""
    entries = cpuinfo()
    parts = [entries.get("model name", platform.processor())]
    parts += [f"{key} {entries[key]}" for key in ("cpu family", "model") if key in entries]
    return ", ".join(filter(None, (*parts, platform.machine())))


def _kernels() -> str:
    tiles: int = torch.ops.omniattn.tile_state()
    found = config.CPU_ISAS[torch.ops.omniattn.detected_cpu_isa()]
    found = "amx_bf16" if tiles == _NOT_ASKED_FOR else found
    chosen = config.CPU_ISAS[torch.ops.omniattn.cpu_isa()]
    if chosen != found:
        choice = f"although this CPU has {found}: OMNIATTN_CPU_ISA={config.CPU_ISA}"
    elif tiles > 0:
        small = ", a thread has a signal stack of less than 12 KiB" if tiles == errno.ENOSPC else ""
        choice = f"although this CPU has AMX: Linux refused its tiles, {os.strerror(tiles)}{small}"
    elif _library.loaded["cpu"].name.startswith(_SOFTWARE_TILES):
        choice = "with tiles in software, for tests"
    elif config.CPU_ISA not in (None, chosen):
        choice = f"the best this CPU supports, less than OMNIATTN_CPU_ISA={config.CPU_ISA}"
    else:
        choice = "the best this CPU supports, detected from its instructions, not its name"
    return f"{chosen} ({choice}): {_MEANING[chosen]}"


def _linear() -> str:
    """Whose matrix product `linear` uses."""
    of = {str(d).removeprefix("torch."): rule.products for d, rule in gemm_choice.CHOICE.items()}
    if pieces := pieces_of(torch.empty(0)):
        of["float32"] = f"omniattn, of {pieces} pieces of bfloat16"
    parts = [
        f"{', '.join(dtype for dtype in of if of[dtype] == whose)} by {whose}"
        for whose in dict.fromkeys(of.values())
    ]
    return (
        f"products of {'; '.join(parts)}: the faster one on this kind of CPU, as far as measured;"
        ' backend="cpu" forces omniattn'
    )


def _threads() -> str:
    variables = [f"{name}={os.environ[name]}" for name in _THREAD_VARIABLES if name in os.environ]
    given = f" ({', '.join(variables)})" if variables else ""
    return (
        f"{torch.get_num_threads()}{given}, CPUs: {os.cpu_count()}; "
        "torch.set_num_threads or OMP_NUM_THREADS changes it"
    )


def _cuda() -> str:
    if _library.cuda_unavailable is None:
        return f"used, on {torch.cuda.get_device_name()}"
    if torch.version.cuda is None:
        todo = (
            "for an NVIDIA GPU, install a torch with CUDA (see pytorch.org), then omniattn again, "
            "with nvcc 12 or newer on the PATH"
        )
    elif not torch.cuda.is_available():
        todo = "see if nvidia-smi lists a GPU and if CUDA_VISIBLE_DEVICES hides it"
    elif _library.find(_library.CUDA_LIBRARY) is None:
        todo = "install omniattn again, with nvcc 12 or newer on the PATH"
    else:
        todo = "install omniattn again, to build it with the torch that is here now"
    return f"not used: {_library.cuda_unavailable}; {todo}"
