"""The mask rule of docs/adding.md builds, answers right, and does not build without its answer."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RULES = "semantics/mask_rules.h"
PROGRAM = """
#include "semantics/mask.h"

using namespace omniattn;

// Queries 0 .. 69 and keys 0 .. 99: i = q + 30.
int main() {
  MaskRule rule{};
  rule.kind = MaskKind::checkerboard;
  const MaskView mask{70, 100, 1, &rule};
  for (int64_t q = 0; q < 70; ++q) {
    for (int64_t k = 0; k < 100; ++k) {
      if (visible(mask, 0, 0, q, k) != ((q + 30 + k) % 2 == 0)) return 1;
    }
  }
  return classify(mask, 0, 0, {0, 64}, {0, 64}) != TileClass::partial;
}
"""


def build(folder, struct):
    header = (ROOT / "csrc" / RULES).read_text()
    neighbours = re.search(r"  rule\(neighbours, \d+, Neighbours\)", header)[0]
    header = header.replace(neighbours, f"{neighbours} \\\n  rule(checkerboard, 17, Checkerboard)")
    header = header.replace("}  // namespace mask_rules", f"{struct}\n}}  // namespace mask_rules")
    (folder / "semantics").mkdir()
    (folder / RULES).write_text(header)
    (folder / "main.cpp").write_text(PROGRAM)
    flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-I.", f"-I{ROOT / 'csrc'}"]
    command = ["g++", *flags, "main.cpp", "-o", "main"]
    env = os.environ | {"LC_ALL": "C"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


@pytest.fixture
def struct():
    page = (ROOT / "docs/adding.md").read_text()
    return re.search(r"```cpp\n(.*?)```", page, re.DOTALL)[1]


def test_example_answers_right(tmp_path, struct):
    result = build(tmp_path, struct)
    assert result.returncode == 0, result.stderr
    assert subprocess.run([tmp_path / "main"]).returncode == 0


@pytest.mark.parametrize("member", ["keys_in", "all", "bits"])
def test_missing_member_is_a_compile_error(tmp_path, struct, member):
    result = build(tmp_path, struct.replace(f" {member}(", f" other_{member}("))
    assert result.returncode != 0
    assert f"has no member named '{member}'" in result.stderr
