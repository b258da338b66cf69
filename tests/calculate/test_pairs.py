"""Pairs of masks against those of their dense form."""

import pytest
import torch

from omniattn import calculate
from omniattn.calculate.pairs import pairs_of_rules
from omniattn.calculate.patterns import pattern_counts, selected_pairs
from omniattn.functional import masks

MASKS = {
    "causal": masks.Causal(),
    "window": masks.SlidingWindow(3, 0),
    "both sides": masks.SlidingWindow(2, 4),
    "chunked": masks.Chunked(5),
    "chunks before": masks.Chunked(5, back=(1, 2)),
    "prefix": masks.PrefixLM(torch.tensor([4])),
    "lengths": masks.KeyLengths(torch.tensor([6])),
    "window in chunks": masks.SlidingWindow(3, 0) & masks.Chunked(5),
    "dilated": masks.Dilated(3, 2),
    "strided": masks.Strided(4, 2),
    "fixed": masks.Fixed(4, 1),
    "global": masks.hub_spoke(2, (0, 7)),
    "representatives": masks.deterministic_sparse(3, 2),
}


@pytest.mark.parametrize("sizes", [(13, 13), (5, 13), (1, 13), (13, 0)])
@pytest.mark.parametrize("name", MASKS)
def test_pairs_are_those_of_the_dense_mask(name, sizes):
    tq, tk = sizes
    dense = MASKS[name].dense(tq, tk).expand(1, 1, tq, tk)
    assert calculate.pairs(MASKS[name], tq, tk, heads=3) == 3 * int(dense.sum())


@pytest.mark.parametrize("name", [n for n in MASKS if n not in ("global", "representatives")])
def test_reach_is_the_distance_of_the_farthest_key(name):
    tq, tk = 9, 13
    seen = MASKS[name].dense(tq, tk).expand(1, 1, tq, tk)[0, 0]
    distance = (torch.arange(tq)[:, None] + tk - tq - torch.arange(tk))[seen]
    assert pairs_of_rules(MASKS[name].rules(), tq, tk).reach == max(0, int(distance.max()))


def test_heads_with_patterns_of_their_own():
    mask = masks.Strided(4, 2, split_heads=True)
    assert calculate.pairs(mask, 20, heads=6) == int(mask.dense(20, 20, heads=6).sum())


def test_a_long_sequence_takes_no_time():
    assert calculate.pairs(masks.Causal(), 10**6) == 10**6 * (10**6 + 1) // 2


@pytest.mark.parametrize("query", [0, 3, 40])
@pytest.mark.parametrize("name", ["causal", "window", "dilated", "representatives"])
def test_keys_of_a_query(name, query):
    row = MASKS[name].dense(query + 1, query + 1).reshape(-1, query + 1)[-1]
    assert calculate.keys_of(MASKS[name], query).equal(row.nonzero().flatten())


def test_counts_of_patterns():
    found = {count.name: count for count in pattern_counts(300)}
    assert len(found) > 8
    assert found["causal"].pairs == 300 * 301 // 2
    for count in found.values():
        assert 0 < count.last <= 300
        assert count.density == count.pairs / 300**2
    assert selected_pairs(300, 16) == sum(min(16, i + 1) for i in range(300))


def test_bad_input_is_named():
    with pytest.raises(TypeError, match=r"pairs: mask must be a mask .* got mask=3"):
        calculate.pairs(3, 4)
    with pytest.raises(ValueError, match=r"pairs: queries must be .* got queries=-1"):
        calculate.pairs(masks.Causal(), -1)
    with pytest.raises(ValueError, match=r"keys_of: query must be .* got query=-1"):
        calculate.keys_of(masks.Causal(), -1)
