"""AMX tiles: the arithmetic of the software ones, their equality with the hardware, and how a
process comes to have the registers."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from emulation import SOFTWARE, TILES, needs_software, software

from omniattn import _kernels as kernels
from omniattn import config
from omniattn.cli import info
from omniattn.functional import linear

ROOT = Path(__file__).parents[2]
ISAS = kernels.probe_isas()
hardware = pytest.mark.skipif("amx_bf16" not in ISAS, reason="needs AMX")
F32, BF16 = 1, 2


def dtype_of(isa):
    """Returns the dtype that a level with tiles multiplies."""
    return "f16" if isa.startswith("amx_fp16") else "bf16"


def in_software(test):
    """Runs it on every form of software tiles that there is."""
    forms = [isa for level in TILES for isa in software(level) or [f"{level}_portable"]]
    return needs_software(pytest.mark.parametrize("isa", forms)(test))


def as_bits(x, dtype):
    """Returns the bits of floats, truncated to bf16 or rounded to fp16."""
    if dtype == "f16":
        return np.asarray(x).astype(np.float16).view(np.uint16)
    return (np.asarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def as_float(bits, dtype):
    if dtype == "f16":
        return bits.view(np.float16).astype(np.float64)
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def multiply(isa, a, b, c):
    """C + A B on one tile; A (16, 32) and B (32, 16) as bits."""
    out, (m, k), n = c.copy(), a.shape, b.shape[1]
    probe = kernels.Probe(isa)
    probe.tile(dtype_of(isa), "packed_rows", a, k, False, b, n, out, n, m, n, k, True)
    return out


def expected(a, b, c, dtype):
    """The rule, in float64, where products of 16-bit numbers and their sums with an fp32 are exact:
    those of fp16 are multiples of 2^-48."""
    sums = np.zeros((2, *c.shape), np.float32)
    for k in range(a.shape[1]):
        product = as_float(a, dtype)[:, k, None] * as_float(b, dtype)[k]
        sums[k % 2] = (sums[k % 2].astype(np.float64) + product).astype(np.float32)
    return c + (sums[0] + sums[1])


@in_software
def test_sums_are_one_chain_of_the_even_and_one_of_the_odd_terms(isa):
    rng = np.random.default_rng(0)
    for _ in range(50):
        shapes = ((16, 32), (32, 16))
        a, b = (as_bits(rng.standard_normal(shape), dtype_of(isa)) for shape in shapes)
        c = rng.standard_normal((16, 16)).astype(np.float32)
        np.testing.assert_array_equal(multiply(isa, a, b, c), expected(a, b, c, dtype_of(isa)))


@in_software
def test_denormals_of_fp32_are_zero(isa):
    """bf16 operands and fp32 sums flush denormals to zero; denormals of fp16 are normal in fp32 and
    keep their value."""
    dtype = dtype_of(isa)
    a, b, c = np.zeros((16, 32), np.uint16), np.zeros((32, 16), np.uint16), np.zeros((16, 16))
    c = c.astype(np.float32)
    a[0, 0], b[0, 0] = 0x0001, as_bits(1.0, dtype)[()]  # a denormal operand
    if dtype == "bf16":
        a[1, 1], b[1, 1] = as_bits(2.0**-100, dtype)[()], as_bits(2.0**-40, dtype)[()]
    c[2, 2] = 2.0**-130  # a denormal sum
    found = multiply(isa, a, b, c)
    assert found[0, 0] == (2.0**-24 if dtype == "f16" else 0)
    found[0, 0] = 0
    assert not found.any()


@in_software
def test_a_pair_without_second_term_is_no_denormal(isa):
    """The two halves of the pair, read as one fp32 number, form a denormal."""
    a, b = np.zeros((16, 32), np.uint16), np.zeros((32, 16), np.uint16)
    a[:, 0], b[0] = as_bits(3.0, dtype_of(isa)), as_bits(5.0, dtype_of(isa))
    assert (multiply(isa, a, b, np.zeros((16, 16), np.float32)) == 15).all()


SCOPE = """
#include "runtime/tiles.h"

