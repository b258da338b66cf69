"""omniattn info: describes this machine and this build, as a table or as JSON."""

from __future__ import annotations

import argparse
import errno
import json
import os
import platform
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import omniattn
from omniattn import config
from omniattn.ops.dispatch import calls, gemm_choice, level_choice, torch_kernels
from omniattn.ops.dispatch import library as _library
from omniattn.ops.dispatch.cpu import cpu_family, cpuinfo
from omniattn.ops.dispatch.precision import split_bf16_of

_CPU_NUMBERS = {"family": "cpu family", "model": "model"}
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")

#: Description of each ISA level; float64 runs on the slowest built one.
_MEANING = {
    "baseline": "portable code for any CPU, much slower than the others; "
    "bfloat16 and float16 are computed in float32",
    "avx2": "256-bit vectors; bfloat16 and float16 are computed in float32",
    "avx512": "512-bit vectors; bfloat16 and float16 are computed in float32",
    "avx512_bf16": "512-bit vectors; bfloat16 matrix products with float32 accumulation; other "
    "bfloat16 and all float16 operations are computed in float32",
    "amx_bf16": "512-bit vectors; bfloat16 matrix products in AMX tiles, which treat denormals as "
    "0, with float32 accumulation; otherwise like avx512_bf16",
    "amx_fp16": "512-bit vectors; float16 and bfloat16 matrix products in AMX tiles, which treat "
    "bfloat16 denormals as 0, with float32 accumulation; otherwise like avx512_bf16",
}

#: Prefix of libraries that emulate AMX tiles in software.
_SOFTWARE_TILES = "libomniattn_amx_"

#: Result of `torch.ops.omniattn.tile_state` if the CPU has AMX but Linux was not asked for
#: permission to use its tiles.
_NOT_ASKED_FOR = -2


def run(args: argparse.Namespace) -> int:
    """Prints the facts as a table or JSON, and returns the exit code."""
    found = facts()
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    table = textwrap.TextWrapper(100, break_long_words=False, break_on_hyphens=False)
    table.subsequent_indent = " " * 14
    for name, value in _rows(found):
        table.initial_indent = f"{name:<14}"
        print(table.fill(value))
    print("`python -m omniattn check` compares every op with its definition on this machine.")
    return 0


def facts() -> dict[str, Any]:
    """Returns the facts that the command shows, as JSON-serialisable values."""
    entries = cpuinfo()
    names = {"name": "model name", **_CPU_NUMBERS}
    cpu = {key: entries[name] for key, name in names.items() if name in entries}
    given = {name: os.environ[name] for name in _THREAD_VARIABLES if name in os.environ}
    return {
        "omniattn": {
            "version": omniattn.__version__,
            "folder": str(Path(omniattn.__file__).parent),
        },
        "torch": {"version": torch.__version__, "python": platform.python_version()},
        "cpu": {"name": platform.processor(), **cpu, "machine": platform.machine()},
        "kernels": _kernels(),
        "linear": _linear(),
        "levels": level_choice.describe(level_choice.record_of(cpu_family())),
        "calls": _calls(),
        "threads": {"count": torch.get_num_threads(), "environment": given, "cpus": os.cpu_count()},
        "cuda": _cuda(),
        "libraries": {device: _library_facts(device) for device in _library.loaded},
    }


