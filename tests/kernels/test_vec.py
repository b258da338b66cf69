"""SIMD functions and conversions of every ISA, element by element, against fp64 and numpy."""

import math

import numpy as np
import pytest

from omniattn import _kernels as kernels

NUMPY = {"f64": np.float64, "f32": np.float32, "bf16": np.uint16, "f16": np.uint16}


@pytest.fixture(params=kernels.probe_isas())
def probe(request):
    return kernels.Probe(request.param)


def apply(probe, function, dtype, x):
    y = np.empty_like(x)
    probe.map(function, dtype, x, y, x.size)
    return y


def widen(bits, dtype):
    if dtype == "f16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float32_samples(low, high, count=200_000, seed=0):
    """Values in [low, high]: half of them uniform, half with uniform bit patterns."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, count, dtype=np.uint32).view(np.float32)
    bits = bits[np.isfinite(bits) & (bits >= low) & (bits <= high)]
    uniform = rng.uniform(max(low, -1e30), min(high, 1e30), count)
    return np.concatenate([uniform.astype(np.float32), bits])


def ulp_error(y, exact):
    """Distance in units in the last place of the float32 next to `exact`."""
    with np.errstate(over="ignore"):
        nearest = exact.astype(np.float32)
    ordinary = np.isfinite(nearest)
    np.testing.assert_array_equal(y[~ordinary], nearest[~ordinary])
    unit = np.spacing(np.abs(nearest[ordinary])).astype(np.float64)
    return np.abs(y[ordinary].astype(np.float64) - exact[ordinary]) / unit


NORMAL = np.vectorize(lambda x: math.erfc(-x / math.sqrt(2)) / 2, otypes=[np.float64])
FUNCTIONS = {  # function: (fp64 definition, from, to, bound in ULP)
    "exp": (np.exp, -110.0, 95.0, 2.0),
    "exp2": (np.exp2, -160.0, 130.0, 3.5),
    "log": (np.log, 1e-45, 3.4e38, 2.0),
    "tanh": (np.tanh, -1e30, 1e30, 4.0),
    "normal": (NORMAL, 0.0, 1e30, 5.0),
    "sigmoid": (lambda x: 1 / (1 + np.exp(-x)), -87.0, 1e30, 4.0),
    "sqrt": (np.sqrt, 0.0, 3.4e38, 0.5),
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_float32_function_within_ulps(probe, function):
    exact, low, high, bound = FUNCTIONS[function]
    dense = np.linspace(max(low, -8), min(high, 8), 100_001, dtype=np.float32)
    x = np.concatenate([float32_samples(low, high), dense])
    with np.errstate(all="ignore"):
        reference = exact(x.astype(np.float64))
    assert ulp_error(apply(probe, function, "f32", x), reference).max() <= bound


@pytest.mark.parametrize("function", ["sin", "cos"])
def test_sines_of_any_angle(probe, function):
    exact = {"sin": np.sin, "cos": np.cos}[function]
    near = np.linspace(-np.pi / 4, np.pi / 4, 100_001).astype(np.float32)
    assert (
        ulp_error(apply(probe, function, "f32", near), exact(near.astype(np.float64))).max() <= 1.5
    )
    multiples = (np.arange(-5300, 5300) * np.pi / 2).astype(np.float32)
    some = [float32_samples(-high, high, 20_000) for high in (8.0, 1e3, 8192.0, 8200.0, 1e30)]
    x = np.concatenate([multiples, *some])
    error = np.abs(apply(probe, function, "f32", x) - exact(x.astype(np.float64)))
    assert error.max() <= 2**-23


def test_left_tail_of_the_normal_distribution_keeps_its_digits(probe):
    x = np.linspace(-12, 0, 100_001, dtype=np.float32)
    exact = NORMAL(x.astype(np.float64))
    error = np.abs(apply(probe, "normal", "f32", x) / exact - 1)
    assert (error <= 2**-21 + 2**-25 * x.astype(np.float64) ** 2).all()


def test_exp2_is_exact_at_integers(probe):
    whole = np.arange(-126, 128, dtype=np.float32)
    powers = np.exp2(whole.astype(np.float64))
    np.testing.assert_array_equal(apply(probe, "exp2", "f32", whole), powers)


INF, NAN = math.inf, math.nan
SPECIAL = {
    "exp": [(-INF, 0), (INF, INF), (NAN, NAN), (0, 1), (-1e4, 0), (1e4, INF)],
    "exp2": [(-INF, 0), (INF, INF), (NAN, NAN), (0, 1), (-1e4, 0), (1e4, INF)],
    "log": [(0, -INF), (-0.0, -INF), (INF, INF), (NAN, NAN), (-1, NAN), (-INF, NAN), (1, 0)],
    "tanh": [(-INF, -1), (INF, 1), (NAN, NAN), (0, 0), (-0.0, -0.0), (1e-40, 1e-40)],
    "normal": [(-INF, 0), (INF, 1), (NAN, NAN), (-1e30, 0), (1e30, 1)],
    "sigmoid": [(-INF, 0), (INF, 1), (NAN, NAN), (0, 0.5)],
    "sqrt": [(INF, INF), (NAN, NAN), (-1, NAN), (0, 0), (-0.0, -0.0)],
    "abs": [(-INF, INF), (NAN, NAN), (-0.0, 0.0), (-3, 3)],
    "negate": [(INF, -INF), (NAN, NAN), (0.0, -0.0), (-0.0, 0.0)],
    "round": [(0.5, 0), (1.5, 2), (-2.5, -2), (-0.25, -0.0), (INF, INF), (NAN, NAN), (3e9, 3e9)],
    "sin": [(0, 0), (INF, NAN), (-INF, NAN), (NAN, NAN)],
    "cos": [(0, 1), (INF, NAN), (-INF, NAN), (NAN, NAN)],
    "floor": [(0.5, 0), (-0.5, -1), (-2, -2), (-INF, -INF), (NAN, NAN), (3e9, 3e9)],
}


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("function", SPECIAL)
def test_special_values(probe, function, dtype):
    x, want = np.array(SPECIAL[function], NUMPY[dtype]).T.copy()
    got = apply(probe, function, dtype, x)
    np.testing.assert_array_equal(got, want)
    zero = want == 0
    if function in ("tanh", "sqrt", "abs", "negate"):
        np.testing.assert_array_equal(np.signbit(got[zero]), np.signbit(want[zero]))


@pytest.mark.parametrize("function", ["exp", "exp2", "log", "tanh", "normal", "sigmoid"])
def test_float64_functions(probe, function):
    x = np.linspace(0.01, 20, 1001)
    exact = FUNCTIONS[function][0](x)
    np.testing.assert_allclose(apply(probe, function, "f64", x), exact, rtol=1e-15)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_every_half_survives_a_round_trip(probe, dtype):
    bits = np.arange(2**16, dtype=np.uint16)
    back = apply(probe, "copy", dtype, bits)
    value, returned = widen(bits, dtype), widen(back, dtype)
    number = ~np.isnan(value)
    np.testing.assert_array_equal(back[number], bits[number])
    assert np.isnan(returned[~number]).all()


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_narrowing_rounds_to_nearest_even(probe, dtype):
    """-x of a half is exact, so narrowing is seen through exp, whose fp32 result is known."""
    x = np.arange(2**16, dtype=np.uint16)
    x = x[np.isfinite(widen(x, dtype))]
    fp32 = apply(probe, "exp", "f32", widen(x, dtype))
    if dtype == "f16":
        with np.errstate(over="ignore"):
            want = fp32.astype(np.float16).view(np.uint16)
    else:
        bits = fp32.view(np.uint32)
        want = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    np.testing.assert_array_equal(apply(probe, "exp", dtype, x), want)


@pytest.mark.parametrize("dtype", NUMPY)
def test_partial_vectors_leave_the_rest_alone(probe, dtype):
    lanes = 64
    x = np.arange(1, lanes + 1).astype(NUMPY[dtype])
    for n in range(lanes):
        y = np.full(lanes, 7777, NUMPY[dtype])
        probe.map("copy", dtype, x, y, n)
        np.testing.assert_array_equal(y[:n], x[:n])
        assert (y[n:] == 7777).all()


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_reductions(probe, dtype):
    x = np.random.default_rng(0).integers(-99, 99, 256).astype(NUMPY[dtype])
    assert probe.reduce(dtype, x) == (x.sum(), x.max())
