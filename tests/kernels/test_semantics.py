"""Brute-force properties of csrc/semantics: a rule's answers about ranges are never wrong."""

import itertools
import math
import sys

import numpy as np
import pytest

from omniattn import _kernels as kernels
from omniattn.encoding.masks import (
    ANY_FAR,
    CHUNK_BITS,
    COLUMN_BITS,
    LAYOUTS,
    PARTS,
    GridAxis,
    MaskKind,
)
from omniattn.encoding.options import NORMALISERS, TRANSFORMS, ScoreKind

BOTTOM_RIGHT, TOP_LEFT, KEY_LENGTHS, TENSOR, PREFIX, CHUNK, DOCUMENTS = list(MaskKind)[:7]
DILATED, STRIDED, STRIDED_HEADS, FIXED, EVERY, BLOCKS = list(MaskKind)[7:13]
NEIGHBOURS, GRID = MaskKind.NEIGHBOURS, MaskKind.GRID
BIAS, SOFTCAP, SINKS, HEAD_SCALE, SIGMOID, RELU2 = list(ScoreKind)[:6]
CAPS = [ScoreKind[name.upper()] for name in TRANSFORMS]
RANGES = (BOTTOM_RIGHT, TOP_LEFT, KEY_LENGTHS, PREFIX, CHUNK)  # one query sees one range of keys
B, H = 2, 2


def windows():
    for kind in (BOTTOM_RIGHT, TOP_LEFT):
        for left, right in itertools.product((-1, 0, 1, 5, 40), repeat=2):
            yield [kind, left, right, -1]


#: inner, length, kernel, dilation, stride, causal
AXES = (
    (1, 7, 3, 1, 1, False),
    (1, 7, 4, 1, 3, False),
    (1, 9, 2, 3, 2, True),
    (1, 150, 9, 2, 1, False),
    (3, 4, 2, 1, 1, False),
    (5, 6, 3, 2, 3, False),
    (2, 40, 5, 1, 4, True),
    (70, 3, 1, 2, 1, True),
    (1, 1, 1, 1, 1, False),
    (4, 5, 5, 1, 5, False),
)


def grids():
    for axis in AXES:
        kind, a, b, _ = GridAxis(*axis).rule()
        yield [kind, a, b, -1]


def patterns():
    yield from ([PREFIX, 0, 0, 0], [DOCUMENTS, 0, 0, 3], [DOCUMENTS, 0, 0, 5], [BLOCKS, 0, 0, 7])
    yield from grids()
    for n in (1, 2, 3, 7, 70):
        for near, far in ((0, 0), (0, 1), (1, 3), (2, ANY_FAR)):
            yield [CHUNK, n, near + (far << CHUNK_BITS), -1]
        yield [DILATED, n, 0, -1]
        yield [EVERY, n, 0, -1]
        yield from ([NEIGHBOURS, 3, n, -1], [NEIGHBOURS, 2 * n + 1, 2, -1])
        for m in (0, 1, 2, 5):
            yield [STRIDED, n, m, -1]
            yield [STRIDED_HEADS, n, m, -1]
            yield [FIXED, n, min(m, n), -1]
            yield from ([FIXED, p * n, min(m, n) + (p << COLUMN_BITS), -1] for p in (1, 2, 3))


