"""A line in runtime/isa.h adds an ISA: flags, dtypes and the choice of kernels follow from it."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAST = "level(amx_fp16, f16, TILES(amx-fp16), __VA_ARGS__)"
ADDED = "level(dot_f16, f16, HAS(avx10.2) && TILES(amx-tf32), __VA_ARGS__)"
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
AMX = ["-DOMNIATTN_TILES"]  # whose instructions the compiler need not know
PROGRAM = """
#include <cstdio>
#include <initializer_list>

#include "runtime/cpu_isa.h"
#include "runtime/dispatch.h"

namespace omniattn {

Isa active_isa() { return Isa::dot_f16; }
uint32_t levels_up_to(Isa isa) { return (2u << static_cast<int>(isa)) - 1; }

struct Kernels {
  const char* isa;
};
OMNIATTN_KERNEL_TABLE(Kernels, rows)
OMNIATTN_PRODUCT_KERNEL_TABLE(Kernels, products)
#define DEFINE_ROWS(name) namespace isa_##name { const Kernels rows_table{#name}; }
#define DEFINE_PRODUCTS(name, ...) namespace isa_##name { const Kernels products_table{#name}; }
DEFINE_ROWS(baseline)
DEFINE_ROWS(avx2)
DEFINE_ROWS(avx512)
OMNIATTN_ISAS(DEFINE_PRODUCTS)

}  // namespace omniattn

int main() {
  using namespace omniattn;
  std::printf("%s %s", rows(DType::f64).isa, rows(DType::f32).isa);
  for (const Isa isa :
       {Isa::baseline, Isa::avx512, Isa::avx512_bf16, Isa::amx_bf16, Isa::amx_fp16,
        Isa::dot_f16}) {
    for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
      std::printf(" %s", products_on(isa, dtype).isa);
    }
  }
  std::printf(" %d", has_kernels_for(OMNIATTN_ISA::kIsa, DType::bf16));
  std::printf(" %s\\n", products(DType::f16).isa);
}
"""


@pytest.fixture
def table(tmp_path):
    """Folder with the table, to which a level is added."""
    text = (ROOT / "csrc/runtime/isa.h").read_text()
    assert text.count(LAST) == 1
    (tmp_path / "csrc/runtime").mkdir(parents=True)
    (tmp_path / "csrc/runtime/isa.h").write_text(text.replace(LAST, f"{LAST} {ADDED}"))
    return tmp_path


def test_kernels_are_chosen_by_level_and_dtype(table):
    (table / "main.cpp").write_text(PROGRAM)
    flags = ["-std=c++20", "-Wall", "-Wextra", "-Werror", "-DOMNIATTN_ISA=isa_dot_f16"]
    include = [f"-I{table / 'csrc'}", f"-I{ROOT / 'csrc'}"]
    subprocess.run(["g++", *flags, *include, "main.cpp", "-o", "main"], cwd=table, check=True)
    result = subprocess.run([table / "main"], capture_output=True, text=True, check=True)
    *rows, built_for_bf16, active = result.stdout.split()
    rows, products = rows[:2], rows[2:]
    assert rows == ["baseline", "avx512"]  # of f64, on one level alone, and of f32
    assert products[:4] == ["baseline"] * 4
    assert products[4:8] == ["baseline", "avx512", "avx512", "avx512"]
    assert products[8:12] == ["baseline", "avx512", "avx512_bf16", "avx512"]
    assert products[12:16] == ["baseline", "avx512", "amx_bf16", "avx512"]
    assert products[16:20] == ["baseline", "avx512", "amx_bf16", "amx_fp16"]
    assert products[20:] == ["baseline", "avx512", "amx_bf16", "dot_f16"]
    assert built_for_bf16 == "0" and active == "dot_f16"


@pytest.fixture
def read_by_cmake(table):
    """Returns what cmake/isa.cmake makes of the table and of OMNIATTN_LEVELS, or its error."""

    def read(levels):
        (table / "cmake").mkdir(exist_ok=True)
        (table / "cmake/isa.cmake").write_text((ROOT / "cmake/isa.cmake").read_text())
        (table / "print.cmake").write_text(PRINT)
        command = ["cmake", f"-DOMNIATTN_LEVELS={levels}", "-P", "print.cmake"]
        result = subprocess.run(command, cwd=table, capture_output=True, text=True)
        if result.returncode != 0:
            return result.stderr
        return dict(re.findall(r"(\w+): (.*)", result.stderr))

    return read


PRINT = """
cmake_minimum_required(VERSION 3.25)
set(CMAKE_SYSTEM_PROCESSOR x86_64)
include(${CMAKE_CURRENT_LIST_DIR}/cmake/isa.cmake)
message("mask: ${OMNIATTN_LEVEL_MASK}")
message("all: ${OMNIATTN_ISAS}\nproducts: ${OMNIATTN_PRODUCT_ISAS}\ntiles: ${OMNIATTN_TILE_ISAS}")
foreach(isa IN LISTS OMNIATTN_ISAS OMNIATTN_PRODUCT_ISAS)
  message("${isa}: ${OMNIATTN_FLAGS_${isa}}")
endforeach()
"""


def test_flags_are_those_of_the_table(read_by_cmake):
    found = read_by_cmake("all")
    assert found.pop("mask") == "127"
    extensions = {
        name: [f for f in flags.split(";") if not f.startswith(("-O", "-W", "-mprefer", "$"))]
        for name, flags in found.items()
    }
    assert extensions == {
        "all": ["baseline", "avx2", "avx512"],
        "products": ["avx512_bf16", "amx_bf16", "amx_fp16", "dot_f16"],
        "tiles": ["amx_bf16", "amx_fp16", "dot_f16"],
        "baseline": [],
        "avx2": AVX2,
        "avx512": AVX512,
        "avx512_bf16": [*AVX512, "-mavx512bf16"],
        "amx_bf16": [*AVX512, "-mavx512bf16", *AMX],
        "amx_fp16": [*AVX512, "-mavx512bf16", *AMX],
        "dot_f16": [*AVX512, "-mavx512bf16", *AMX, "-mavx10.2"],
    }


def test_a_build_omits_levels_and_keeps_the_flags_of_the_others(read_by_cmake):
    found = read_by_cmake("avx512;amx_bf16")
    assert found["mask"] == str(1 << 2 | 1 << 4)
    assert (found["all"], found["products"], found["tiles"]) == ("avx512", "amx_bf16", "amx_bf16")
    assert "avx2" not in found
    assert {"-mavx2", "-mavx512bf16", "-DOMNIATTN_TILES"} <= set(found["amx_bf16"].split(";"))


@pytest.mark.parametrize(
    ("levels", "message"),
    [
        ("avx3", r"must be native, all or some of\s+baseline, avx2.*got\s+avx3"),
        ("amx_bf16", r"must name baseline, avx2 or avx512.*got\s+amx_bf16"),
    ],
)
def test_levels_that_nothing_can_run_are_refused(read_by_cmake, levels, message):
    assert re.search(message, read_by_cmake(levels), re.DOTALL)
