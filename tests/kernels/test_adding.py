"""The rules of docs/adding.md build, answer right, and do not build without their answers."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MASK_PROGRAM = """
#include "semantics/mask.h"

using namespace omniattn;

// Queries 0 .. 69 and keys 0 .. 99: i = q + 30.
int main() {
  MaskRule rule{};
  rule.kind = MaskKind::checkerboard;
  const AttentionMask mask{70, 100, 1, {rule}, {}};
  for (int64_t q = 0; q < 70; ++q) {
    for (int64_t k = 0; k < 100; ++k) {
      if (visible(mask, 0, 0, q, k) != ((q + 30 + k) % 2 == 0)) return 1;
    }
  }
  return classify(mask, 0, 0, {0, 64}, {0, 64}) != TileClass::partial;
}
"""
# The kernel is that of the package: it knows nothing of the rules that are added.
SCORE_PROGRAM = """
#include <cmath>

#include "kernels/attention/attention_plan_cpu.cpp"
#include "kernels/attention_weights/attention_weights_cpu.cpp"
#include "runtime/gemm_tile_cpu.cpp"

using namespace omniattn;

double softsign(double s, double c) { return s / (1 + std::abs(s) / c); }

bool near(double a, double b) { return std::abs(a - b) < 1e-6; }

int main() {
  const Score score = make_score(0.5, term(ScoreKind::softsign), 3.0);
  for (double s = -9; s <= 9; s += 0.25) {
    const auto g = transform_at(score, score.pre * s / 0.5);
    const double step = 1e-6, slope = (softsign(s + step, 3) - softsign(s - step, 3)) / (2 * step);
    if (!near(from_logit(score, score.post * g.value), softsign(s, 3))) return 1;
    if (!near(g.slope, slope)) return 2;
  }

  const TableTerm table{ScoreKind::sides, 0, 0, 3, nullptr, 0};
  for (int64_t i = 0; i < 4; ++i) {
    for (int64_t k = 0; k < 4; ++k) {
      if (table_row(table, i, k) != 1 + (k > i) - (k < i)) return 3;
      if (table_factor(table, i, k) != 1) return 4;
    }
  }
  if (!table_fits(table, 4, 4) || !is_relative(table.kind)) return 5;
  if (is_plain(term(table.kind)) || !is_natural(term(table.kind))) return 6;

  // One query and three keys of one head of size 1.
  const double q = 2, k[3] = {-7, 0.5, 4}, lse = 0.25;
  double weights[3] = {}, scratch[1 << 16];
  AttentionWeightsParams params{};
  AttentionProblem& p = params.problem;
  p.dtype = DType::f64;
  p.batch = p.tq = p.hq = p.hkv = p.d = p.dv = 1;
  p.tk = 3;
  p.q = {&q, 1, 1, 1};
  p.k = p.v = {k, 3, 1, 1};
  p.mask.tq = 1;
  p.mask.tk = 3;
  p.terms = term(ScoreKind::softsign);
  p.table.kind = ScoreKind::none;
  p.score = score;
  params.lse = &lse;
  params.out = weights;
  isa_baseline::attention_weights_kernels_table.weights(params, scratch, 0,
                                                        weights_items(params));
  for (int n = 0; n < 3; ++n) {
    if (!near(weights[n], std::exp(softsign(0.5 * q * k[n], 3) - lse))) return 7;
  }
  return 0;
}
"""
ACTIVATION_PROGRAM = """
#include <cmath>

#include "kernels/activation/activation_cpu.cpp"

using namespace omniattn;

double hard_swish(double x) { return x * std::fmin(std::fmax(x / 6 + 0.5, 0), 1); }

bool near(double a, double b) { return std::abs(a - b) < 1e-5; }

