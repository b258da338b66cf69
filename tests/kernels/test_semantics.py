"""Brute-force properties of csrc/semantics: a rule's answers about ranges are never wrong."""

import itertools

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

BOTTOM_RIGHT, TOP_LEFT, KEY_LENGTHS, TENSOR, PREFIX, CHUNK, DOCUMENTS = list(MaskKind)[:7]
DILATED, STRIDED, STRIDED_HEADS, FIXED, EVERY, BLOCKS = list(MaskKind)[7:13]
NEIGHBORS, GRID, POOLED = MaskKind.NEIGHBORS, MaskKind.GRID, MaskKind.POOLED
# One query sees one range of keys.
RANGES = (BOTTOM_RIGHT, TOP_LEFT, KEY_LENGTHS, PREFIX, CHUNK, POOLED)
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
        yield from ([POOLED, n, m, -1] for m in (-9, 0, 4))
        yield [DILATED, n, 0, -1]
        yield [EVERY, n, 0, -1]
        yield from ([NEIGHBORS, 3, n, -1], [NEIGHBORS, 2 * n + 1, 2, -1])
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
    assert compared == set(MaskKind) - {*LAYOUTS, *PARTS, MaskKind.OWN_KERNELS}


def neighbors(i, size, dilation, tk):
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
        elif kind == POOLED:
            out &= j * a + b <= q
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
        elif kind == NEIGHBORS:
            seen = [neighbors(x, a, b, tk) for x in i[:, 0]]
            out &= np.array([[key in run for key in range(tk)] for run in seen])
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


def bits(row):
    """An integer whose bit n is row[n]."""
    return int.from_bytes(np.packbits(row, bitorder="little").tobytes(), "little")


def check_tiles(rules, mask, want, query_sizes, key_sizes):
    """Range answers are never wrong, and exact for a rule that gives every query one range."""
    _, _, tq, tk = want.shape
    for b, h, size in itertools.product(range(B), range(H), query_sizes):
        for q in chunks(tq, size):
            rows = want[b, h, slice(*q)]
            seen_by_any, seen_by_all = bits(rows.any(0)), bits(rows.all(0))
            for k in itertools.chain.from_iterable(chunks(tk, size) for size in key_sizes):
                tile = (1 << k[1]) - (1 << k[0])
                full, seen = seen_by_all & tile == tile, seen_by_any & tile
                verdict = mask.classify(b, h, q, k)
                assert verdict != kernels.TileClass.skip or not seen, rules
                assert verdict != kernels.TileClass.full or full, rules
                first, last = mask.visible_keys_in(b, h, q, k)
                assert not seen or (seen & -seen).bit_length() > first, rules
                assert not seen or seen.bit_length() <= last, rules
                if is_single_range(rules):
                    assert (verdict == kernels.TileClass.full) == full, rules
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
    wrong += [[CHUNK, 3, 1, -1], [CHUNK, 3, -1, -1], [GRID, 0, 0, -1], [POOLED, 0, 0, -1]]
    for axis in ((1, 4, 5), (1, 4, 3, 2), (1, 4, 2, 1, 3), (0, 4, 1), (1, 4, 0)):
        wrong.append([*GridAxis(*axis).rule()[:3], -1])
    heads = [FIXED, 2, 1 + (3 << COLUMN_BITS), -1]
    for rules in (*wrong, heads, [EVERY, 0, 0, -1], [BOTTOM_RIGHT, 1 << 40, 0, -1]):
        with pytest.raises(ValueError, match="meaning"):
            kernels.Mask(rules, [], 4, 4)
