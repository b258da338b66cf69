"""Registers and shared memory of every CUDA kernel, as ptxas reports them; needs nvcc but no GPU.

Writes docs/cuda_resources.md, or compares with it: an increase that nobody meant shows in review.
Another release of nvcc than the one of the table allocates differently and is not compared.
"""

from __future__ import annotations

import argparse
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
LONGEST_COMPILATION = 60.0
ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\S+)'")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")
SPILLED = re.compile(r"[1-9]\d* bytes spill (?:stores|loads)")
#: What a launcher may call of the CUDA runtime: nothing that waits or allocates, so that graphs can
#: capture it.
LAUNCHING = {"LaunchKernel", "FuncSetAttribute", "GetLastError", "GetErrorString"}


def release() -> str:
    out = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release ([\d.]+)", out)
    assert found, out
    return found.group(1)


def heading() -> str:
    return f"""# Registers and shared memory of the CUDA kernels

Registers per thread / bytes of static shared memory per block; tiles lie in dynamic shared memory,
whose size is a struct beside each kernel and at most the 163 KiB of sm_80. No kernel spills: the
script and the development build fail where one does. Written by
`python benchmarks/cuda_resources.py` with nvcc {release()}.

| kernel | {" | ".join(ARCHS)} |
|---|{"---|" * len(ARCHS)}
"""


def compile_for(source: Path, arch: str) -> str:
    """What ptxas says about a file; an error where compiling takes too long to work with."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*filter(None, [shutil.which("ccache")]), "nvcc", "-std=c++20", "-O3", "-c"]
        command += [f"-arch={arch}", "-Xptxas=-v", f"-I{ROOT / 'csrc'}", str(source)]
        command += ["-o", f"{folder}/kernel.o"]
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
        sys.exit(f"{source.name}: {seconds:.0f} s for {arch}; split its instantiations")
    if spilled := SPILLED.search(text):
        sys.exit(f"{source.name}: {spilled.group()} for {arch}")
    if calls := set(re.findall(r"\bcuda(\w+)", undefined)) - LAUNCHING:
        sys.exit(f"{source.name}: launchers may not call {', '.join(f'cuda{c}' for c in calls)}")
    return text


def demangled(names: list[str]) -> list[str]:
    text = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True)
    short = re.compile(r"^.*::(\w+_kernel(?:<.*?>)?)\(.*$")
    lines = text.stdout.replace("omniattn::", "").splitlines()
    return [short.sub(r"\1", "::" + line.removeprefix("void ")) for line in lines]


def measure(arch: str) -> dict[str, str]:
    """kernel -> "registers / bytes" of all kernels."""
    sources = sorted((ROOT / "csrc/kernels").glob("*/*.cu"))
    with ThreadPoolExecutor(2) as pool:
        reports = pool.map(lambda source: compile_for(source, arch), sources)
        lines = [line for report in reports for line in report.splitlines()]
    found: dict[str, str] = {}
    name = ""
    for line in lines:
        if entry := ENTRY.search(line):
            name = entry.group(1)
        elif used := USED.search(line):
            shared = SHARED.search(line)
            found[name] = f"{used.group(1)} / {shared.group(1) if shared else 0}"
    return dict(sorted(zip(demangled(list(found)), found.values(), strict=True)))


def read_table() -> dict[str, list[str]]:
    rows = [line for line in TABLE.read_text().splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {cell[0].strip("`"): cell[1:] for cell in cells}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", choices=ARCHS, help="compare this column instead of writing")
    check = parser.parse_args().check
    if check:
        if f"with nvcc {release()}." not in TABLE.read_text():
            print(f"{TABLE.name} is of another nvcc than {release()}: not compared")
            return
        column = ARCHS.index(check)
        expected = {kernel: cells[column] for kernel, cells in read_table().items()}
        actual = measure(check)
        changed = [k for k in {**expected, **actual} if expected.get(k) != actual.get(k)]
        for kernel in changed:
            print(f"{kernel}: was {expected.get(kernel)}, now {actual.get(kernel)}")
        if changed:
            sys.exit("run python benchmarks/cuda_resources.py and review the difference")
        return
    columns = [measure(arch) for arch in ARCHS]
    rows = [f"| `{k}` | {' | '.join(c[k] for c in columns)} |\n" for k in columns[0]]
    TABLE.write_text(heading() + "".join(rows))


if __name__ == "__main__":
    main()
