"""Floating-point operations of native ops, by their arguments: one entry for each op with products.

A multiply-add is two operations. Recurrences are counted in their recurrent form: each product of a
state (K, V) with a vector, and each outer product added to it, is K V multiply-adds per token and
head. Elementwise work (norms, activations, rotations, decays, softmax) is not counted, as in the
literature. A mixer made of ops in this table needs no entry; a new op with products adds one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from omniattn.calculate.pairs import Pairs, pairs_of_rules
from omniattn.encoding.attention import decode
from omniattn.encoding.masks import LAYOUTS
from omniattn.encoding.options import ScoreKind

#: Arguments of a call by their names in the schema.
Given: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class Cost:
    """Cost of one call of an op.

    Args:
        flops: floating-point operations over the visible pairs.
        dense: operations over all pairs Tq Tk, as eager attention computes them.
        scores: elements of the score matrices, B Hq Tq Tk.
        pairs: visible pairs, summed over batch and heads.
        reach: distance of the farthest key that a query reads; -1 for the whole past; None for an
            op that mixes no tokens.
    """

    flops: int
    dense: int
    scores: int = 0
    pairs: int = 0
    reach: int | None = None


def _products(flops: int) -> Cost:
    return Cost(flops, flops)


def _recurrence(macs: int) -> Cost:
    return Cost(2 * macs, 2 * macs, reach=-1)


def _attention_pairs(given: Given) -> Pairs:
    q, k = given["q"], given["k"]
    tq, tk = q.shape[1], k.shape[1]
    layout, options = decode(
        given["aux"] or (), given["mask"] or (), given["score"] or (), given["params"], (tq, tk)
    )
    if layout is not None and layout[0] in LAYOUTS:
        raise NotImplementedError("calculate: packed and paged calls are not counted")
    rules = options["mask"].rules()
    return pairs_of_rules(rules, tq, tk, batch=q.shape[0], heads=q.shape[2])


def _terms(score: list[int]) -> int:
    """Returns the number of products of queries or keys with rows of distances."""
    kinds = score[::3] if ScoreKind.PROGRAM not in score[::3] else ()
    return sum(kind in (ScoreKind.RELATIVE_KEYS, ScoreKind.RELATIVE_QUERIES) for kind in kinds)


def _scored(q: Tensor, keys: int, width: int, found: Pairs) -> Cost:
    """Cost of `width` multiply-adds for each pair of q (B, Tq, Hq, D) with `keys` keys."""
    scores = q.shape[0] * q.shape[1] * q.shape[2] * keys
    return Cost(2 * width * found.count, 2 * width * scores, scores, found.count, found.reach)


def _attention(given: Given) -> Cost:
    """2 (D + Dv) operations for each visible pair, and 2 D for rows of distances."""
    q, k, v = given["q"], given["k"], given["v"]
    width = q.shape[3] * (1 + _terms(given["score"] or [])) + v.shape[3]
    return _scored(q, k.shape[1], width, _attention_pairs(given))


def _attention_weights(given: Given) -> Cost:
    q, k = given["q"], given["k"]
    return _scored(q, k.shape[1], q.shape[3], _attention_pairs(given))


def _causal_pairs(tq: int, tk: int, causal: bool) -> int:
    return sum(range(tk - tq + 1, tk + 1)) if causal else tq * tk


def _deltaformer(given: Given) -> Cost:
    """K + V multiply-adds for each pair."""
    q, k, v = given["q"], given["k"], given["v"]
    pairs = q.shape[0] * q.shape[2] * _causal_pairs(q.shape[1], k.shape[1], True)
    macs = pairs * (q.shape[3] + v.shape[3])
    return Cost(2 * macs, 2 * macs, pairs=pairs, reach=-1)


def _selected(given: Given) -> Cost:
    """Attention to the selected blocks, one of which is the query's own if it is causal."""
    q, k, v, size = given["q"], given["k"], given["v"], given["block_size"]
    tq, tk, chosen = q.shape[1], k.shape[1], given["indices"].shape[3]
    count = 0
    for i in range(tk - tq, tk):
        last = i + 1 if given["causal"] else tk
        own = (last - 1) % size + 1
        count += min(last, (chosen - 1) * size + own)
    found = Pairs(q.shape[0] * q.shape[2] * count, tk - 1)
    return _scored(q, tk, q.shape[3] + v.shape[3], found)


