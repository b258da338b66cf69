"""Levels of a process on machines other than this one. csrc/runtime/cpu_isa.cpp queries the CPU
through a header. These tests replace it, so that the permission for AMX is tested without AMX."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MACHINE = """
#pragma once
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace omniattn {

// Has what the variable HAS lists, and answers requests for tiles with the number ANSWER.
struct Machine {
  static bool has(const char* extension) {
    const char* const list = std::getenv("HAS");
    const size_t length = std::strlen(extension);
    for (const char* p = list; (p = std::strstr(p, extension)) != nullptr; p += length) {
      if (p[length] == ' ') return true;
    }
    return false;
  }
  static bool has_tiles(const char* extension) { return has(extension); }
  static int request_tiles() {
    std::printf("asked ");
    return std::atoi(std::getenv("ANSWER"));
  }
};
#define OMNIATTN_HAS_EXTENSION(name) Machine::has(name)

}  // namespace omniattn
"""
PROGRAM = """
#include <cstdio>
#include <cstring>

#include "runtime/measured_isa.h"

namespace omniattn {

struct Kernels {
  const char* isa;
};
OMNIATTN_KERNEL_TABLE(Kernels, rows)
OMNIATTN_PRODUCT_KERNEL_TABLE(Kernels, products)
#define DEFINE(name, ...)               \\
  namespace isa_##name {                \\
    const Kernels rows_table{#name};    \\
    const Kernels products_table{#name}; \\
  }
OMNIATTN_ISAS(DEFINE)

}  // namespace omniattn

// The levels of bf16 at 9 and 10 multiply-adds and of fp32 at 10, of attention and of experts.
void print_choices() {
  using namespace omniattn;
  for (const MeasuredOp op : {MeasuredOp::attention, MeasuredOp::moe_experts}) {
    std::printf("%s ", isa_name(isa_for(op, DType::bf16, 9)));
    std::printf("%s ", isa_name(isa_for(op, DType::bf16, 10)));
    std::printf("%s ", isa_name(isa_for(op, DType::f32, 10)));
  }
}

int main(int count, char** levels) {
  using namespace omniattn;
  for (int i = 1; i < count; ++i) {
    Isa isa;
    if (parse_isa(levels[i], isa)) least_madds(MeasuredOp::attention, isa) = 10;
  }
  if (count == 2 && std::strcmp(levels[1], "f64") == 0) {
    std::printf("%s %s", rows(DType::f64).isa, products(DType::f64).isa);
    return 0;
  }
  if (count > 1) {
    print_choices();
    return 0;
  }
  const int tiles = tile_state();  // asks, too, if anyone does
  std::printf("%s %s %d", isa_name(detected_isa()), isa_name(active_isa()), tiles);
  std::printf(" %s", rows(DType::f32).isa);
  for (const DType factors : {DType::f32, DType::bf16, DType::f16}) {
    std::printf(" %s", products(factors).isa);
  }
  for (int32_t isa = -1; isa <= kIsaCount; ++isa) {
    if (set_active_isa(static_cast<Isa>(isa))) std::printf(" %s", isa_name(active_isa()));
  }
}
"""
AVX2 = "avx2 fma f16c "
AVX512 = AVX2 + "avx512f avx512bw avx512vl avx512dq "
BF16 = AVX512 + "avx512bf16 "
AMX = BF16 + "amx-tile amx-bf16 "
FP16 = AMX + "amx-fp16 "
BELOW_AMX = ["baseline", "avx2", "avx512", "avx512_bf16"]
EMULATED = ["OMNIATTN_EMULATED_FROM=avx512_bf16", "OMNIATTN_EMULATED_BY=avx512"]
PORTABLE = ["OMNIATTN_EMULATED_FROM=amx_bf16", "OMNIATTN_EMULATED_BY=avx2"]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """program(has, answer, cap, defines, slow): what it prints, split; or what print_choices says
    where levels are `slow` for attention at less than 10 multiply-adds; with slow=["f64"], the
    levels of fp64."""
    folder = tmp_path_factory.mktemp("levels")
    (folder / "runtime").mkdir()
    (folder / "runtime/machine.h").write_text(MACHINE)
    (folder / "main.cpp").write_text(PROGRAM)

    def run(has, answer=0, cap=None, defines=(), slow=()):
        binary = folder / ("main" + "".join(defines).replace("=", "_"))
        if not binary.exists():
            flags = ["-std=c++20", "-Wall", "-Wextra", "-Werror", *(f"-D{d}" for d in defines)]
            source = ROOT / "csrc/runtime/cpu_isa.cpp"
            command = ["g++", *flags, f"-I{folder}", f"-I{ROOT / 'csrc'}", source, "main.cpp"]
            subprocess.run([*command, "-o", binary], cwd=folder, check=True)
        env = {k: v for k, v in os.environ.items() if k != "OMNIATTN_CPU_ISA"}
        env |= {"HAS": has, "ANSWER": str(answer)}
        env |= {} if cap is None else {"OMNIATTN_CPU_ISA": cap}
        result = subprocess.run(
            [binary, *slow], env=env, capture_output=True, text=True, check=True
        )
        return result.stdout.split()

    return run


@pytest.mark.parametrize(
    ("has", "level", "products"),
    [
        ("", "baseline", "baseline"),
        (AVX2, "avx2", "avx2"),
        (AVX2.replace("fma ", ""), "baseline", "baseline"),
        (AVX512, "avx512", "avx512"),
        (BF16, "avx512", "avx512_bf16"),
        # AMX without the bf16 of AVX-512, as under some hypervisors: nothing above the gap.
        (AVX512 + "amx-tile amx-bf16 amx-fp16 ", "avx512", "avx512"),
    ],
)
def test_a_level_needs_those_below_it(program, has, level, products):
    detected, active, _, rows, f32, bf16, f16, *settable = program(has)
    assert detected == active == bf16 == products
    assert rows == f32 == f16 == level
    assert settable == BELOW_AMX[: len(settable)] and settable[-1] == products


def test_tiles_that_are_granted_are_asked_for_once(program):
    answer = ["0", "avx512", "avx512", "amx_bf16", "avx512", *BELOW_AMX, "amx_bf16"]
    assert program(AMX) == ["asked", "amx_bf16", "amx_bf16", *answer]


def test_each_type_is_multiplied_by_the_best_level_that_has_it(program):
    levels = [*BELOW_AMX, "amx_bf16", "amx_fp16"]
    answer = ["0", "avx512", "avx512", "amx_bf16", "amx_fp16", *levels]
    assert program(FP16) == ["asked", "amx_fp16", "amx_fp16", *answer]


def test_tiles_of_bf16_alone_are_used_below_a_cap(program):
    answer = ["0", "avx512", "avx512", "amx_bf16", "avx512"]
    found = program(FP16, cap="amx_bf16")
    assert found[:8] == ["asked", "amx_fp16", "amx_bf16", *answer]


@pytest.mark.parametrize("error", [28, 22])
def test_a_refusal_leaves_the_level_below_and_is_not_repeated(program, error):
    answer = ["avx512_bf16"] * 2 + [str(error), "avx512", "avx512", "avx512_bf16", "avx512"]
    for has in AMX, FP16:
        assert program(has, error) == ["asked", *answer, *BELOW_AMX]


@pytest.mark.parametrize("cap", ["avx512_bf16", "baseline"])
def test_nobody_asks_below_a_lower_cap(program, cap):
    for has in AMX, FP16:
        detected, active, state, *_ = program(has, cap=cap)
        assert (detected, active, state) == ("avx512_bf16", cap, "-2")


@pytest.mark.parametrize("has", [BF16, AMX.replace("amx-bf16", ""), AMX.replace("amx-tile", "")])
def test_nobody_asks_a_machine_without_tiles(program, has):
    assert program(has)[:3] == ["avx512_bf16", "avx512_bf16", "-1"]


@pytest.mark.parametrize("has", [AVX512, AMX, FP16])
def test_emulation_on_avx512_never_asks(program, has):
    levels = [*BELOW_AMX, "amx_bf16", "amx_fp16"]
    answer = ["amx_fp16", "amx_fp16", "-1", "avx512", "avx512", "amx_bf16", "amx_fp16", *levels]
    assert program(has, defines=EMULATED) == answer


def test_emulation_steps_over_the_levels_that_the_machine_lacks(program):
    """Their kernels would end the process."""
    tiles = ["amx_bf16", "amx_fp16"]
    answer = ["amx_fp16", "amx_fp16", "-1", "avx2", "avx2", *tiles]
    assert program(AVX2, defines=PORTABLE) == [*answer, "baseline", "avx2", *tiles]
    assert program(AVX2, cap="avx512", defines=PORTABLE)[:2] == ["amx_fp16", "avx2"]
    assert program(BF16, defines=PORTABLE)[-6:] == [*BELOW_AMX, *tiles]
    assert program("", defines=PORTABLE)[:2] == ["baseline", "baseline"]


def test_levels_that_were_not_built_are_stepped_over(program):
    built = ["OMNIATTN_LEVELS=0x14"]  # avx512 and amx_bf16
    answer = ["0", "avx512", "avx512", "amx_bf16", "avx512", "avx512", "amx_bf16"]
    assert program(AMX, defines=built) == ["asked", "amx_bf16", "amx_bf16", *answer]
    assert program(AMX, cap="avx512_bf16", defines=built)[:3] == ["avx512", "avx512", "-2"]


@pytest.mark.parametrize("has", ["", AVX2, AVX512, BF16, FP16])
def test_fp64_runs_on_the_slowest_built_level_alone(program, has):
    for cap in None, "baseline":
        assert program(has, cap=cap, slow=["f64"])[-2:] == ["baseline"] * 2
    for level, mask in ("avx2", "0x2a"), ("avx512", "0x14"):  # and levels above
        if (level == "avx2" and has) or "avx512f" in has:
            built = [f"OMNIATTN_LEVELS={mask}"]
            assert program(has, defines=built, slow=["f64"])[-2:] == [level] * 2


@pytest.mark.parametrize(
    ("has", "defines", "slow", "few"),
    [
        (AMX, (), ["amx_bf16"], "avx512_bf16"),
        (AMX, (), ["amx_bf16", "avx512_bf16"], "avx512"),
        (AMX, (), ["avx512_bf16"], "amx_bf16"),
        (AVX2, PORTABLE, ["amx_bf16"], "avx2"),
        (FP16, (), ["amx_bf16"], "avx512_bf16"),
        (FP16, (), ["amx_fp16"], "amx_bf16"),
    ],
)
def test_a_level_is_left_where_there_is_little_to_multiply(program, has, defines, slow, few):
    """By the op that it was measured for, and products of fp32 have no such level."""
    vectors = "avx2" if defines else "avx512"
    found = program(has, defines=defines, slow=slow)
    assert found[-6:] == [few, "amx_bf16", vectors, "amx_bf16", "amx_bf16", vectors]


def test_a_level_that_a_cap_forbids_is_chosen_for_nothing(program):
    assert program(AMX, cap="avx512", slow=["amx_bf16"])[-6:] == ["avx512"] * 6
