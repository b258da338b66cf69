"""Records registers and shared memory of every CUDA kernel from ptxas; needs nvcc but no GPU.

Writes benchmarks/results/cuda_resources.md and its summary docs/cuda_resources.md. --check compares
with the former, so that an unintended increase shows in review. Registers depend on nvcc's release,
so a page of another release is not compared. Compiling all kernels takes minutes, so files with an
unchanged checksum are not compiled again, except with --all.
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
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "benchmarks/results/cuda_resources.md"
SUMMARY = ROOT / "docs/cuda_resources.md"
KERNELS = ROOT / "csrc/kernels"
ARCHS = ("sm_80", "sm_90a")
LONGEST_COMPILATION = 60.0 * len(ARCHS)
ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\S+)'")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")
SPILLED = re.compile(r"[1-9]\d* bytes spill (?:stores|loads)")
#: Functions of the CUDA runtime that a launcher may call. None of them synchronises or allocates,
#: so that CUDA graphs can capture the launch.
LAUNCHING = {"LaunchKernel", "FuncSetAttribute", "GetLastError", "GetErrorString"}
LAUNCHING |= {"GetDevice", "DeviceGetAttribute"}  # maximum shared memory of a block


def release() -> str:
    out = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release ([\d.]+)", out)
    assert found, out
    return found.group(1)


def checksum(source: Path) -> str:
    """Returns the digest of a file's code with all includes, without comments and paths."""
    todo, seen = [source], {}
    while todo:
        file = todo.pop()
        if file in seen:
            continue
        text = file.read_text()
        todo += [ROOT / "csrc" / name for name in re.findall(r'#include "(.+)"', text)]
        todo = [path for path in todo if path.exists()]
        code = (re.sub(r"//.*|#include .*", "", line).strip() for line in text.splitlines())
        seen[file] = "\n".join(filter(None, code))
    return hashlib.sha256("\0".join(sorted(seen.values())).encode()).hexdigest()[:12]


def heading() -> str:
    return f"""# Registers and shared memory of each CUDA kernel

Registers per thread / bytes of static shared memory per block. The checksum after a file's name
covers its code and all that it includes. Written by `python benchmarks/cuda_resources.py`
with nvcc {release()}; summary: [docs/cuda_resources.md](../../docs/cuda_resources.md).
"""


def summary(sections: dict[str, Section]) -> str:
    """Returns docs/cuda_resources.md: the maximum values in each folder of kernels."""
    folders: dict[str, list[list[str]]] = {}
    for file, section in sections.items():
        folders.setdefault(file.split("/")[0], []).extend(section.rows.values())
    lines = []
    for folder, rows in folders.items():
        columns = (
            [[int(n) for n in cell.split(" / ")] for cell in c] for c in zip(*rows, strict=True)
        )
        greatest = [f"{max(r for r, _ in c)} / {max(b for _, b in c)}" for c in columns]
        lines.append(f"| `{folder}` | {len(rows)} | {' | '.join(greatest)} |")
    return f"""# Registers and shared memory of the CUDA kernels

The greatest number of registers per thread / bytes of static shared memory per block among the
kernels of each folder of `csrc/kernels`, as ptxas reports them.
[Values of each kernel](../benchmarks/results/cuda_resources.md).

No kernel spills registers: the script and the development build fail if one does. Tiles lie in
dynamic shared memory. A struct next to each kernel defines their size, at most the 163 KiB per
block of sm_80.

`python benchmarks/cuda_resources.py` writes both pages after a change of a kernel. It needs nvcc,
but no GPU.

| folder | kernels | {" | ".join(ARCHS)} |
|---|---|{"---|" * len(ARCHS)}
{chr(10).join(lines)}
"""


def compiled(source: Path) -> str:
    """Returns ptxas' output for a file; exits if compilation fails, is slow or spills registers."""
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
    # CPU time, not wall time, so that a busy machine causes no error.
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


#: kernel -> "registers / bytes" for each of ARCHS
Rows = dict[str, list[str]]


class Section(NamedTuple):
    """Measurements of a file's kernels."""

    checksum: str
    rows: Rows

    def page(self, file: str) -> str:
        head = f"| kernel | {' | '.join(ARCHS)} |\n|---|{'---|' * len(ARCHS)}\n"
        rows = (f"| `{kernel}` | {' | '.join(cells)} |\n" for kernel, cells in self.rows.items())
        return f"\n## `{file}` {self.checksum}\n\n{head}{''.join(rows)}"


def measured(source: Path) -> Rows:
    found: dict[str, dict[str, str]] = {arch: {} for arch in ARCHS}
    for line in compiled(source).splitlines():
        if entry := ENTRY.search(line):
            name, arch = entry.groups()
        elif used := USED.search(line):
            shared = SHARED.search(line)
            found[arch][name] = f"{used.group(1)} / {shared.group(1) if shared else 0}"
    names = list(found[ARCHS[0]])
    rows = [[column[name] for column in found.values()] for name in names]
    return dict(sorted(zip(demangled(names), rows, strict=True)))


def read_page() -> dict[str, Section]:
    sections = {}
    for part in PAGE.read_text().split("\n## ")[1:]:
        title, *lines = part.splitlines()
        file, digest = title.split()
        cells = [[c.strip() for c in row.strip("|").split(" | ")] for row in lines if "| `" in row]
        sections[file.strip("`")] = Section(digest, {c[0].strip("`"): c[1:] for c in cells})
    return sections


def measure_changed(known: dict[str, Section]) -> dict[str, Section]:
    """Returns the sections of all files; compiles only those with an unknown checksum."""
    sources = {str(p.relative_to(KERNELS)): p for p in sorted(KERNELS.glob("*/*.cu"))}
    digests = {file: checksum(path) for file, path in sources.items()}
    stale = [f for f, digest in digests.items() if f not in known or known[f].checksum != digest]
    with ThreadPoolExecutor(2) as pool:
        new = dict(zip(stale, pool.map(measured, map(sources.get, stale)), strict=True))
    return {
        file: Section(digest, new[file] if file in new else known[file].rows)
        for file, digest in digests.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--all", action="store_true", help="compile also what has not changed")
    args = parser.parse_args()
    same_nvcc = f"with nvcc {release()};" in PAGE.read_text()
    if args.check and not same_nvcc:
        print(f"{PAGE.name} is of another nvcc than {release()}: not compared")
        return
    known = read_page()
    found = measure_changed(known if same_nvcc and not args.all else {})
    if not args.check:
        PAGE.write_text(heading() + "".join(section.page(f) for f, section in found.items()))
        SUMMARY.write_text(summary(found))
        return
    changed = False
    for file in {**known, **found}:
        was, now = (sections[file].rows if file in sections else {} for sections in (known, found))
        for kernel in {**was, **now}:
            if was.get(kernel) != now.get(kernel):
                print(f"{file}: {kernel}: was {was.get(kernel)}, now {now.get(kernel)}")
                changed = True
    if changed:
        sys.exit("run python benchmarks/cuda_resources.py and review the difference")


if __name__ == "__main__":
    main()
