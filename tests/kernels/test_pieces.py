"""fp32 products of bf16 pieces on tiles: their errors against fp64, and shapes of any kind."""

import itertools

import fp32_pieces
import numpy as np
import pytest
from emulation import SOFTWARE, needs_software

from omniattn import _kernels as kernels

F32 = fp32_pieces.F32
#: Bound, in units, on the omitted products and the bits after the last piece. A piece is at most
#: 2^-8 of what the previous one rounds.
LEFT_OUT = {2: 3 * 2.0**8, 3: 4.0}

pytestmark = needs_software


@pytest.fixture(params=SOFTWARE or ["amx_bf16_portable"])
def isa(request):
    return request.param


def product(a, b):
    """A B by multiply-adds of fp32, 256 terms at a time: as usual libraries have it, but with the
    same bits on all machines."""
    c = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for first in range(0, a.shape[1], 256):
        sums = np.zeros_like(c)
        for k in range(first, min(first + 256, a.shape[1])):
            sums = (sums + np.outer(a[:, k].astype(float), b[k])).astype(np.float32)
        c += sums
    return c


@pytest.mark.parametrize("pieces", [2, 3])
@pytest.mark.parametrize("name", fp32_pieces.DATA)
def test_errors_are_those_of_fp32_and_of_what_is_left_out(isa, name, pieces):
    a, b = fp32_pieces.operands(name)
    found = fp32_pieces.errors(a, b, fp32_pieces.in_pieces(a, b, pieces, isa))
    usual = fp32_pieces.errors(a, b, product(a, b))
    for ours, theirs in zip(found, usual, strict=True):
        assert ours <= 2 * theirs + LEFT_OUT[pieces]


def test_published_errors_are_those_of_this_code():
    """In the columns of pieces, whose bits depend on no machine."""
    published = fp32_pieces.PAGE.read_text().split(fp32_pieces.BEGIN)[1].split(fp32_pieces.END)[0]
    for line, again in zip(published.splitlines(), fp32_pieces.table().splitlines(), strict=True):
        assert line.split("|")[1] == again.split("|")[1]
        assert line.split("|")[3:] == again.split("|")[3:]


@pytest.mark.parametrize("pieces", [2, 3])
@pytest.mark.parametrize("transposed", list(itertools.product([False, True], repeat=2)), ids=str)
def test_products_of_integers_are_exact(isa, transposed, pieces):
    """Any shape and layout, with a bias or onto C."""
    rng = np.random.default_rng(0)
    shapes = [(5, 1, 1), (7, 300, 257), (100, 130, 515), (230, 17, 2), (16, 64, 700), (9, 9, 0)]
    for m, n, k in shapes:
        limit = 300 if pieces == 3 else 128  # two pieces each; with two, B is one
        a, b = rng.integers(-300, 300, (m, k)), rng.integers(-limit, limit, (k, n))
        a[:, rng.random(k) < 1 - 80 / (k + 1)] = 0  # sums stay below 2^24
        bias, start = rng.integers(-9, 9, n), rng.integers(-9, 9, (m, n))
        for accumulate in (False, True):
            rows, cols = (
                np.ascontiguousarray(x.T if flip else x, np.float32)
                for x, flip in zip((a, b), transposed, strict=True)
            )
            c = start.astype(np.float32) if accumulate else np.full((m, n), np.nan, np.float32)
            kernels.gemm(
                isa, (F32, F32, F32), rows, transposed[0], cols, transposed[1],
                None if accumulate else bias.astype(np.float32), c, k, accumulate, pieces,
            )  # fmt: skip
            want = a @ b + (start if accumulate else bias)
            np.testing.assert_array_equal(c, want, err_msg=f"{m=} {n=} {k=} {accumulate=}")


@pytest.mark.parametrize("pieces", [2, 3])
def test_results_at_both_ends_of_the_range(isa, pieces):
    """Powers of two are one piece: nothing is rounded but what fp32 cannot hold."""
    for row, column in itertools.product((-149, -126, -100, 0, 127), repeat=2):
        a, b = np.zeros((16, 32), np.float32), np.zeros((32, 16), np.float32)
        a[:, 0], b[0] = 2.0**row, 2.0**column
        a[3], b[:, 5] = 0, 0
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(fp32_pieces.in_pieces(a, b, pieces, isa), a @ b)
