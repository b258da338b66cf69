"""Scores, dropout, softmax and rotation as kernels compute them, against plain Python."""

import itertools
import math
import sys

import numpy as np
import pytest

from omniattn import _kernels as kernels
from omniattn.encoding.options import NORMALIZERS, TRANSFORMS, ScoreKind

BIAS, SOFTCAP, SINKS, HEAD_SCALE, SIGMOID, RELU2 = list(ScoreKind)[:6]


CAPS = [ScoreKind[name.upper()] for name in TRANSFORMS]
OF_PRODUCTS = (HEAD_SCALE, ScoreKind.RELATIVE_KEYS, ScoreKind.RELATIVE_QUERIES)


def philox_numpy(counter, key):
    """Philox4x32-10 on arrays of counters (..., 4)."""
    c = [counter[..., n].astype(np.uint64) for n in range(4)]
    k0, k1 = (int(k) for k in key)
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            (p1 >> np.uint64(32)) ^ c[1] ^ np.uint64(k0),
            p1 & low,
            (p0 >> np.uint64(32)) ^ c[3] ^ np.uint64(k1),
            p0 & low,
        ]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack(c, -1)


def test_philox_known_answers():
    ones = 0xFFFFFFFF
    cases = [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([ones] * 4, [ones] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ]
    for counter, key, want in cases:
        assert kernels.philox(counter, key) == want
        assert philox_numpy(np.array(counter), key).tolist() == want


def test_philox_against_numpy():
    rng = np.random.default_rng(1)
    counters = rng.integers(0, 1 << 32, (200, 4))
    key = [0x12345678, 0x9ABCDEF0]
    want = philox_numpy(counters, key)
    assert [kernels.philox(c, key) for c in counters.tolist()] == want.tolist()


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_dropout_bits_follow_the_position(p):
    seed, offset, row, query = -7, 3, 11, 1000
    key = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF]
    j = np.arange(128, 192)
    counter = np.stack([j >> 2, np.full(64, query), np.full(64, row), np.full(64, offset)], -1)
    words = philox_numpy(counter, key)[np.arange(64), j & 3]
    bits = kernels.dropout_keep_bits(p, seed, offset, row, query, 128)
    assert [(bits >> n) & 1 for n in range(64)] == (words >= math.floor(p * 2**32)).tolist()


def test_score_factors():
    factors = [(0.125, 0.0), (0.125, 20.0), (-0.5, 3.0), (0.0, 0.0)]
    for (scale, cap), plain in itertools.product(factors, (True, False)):
        rules = [SOFTCAP] * (cap > 0) + [BIAS] * (not plain)
        pre, post, chain = kernels.make_score(scale, rules, cap)
        x = pre * 1.7
        logit = (post * math.tanh(x) if cap else x) / (math.log2(math.e) if plain else 1)
        want = cap * math.tanh(scale * 1.7 / cap) if cap else scale * 1.7
        assert logit == pytest.approx(want)
        assert pre * chain == pytest.approx(scale)


@pytest.mark.parametrize("kind", ScoreKind)
def test_logits_are_natural_unless_all_weights_are_powers_of_scores(kind):
    pre, _, chain = kernels.make_score(0.125, [kind], 1.0)
    post = kernels.make_score(0.125, [kind] if kind in CAPS else [kind, SOFTCAP], 1.0)[1]
    unit = math.log2(math.e) if kind in (*CAPS, *OF_PRODUCTS) else 1
    assert post == pytest.approx(unit)
    if kind not in CAPS:
        assert (pre, chain) == pytest.approx((0.125 * unit, 1 / unit))


FUNCTIONS = {
    SOFTCAP: np.tanh,
    SIGMOID: lambda x: 1 / (1 + np.exp(-x)),
    RELU2: lambda x: np.maximum(x, 0) ** 2,
}


