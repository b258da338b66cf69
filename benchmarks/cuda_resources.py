"""Records what every CUDA kernel takes, from ptxas and machine code; needs nvcc but no GPU.

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
from typing import NamedTuple, TypeVar

import machine_code

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "benchmarks/results/cuda_resources.md"
SUMMARY = ROOT / "docs/cuda_resources.md"
KERNELS = ROOT / "csrc/kernels"
ARCHS = ("sm_80", "sm_90a")
LONGEST_COMPILATION = 60.0 * len(ARCHS)
ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\S+)'")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")
STACK = re.compile(r"(\d+) bytes cumulative stack")
SPILLED = re.compile(r"[1-9]\d* bytes spill (?:stores|loads)")
#: Kernels that the summary leaves out, since the bf16 kernels take about as much.
OTHER_DTYPES = re.compile(r"\b(f16|float|double)\b")
#: Bytes of stack of a thread. A stack is local memory, which only rare paths may use.
MOST_STACK = 128
#: kernels that may have more of it, in 16 bits and f32 -> bytes
LARGER_STACKS = {
    # the values of a program (score_mod), and the rules of masks and scores as calls
    r"attention_\w+_fma_kernel.*": 600,
    r"attention_stick_\w+_kernel.*": 450,
    # states that do not fit in registers
    r"selective_\w+_kernel<\w+, (32|64|256), \(SelectiveRule\).>": 3300,
}


Found = TypeVar("Found")


class Tile(NamedTuple):
    """Limit for the instructions of a plain tile (machine_code.Code.tile)."""

    products: int
    most: int
    copies: int = 0  # of a loop, if a loop makes them
    product: str = "HMMA"
    rounds: int = 0  # of other loops within it


TILES = {
    r"attention_forward_mma_kernel<\w+, 64>": Tile(64, 500),
    r"attention_forward_mma_kernel<\w+, 128>": Tile(128, 700),
    r"attention_forward_mma_kernel<\w+, 256>": Tile(128, 900, copies=8),
    r"attention_dq_mma_kernel<\w+, 64>": Tile(96, 500),
    r"attention_dq_mma_kernel<\w+, 128>": Tile(96, 450),
    r"attention_dq_mma_kernel<\w+, 256>": Tile(160, 800, copies=8),
    r"attention_dkdv_mma_kernel<\w+, 64>": Tile(64, 350),
    r"attention_dkdv_mma_kernel<\w+, 128>": Tile(96, 450),
    r"attention_dkdv_mma_kernel<\w+, 256>": Tile(160, 800, copies=8),
    r"moe_\w+_kernel<gpu::GemmByMma<.*": Tile(64, 350),
    # 32 tokens of 16 columns: 60 instructions per token and column are 30,720.
    r"recurrence_forward_mma_kernel<bf16, 64, false>": Tile(106, 1000),
    r"recurrence_forward_mma_kernel<bf16, 64, true>": Tile(146, 1700),
    r"recurrence_forward_mma_kernel<bf16, 128, false>": Tile(194, 1350),
    r"recurrence_forward_mma_kernel<bf16, 128, true>": Tile(274, 2100),
    r"recurrence_du_mma_kernel<bf16, 64, false>": Tile(106, 1300),
    r"recurrence_du_mma_kernel<bf16, 64, true>": Tile(162, 2100),
    r"recurrence_du_mma_kernel<bf16, 128, false>": Tile(194, 1600),
    r"recurrence_du_mma_kernel<bf16, 128, true>": Tile(306, 2500),
    # Numbers of f16 are split where they are loaded.
    r"recurrence_forward_mma_kernel<f16, 64, false>": Tile(154, 1900),
    r"recurrence_forward_mma_kernel<f16, 64, true>": Tile(210, 3000),
    r"recurrence_forward_mma_kernel<f16, 128, false>": Tile(290, 3200),
    r"recurrence_forward_mma_kernel<f16, 128, true>": Tile(402, 4800),
    r"recurrence_du_mma_kernel<f16, 64, false>": Tile(154, 2200),
    r"recurrence_du_mma_kernel<f16, 64, true>": Tile(242, 3500),
    r"recurrence_du_mma_kernel<f16, 128, false>": Tile(290, 3500),
    r"recurrence_du_mma_kernel<f16, 128, true>": Tile(466, 5200),
    # A tile of these has 16 columns of values and a quarter of the channels.
    r"recurrence_rows_mma_kernel<\w+, 64, false>": Tile(30, 220),
    r"recurrence_rows_mma_kernel<\w+, 64, true>": Tile(48, 250),
    r"recurrence_rows_mma_kernel<\w+, 128, false>": Tile(54, 350),
    r"recurrence_rows_mma_kernel<\w+, 128, true>": Tile(84, 400),
    # 16 tokens of 16 columns: 60 instructions per token and column are 15,360. A loop computes the
    # scores, two rows of 18 at a time.
    r"recurrence_channels_forward_mma_kernel<\w+, 64, false>": Tile(78, 2000, rounds=9),
    r"recurrence_channels_forward_mma_kernel<\w+, 64, true>": Tile(102, 2400, rounds=9),
    r"recurrence_channels_forward_mma_kernel<\w+, 128, false>": Tile(150, 3000, rounds=9),
    r"recurrence_channels_forward_mma_kernel<\w+, 128, true>": Tile(198, 3700, rounds=9),
    r"recurrence_channels_du_mma_kernel<\w+, 64, false>": Tile(78, 2100, rounds=9),
    r"recurrence_channels_du_mma_kernel<\w+, 64, true>": Tile(126, 2700, rounds=9),
    r"recurrence_channels_du_mma_kernel<\w+, 128, false>": Tile(150, 3100, rounds=9),
    r"recurrence_channels_du_mma_kernel<\w+, 128, true>": Tile(246, 4100, rounds=9),
    r"recurrence_channels_rows_mma_kernel<\w+, 64, false>": Tile(18, 220),
    r"recurrence_channels_rows_mma_kernel<\w+, 64, true>": Tile(30, 250),
    r"recurrence_channels_rows_mma_kernel<\w+, 128, false>": Tile(30, 350),
    r"recurrence_channels_rows_mma_kernel<\w+, 128, true>": Tile(48, 400),
    # Four steps of a vector of channels: 40 instructions per 128 bytes of y are 640.
    r"causal_conv_forward_vector_kernel<.*": Tile(4, 600, product="STG.E.128"),
    r"causal_conv_slope_vector_kernel<.*": Tile(8, 850, product="STG.E.128"),
    r"causal_conv_dx_vector_kernel<.*": Tile(4, 500, product="STG.E.128"),
}
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
    return f"""# Registers and memory of each CUDA kernel

