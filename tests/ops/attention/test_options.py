"""Meaning of each option of attention, pair by pair in Python floats. Kernels and reference share
one encoding, so that comparing them would not show a mistake in it."""

from __future__ import annotations

import inspect
import math
import typing

import pytest
import torch

from omniattn import functional, reference
from omniattn.encoding.options import AttentionOptions, Options, WeightOptions
from omniattn.functional.scores import DistanceBias, DistanceRows
from omniattn.reference.layers import philox

B, TQ, TK, HEADS, KV_HEADS, D = 2, 3, 5, 4, 2, 4
random = torch.Generator().manual_seed(0)


def normal(*shape):
    return torch.randn(shape, generator=random, dtype=torch.float64)


Q, K, V = normal(B, TQ, HEADS, D), normal(B, TK, KV_HEADS, D), normal(B, TK, KV_HEADS, 3)
MASK = torch.rand(B, HEADS, TQ, TK, generator=random) < 0.6
MASK[..., 0] = True
BIAS, SLOPES, TABLE = normal(B, HEADS, TQ, TK), normal(B, HEADS).abs(), normal(4, HEADS)
ROWS = normal(4, HEADS, D)
SINKS, FACTORS, SEED = normal(HEADS), normal(HEADS), torch.tensor([7, 11])
KEEP = philox.attention_keep(B, HEADS, TQ, TK, 0.4, SEED)


def softmax(row, h):
    total = sum(map(math.exp, row.values()))
    return {j: math.exp(s) / total for j, s in row.items()}


def softmax_with_sink(row, h):
    total = sum(map(math.exp, row.values())) + math.exp(SINKS[h])
    return {j: math.exp(s) / total for j, s in row.items()}


def distance(i, j):
    """Distance from query i, at position i + Tk - Tq, to key j."""
    return j - (i + 2)


def row(i, j):
    """Returns the table row (0 to 3) of a pair; row 2 is distance 0."""
    return min(max(distance(i, j) + 2, 0), 3)