int main() {
  double x[83], y[83];
  for (int n = 0; n < 83; ++n) x[n] = 0.1 * n - 4.05;
  for (double at : x) {
    const double step = 1e-6;
    const double slope = (hard_swish(at + step) - hard_swish(at - step)) / (2 * step);
    const auto number = activate(Activation::hard_swish, static_cast<float>(at));
    if (!near(number.value, hard_swish(at)) || !near(number.slope, slope)) return 1;
  }
  GluParams p{};
  p.dtype = DType::f64;
  p.act = Activation::hard_swish;
  p.cols = 83;
  p.gate = x;
  p.y = y;
  isa_baseline::activation_kernels_table.glu(p, 0, 1);
  for (int n = 0; n < 83; ++n) {
    if (!near(y[n], hard_swish(x[n]))) return 2;
  }
  return kActivationCount != 9;
}
"""


def section_of(title):
    page = (ROOT / "docs/adding.md").read_text()
    return re.search(rf"^## {title}\n(.*?)(?:^## |\Z)", page, re.DOTALL | re.MULTILINE)[1]


def examples(title):
    return re.findall(r"```cpp\n(.*?)```", section_of(title), re.DOTALL)


def build(folder, rules, last, lines, structs, program):
    """A program with a copy of the header of `rules`, in which `lines` follow the last rule."""
    path = f"semantics/{rules}.h"
    header = (ROOT / "csrc" / path).read_text()
    line = re.search(rf"rule\([\s\\]*{last}, \d+, \w+\)", header)[0]
    header = header.replace(line, f"{line} \\\n  {lines}")
    end = f"}}  // namespace {rules}"
    header = header.replace(end, "\n".join([*structs, end]))
    (folder / "semantics").mkdir()
    (folder / path).write_text(header)
    (folder / "main.cpp").write_text(program)
    flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-DOMNIATTN_ISA=isa_baseline"]
    command = ["g++", *flags, "-I.", f"-I{ROOT / 'csrc'}", "main.cpp", "-o", "main"]
    env = os.environ | {"LC_ALL": "C"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def build_mask(folder, struct):
    line = "rule(checkerboard, 1000, Checkerboard)"
    return build(folder, "mask_rules", "grid", line, [struct], MASK_PROGRAM)


def build_scores(folder, structs):
    lines = "rule(softsign, 30, Softsign) rule(sides, 31, Sides)"
    return build(folder, "score_rules", "window", lines, structs, SCORE_PROGRAM)


def build_activation(folder, struct):
    line = "rule(hard_swish, 8, HardSwish)"
    return build(folder, "activation_rules", "relu_squared", line, [struct], ACTIVATION_PROGRAM)


@pytest.mark.parametrize(
    ("title", "row"),
    [
        ("A mask rule", "a rule on query and key positions"),
        ("A score rule", "a function of each score, or another normalizer"),
        ("An activation", "an activation"),
        ("A decay rule", "a decay of a recurrence"),
        ("A model", "an architecture made of existing modules"),
        ("A layer of transformers", "a kind of layer of transformers for `patch`"),
    ],
)
def test_page_counts_the_files_of_its_steps(title, row):
    page = (ROOT / "docs/adding.md").read_text()
    count = re.search(rf"^\| {row} \|.*\| (\d+)[^|]*\|$", page, re.MULTILINE)[1]
    steps = re.findall(r"^\d\. (.*?):", section_of(title), re.MULTILINE | re.DOTALL)
    files = [path for step in steps for path in re.findall(r"`((?:csrc|python)/\S+)`", step)]
    files = [path for path in files if "/testing/specs/" not in path]  # cases of tests
    assert all((ROOT / path).is_file() for path in files if "<name>" not in path)
    assert len(files) == int(count)


def test_mask_answers_right(tmp_path):
    result = build_mask(tmp_path, *examples("A mask rule"))
    assert result.returncode == 0, result.stderr
    assert subprocess.run([tmp_path / "main"]).returncode == 0


def test_scores_answer_right(tmp_path):
    result = build_scores(tmp_path, examples("A score rule"))
    assert result.returncode == 0, result.stderr
    assert subprocess.run([tmp_path / "main"]).returncode == 0


def test_activation_answers_right(tmp_path):
    result = build_activation(tmp_path, *examples("An activation"))
    assert result.returncode == 0, result.stderr
    assert subprocess.run([tmp_path / "main"]).returncode == 0


@pytest.mark.parametrize("member", ["keys_in", "all", "bits"])
def test_missing_member_of_a_mask_is_a_compile_error(tmp_path, member):
    (struct,) = examples("A mask rule")
    result = build_mask(tmp_path, struct.replace(f" {member}(", f" other_{member}("))
    assert result.returncode != 0
    assert f"has no member named '{member}'" in result.stderr


@pytest.mark.parametrize("member", ["at", "row", "kRelative", "fits"])
def test_missing_member_of_a_score_is_a_compile_error(tmp_path, member):
    structs = [re.sub(rf"\b{member}\b", f"other_{member}", s) for s in examples("A score rule")]
    result = build_scores(tmp_path, structs)
    assert result.returncode != 0
    assert f"has no member named '{member}'" in result.stderr


def test_activation_without_its_formula_is_a_compile_error(tmp_path):
    (struct,) = examples("An activation")
    result = build_activation(tmp_path, struct.replace(" at(", " other_at("))
    assert result.returncode != 0
    assert "'at' is not a member of 'omniattn::activation_rules::HardSwish'" in result.stderr