Registers per thread / bytes of static shared memory per block / bytes of stack per thread and, for
kernels in the summary's second table, instructions and products of a plain tile. The checksum
after a file's name covers its code and all that it includes. Written by
`python benchmarks/cuda_resources.py`
with nvcc {release()}; summary: [docs/cuda_resources.md](../../docs/cuda_resources.md).
"""


def summary(sections: dict[str, Section]) -> str:
    """Returns docs/cuda_resources.md: the maximum values in each folder of kernels, and tiles."""
    folders: dict[str, list[list[Cell]]] = {}
    tiles = []
    for file, section in sections.items():
        folders.setdefault(file.split("/")[0], []).extend(section.rows.values())
        for kernel, cells in section.rows.items():
            if (limit := match(TILES, kernel)) and not OTHER_DTYPES.search(kernel):
                counts = " | ".join(str(cell.instructions) for cell in cells)
                work = f"{limit.products} {limit.product}"
                tiles.append(f"| `{kernel}` | {work} | {limit.most} | {counts} |")
    lines = []
    for folder, rows in folders.items():
        columns = [[tuple(cell[:3]) for cell in column] for column in zip(*rows, strict=True)]
        greatest = [" / ".join(str(max(n)) for n in zip(*c, strict=True)) for c in columns]
        lines.append(f"| `{folder}` | {len(rows)} | {' | '.join(greatest)} |")
    return f"""# Registers, memory and instructions of the CUDA kernels

The greatest number of registers per thread / bytes of static shared memory per block / bytes of
stack per thread among the kernels of each folder of `csrc/kernels`, as ptxas reports them.
[Values of each kernel](../benchmarks/results/cuda_resources.md).

`python benchmarks/cuda_resources.py` writes both pages after a change of a kernel. It needs nvcc
and cuobjdump (packages `nvidia-cuda-cuobjdump` and `nvidia-cuda-nvdisasm`), but no GPU. It fails if
a kernel

- spills registers (the development build fails, too);
- has more than {MOST_STACK} bytes of stack, unless `LARGER_STACKS` names the reason;
- splits a store of 16 bytes in smaller ones, in 16 bits or f32;
- accesses local memory in a plain tile of tensor cores;
- takes more instructions for such a tile than the limit below.

Tiles lie in dynamic shared memory. A struct next to each kernel defines their size, at most the
163 KiB per block of sm_80.

| folder | kernels | {" | ".join(ARCHS)} |
|---|---|{"---|" * len(ARCHS)}
{chr(10).join(lines)}

## Instructions of a plain tile

Instructions that a warp executes for a tile of which all pairs are visible, without terms and
dropout, with the copy of the next tile: the shortest way through the loop's machine code that
passes all products (HMMA), copies and exponentials, with the loop over rows of scores where decays
are per channel. Loops without products are counted by their stores of 16 bytes per thread
(STG.E.128).