def test_every_function_of_a_score_is_compared():
    assert set(FUNCTIONS) == {ScoreKind[name.upper()] for name in (*TRANSFORMS, *NORMALIZERS)}


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_functions_of_scores_and_their_derivatives(kind):
    for x in np.linspace(-6, 6, 50):
        value, slope = kernels.score_function(kind, x)
        near, step = FUNCTIONS[kind], 1e-6
        assert value == pytest.approx(near(x), rel=1e-12)
        want = (near(x + step) - near(x - step)) / (2 * step)
        assert slope == pytest.approx(want, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("kind", [SIGMOID, RELU2])
def test_hidden_keys_have_no_weight(kind):
    assert kernels.score_function(kind, -math.inf) == (0, 0)


# First distance of each bucket (spec attention 15), beyond the near ones.
T5_BOTH = {9: 12, 10: 16, 11: 23, 12: 32, 13: 46, 14: 64, 15: 91}


T5_CAUSAL = dict(
    zip(range(17, 32), (19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113), strict=True)
)


@pytest.mark.parametrize("both,near,starts", [(True, 9, T5_BOTH), (False, 17, T5_CAUSAL)])
def test_t5_buckets(both, near, starts):
    starts = {n: n for n in range(near)} | starts
    for distance in range(2000):
        bucket = max(n for n, start in starts.items() if start <= distance)
        assert kernels.t5_bucket(-distance, both, 32, 128) == bucket
        ahead = (bucket + 16) * (distance > 0) if both else 0
        assert kernels.t5_bucket(distance, both, 32, 128) == ahead


def test_rows_of_a_window_table():
    for height, width in ((2, 3), (4, 4)):
        for q, k in itertools.product(range(height * width), repeat=2):
            (yq, xq), (yk, xk) = divmod(q, width), divmod(k, width)
            want = (yq - yk + height - 1) * (2 * width - 1) + xq - xk + width - 1
            assert kernels.window_row(q, k, height, width) == want


def test_softmax_rules_of_an_empty_row():
    inf = math.inf
    assert kernels.softmax_shift(-inf) == 0 and kernels.softmax_shift(2.5) == 2.5
    assert kernels.softmax_normalizer(0.0) == 0 and kernels.softmax_normalizer(4.0) == 0.25
    for rules in ([], [BIAS]):
        assert kernels.softmax_lse(rules, -inf, 0.0, -inf) == (-inf, 0)
        assert kernels.softmax_backward_shift(rules, -inf, 0.0) == (inf, 0)
        assert math.isnan(kernels.softmax_lse(rules, 1.0, math.nan, math.nan)[0])
    assert math.isnan(kernels.softmax_normalizer(math.nan))


@pytest.mark.parametrize("m", [0.0, 1.0, -3.5, 1e9, -1e17, -sys.float_info.max, sys.float_info.max])
@pytest.mark.parametrize("rules, unit", [([BIAS], math.log2(math.e)), ([], 1.0)])
def test_the_backward_finds_m_and_l_of_a_row(rules, unit, m):
    """2^((s - shift) unit + exponent) is e^(s - m) / l of a logit s."""
    lse, tail = kernels.softmax_lse(rules, m, 8.0, math.log(8))
    assert lse == pytest.approx(m * math.log(2) * unit + math.log(8), rel=1e-15)
    shift, exponent = kernels.softmax_backward_shift(rules, lse, tail)
    lost = 1e-15 + 1e-31 * abs(m)  # of ln l, by the difference of m and lse
    assert (m - shift) * unit + exponent == pytest.approx(-3, rel=1e-15, abs=min(3, lost))


def test_rope_pairs_and_rotation():
    assert [kernels.rope_pair(n, 4, True) for n in range(4)] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [kernels.rope_pair(n, 4, False) for n in range(4)] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    # Worked example of the specification: (0.3, 0.2) turned by 0.2 rad.
    x, y = kernels.rope_rotate(0.3, 0.2, math.cos(0.2), math.sin(0.2))
    assert (x, y) == (pytest.approx(0.2543, abs=1e-4), pytest.approx(0.2556, abs=1e-4))


def test_kv_head():
    assert [kernels.kv_head(h, 8, 2) for h in range(8)] == [0] * 4 + [1] * 4