def _rows(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "omniattn", "{version} in {folder}".format(**found["omniattn"])
    yield "torch", "{version}, Python {python}".format(**found["torch"])
    cpu = found["cpu"]
    numbers = [f"{text} {cpu[k]}" for k, text in _CPU_NUMBERS.items() if k in cpu]
    yield "CPU", ", ".join(filter(None, (cpu["name"], *numbers, cpu["machine"])))
    kernels = "{level} ({reason}): {meaning}; built for {built}; float64 runs on {float64}"
    yield "kernels", kernels.format(**found["kernels"])
    yield "linear", _linear_row(found["linear"])
    if found["levels"]:
        yield "levels", "; ".join(found["levels"])
    in_python = "in Python, 1 to 2 us more each: {reason}"
    yield "calls", "compiled" if found["calls"]["compiled"] else in_python.format(**found["calls"])
    threads = found["threads"]
    given = ", ".join(f"{name}={value}" for name, value in threads["environment"].items())
    yield (
        "threads",
        f"{threads['count']}{given and f' ({given})'}, CPUs: {threads['cpus']}; "
        "torch.set_num_threads or OMP_NUM_THREADS changes it",
    )
    cuda = found["cuda"]
    used = "used, on {device}" if cuda["used"] else "not used: {reason}; {advice}"
    yield "CUDA", used.format(**cuda)
    for device, library in found["libraries"].items():
        given = " (by OMNIATTN_LIBRARY_DIR)" if library["by_environment"] else ""
        missing = ", ".join(library["without"])
        count = f"{len(library['ops'])} native ops{missing and f', without {missing}'}"
        yield f"{device} library", f"{library['path']}{given}, {count}"
        tables = "; ".join(f"{op}: {', '.join(names)}" for op, names in library["paths"].items())
        left_out = "; ".join(f"{path}: {why}" for path, why in library["omitted paths"].items())
        yield (
            f"{device} paths",
            f"{tables} (the first that takes a call; OMNIATTN_LOG_PATHS=1 logs it)"
            + (f"; left out: {left_out}" if left_out else ""),
        )


def _library_facts(device: str) -> dict[str, Any]:
    path, ops = _library.loaded[device], _library.ops_of(device)
    return {
        "path": str(path),
        "by_environment": path.parent == config.LIBRARY_DIR,
        "ops": sorted(ops),
        "without": sorted(set(_library.ops_of("cpu")).difference(ops)),
        "paths": _library.paths(device),
        "omitted paths": {
            f"{op} {name}": why for (op, name), why in torch_kernels.omitted(device).items()
        },
    }


def _kernels() -> dict[str, str]:
    tiles: int = torch.ops.omniattn.tile_state()
    found = config.CPU_ISAS[torch.ops.omniattn.detected_cpu_isa()]
    found = "amx_bf16" if tiles == _NOT_ASKED_FOR else found
    chosen = config.CPU_ISAS[torch.ops.omniattn.cpu_isa()]
    if chosen != found:
        reason = f"although this CPU has {found}: OMNIATTN_CPU_ISA={config.CPU_ISA}"
    elif tiles > 0:
        small = ", a thread has a signal stack of less than 12 KiB" if tiles == errno.ENOSPC else ""
        reason = f"although this CPU has AMX: Linux refused its tiles, {os.strerror(tiles)}{small}"
    elif _library.loaded["cpu"].name.startswith(_SOFTWARE_TILES):
        reason = "with tiles in software, for tests"
    elif config.CPU_ISA not in (None, chosen):
        reason = f"the best this CPU supports, less than OMNIATTN_CPU_ISA={config.CPU_ISA}"
    else:
        reason = "the best this CPU supports, detected from its instructions, not its name"
    levels = _library.built_isas()
    facts = {"level": chosen, "reason": reason, "meaning": _MEANING[chosen]}
    return facts | {"built": ", ".join(levels), "float64": levels[0]}


def _linear() -> dict[str, str]:
    """Names the library whose matrix product `linear` uses, by dtype."""
    of = {str(d).removeprefix("torch."): rule.products for d, rule in gemm_choice.CHOICE.items()}
    if pieces := split_bf16_of(torch.empty(0)):
        of["float32"] = f"omniattn, of {pieces} pieces of bfloat16"
    return of


def _linear_row(of: dict[str, str]) -> str:
    parts = [
        f"{', '.join(dtype for dtype in of if of[dtype] == whose)} by {whose}"
        for whose in dict.fromkeys(of.values())
    ]
    return (
        f"products of {'; '.join(parts)}: the faster one on this kind of CPU, as far as measured;"
        ' backend="cpu" forces omniattn'
    )


def _calls() -> dict[str, Any]:
    reason = calls.why_not_compiled()
    return {"compiled": True} if reason is None else {"compiled": False, "reason": reason}


def _cuda() -> dict[str, Any]:
    """Returns whether CUDA is used and on which device, or why not and what to do."""
    if _library.cuda_unavailable is None:
        return {"used": True, "device": torch.cuda.get_device_name()}
    if torch.version.cuda is None:
        advice = (
            "for an NVIDIA GPU, install a torch with CUDA (see pytorch.org), then omniattn again, "
            "with nvcc 12 or newer on the PATH"
        )
    elif not torch.cuda.is_available():
        advice = "see if nvidia-smi lists a GPU and if CUDA_VISIBLE_DEVICES hides it"
    elif _library.find(_library.CUDA_LIBRARY) is None:
        advice = "install omniattn again, with nvcc 12 or newer on the PATH"
    else:
        advice = "install omniattn again, to build it with the torch that is here now"
    return {"used": False, "reason": _library.cuda_unavailable, "advice": advice}
