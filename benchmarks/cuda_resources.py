"""Registers and shared memory of every CUDA kernel, as ptxas reports them; needs nvcc but no GPU.

Writes docs/cuda_resources.md, or compares with it: an unintended increase shows in review. Another
release of nvcc than the one of the table allocates differently and is not compared. Compiling takes
minutes, so a table that was made of these very sources is not made again, except with --all.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs/cuda_resources.md"
ARCHS = ("sm_80", "sm_90a")
LONGEST_COMPILATION = 60.0 * len(ARCHS)
ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\S+)'")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")
SPILLED = re.compile(r"[1-9]\d* bytes spill (?:stores|loads)")
#: What a launcher may call of the CUDA runtime: nothing that waits or allocates, so that graphs can
#: capture it.
LAUNCHING = {"LaunchKernel", "FuncSetAttribute", "GetLastError", "GetErrorString"}
LAUNCHING |= {"GetDevice", "DeviceGetAttribute"}  # the shared memory that a block can have


def release() -> str:
    out = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release ([\d.]+)", out)
    assert found, out
    return found.group(1)


def sources() -> str:
    """A checksum of the kernels and all that they include."""
    root, todo, seen = ROOT / "csrc", sorted((ROOT / "csrc/kernels").glob("*/*.cu")), {}
    while todo:
        file = todo.pop()
        if file in seen:
            continue
        seen[file] = file.read_bytes()
        included = re.findall(r'#include "(.+)"', seen[file].decode())
        todo += [path for path in (root / name for name in included) if path.exists()]
    digest = hashlib.sha256()
    for file, text in sorted(seen.items()):
        digest.update(str(file.relative_to(root)).encode() + b"\0" + text)
    return digest.hexdigest()[:16]


def heading() -> str:
    return f"""# Registers and shared memory of the CUDA kernels

Registers per thread / bytes of static shared memory per block; tiles lie in dynamic shared memory,
whose size is a struct next to each kernel and at most the 163 KiB of sm_80. No kernel spills: the
script and the development build fail where one does. Written by
`python benchmarks/cuda_resources.py` with nvcc {release()} from the sources `{sources()}`.

| kernel | {" | ".join(ARCHS)} |
|---|{"---|" * len(ARCHS)}
"""


def compiled(source: Path) -> str:
    """What ptxas says about a file; an error where compiling takes too long to work with."""
    targets = [arch.removeprefix("sm_") for arch in ARCHS]
    with tempfile.TemporaryDirectory() as folder:
        command = [*filter(None, [shutil.which("ccache")]), "nvcc", "-std=c++20", "-O3", "-c"]
        command += [f"-gencode=arch=compute_{target},code=sm_{target}" for target in targets]
        command += ["-Xptxas=-v", f"-I{ROOT / 'csrc'}", str(source), "-o", f"{folder}/kernel.o"]
        report = Path(folder, "report")
        with report.open("w") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        text = report.read_text()
        undefined = subprocess.run(
            ["nm", "-u", f"{folder}/kernel.o"], capture_output=True, text=True
        ).stdout
    if process.returncode != 0:
        sys.exit(text)
    # Of the processor, not of the clock: a busy machine is no reason.
    if (seconds := usage.ru_utime + usage.ru_stime) > LONGEST_COMPILATION:
        sys.exit(f"{source.name}: {seconds:.0f} s; split its instantiations")
    if spilled := SPILLED.search(text):
        sys.exit(f"{source.name}: {spilled.group()}")
    if calls := set(re.findall(r"\bcuda(\w+)", undefined)) - LAUNCHING:
        sys.exit(f"{source.name}: launchers may not call {', '.join(f'cuda{c}' for c in calls)}")
    return text


def demangled(names: list[str]) -> list[str]:
    text = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True)
    short = re.compile(r"^.*::(\w+_kernel(?:<.*?>)?)\(.*$")
    lines = text.stdout.replace("omniattn::", "").splitlines()
    return [short.sub(r"\1", "::" + line.removeprefix("void ")) for line in lines]


def measure() -> dict[str, list[str]]:
    """kernel -> "registers / bytes" of all kernels, for each of ARCHS."""
    sources = sorted((ROOT / "csrc/kernels").glob("*/*.cu"))
    with ThreadPoolExecutor(2) as pool:
        lines = [line for report in pool.map(compiled, sources) for line in report.splitlines()]
    found: dict[str, dict[str, str]] = {arch: {} for arch in ARCHS}
    for line in lines:
        if entry := ENTRY.search(line):
            name, arch = entry.groups()
        elif used := USED.search(line):
            shared = SHARED.search(line)
            found[arch][name] = f"{used.group(1)} / {shared.group(1) if shared else 0}"
    names = list(found[ARCHS[0]])
    rows = [[column[name] for column in found.values()] for name in names]
    return dict(sorted(zip(demangled(names), rows, strict=True)))


def read_table() -> dict[str, list[str]]:
    rows = [line for line in TABLE.read_text().splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {cell[0].strip("`"): cell[1:] for cell in cells}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--all", action="store_true", help="compile also what has not changed")
    args = parser.parse_args()
    if args.check:
        text = TABLE.read_text()
        if f"with nvcc {release()} " not in text:
            print(f"{TABLE.name} is of another nvcc than {release()}: not compared")
            return
        if f"`{sources()}`" in text and not args.all:
            print(f"{TABLE.name} was made from these sources")
            return
        expected, actual = read_table(), measure()
        changed = [k for k in {**expected, **actual} if expected.get(k) != actual.get(k)]
        for kernel in changed:
            print(f"{kernel}: was {expected.get(kernel)}, now {actual.get(kernel)}")
        if changed:
            sys.exit("run python benchmarks/cuda_resources.py and review the difference")
        return
    rows = [f"| `{kernel}` | {' | '.join(cells)} |\n" for kernel, cells in measure().items()]
    TABLE.write_text(heading() + "".join(rows))


if __name__ == "__main__":
    main()