def sides(tq, tk, seed=0):
    rng = np.random.default_rng(seed)
    lengths = np.array([tk // 2, tk], np.int64)
    dense = rng.random((B, H, tq, tk)) < 0.5
    rows = np.broadcast_to(rng.random((1, 1, 1, tk)) < 0.5, (B, H, tq, tk))
    ordered = [np.sort(rng.integers(0, 4, (B, n))) for n in (tq, tk)]
    mixed = [rng.integers(0, 3, (B, n)) for n in (tq, tk)]
    codes = rng.integers(0, 4, (B, H, -(-tq // 64), -(-tk // 64)), np.int32)
    bits = rng.integers(-(2**63), 2**63, (2, 64), np.int64) & rng.integers(0, 2**63, (2, 64))
    return [lengths, dense, rows, *ordered, *mixed, codes, bits]


def programs():
    yield []
    for w in windows():
        yield w
        yield [*w, KEY_LENGTHS, 0, 0, 0]
    yield [KEY_LENGTHS, 0, 0, 0]
    yield [TENSOR, 0, 0, 1]
    yield [TENSOR, 0, 0, 2]
    yield [BOTTOM_RIGHT, -1, 0, -1, KEY_LENGTHS, 0, 0, 0, TENSOR, 0, 0, 1]
    yield [BOTTOM_RIGHT, 3, 0, -1, TOP_LEFT, 2, 2, -1]
    yield from patterns()
    yield [BOTTOM_RIGHT, -1, 0, -1, FIXED, 4, 1, -1, DOCUMENTS, 0, 0, 3]
    yield [BOTTOM_RIGHT, 6, 6, -1, DILATED, 2, 0, -1]
    rows, columns, *_ = grids()
    yield [*rows, *columns]


def test_every_rule_is_compared():
    compared = {kind for program in programs() for kind in program[::4]}
    assert compared == set(MaskKind) - {*LAYOUTS, *PARTS}


def neighbours(i, size, dilation, tk):
    """The run of `size` keys of i's residue whose ends are least unequally far from i."""
    keys = range(i % dilation, tk, dilation)
    runs = [keys[n : n + size] for n in range(max(len(keys) - size, 0) + 1)]
    return min(runs, key=lambda run: abs(2 * i - run[0] - run[-1]) if run else 0)


def on_axis(i, axis):
    """The coordinates that position i sees along an axis."""
    inner, length, kernel, dilation, stride, causal = axis
    y = i // inner % length
    line = list(range(y % dilation, length, dilation))
    group = [z for z in line if line.index(z) // stride == line.index(y) // stride]
    if causal:
        return [z for z in line[: line.index(y) + 1] if (group[-1] - z) // dilation < kernel]
    middle = line.index(line[min(line.index(group[0]) + stride // 2, len(line) - 1)])
    runs = [line[n : n + kernel] for n in range(len(line) - kernel + 1)]
    # The middle is at place kernel // 2 of its run, or as near to that as the ends allow.
    return min(runs, key=lambda run: abs(line.index(run[0]) + kernel // 2 - middle))


def expected(rules, side, tq, tk):
    """Visibility (B, H, Tq, Tk) by the definitions."""
    q, j = np.arange(tq)[:, None], np.arange(tk)[None, :]
    i, heads = q + tk - tq, np.arange(H)[:, None, None]
    out = np.ones((B, H, tq, tk), bool)
    for kind, a, b, aux in np.reshape(rules, (-1, 4)).tolist():
        if kind in (BOTTOM_RIGHT, TOP_LEFT):
            centre = i if kind == BOTTOM_RIGHT else q
            if a >= 0:
                out &= j >= centre - a
            if b >= 0:
                out &= j <= centre + b
        elif kind in (KEY_LENGTHS, PREFIX):
            out &= (j < side[0][:, None, None, None]) | ((j <= i) & (kind == PREFIX))
        elif kind == TENSOR:
            out &= side[aux]
        elif kind == DOCUMENTS:
            out &= side[aux][:, None, :, None] == side[aux + 1][:, None, None, :]
        elif kind == CHUNK:
            near, far = b % (1 << CHUNK_BITS), b >> CHUNK_BITS
            out &= (i // a - j // a >= near) & ((i // a - j // a <= far) | (far == ANY_FAR))
        elif kind == GRID:
            windows = [(b >> shift) % (1 << 13) for shift in (0, 13, 26)]
            axis = (a % (1 << 20), a >> 20, *windows, b >> 39 == 1)
            seen = [on_axis(x, axis) for x in i[:, 0]]
            out &= np.array([[y // axis[0] % axis[1] in row for y in range(tk)] for row in seen])
        elif kind == DILATED:
            out &= (i - j) % a == 0
        elif kind == STRIDED:
            out &= (i - b < j) | ((i - j) % a == 0)
        elif kind == STRIDED_HEADS:
            out &= np.where(heads % 2 == 0, i - b < j, (i - j) % a == 0)
        elif kind == FIXED:
            n, columns = divmod(b, 1 << COLUMN_BITS)
            first, from_end = heads % max(n, 1) * columns, a - 1 - j % a
            out &= (i // a == j // a) | ((from_end >= first) & (from_end < first + columns))
        elif kind == EVERY:
            out &= (j % a == 0) | (j == i)
        elif kind == NEIGHBOURS:
            out &= np.array(
                [[key in neighbours(x, a, b, tk) for key in range(tk)] for x in i[:, 0]]
            )
        else:
            code = side[aux][:, :, q // 64, j // 64]
            words = side[aux + 1][np.maximum(code - 2, 0), q % 64]
            out &= np.where(code < 2, code == 1, (words >> (j % 64)) & 1 == 1)
    return out


def is_single_range(rules):
    return len(rules) <= 4 and all(kind in RANGES for kind in rules[::4])


def chunks(n, size):
    return [(a, min(a + size, n)) for a in range(0, n, size)]


@pytest.mark.parametrize("tq,tk", [(1, 1), (1, 9), (7, 7), (6, 13), (13, 6)])
def test_rules_against_brute_force(tq, tk):
    side = sides(tq, tk)
    for rules in programs():
        mask = kernels.Mask(rules, side, tq, tk)
        want = expected(rules, side, tq, tk)
        got = np.array([mask.visible(*x) for x in np.ndindex(B, H, tq, tk)]).reshape(want.shape)
        assert (got == want).all(), rules
        check_tiles(rules, mask, want, (1, 3, 8), (1, 4, 8))


@pytest.mark.parametrize("tq,tk", [(150, 200), (70, 300)])
def test_patterns_in_kernel_tiles(tq, tk):
    side = sides(tq, tk)
    for rules in [*patterns(), [BOTTOM_RIGHT, -1, 0, -1, DOCUMENTS, 0, 0, 3]]:
        check_tiles(
            rules, kernels.Mask(rules, side, tq, tk), expected(rules, side, tq, tk), (24,), (16, 64)
        )


def check_tiles(rules, mask, want, query_sizes, key_sizes):
    """Range answers are never wrong, and exact for a rule that gives every query one range."""
    _, _, tq, tk = want.shape
    for b, h, qs, ks in itertools.product(range(B), range(H), query_sizes, key_sizes):
        for q, k in itertools.product(chunks(tq, qs), chunks(tk, ks)):
            tile = want[b, h, slice(*q), slice(*k)]
            verdict = mask.classify(b, h, q, k)
            assert verdict != kernels.TileClass.skip or not tile.any(), rules
            assert verdict != kernels.TileClass.full or tile.all(), rules
            first, last = mask.visible_keys_in(b, h, q, k)
            seen = np.flatnonzero(tile.any(0)) + k[0]
            assert all(first <= j < last for j in seen), rules
            if is_single_range(rules):
                assert (verdict == kernels.TileClass.full) == tile.all(), rules
            if len(rules) == 0:
                assert verdict == kernels.TileClass.full


SKIPPED = {
    "documents": [DOCUMENTS, 0, 0, 3],
    "dilated": [DILATED, 70, 0, -1],
    "fixed": [FIXED, 70, 2, -1],
    "fixed heads": [FIXED, 70, 2 + (3 << COLUMN_BITS), -1],
    "every": [EVERY, 70, 0, -1],
    "blocks": [BLOCKS, 0, 0, 7],
    "grid of rows": [*GridAxis(64, 5, 1).rule()[:3], -1],
    "grid of columns": [*GridAxis(1, 160, 3).rule()[:3], -1],
}


@pytest.mark.parametrize("rules", SKIPPED.values(), ids=SKIPPED.keys())
def test_hidden_tiles_are_skipped(rules):
    """No tile of sparse patterns is visited in vain (each hides some)."""
    tq = tk = 320
    side = sides(tq, tk)
    mask, want = kernels.Mask(rules, side, tq, tk), expected(rules, side, tq, tk)
    hidden = 0
    for b, h, q, k in itertools.product(range(B), range(H), chunks(tq, 16), chunks(tk, 16)):
        if not want[b, h, slice(*q), slice(*k)].any():
            assert mask.classify(b, h, q, k) == kernels.TileClass.skip
            hidden += 1
    assert hidden > 0


@pytest.mark.parametrize("tq,tk", [(1, 9), (7, 7), (6, 13), (13, 6)])
def test_schedule_covers_what_is_visible_and_no_more_than_needed(tq, tk):
    side = sides(tq, tk)
    for rules in programs():
        mask = kernels.Mask(rules, side, tq, tk)
        want = expected(rules, side, tq, tk)
        for b, size in itertools.product(range(B), (1, 4, 5)):
            for q in chunks(tq, 3):
                first, last = mask.key_blocks(b, q, size)
                seen = want[b, :, q[0] : q[1]].any((0, 1))
                outside = [j for j in np.flatnonzero(seen) if not first <= j // size < last]
                assert not outside, rules
                if is_single_range(rules):
                    assert last - first == len({j // size for j in np.flatnonzero(seen)}), rules
            for n in range(-(-tk // size)):
                k = kernels.block(n, size, tk)
                first, last = mask.query_blocks(b, k, 3)
                seen = want[b, :, :, k[0] : k[1]].any((0, 2))
                assert all(first <= i // 3 < last for i in np.flatnonzero(seen)), rules
                if is_single_range(rules):
                    assert last - first == len({i // 3 for i in np.flatnonzero(seen)}), rules


@pytest.mark.parametrize("tq,tk", [(7, 7), (6, 13), (150, 320)])
def test_cursors_visit_every_visible_block_in_order(tq, tk):
    side = sides(tq, tk)
    for rules in programs() if tq < 64 else patterns():
        mask = kernels.Mask(rules, side, tq, tk)
        want = expected(rules, side, tq, tk)
        for b, h, size in itertools.product(range(B), range(H), (3, 64)):
            for walk, seen in ((mask.walk_keys, want[b, h]), (mask.walk_queries, want[b, h].T)):
                rows, columns = seen.shape
                for part in chunks(rows, 24):
                    visited = walk(b, h, part, size)
                    visible = np.flatnonzero(seen[slice(*part)].any(0)) // size
                    assert visited == sorted(set(visited)), rules
                    assert set(visible.tolist()) <= set(visited) <= set(range(-(-columns // size)))


def test_cursors_jump_over_hidden_blocks_of_a_table():
    tq, tk = 192, 1 << 16
    codes = np.zeros((1, 1, 3, tk // 64), np.int32)
    codes[0, 0, 1, [5, 900]] = codes[0, 0, 2, 7] = 1
    mask = kernels.Mask([BLOCKS, 0, 0, 0], [codes, np.zeros((1, 64), np.int64)], tq, tk)
    assert mask.walk_keys(0, 0, (0, 64), 64) == []
    assert mask.walk_keys(0, 0, (64, 160), 64) == [5, 7, 900]
    assert mask.walk_queries(0, 0, (320, 384), 64) == [1]
    assert mask.walk_queries(0, 0, (320, 512), 64) == [1, 2]


def test_visible_bits_hold_64_keys_and_stop_at_the_end():
    tq, tk = 3, 150
    side = sides(tq, tk)
    for rules in programs():
        mask = kernels.Mask(rules, side, tq, tk)
        want = expected(rules, side, tq, tk)
        for b, h, q, key in itertools.product(
            range(B), range(H), range(tq), (0, 64, 100, 128, 192)
        ):
            bits = mask.visible_bits(b, h, q, key)
            got = [(bits >> n) & 1 for n in range(64)]
            row = np.pad(want[b, h, q], (0, 128))[key : key + 64]
            assert got == row.astype(int).tolist(), (rules, q, key)


def test_long_sequences_do_not_overflow():
    n = 1 << 40
    mask = kernels.Mask([BOTTOM_RIGHT, n - 1, 0, -1], [], n, n)
    assert mask.visible_keys(0, (n - 1, n)) == (0, n)
    assert mask.classify(0, 0, (0, 64), (64, 128)) == kernels.TileClass.skip


def test_parameters_without_a_meaning_are_refused():
    wrong = [[CHUNK, 0, 0, -1], [DILATED, -1, 0, -1], [STRIDED, 3, -1, -1], [FIXED, 2, 3, -1]]
    wrong += [[CHUNK, 3, 1, -1], [CHUNK, 3, -1, -1], [GRID, 0, 0, -1]]
    for axis in ((1, 4, 5), (1, 4, 3, 2), (1, 4, 2, 1, 3), (0, 4, 1), (1, 4, 0)):
        wrong.append([*GridAxis(*axis).rule()[:3], -1])
    heads = [FIXED, 2, 1 + (3 << COLUMN_BITS), -1]
    for rules in (*wrong, heads, [EVERY, 0, 0, -1], [BOTTOM_RIGHT, 1 << 40, 0, -1]):
        with pytest.raises(ValueError, match="meaning"):
            kernels.Mask(rules, [], 4, 4)


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
    unit = math.log2(math.e) if kind in (*CAPS, HEAD_SCALE) else 1
    assert post == pytest.approx(unit)
    if kind not in CAPS:
        assert (pre, chain) == pytest.approx((0.125 * unit, 1 / unit))


FUNCTIONS = {
    SOFTCAP: np.tanh,
    SIGMOID: lambda x: 1 / (1 + np.exp(-x)),
    RELU2: lambda x: np.maximum(x, 0) ** 2,
}


def test_every_function_of_a_score_is_compared():
    assert set(FUNCTIONS) == {ScoreKind[name.upper()] for name in (*TRANSFORMS, *NORMALISERS)}


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
    assert kernels.softmax_normaliser(0.0) == 0 and kernels.softmax_normaliser(4.0) == 0.25
    for rules in ([], [BIAS]):
        assert kernels.softmax_lse(rules, -inf, 0.0, -inf) == (-inf, 0)
        assert kernels.softmax_backward_shift(rules, -inf) == inf
        assert math.isnan(kernels.softmax_lse(rules, 1.0, math.nan, math.nan)[0])
    assert math.isnan(kernels.softmax_normaliser(math.nan))
    lse, tail = kernels.softmax_lse([], 1.0, 8.0, math.log(8))
    assert lse == pytest.approx(4 * math.log(2)) and tail == 0


@pytest.mark.parametrize("m", [0.0, -3.5, 1e9, -1e17, -sys.float_info.max, sys.float_info.max])
def test_lse_and_its_tail_hold_m_and_l(m):
    lse, tail = kernels.softmax_lse([BIAS], m, 8.0, math.log(8))
    assert lse == m + math.log(8)
    assert (lse - m) + tail == pytest.approx(math.log(8), rel=1e-15, abs=1e-15)
    assert kernels.softmax_backward_shift([BIAS], lse) == lse


def test_rope_pairs_and_rotation():
    assert [kernels.rope_pair(n, 4, True) for n in range(4)] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [kernels.rope_pair(n, 4, False) for n in range(4)] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    # Worked example of the specification: (0.3, 0.2) turned by 0.2 rad.
    x, y = kernels.rope_rotate(0.3, 0.2, math.cos(0.2), math.sin(0.2))
    assert (x, y) == (pytest.approx(0.2543, abs=1e-4), pytest.approx(0.2556, abs=1e-4))


def test_kv_head():
    assert [kernels.kv_head(h, 8, 2) for h in range(8)] == [0] * 4 + [1] * 4
