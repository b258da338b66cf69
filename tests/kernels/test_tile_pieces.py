"""fp32 times fp16 on tiles, in two pieces of fp16 (csrc/runtime/tile_pieces.h): what kernels
compute keeps the range of fp32."""

import itertools

import numpy as np
import pytest
from emulation import needs_software, software

from omniattn import _kernels as kernels

F32, F16 = 1, 3
pytestmark = needs_software


@pytest.fixture(params=software("amx_fp16") or ["amx_fp16_portable"])
def isa(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["a", "at"])
def multiply(isa, request):
    """multiply(a, b): A B, with A stored in both orders; B in bits of fp16."""
    transposed = request.param

    def run(a, b):
        c = np.full((a.shape[0], b.shape[1]), np.nan, np.float32)
        rows = np.ascontiguousarray(a.T if transposed else a, np.float32)
        bits = np.ascontiguousarray(b, np.float16).view(np.uint16)
        dtypes = F32, F16, F32
        kernels.gemm(isa, dtypes, rows, transposed, bits, False, None, c, a.shape[1], False)
        return c

    return run


def operands(m=70, k=300, n=50):
    rng = np.random.default_rng(0)
    return rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal((k, n))


def errors(found, a, b):
    """In units of 2^-22 of the sums of magnitudes."""
    a, b = a.astype(np.float64), b.astype(np.float16).astype(np.float64)
    return np.abs(found - a @ b) / (np.abs(a) @ np.abs(b)) * 2.0**22


def test_two_pieces_have_22_bits(multiply):
    a, b = operands()
    assert errors(multiply(a, b), a, b).max() < 1


@pytest.mark.parametrize("exponent", [-149, -140, -126, -30, 15, 90, 110])
def test_rows_of_any_size_keep_their_digits(multiply, exponent):
    """A power of two brings them to the range of fp16; rows of other sizes do not matter."""
    a, b = operands()
    a[5] = np.float32(a[5] * 2.0**exponent)
    b = np.abs(b)
    found = multiply(a, b)
    unit = 2.0**-149 / (np.abs(a).astype(np.float64) @ b)[5] * 2.0**22  # of fp32 itself
    assert (errors(found, a, b)[5] <= 1 + unit).all()
    assert np.delete(errors(found, a, b), 5, 0).max() < 1


def test_elements_far_below_the_largest_of_their_row(multiply):
    a, b = operands()
    a *= 2.0 ** -np.arange(a.shape[1])
    roundings = 8  # of sums in fp32, while they are large
    assert errors(multiply(a, b), a, b).max() < 0.5 + roundings / 4


def test_what_is_not_finite_stays_in_its_row(multiply):
    a, b = operands()
    plain = multiply(a, b)
    a[3, 7], a[40, 299] = np.inf, np.nan
    a[9, 1], a[9, 2] = 1e38, -np.inf
    found = multiply(a, b)
    np.testing.assert_array_equal(found[3], np.where(b[7] > 0, np.inf, -np.inf))
    np.testing.assert_array_equal(found[9], np.where(b[2] > 0, -np.inf, np.inf))
    assert np.isnan(found[40]).all()
    others = np.setdiff1d(np.arange(len(a)), [3, 9, 40])
    np.testing.assert_array_equal(found[others], plain[others])


def test_results_overflow_where_those_of_fp32_do(multiply):
    a, b = np.zeros((2, 33), np.float32), np.zeros((33, 16))
    a[:, 0], b[0], a[1, 1], b[1] = 2.0**127, 1.0, 2.0**127, 1.0
    assert (multiply(a, b)[0] == np.float32(2.0**127)).all()
    assert (multiply(a, b)[1] == np.inf).all()


def test_powers_of_two_are_exact(multiply):
    for row, column in itertools.product((-149, -126, -100, 0, 100, 127), (-24, -14, 0, 15)):
        a, b = np.zeros((16, 32), np.float32), np.zeros((32, 16))
        a[:, 0], b[0] = 2.0**row, 2.0**column
        a[3], b[:, 5] = 0, 0
        with np.errstate(over="ignore", under="ignore"):
            np.testing.assert_array_equal(multiply(a, b), a @ b.astype(np.float32))