int main() {
  using namespace omniattn::OMNIATTN_ISA;
#if defined(SCOPE)
  const TileScope scope;
#else
  { const TileScope ended; }
#endif
  TileRegisters tiles;
  tiles.zero<0>();
}
"""


FLAGS = {
    "emulated": ["-mavx2", *(f"-mavx512{x}" for x in ("f", "bw", "vl", "dq"))],
    "portable": ["-mavx2", "-DOMNIATTN_WIDE_VECTORS"],
}


@in_software
def test_software_tiles_need_a_configuration_as_the_hardware_does(tmp_path, isa):
    """Outside a scope the hardware would end the process without a word."""
    (tmp_path / "main.cpp").write_text(SCOPE)
    level, form = isa.rsplit("_", 1)
    flags = ["-mfma", "-mf16c", *FLAGS[form]]
    flags += [f"-DOMNIATTN_ISA=isa_{level}", f"-I{ROOT / 'csrc'}", "-w", "-std=c++20", "-O1"]
    for defines, fails in (["-DSCOPE"], False), ([], True):
        command = ["g++", *flags, *defines, "main.cpp", "-o", "main"]
        subprocess.run(command, cwd=tmp_path, check=True)
        result = subprocess.run([tmp_path / "main"], capture_output=True, text=True)
        assert (result.returncode < 0) is fails
        assert ("tiles are used outside a TileScope" in result.stderr) is fails


def aligned(x, offset):
    """A copy that starts `offset` bytes after a cache line."""
    memory = np.zeros(x.nbytes + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    copy = memory[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy


@in_software
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("a_transposed", [False, True], ids=["a", "at"])
@pytest.mark.parametrize("k", [1, 32, 33, 96, 512, 545])
def test_blocks_of_any_size(isa, k, a_transposed, accumulate):
    """Whole and partial tiles, A in place and copied: small integers make every sum exact."""
    rng = np.random.default_rng(0)
    probe = kernels.Probe(isa)
    for m, n in [(1, 16), (16, 31), (17, 32), (31, 33), (32, 64), (33, 70), (48, 48), (96, 130)]:
        a, b, c = (rng.integers(-2, 3, shape) for shape in ((m, k), (k, n), (m, n)))
        want = a @ b + (c if accumulate else 0)
        dtype = dtype_of(isa)
        rows = as_bits(a, dtype)
        if a_transposed:
            padded = np.zeros((k + k % 2, m), np.uint16)
            padded[:k] = rows.T
            rows = np.ascontiguousarray(padded.reshape(-1, 2, m).swapaxes(1, 2))
        for offset in (0, 2):
            out = c.astype(np.float32) if accumulate else np.full((m, n), np.nan, np.float32)
            lda = m if a_transposed else k
            probe.tile(
                dtype, "packed_rows", aligned(rows, offset), lda, a_transposed, as_bits(b, dtype),
                n, out, n, m, n, k, accumulate,
            )  # fmt: skip
            np.testing.assert_array_equal(out, want, err_msg=f"{m=} {n=} {offset=}")


@in_software
def test_what_lies_behind_the_operands_is_not_multiplied(isa):
    """NaN next to the terms of A, and in its rows and columns of C that are not asked for."""
    m, n, k = 17, 33, 40
    dtype = dtype_of(isa)
    a, b = np.full((m, 64), 0xFFFF, np.uint16), as_bits(np.ones((k, n)), dtype)
    a[:, :k] = as_bits(1.0, dtype)
    out = np.full((m + 1, n + 3), np.nan, np.float32)
    probe = kernels.Probe(isa)
    probe.tile(dtype, "packed_rows", a, 64, False, b, n, out, n + 3, m, n, k, False)
    assert (out[:m, :n] == k).all()
    assert np.isnan(out[m:]).all()
    assert np.isnan(out[:, n:]).all()


def operands(rng, kind):
    """Bits of A and B, and C: values of many kinds for bf16, all bits among them."""
    a, b = (rng.integers(0, 1 << 16, shape, np.uint16) for shape in ((16, 32), (32, 16)))
    c = rng.integers(0, 1 << 32, (16, 16), np.uint32)
    exponents = {
        "any": None,
        "finite": (1, 251),
        "near the denormals": (60, 72),
        "overflow": (190, 192),
        "denormal": (0, 2),
    }[kind]
    if exponents is not None:
        a, b = (
            (x & 0x807F) | (rng.integers(*exponents, x.shape).astype(np.uint16) << 7)
            for x in (a, b)
        )
        c = (c & 0x80FFFFFF) | (rng.integers(0, 4, c.shape, np.uint32) << 23)
    return a, b, c.view(np.float32)


def assert_same_bits(got, want):
    """NaN for NaN: which operand's payload survives is the only difference."""
    same = (got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want))
    assert same.all()


@hardware
@pytest.mark.parametrize("isa", [isa for level in TILES for isa in software(level)])
@pytest.mark.parametrize("kind", ["any", "finite", "near the denormals", "overflow", "denormal"])
def test_software_tiles_equal_the_hardware(kind, isa):
    level = isa.rsplit("_", 1)[0]
    if level not in ISAS:
        pytest.skip(f"needs {level}")
    rng = np.random.default_rng(0)
    for _ in range(500):
        a, b, c = operands(rng, kind)
        assert_same_bits(multiply(isa, a, b, c), multiply(level, a, b, c))


STATEMENTS = """
#include "runtime/tiles.h"
using omniattn::f16;
void ours() {
  omniattn::OMNIATTN_ISA::TileRegisters t;
  t.multiply_add<f16, 0, 4, 6>();
  t.multiply_add<f16, 3, 5, 7>();
}
"""
WRITTEN = "tdpfp16ps %tmm6, %tmm4, %tmm0; tdpfp16ps %tmm7, %tmm5, %tmm3"