#: By option: its value, and what it changes, of: `seen(b, h, i, j)`, `logit(dot, b, h, i, j)`,
#: `weigh(row, h)`, `keep(b, h, i, j)`.
MEANING = {
    "causal": (True, {"seen": lambda b, h, i, j: distance(i, j) <= 0}),
    "window_size": ((1, 0), {"seen": lambda b, h, i, j: -1 <= distance(i, j) <= 0}),
    "mask": (MASK, {"seen": lambda *at: MASK[at]}),
    "bias": (BIAS, {"logit": lambda dot, *at: dot / 2 + BIAS[at]}),
    "scale": (0.3, {"logit": lambda dot, *at: 0.3 * dot}),
    "softcap": (1.5, {"logit": lambda dot, *at: 1.5 * math.tanh(dot / 2 / 1.5)}),
    "alibi_slopes": (
        SLOPES,
        {"logit": lambda dot, b, h, i, j: dot / 2 - SLOPES[b, h] * abs(distance(i, j))},
    ),
    "relative": (
        DistanceBias(TABLE, 2),
        {"logit": lambda dot, b, h, i, j: dot / 2 + TABLE[row(i, j), h]},
    ),
    "relative_keys": (
        DistanceRows(ROWS, 2),
        {"logit": lambda dot, b, h, i, j: (dot + float(Q[b, i, h] @ ROWS[row(i, j), h])) / 2},
    ),
    "relative_queries": (
        DistanceRows(ROWS, -2),
        {"logit": lambda dot, b, h, i, j: (dot + float(K[b, j, h // 2] @ ROWS[row(i, j), h])) / 2},
    ),
    "sinks": (SINKS, {"weigh": softmax_with_sink}),
    "head_scale": (FACTORS, {"logit": lambda dot, b, h, i, j: FACTORS[h] * dot / 2}),
    "normalizer": (
        "sigmoid",
        {"weigh": lambda row, h: {j: 1 / (1 + math.exp(-s)) for j, s in row.items()}},
    ),
    "score_mod": (
        lambda s, b, h, q, k: torch.tanh(s) * (k + 1) - FACTORS[h] * b,
        {"logit": lambda dot, b, h, i, j: math.tanh(dot / 2) * (j + 1) - FACTORS[h] * b},
    ),
    "dropout_p": (0.4, {"keep": lambda *at: KEEP[at] / 0.6}),
}


def definition(
    seen=lambda *at: True,
    logit=lambda dot, *at: dot / math.sqrt(D),
    weigh=softmax,
    keep=lambda *at: 1.0,
):
    """O, and the weights before dropout."""
    out, weights = torch.zeros(B, TQ, HEADS, 3).double(), torch.zeros(B, HEADS, TQ, TK).double()
    for b, i, h in torch.cartesian_prod(*(torch.arange(n) for n in (B, TQ, HEADS))).tolist():
        kv = h // (HEADS // KV_HEADS)
        dots = {j: float(Q[b, i, h] @ K[b, j, kv]) for j in range(TK) if seen(b, h, i, j)}
        row = weigh({j: float(logit(dot, b, h, i, j)) for j, dot in dots.items()}, h)
        for j, weight in row.items():
            weights[b, h, i, j] = weight
            out[b, i, h] += weight * keep(b, h, i, j) * V[b, j, kv]
    return out, weights


def call(function, *inputs, **options):
    seed = {"seed": SEED} if "dropout_p" in options else {}
    return function(*inputs, **options, **seed)


@pytest.mark.parametrize("room", [functional, reference], ids=["native", "reference"])
@pytest.mark.parametrize("option", MEANING)
def test_an_option_means_this(option, room):
    value, change = MEANING[option]
    out, weights = definition(**change)
    torch.testing.assert_close(call(room.attention, Q, K, V, **{option: value}), out)

    everything = torch.full((B,), TK)
    cached = call(room.attention_cached, Q, K, V, everything, **{option: value})
    torch.testing.assert_close(cached, out)

    packed = (t.flatten(0, 1) for t in (Q, K, V))
    ends = (torch.arange(B + 1) * n for n in (TQ, TK))
    varlen = call(room.attention_varlen, *packed, *ends, TQ, TK, **{option: value})
    torch.testing.assert_close(varlen, out.flatten(0, 1))

    if option in WeightOptions.__annotations__:
        lse = torch.zeros(B, HEADS, TQ).double()
        if option != "normalizer":
            _, lse = call(functional.attention, Q, K, V, return_lse=True, **{option: value})
        got = call(room.attention_weights, Q, K, lse, **{option: value})
        torch.testing.assert_close(got, weights)


@pytest.mark.parametrize("room", [functional, reference], ids=["native", "reference"])
def test_other_weights_and_the_lse_mean_this(room):
    def relu2(row, h):
        return {j: max(s, 0) ** 2 for j, s in row.items()}

    out, _ = definition(weigh=relu2)
    torch.testing.assert_close(room.attention(Q, K, V, normalizer="relu2"), out)
    _, lse = room.attention(Q, K, V, return_lse=True)
    total = sum(math.exp(float(Q[1, 2, 3] @ K[1, j, 1]) / 2) for j in range(TK))
    assert lse[1, 3, 2].item() == pytest.approx(math.log(total))


def test_no_option_is_without_meaning_and_all_are_declared_once():
    declared = AttentionOptions.__annotations__
    assert [*MEANING, "seed"] == [*declared]
    hints, fields = (
        {name: hint.__forward_arg__ for name, hint in each.items()}
        for each in (declared, Options.__annotations__)
    )
    assert hints == fields


@pytest.mark.parametrize("room", [functional, reference])
@pytest.mark.parametrize("name", ["attention", "attention_varlen", "attention_cached"])
def test_help_spells_the_options_out(name, room):
    parameters = inspect.signature(getattr(room, name)).parameters
    shown = {n: parameters[n].default for n in AttentionOptions.__annotations__}
    assert shown == Options._field_defaults
    assert not any(p.kind == p.VAR_KEYWORD for p in parameters.values())
    assert "seed" not in inspect.signature(room.attention_weights).parameters


@pytest.mark.parametrize("room", [functional, reference])
def test_a_name_that_is_no_option_raises(room):
    with pytest.raises(TypeError, match=r"attention\(\) got .* keyword argument 'causl'"):
        room.attention(Q, K, V, causl=True)
    lse = torch.zeros(B, HEADS, TQ).double()
    with pytest.raises(TypeError, match=r"attention_weights\(\) got .* argument 'dropout_p'"):
        room.attention_weights(Q, K, lse, dropout_p=0.5)


def test_types_can_be_looked_up():
    assert "return" in typing.get_type_hints(functional.attention)
