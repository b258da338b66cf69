"""A failed assertion inside a kernel ends the process with a message."""

import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
ARENA = """
#include "kernels/attention/attention_tile.h"

int main() {
  float memory[8];
  omniattn::isa_baseline::Arena<float> arena{memory, 8};
  arena.take(6);
  arena.take(3);
}
"""
DISPATCH = """
#include "runtime/dispatch.h"

int main() {
  omniattn::dispatch(omniattn::DType{DTYPE}, [](auto) {});
}
"""


@pytest.mark.parametrize(
    ("source", "defines", "message"),
    [
        (ARENA, ["OMNIATTN_ASSERTS"], "assertion failed: 0 <= elements && elements <= left"),
        (ARENA, [], None),
        (DISPATCH, ["DTYPE=1"], None),
        (DISPATCH, ["DTYPE=7"], "called with a dtype that it was not built for"),
        # Objects that have products of bf16 only know no other dtype.
        (DISPATCH, ["DTYPE=2", "OMNIATTN_ISA=isa_avx512_bf16"], None),
        (DISPATCH, ["DTYPE=1", "OMNIATTN_ISA=isa_avx512_bf16"], "that it was not built for"),
    ],
)
def test_process_ends_with_a_message(tmp_path, source, defines, message):
    if source is ARENA:
        defines = ["OMNIATTN_ISA=isa_baseline", *defines]
    flags = [f"-D{name}" for name in defines]
    (tmp_path / "main.cpp").write_text(source)
    command = ["g++", "-std=c++20", "-O1", "-w", f"-I{CSRC}", *flags, "main.cpp", "-o", "main"]
    subprocess.run(command, cwd=tmp_path, check=True)
    result = subprocess.run([tmp_path / "main"], capture_output=True, text=True)
    if message is None:
        assert result.returncode == 0, result.stderr
    else:
        assert result.returncode < 0 and message in result.stderr