def _indexer(given: Given) -> Cost:
    """Scores of all pairs: D multiply-adds for each head, and the weighted sum over heads."""
    q, k = given["q"], given["k"]
    count = q.shape[0] * q.shape[2] * _causal_pairs(q.shape[1], k.shape[1], given["causal"])
    weighed = given["w"] is not None
    return _scored(q, k.shape[1], q.shape[3] + weighed, Pairs(count, k.shape[1] - 1))


def _glu_mlp(given: Given) -> Cost:
    rows = given["x"].numel() // given["x"].shape[-1]
    weights = (given[f"{name}_weight"] for name in ("gate", "up", "down"))
    return _products(2 * rows * sum(w.numel() for w in weights if w is not None))


def _experts(given: Given) -> Cost:
    """2 operations for each weight of each chosen expert of each token."""
    each = given["up"][0].numel() + given["down"][0].numel()
    return _products(2 * given["index"].numel() * each)


def _matrix_state(given: Given) -> Cost:
    """2 K V multiply-adds (write, read), 3 with the delta rule, 4 with a low-rank transition."""
    k, v = given["k"], given["v"]
    size = k.shape[-1] * v.shape[-1]
    times = 3 if given.get("delta") else 4 if given.get("a") is not None else 2
    divided = k.shape[-1] if given.get("normalize") else 0
    return _recurrence(math.prod(v.shape[:-1]) * (times * size + divided))


def _log_linear(given: Given) -> Cost:
    """K V multiply-adds for a token's own state and for each bit of its position that is 1."""
    k, v = given["k"], given["v"]
    states = sum(1 + t.bit_count() for t in range(k.shape[1]))
    return _recurrence(v.shape[0] * v.shape[2] * v.shape[3] * k.shape[3] * states)


def _mesa(given: Given) -> Cost:
    """2 K^2 multiply-adds for each step of conjugate gradients."""
    return _recurrence(2 * given["q"].numel() * given["q"].shape[3] * given["max_iterations"])


def _fast_weights(given: Given) -> Cost:
    """3 products of a token with K x V weights, 2 more with momentum, and 2 with each token of half
    a mini-batch."""
    k, v = given["q"].shape[3], given["v"].shape[3]
    inside = min(given["mini_batch_size"], 64) * (k + v) / 2
    tokens = math.prod(given["q"].shape[:3])
    return _recurrence(int(tokens * (k * v * (3 if given["descent"] else 5) + inside)))


def _memory_mlp(given: Given) -> Cost:
    """7 products of a token with the matrices of an MLP, 3 with each token of half a mini-batch."""
    q, v, size = given["q"], given["v"], given["mini_batch_size"]
    widths = [q.shape[3], *given["hidden"], v.shape[3]]
    inside = sum(size * (rows + columns) for rows, columns in itertools.pairwise(widths))
    return _recurrence(math.prod(q.shape[:3]) * (7 * given["weights"].shape[2] + inside))


def _atlas(given: Given) -> Cost:
    """As `_fast_weights`, with the products of keys for each window, and two powers and a product
    for each step of Newton and Schulz."""
    q, v, window = given["q"], given["v"], given["step"].shape[3]
    k, width, size = q.shape[3], v.shape[3], given["mini_batch_size"]
    tokens, each = math.prod(q.shape[:3]), min(k, width)
    keys = (size + window - 1) / size
    if steps := given.get("newton_schulz_steps"):
        inside = k * width * (2 + (keys + 1) * size) + steps * each * (2 * k * width + each**2)
    else:
        inside = k * width * (2 + 3 * keys) + size * keys * (k + width)
    return _recurrence(int(tokens * inside))


def _sparsemax(given: Given) -> Cost:
    """2 products of each query and each key."""
    q, k, v = given["q"], given["k"], given["v"]
    pairs = q.shape[0] * q.shape[2] * q.shape[1] * k.shape[1]
    return _products(2 * pairs * (q.shape[3] + v.shape[3]))


def _parallax(given: Given) -> Cost:
    """3 products of each query and each key."""
    q, k, v = given["q"], given["k"], given["v"]
    pairs = q.shape[0] * q.shape[2] * q.shape[1] * k.shape[1]
    return _products(2 * pairs * (2 * q.shape[3] + v.shape[3]))


