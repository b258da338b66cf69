"""Reads machine code of CUDA kernels: control flow, stores, instructions of a tile."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections import Counter, defaultdict
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

LINE = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
STORE = re.compile(r".*\[(\w+)(?:\.64)?(?:\+(-?0x[0-9a-f]+))?\]")
ENDS = {"EXIT", "RET", "BRX", "JMX", "BPT", "KILL"}
WIDTHS = {"64": 8, "128": 16, "U8": 1, "S8": 1, "U16": 2, "S16": 2}


def disassembled(compiled: Path) -> str:
    """Returns the output of cuobjdump, of CUDA's toolkit or of its packages for Python."""
    packaged = Path(sysconfig.get_path("purelib"), "nvidia/cu13/bin")
    path = f"{os.environ['PATH']}:{packaged}"
    if (program := shutil.which("cuobjdump", path=path)) is None:
        raise FileNotFoundError("cuobjdump: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    # cuobjdump starts nvdisasm.
    command, env = [program, "-sass", compiled], {**os.environ, "PATH": path}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout


class Instruction(NamedTuple):
    """One instruction; `guard` is the predicate that it is executed under, or None."""

    address: int
    guard: str | None
    name: str  # with its modifiers, e.g. STG.E.128
    operands: str

    @property
    def base(self) -> str:
        return self.name.split(".")[0]

    @property
    def target(self) -> int | None:
        """Address that a branch goes to."""
        found = re.search(r"0x[0-9a-f]+$", self.operands) if self.base == "BRA" else None
        return int(found.group(), 16) if found else None

    @property
    def conditional(self) -> bool:
        return self.guard is not None or "P" in self.operands.split("0x")[0] or "DIV" in self.name


class Work(NamedTuple):
    """Instructions that a warp executes for a tile, and how many of them are products."""

    instructions: int
    products: int
    local: int  # accesses to local memory


#: products, copies, exponentials, minus instructions, minus accesses to local memory
Way = tuple[int, int, int, int, int]


class Code:
    """Machine code of a kernel as basic blocks."""

    def __init__(self, instructions: list[Instruction]) -> None:
        self.instructions = instructions
        targets = {i.target for i in instructions if i.base == "BRA"}
        starts = [0]
        for n, i in enumerate(instructions[1:], 1):
            before = instructions[n - 1]
            if i.address in targets or before.base in ENDS or before.base == "BRA":
                starts.append(n)
        ends = [*starts[1:], len(instructions)]
        self.blocks = [instructions[a:b] for a, b in zip(starts, ends, strict=True)]
        place = {block[0].address: n for n, block in enumerate(self.blocks)}
        self.next: list[list[int]] = []
        for n, block in enumerate(self.blocks):
            last = block[-1]
            after = [n + 1] if n + 1 < len(self.blocks) else []
            if last.base == "BRA" and last.target in place:
                self.next.append([place[last.target], *(after if last.conditional else [])])
            elif last.base in ENDS and last.guard is None:
                self.next.append([])
            else:
                self.next.append(after)

    @cached_property
    def loops(self) -> list[tuple[int, set[int]]]:
        """Head and blocks of each loop: all blocks on a way from its head back to it."""
        before = defaultdict(list)
        reached, todo = {0}, [0]
        while todo:
            n = todo.pop()
            for m in self.next[n]:
                before[m].append(n)
                if m not in reached:
                    reached.add(m)
                    todo.append(m)
        dominators = {n: reached for n in reached} | {0: {0}}
        changed = True
        while changed:
            changed = False
            for n in sorted(reached - {0}):
                now = {n} | set.intersection(*(dominators[m] for m in before[n]))
                changed |= now != dominators[n]
                dominators[n] = now
        found: dict[int, set[int]] = {}
        for n in sorted(reached):
            for head in set(self.next[n]) & dominators[n]:
                body = found.setdefault(head, {head})
                todo = [n]
                while todo:
                    m = todo.pop()
                    if m not in body:
                        body.add(m)
                        todo += before[m]
        return sorted(found.items(), key=lambda loop: len(loop[1]))

    def count(self, block: int, name: str) -> int:
        """Number of instructions with a name, or with its first part."""
        return sum(name in (i.base, i.name) for i in self.blocks[block])

    def split_stores(self) -> int:
        """Number of stores of 16-byte pieces, one after the other, that are made of narrower parts.

        Runs that do not end with a whole piece are elements of a struct.
        """
        split = 0
        for block in self.blocks:
            runs: dict[tuple[str, str | None], dict[int, int]] = defaultdict(dict)
            for i in block:
                if i.base == "STG" and (found := STORE.match(i.operands)):
                    width = next((WIDTHS[m] for m in i.name.split(".") if m in WIDTHS), 4)
                    runs[found.group(1), i.guard][int(found.group(2) or "0", 16)] = width
            for parts in runs.values():
                narrow = {at: width for at, width in parts.items() if width < 16}
                pieces = Counter[int]()
                for at, width in narrow.items():
                    pieces[at // 16] += width
                if all(bytes_ == 16 for bytes_ in pieces.values()):
                    split += len(pieces)
        return split

    def local_in_loops(self) -> int:
        """Number of loads and stores of local memory within loops."""
        inside = set().union(*(body for _, body in self.loops)) if self.loops else set()
        return sum(self.count(n, base) for n in inside for base in ("LDL", "STL"))

    def tile(self, copies: int = 0, product: str = "HMMA", rounds: int = 0) -> Work | None:
        """Counts the instructions of a plain tile: the shortest way through the innermost loop with
        products that computes all of them, copies all operands and takes all exponentials.
        `product` is their name.

        Loops within it are of other tiles, except those that copy (LDGSTS): each is executed until
        it has made `copies` of them. With `rounds`, all others are executed so many times.
        """
        ways: dict[frozenset[int], Way] = {}
        for head, body in self.loops:
            inner = any(known <= body for known in ways)
            if not inner and any(self.count(n, product) for n in body):
                ways[frozenset(body)] = self._best(head, body, copies, product, rounds)
        if not ways:
            return None
        products, _, _, instructions, local = max(ways.values())
        return Work(-instructions, products, -local)

    def _best(self, head: int, body: set[int], copies: int, product: str, rounds: int) -> Way:
        """Returns the best way through a loop."""
        inner = [b for h, b in self.loops if b < body and h != head]
        copied = [(b, sum(self.count(n, "LDGSTS") for n in b)) for b in inner]
        times = {n: copies // count if count else rounds for b, count in copied for n in b}
        skipped = {n for n, count in times.items() if rounds == count == 0}
        best: dict[int, Way] = {}
        for n in self._after(head, body - skipped):
            ways = [best[m] for m in self.next[n] if m in best]
            if head in self.next[n]:
                ways.append((0, 0, 0, 0, 0))
            if ways:
                then, k = max(ways), times.get(n, 1)
                best[n] = (
                    then[0] + self.count(n, product),
                    then[1] + self.count(n, "LDGSTS") * k,
                    then[2] + sum(i.name == "MUFU.EX2" for i in self.blocks[n]),
                    then[3] - len(self.blocks[n]) * k,
                    then[4] - self.count(n, "LDL") - self.count(n, "STL"),
                )
        return best[head]

    def _after(self, head: int, body: set[int]) -> list[int]:
        """Returns the blocks of a loop, each after all that can follow it."""
        order: list[int] = []
        seen = {head}
        todo = [(head, iter(self.next[head]))]
        while todo:
            n, following = todo[-1]
            m = next((m for m in following if m in body and m not in seen), None)
            if m is None:
                order.append(n)
                todo.pop()
            else:
                seen.add(m)
                todo.append((m, iter(self.next[m])))
        return order


def read(compiled: Path) -> dict[str, dict[str, Code]]:
    """Returns the machine code of an object file: architecture -> mangled name -> code."""
    found: dict[str, dict[str, list[Instruction]]] = defaultdict(dict)
    arch = name = ""
    for line in disassembled(compiled).splitlines():
        if match := LINE.match(line):
            address, guard, mnemonic, operands = match.groups()
            found[arch][name].append(Instruction(int(address, 16), guard, mnemonic, operands))
        elif "arch = " in line:
            arch = line.split("arch = ")[1].strip()
        elif "Function : " in line:
            name = line.split("Function : ")[1].strip()
            found[arch][name] = []
    return {a: {k: Code(i) for k, i in kernels.items()} for a, kernels in found.items()}
