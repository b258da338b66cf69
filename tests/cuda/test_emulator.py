"""The emulator finds every seeded mistake at its line, and correct kernels run clean."""

import ctypes
import platform
import re
from pathlib import Path

import pytest
import torch

from omniattn.ops.dispatch import library as _library

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the emulator switches stacks in x86-64 code"
)

SOURCE = Path(__file__).with_name("fixtures.cu")
ORDERS = {"forward": 0, "reverse": 1, "random": 2}

# mistake in fixtures.cu -> (kernel, what the report says, the builds that report it in any order)
MISTAKES = {
    "dropped barrier": ("reverse", "race on shared memory", ["race"]),
    "weakened wait": ("pipeline", "race: read of a cp.async target before its wait", ["race"]),
    "missing syncwarp": ("exchange", "race on shared memory|uninitialised", ["race"]),
    "wrong count": ("handover", "barrier divergence|incomplete|uninitialised", ["value", "race"]),
    "deadlock": ("starve", "deadlock", ["value", "race"]),
    "dynamic bounds": ("dynamic_bounds", "out of bounds: .*dynamic shared", ["value", "race"]),
    "static bounds": ("static_bounds", "out of bounds: .*buffer", ["value", "race"]),
    "global bounds": ("global_bounds", "access to invalid address", ["value", "race"]),
    "divergent barrier": ("divergent", "barrier divergence", ["value", "race"]),
    "early exit": ("early_exit", "deadlock", ["value", "race"]),
    "divergent shuffle": ("shuffle", "deadlock", ["value", "race"]),
    "pending copy": ("pending_copy", "is pending when the kernel ends", ["value", "race"]),
    "unaligned store": ("vector_store", "must be 16-byte aligned", ["value", "race"]),
    "uninitialised": ("uninitialised", "uninitialised", ["race"]),
    "forgotten reader": ("many_readers", "race on shared memory", ["race"]),
}
REVERSED = {"reverse", "pipeline"}  # out = in reversed; the others keep or permute `in`


@pytest.fixture(scope="module", params=["value", "race"])
def build(request):
    path = _library.find(f"libemulator_fixtures_{request.param}.so")
    assert path is not None, "the development build has the emulator's fixtures"
    library = ctypes.CDLL(str(path))
    library.run_fixture.restype = library.run_matmul.restype = ctypes.c_char_p
    return request.param, library


def run(library, kernel, broken, order):
    x = torch.arange(128, dtype=torch.float32)
    y = torch.full_like(x, -1)
    pointers = (ctypes.c_void_p(t.data_ptr()) for t in (x, y))
    message = library.run_fixture(kernel.encode(), broken, ORDERS[order], *pointers)
    return message.decode(), y


def positions(mistake):
    lines = SOURCE.read_text().splitlines()
    marked = [i for i, line in enumerate(lines, 1) if line.endswith(f"// at: {mistake}")]
    assert marked
    return "|".join(rf"fixtures\.cu:{i}\b" for i in marked)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_reported_at_its_line(build, mistake, order):
    name, library = build
    kernel, pattern, builds = MISTAKES[mistake]
    if name not in builds:
        return  # a wrong value, in some orders: see the next test
    message, _ = run(library, kernel, True, order)
    assert re.search(pattern, message), message
    assert re.search(positions(mistake), message), message


@pytest.mark.parametrize("mistake", [m for m in MISTAKES if "value" not in MISTAKES[m][2]])
def test_race_changes_a_value_in_some_order(build, mistake):
    name, library = build
    if name == "race":
        return
    kernel = MISTAKES[mistake][0]
    expected = run(library, kernel, False, "forward")[1]
    values = [run(library, kernel, True, order)[1] for order in ORDERS]
    assert not all(torch.equal(expected, value) for value in values)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kernel", [entry[0] for entry in MISTAKES.values()])
def test_correct_kernel_is_clean(build, kernel, order):
    _, library = build
    message, y = run(library, kernel, False, order)
    assert message == ""
    if kernel in REVERSED:
        assert torch.equal(y, torch.arange(127.0, -1, -1))
    elif kernel in ("handover", "many_readers"):
        assert torch.equal(y, torch.arange(32.0).repeat(4))
    else:
        assert torch.equal(y.sort().values, torch.arange(128.0))


@pytest.mark.parametrize("kind", ["bf16", "f16", "tf32"])
def test_matrix_wrappers_multiply(build, kind):
    _, library = build
    generator = torch.Generator().manual_seed(0)
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "tf32": torch.float32}[kind]
    shapes = ((16, 8), (8, 8)) if kind == "tf32" else ((16, 16), (16, 16))
    # Small integers: exact in every format.
    a, b = (torch.randint(-4, 5, s, generator=generator).to(dtype) for s in shapes)
    c = torch.empty(16, b.shape[1])
    pointers = (ctypes.c_void_p(t.data_ptr()) for t in (a, b, c))
    assert library.run_matmul(kind.encode(), *pointers) == b""
    assert torch.equal(c, a.float() @ b.float())
