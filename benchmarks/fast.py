"""Measures time and memory of a training step with different settings.

    python benchmarks/fast.py [--rounds 9] [--quick]

Each setting runs in its own process; the steps of all settings alternate. Writes
benchmarks/results/fast.csv and the table of docs/fast.md; --quick only prints. Allocators are
measured if their libraries are installed (Debian: libjemalloc2, libtcmalloc-minimal4).
"""

from __future__ import annotations

import argparse
import csv
import ctypes.util
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from report import RESULTS, ROOT, commit
from turns import serve, take_turns

from omniattn.ops.dispatch.cpu import cpu_family, cpuinfo
from omniattn.testing.table import replace_block

RECORD = RESULTS / "fast.csv"
PAGE = ROOT / "docs" / "fast.md"
BATCH, TOKENS = 8, 256


def preload(name: str, **options: str) -> dict[str, str] | None:
    """Returns the environment that loads an allocator, or None if it is not installed."""
    library = ctypes.util.find_library(name)
    return None if library is None else {"LD_PRELOAD": library, **options}


#: Setting -> (how users choose it, environment, options of `step_of`).
SETTINGS: dict[str, tuple[str, Mapping[str, str] | None, list[str]]] = {
    "default": ("", {}, []),
    "one thread": ("`torch.set_num_threads(1)`", {}, ["one-thread"]),
    "autocast": ('`torch.autocast("cpu", torch.bfloat16)`', {}, ["autocast"]),
    "weights in bf16": ("`model.to(torch.bfloat16)`", {}, ["bf16"]),
    "compiled": ("`torch.compile(model)`", {}, ["compile"]),
    "reference definitions": ('`backend="reference"` of the config', {}, ["reference"]),
    "loss of the logits": (
        "`cross_entropy(model(tokens), targets)`, not `model(tokens, targets)`",
        {},
        ["logits"],
    ),
    "jemalloc": ("`LD_PRELOAD=libjemalloc.so.2`", preload("jemalloc"), []),
    "jemalloc, memory kept": (
        "also `MALLOC_CONF=dirty_decay_ms:-1,muzzy_decay_ms:-1`",
        preload("jemalloc", MALLOC_CONF="dirty_decay_ms:-1,muzzy_decay_ms:-1"),
        [],
    ),
    "tcmalloc": (
        "`LD_PRELOAD=libtcmalloc_minimal.so.4`",
        preload("tcmalloc_minimal"),
        [],
    ),
    "glibc, memory kept": (
        "`MALLOC_TRIM_THRESHOLD_`, `MALLOC_MMAP_THRESHOLD_`",
        {"MALLOC_TRIM_THRESHOLD_": str(2**32), "MALLOC_MMAP_THRESHOLD_": str(2**32)},
        [],
    ),
    "bound threads": ("`OMP_PROC_BIND=true`", {"OMP_PROC_BIND": "true"}, []),
    "sleeping threads": ("`OMP_WAIT_POLICY=passive`", {"OMP_WAIT_POLICY": "passive"}, []),
}


def step_of(options: list[str]) -> Callable[[], None]:
    """Returns a training step of the preset "llama" without an optimizer."""
    from dataclasses import replace

    import torch
    from torch.nn.functional import cross_entropy

    from omniattn.models import PRESETS

    if "one-thread" in options:
        torch.set_num_threads(1)
    torch.manual_seed(0)
    config = PRESETS["llama"]
    if "reference" in options:
        config = replace(config, backend="reference")
    model: Any = config.build()
    if "bf16" in options:
        model = model.to(torch.bfloat16)
    if "compile" in options:
        model = torch.compile(model)
    tokens = torch.randint(256, (BATCH, TOKENS + 1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    def step() -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in options):
            if "logits" in options:
                loss = cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())
            else:
                loss = model(inputs, targets)
        loss.backward()

    return step


def table(rows: list[dict[str, str]]) -> str:
    """Returns a section for each family of CPUs."""
    parts = []
    for family in dict.fromkeys(row["family"] for row in rows):
        own = [row for row in rows if row["family"] == family]
        first = own[0]
        lines = [
            f"### {family}\n\n{first['cpu']}, {first['threads']} threads, torch {first['torch']}, "
            f"{first['date']}, load average before the run {first['load']}.\n",
            "| setting | how | step | relative to default | memory |\n|---|---|---|---|---|",
        ]
        for row in own:
            share = float(row["ms"]) / float(first["ms"])
            how = SETTINGS[row["setting"]][0]
            lines.append(
                f"| {row['setting']} | {how} | {float(row['ms']):.0f} ms | {share:.2f} | "
                f"{row['mib']} MiB |"
            )
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="print, write nothing")
    parser.add_argument("--worker", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        serve(step_of(args.worker))
        return
    import torch

    machine = {
        "family": cpu_family(),
        "cpu": cpuinfo().get("model name", ""),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),  # from other processes, before the first step
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
    }
    commands = {
        name: ([__file__, "--worker", *options], env)
        for name, (_, env, options) in SETTINGS.items()
        if env is not None
    }
    rows: list[dict[str, Any]] = []
    for name, turns in take_turns(commands, args.rounds).items():
        measured = {"setting": name, "ms": round(turns.seconds * 1e3, 1), "mib": round(turns.mib)}
        rows.append({"family": machine["family"], **measured, **machine})
        print(measured, flush=True)
    if args.quick:
        return
    before = list(csv.DictReader(RECORD.open())) if RECORD.exists() else []
    every = [row for row in before if row["family"] != machine["family"]] + rows
    with RECORD.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(sorted(every, key=lambda row: row["family"]))
    with RECORD.open() as file:
        written = table(list(csv.DictReader(file)))
    PAGE.write_text(replace_block(PAGE.read_text(encoding="utf-8"), "settings", written))


if __name__ == "__main__":
    main()