| kernel | work | limit | {" | ".join(ARCHS)} |
|---|---|---|{"---|" * len(ARCHS)}
{chr(10).join(tiles)}
"""


def match(table: dict[str, Found], kernel: str) -> Found | None:
    return next((value for name, value in table.items() if re.fullmatch(name, kernel)), None)


def compiled(source: Path) -> tuple[str, dict[str, dict[str, machine_code.Code]]]:
    """Returns ptxas' output for a file, and its machine code.

    Exits if compilation fails, is slow or spills registers.
    """
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
        code = machine_code.read(Path(folder, "kernel.o")) if process.returncode == 0 else {}
    if process.returncode != 0:
        sys.exit(text)
    # CPU time, not wall time, so that a busy machine causes no error.
    if (seconds := usage.ru_utime + usage.ru_stime) > LONGEST_COMPILATION:
        sys.exit(f"{source.name}: {seconds:.0f} s; split its instantiations")
    if spilled := SPILLED.search(text):
        sys.exit(f"{source.name}: {spilled.group()}")
    if calls := set(re.findall(r"\bcuda(\w+)", undefined)) - LAUNCHING:
        sys.exit(f"{source.name}: launchers may not call {', '.join(f'cuda{c}' for c in calls)}")
    return text, code


def demangled(names: list[str]) -> list[str]:
    text = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True)
    short = re.compile(r"^.*::(\w+_kernel(?:<.*?>)?)\(.*$")
    lines = text.stdout.replace("omniattn::", "").splitlines()
    return [short.sub(r"\1", "::" + line.removeprefix("void ")) for line in lines]


class Cell(NamedTuple):
    """Measurements of a kernel on one architecture."""

    registers: int
    shared: int  # bytes
    stack: int  # bytes
    instructions: int = 0  # of a plain tile; 0: has none
    products: int = 0

    def __str__(self) -> str:
        tile = f" / {self.instructions} per {self.products}" if self.products else ""
        return f"{self.registers} / {self.shared} / {self.stack}{tile}"


#: kernel -> measurements on each of ARCHS
Rows = dict[str, list[Cell]]


class Section(NamedTuple):
    """Measurements of a file's kernels."""

    checksum: str
    rows: Rows

    def page(self, file: str) -> str:
        head = f"| kernel | {' | '.join(ARCHS)} |\n|---|{'---|' * len(ARCHS)}\n"
        rows = (f"| `{k}` | {' | '.join(map(str, cells))} |\n" for k, cells in self.rows.items())
        return f"\n## `{file}` {self.checksum}\n\n{head}{''.join(rows)}"


def defects(kernel: str, cell: Cell, code: machine_code.Code, tile: Tile | None) -> list[str]:
    """Returns what is wrong with the machine code of a kernel."""
    found = []
    is_double = "double" in kernel  # made to be right
    if not is_double and (split := code.split_stores()):
        found.append(f"{split} stores of 16 bytes are split")
    most = match(LARGER_STACKS, kernel) or MOST_STACK
    if not is_double and cell.stack > most:
        found.append(f"{cell.stack} bytes of stack, at most {most}")
    if tile is not None:
        if cell.products != tile.products:
            found.append(f"{cell.products} products in a tile, expected {tile.products}")
        if cell.instructions > tile.most:
            found.append(f"{cell.instructions} instructions for a tile, at most {tile.most}")
        if (work := code.tile(*tile[2:])) and work.local:
            found.append(f"{work.local} accesses to local memory in a plain tile")
    elif cell.products:
        found.append("no limit in TILES for a kernel of tensor cores")
    return found


def measured(source: Path) -> Rows:
    text, code = compiled(source)
    found: dict[str, dict[str, Cell]] = {arch: {} for arch in ARCHS}
    for line in text.splitlines():
        if entry := ENTRY.search(line):
            name, arch = entry.groups()
        elif used := USED.search(line):
            numbers = [used, SHARED.search(line), STACK.search(line)]
            found[arch][name] = Cell(*(int(n.group(1)) if n else 0 for n in numbers))
    names = list(found[ARCHS[0]])
    rows: Rows = {}
    wrong = []
    for name, kernel in sorted(zip(names, demangled(names), strict=True), key=lambda pair: pair[1]):
        tile = match(TILES, kernel)
        rows[kernel] = []
        for arch in ARCHS:
            cell = found[arch][name]
            if work := code[arch][name].tile(*tile[2:]) if tile else code[arch][name].tile():
                cell = cell._replace(instructions=work.instructions, products=work.products)
            rows[kernel].append(cell)
            these = defects(kernel, cell, code[arch][name], tile)
            wrong += [f"{source.name}: {kernel} on {arch}: {defect}" for defect in these]
    if wrong:
        sys.exit("\n".join(wrong))
    return rows


def read_cell(text: str) -> Cell:
    return Cell(*map(int, re.split(" / | per ", text)))


def read_page() -> dict[str, Section]:
    sections = {}
    for part in PAGE.read_text().split("\n## ")[1:]:
        title, *lines = part.splitlines()
        file, digest = title.split()
        cells = [[c.strip() for c in row.strip("|").split(" | ")] for row in lines if "| `" in row]
        rows = {c[0].strip("`"): [read_cell(text) for text in c[1:]] for c in cells}
        sections[file.strip("`")] = Section(digest, rows)
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
                cells = ([str(cell) for cell in rows.get(kernel, [])] for rows in (was, now))
                print(f"{file}: {kernel}:", "was {}, now {}".format(*cells))
                changed = True
    if changed:
        sys.exit("run python benchmarks/cuda_resources.py and review the difference")


if __name__ == "__main__":
    main()