def _multi_token(given: Given) -> Cost:
    """2 products of each query and each key, and a convolution and a mix of heads."""
    q, k, v, weight = given["q"], given["k"], given["v"], given["weight"]
    pairs = q.shape[0] * q.shape[2] * q.shape[1] * k.shape[1]
    taps = weight.shape[1] * weight.shape[2] + given["head_weight"].shape[2]
    return _products(2 * pairs * (q.shape[3] + v.shape[3] + taps))


def _selective_scan(given: Given) -> Cost:
    return _recurrence(2 * given["u"].numel() * given["B"].shape[-1])


def _ssd_step(given: Given) -> Cost:
    return _recurrence(2 * given["x"].numel() * given["B"].shape[-1])


def _slstm(given: Given) -> Cost:
    return _recurrence(math.prod(given["x"].shape[:2]) * given["r"].numel())


def _convolution(given: Given) -> Cost:
    x, weight = given["x"], given["weight"]
    flops = 2 * (x.numel() // weight.shape[0]) * weight.numel()
    return Cost(flops, flops, reach=weight.shape[-1] - 1)


def _filters(given: Given) -> Cost:
    """A multiply-add for each channel and tap of a token."""
    x, taps = given["x"], given["taps"]
    flops = 2 * x.numel() * taps.shape[-1]
    return Cost(flops, flops, reach=taps.shape[-1] - 1)


def _vandermonde(given: Given) -> Cost:
    """Kernel of length L from N complex modes: a complex multiply-add is 8 operations."""
    flops = 8 * (given["c"].numel() // 2) * int(given["length"])
    return Cost(flops, flops, reach=-1)


def _cauchy(given: Given) -> Cost:
    """Sums of L numbers over N poles and their conjugates, 8 operations for each term."""
    terms = 2 * (given["v"].numel() // 2) * given["z"].shape[0]
    return Cost(8 * terms, 8 * terms, reach=-1)


def _linear(given: Given) -> Cost:
    x, weight = given["x"], given["weight"]
    return _products(2 * (x.numel() // weight.shape[-1]) * weight.numel())


def _sequential(given: Given) -> Cost:
    """An elementwise recurrence."""
    return Cost(0, 0, reach=-1)


#: Op -> its cost; names without the suffixes of variants.
COSTS: dict[str, Callable[[Given], Cost]] = {
    "attention": _attention,
    "attention_int8": _attention,
    "attention_weights": _attention_weights,
    "attention_select": _attention_weights,
    "selected_attention": _selected,
    "dsa_indexer": _indexer,
    "glu_mlp": _glu_mlp,
    "moe": _experts,
    "recurrence": _matrix_state,
    "log_linear_attention": _log_linear,
    "mesa_net": _mesa,
    "mesa_step": _mesa,
    "fast_weights": _fast_weights,
    "atlas_linear": _atlas,
    "atlas_orthogonal": _atlas,
    "titans_mlp": _memory_mlp,
    "deltaformer_attention": _deltaformer,
    "sparsemax_attention": _sparsemax,
    "multi_token_attention": _multi_token,
    "parallax_attention": _parallax,
    "selective_scan": _selective_scan,
    "ssd": _ssd_step,
    "slstm": _slstm,
    "causal_conv1d": _convolution,
    "dynamic_conv1d": _filters,
    "vandermonde": _vandermonde,
    "cauchy": _cauchy,
    "linear": _linear,
    "linear_cross_entropy": _linear,
    "linear_scan": _sequential,
    "rwkv4": _sequential,
    "exponential_gates": _sequential,
    "mamba3_inputs": _sequential,
}
#: Ops without products, which mix no tokens.
ELEMENTWISE = frozenset(
    (
        *("norm", "add_norm", "gated_norm", "norm_rope", "rope", "top_k", "glu", "activate"),
        *("cross_entropy", "dropout", "uniform_like"),
    )
)


def op_cost(name: str, given: Given) -> Cost:
    """Returns the cost of one call of a native op.

    Raises:
        NotImplementedError: the op is neither in `COSTS` nor in `ELEMENTWISE`.
    """
    base = name
    for suffix in ("_only", "_raw", "_"):
        base = base.removesuffix(suffix)
    if base in ELEMENTWISE:
        return Cost(0, 0)
    if base not in COSTS:
        raise NotImplementedError(f"calculate: omniattn::{name} has no entry in op_costs.COSTS")
    return COSTS[base](given)
