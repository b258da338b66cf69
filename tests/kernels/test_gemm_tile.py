"""Register tiles and packing of every ISA. Small integers make every sum exact in every dtype."""

import itertools

import numpy as np
import pytest

from omniattn import _kernels as kernels

NUMPY = {"f64": np.float64, "f32": np.float32, "bf16": np.uint16, "f16": np.uint16}
MS = [1, 2, 5, 6, 7, 8, 13]
NS = [1, 15, 16, 17, 31, 48, 63, 64, 65, 130]
KS = [1, 2, 3, 16, 33]


@pytest.fixture(params=kernels.probe_isas())
def probe(request):
    return kernels.Probe(request.param)


def encode(x, dtype):
    """Integers as an array of the dtype; halves as their bits."""
    if dtype == "f16":
        return x.astype(np.float16).view(np.uint16)
    if dtype == "bf16":
        return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return x.astype(NUMPY[dtype])


def strided(x, stride, dtype):
    """The rows of x with row stride `stride`, NaN between them and nothing after the last."""
    rows, cols = x.shape
    flat = np.full((rows - 1) * stride + cols, 0xFFFF, np.uint16)
    if NUMPY[dtype] != np.uint16:
        flat = np.full(flat.size, np.nan, NUMPY[dtype])
    for i in range(rows):
        flat[i * stride : i * stride + cols] = encode(x[i], dtype)
    return flat


def pairs(x):
    """(k, m) -> (ceil(k / 2), m, 2), padded with zero if k is odd."""
    k, m = x.shape
    padded = np.zeros((k + k % 2, m), x.dtype)
    padded[:k] = x
    return np.ascontiguousarray(padded.reshape(-1, 2, m).swapaxes(1, 2)).reshape(-1, 2 * m)


def shapes():
    for i, (m, n, k) in enumerate(itertools.product(MS, NS, KS)):
        yield m, n, k, bool(i % 2)


@pytest.mark.parametrize("a_transposed", [False, True], ids=["a", "at"])
@pytest.mark.parametrize("layout", ["rows", "packed_rows", "packed_transposed"])
@pytest.mark.parametrize("dtype", NUMPY)
def test_product_is_exact(probe, dtype, layout, a_transposed):
    operand = probe.operand(dtype)
    in_pairs = operand in ("bf16", "f16")
    if layout == "rows" and (operand != dtype or in_pairs):
        pytest.skip("plain rows of B must be operands")
    rng = np.random.default_rng(0)
    compute = np.float64 if dtype == "f64" else np.float32
    for m, n, k, accumulate in shapes():
        a, b, c = (rng.integers(-8, 9, s) for s in ((m, k), (k, n), (m, n)))
        want = a @ b + (c if accumulate else 0)
        if not a_transposed:
            a_data, lda = strided(a, k + 3, operand), k + 3
        elif in_pairs:
            a_data, lda = strided(pairs(a.T), 2 * (m + 1), operand), m + 1
        else:
            a_data, lda = strided(a.T, m + 1, operand), m + 1
        b_data = b.T if layout == "packed_transposed" else b
        ldb = b_data.shape[1] + 2
        b_data = strided(b_data, ldb, dtype)
        out = np.full((m, n + 2), 77, compute)
        out[:, :n] = c if accumulate else np.nan
        probe.tile(
            dtype, layout, a_data, lda, a_transposed, b_data, ldb, out, n + 2, m, n, k, accumulate
        )
        np.testing.assert_array_equal(out[:, :n], want, err_msg=f"{m=} {n=} {k=}")
        assert (out[:, n:] == 77).all()


@pytest.mark.parametrize("dtype", NUMPY)
def test_both_packings_agree(probe, dtype):
    rng = np.random.default_rng(1)
    for n, k in itertools.product(NS, KS):
        b = encode(rng.integers(-99, 99, (k, n)), dtype)
        rows = probe.pack(dtype, "packed_rows", b, n, n, k)
        transposed = probe.pack(dtype, "packed_transposed", np.ascontiguousarray(b.T), k, n, k)
        assert rows == transposed, (n, k)


def test_infinities_and_nan_stay_in_their_row_and_column(probe):
    m, n, k = 7, 37, 5
    a, b = np.ones((m, k), np.float32), np.ones((k, n), np.float32)
    a[2, 1], b[3, 20] = np.nan, np.inf
    out = np.empty((m, n), np.float32)
    probe.tile("f32", "packed_rows", a, k, False, b, n, out, n, m, n, k, False)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(out, a @ b)
