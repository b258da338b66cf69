"""The blocked product of every ISA, the emulated bf16 dot included, on sums that are exact."""

import itertools

import numpy as np
import pytest

from omniattn import _kernels as kernels

F64, F32, BF16, F16 = range(4)
NUMPY = {F64: np.float64, F32: np.float32, BF16: np.uint16, F16: np.uint16}
DTYPES = [  # A, B, C
    (F64, F64, F64),
    (F32, F32, F32),
    (BF16, BF16, BF16),
    (BF16, BF16, F32),
    (F16, F16, F16),
    (F32, BF16, F32),
    (F32, F16, F16),
]
SHAPES = [
    (1, 70, 33),
    (4, 65, 5),
    (5, 1, 1),
    (7, 300, 257),
    (100, 130, 515),
    (230, 17, 2),
    (3, 9, 0),
]


def encode(x, dtype):
    if dtype == F16:
        return x.astype(np.float16).view(np.uint16)
    if dtype == BF16:
        return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return x.astype(NUMPY[dtype])


@pytest.mark.parametrize("transposed", list(itertools.product([False, True], repeat=2)), ids=str)
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("isa", kernels.probe_isas())
def test_product_is_exact(isa, dtypes, transposed):
    rng = np.random.default_rng(0)
    for m, n, k in SHAPES:
        # Few nonzero terms keep every result an integer that half types hold exactly.
        a, b = rng.integers(-2, 3, (m, k)), rng.integers(-2, 3, (k, n))
        a[:, rng.random(k) < 1 - 30 / (k + 1)] = 0
        bias, start = rng.integers(-2, 3, n), rng.integers(-2, 3, (m, n))
        for accumulate in (False, True):
            wide = dtypes[2] in (F64, F32)
            if accumulate and not wide:
                continue
            operands = [
                np.ascontiguousarray(encode(x.T if flip else x, d))
                for x, flip, d in ((a, transposed[0], dtypes[0]), (b, transposed[1], dtypes[1]))
            ]
            c = encode(start if accumulate else np.full((m, n), 7), dtypes[2])
            kernels.gemm(
                isa, dtypes, operands[0], transposed[0], operands[1], transposed[1],
                None if accumulate else encode(bias, dtypes[1]), c, k, accumulate,
            )  # fmt: skip
            want = encode(a @ b + (start if accumulate else bias), dtypes[2])
            np.testing.assert_array_equal(c, want, err_msg=f"{m=} {n=} {k=} {accumulate=}")