def test_products_of_fp16_are_the_bytes_of_the_assembler(tmp_path):
    (tmp_path / "ours.cpp").write_text(STATEMENTS)
    (tmp_path / "theirs.s").write_text(f"{WRITTEN}\n")
    flags = ["-DOMNIATTN_ISA=isa_amx_fp16", "-DOMNIATTN_TILES", *FLAGS["emulated"], "-mfma"]
    flags += ["-mf16c", f"-I{ROOT / 'csrc'}", "-std=c++20", "-O2", "-w", "-fcf-protection=none"]
    run = partial(subprocess.run, cwd=tmp_path, capture_output=True)
    if run(["as", "theirs.s", "-o", "theirs.o"]).returncode != 0:
        pytest.skip("needs binutils 2.40")
    run(["g++", *flags, "-c", "ours.cpp", "-o", "ours.o"], check=True)
    code = []
    for name in ("ours", "theirs"):
        run(["objcopy", "-O", "binary", "-j", ".text", f"{name}.o", f"{name}.bin"], check=True)
        code.append((tmp_path / f"{name}.bin").read_bytes())
    assert code[1] == code[0].removesuffix(b"\xc3")


@pytest.mark.skipif(len(SOFTWARE) + ("amx_bf16" in ISAS) < 2, reason="needs AVX-512 or AMX")
@pytest.mark.parametrize("pieces", [0, 2, 3])
@pytest.mark.parametrize("transposed", [(False, True), (True, False)], ids=str)
def test_products_are_the_same_on_all_tiles(transposed, pieces):
    rng = np.random.default_rng(0)
    m, n, k = 101, 333, 1100
    a, b = (rng.standard_normal(s).astype(np.float32) for s in ((m, k), (k, n)))
    a, b = (x if pieces else as_bits(x, "bf16") for x in (a, b))
    a, b = (
        np.ascontiguousarray(x.T if flip else x) for x, flip in zip((a, b), transposed, strict=True)
    )
    dtypes = (F32, F32, F32) if pieces else (BF16, BF16, F32)
    results = []
    for isa in [*SOFTWARE, "amx_bf16"]:
        if isa in ISAS:
            c = np.zeros((m, n), np.float32)
            kernels.gemm(isa, dtypes, a, transposed[0], b, transposed[1], None, c, k, False, pieces)
            results.append(c)
    for other in results[1:]:
        assert_same_bits(results[0], other)


# The permission. What `arch_prctl` says without asking for it is 0x1022.
STATE = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def permitted():
    mask = ctypes.c_ulong()
    assert libc.syscall(158, 0x1022, ctypes.byref(mask)) == 0
    return bool(mask.value >> 18 & 1)
"""
RUN = """
import torch
from omniattn.functional import linear
x = torch.ones(64, 64, dtype=torch.bfloat16)
def multiply():
    assert (linear(x, x, backend="cpu") == 64).all()
"""


def run(program, **env):
    env = {k: v for k, v in os.environ.items() if k != "OMNIATTN_CPU_ISA"} | env
    command = [sys.executable, "-c", STATE + program]
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.split()


@hardware
def test_permission_is_asked_for_once_loaded_and_not_below_a_lower_cap():
    program = "import omniattn\nprint(permitted())"
    assert run(program) == ["True"]
    assert run(program, OMNIATTN_CPU_ISA="avx512_bf16") == ["False"]


@hardware
def test_a_refusal_leaves_the_level_below():
    program = """
class Stack(ctypes.Structure):
    _fields_ = [("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
memory = ctypes.create_string_buffer(4096)
assert libc.sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, 4096)), None) == 0
import omniattn, torch
print(torch.ops.omniattn.cpu_isa(), torch.ops.omniattn.tile_state())
"""
    level = str(config.CPU_ISAS.index("avx512_bf16"))
    assert run(program) == [level, "28"]


@hardware
def test_threads_made_before_and_forked_processes_have_tiles():
    program = (
        RUN
        + """
import threading
go = threading.Event()
thread = threading.Thread(target=lambda: (go.wait(), multiply()))
thread.start()
multiply()
go.set()
thread.join()
child = os.fork()
if child == 0:
    torch.set_num_threads(1)
    multiply()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    )
    run(program)


@hardware
def test_onednn_and_our_tiles_take_turns_on_the_same_threads():
    x, weight = (torch.randn(s).to(torch.bfloat16) for s in ((96, 256), (160, 256)))
    ours, theirs = linear(x, weight, backend="cpu"), torch.nn.functional.linear(x, weight)
    for _ in range(100):
        assert torch.equal(linear(x, weight, backend="cpu"), ours)
        assert torch.equal(torch.nn.functional.linear(x, weight), theirs)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (0, "the best this CPU supports"),
        (-1, "the best this CPU supports"),
        (-2, "although this CPU has amx_bf16: OMNIATTN_CPU_ISA="),
        (28, "refused its tiles, No space left on device, a thread has a signal stack of less"),
        (22, "refused its tiles, Invalid argument"),
    ],
)
def test_info_says_what_became_of_tiles(monkeypatch, state, words):
    level = config.CPU_ISAS.index("avx512_bf16" if state else "amx_bf16")
    for op, result in (("tile_state", state), ("detected_cpu_isa", level), ("cpu_isa", level)):
        monkeypatch.setattr(torch.ops.omniattn, op, lambda result=result: result)
    assert words in info._kernels()["reason"]
