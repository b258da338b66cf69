"""attention and its raw op refuse what does not fit."""

import math

import pytest
import torch
from attention_cases import BF16, F16, F32, F64
from hypothesis import given, settings
from hypothesis import strategies as st

from omniattn.encoding.masks import MaskKind
from omniattn.encoding.options import ScoreKind
from omniattn.functional import attention, attention_weights, masks, rms_norm_gated, scores


def test_the_gradient_of_a_parameter_is_wanted_once():
    q, bias = torch.zeros(1, 3, 1, 4), torch.zeros(1, 1, 3, 3)
    rules = ([], [0, 0, -1], [0.5, 0.0])
    out, *stats = torch.ops.omniattn.attention(q, q, q, [bias], None, *rules)
    with pytest.raises(RuntimeError, match="wanted must hold each index once, got two of 0"):
        torch.ops.omniattn.attention_backward(
            out, None, q, q, q, [bias], None, out, *stats, *rules, [0, 0]
        )


BAD_CALLS = [
    ({"q": (2, 3, 4)}, {}, ValueError, r"q must have 4 dimensions .* got q.shape=\(2, 3, 4\)"),
    ({"q": (2, 3, 4, 9)}, {}, ValueError, "q and k must have the same B and D"),
    ({"v": (2, 6, 2, 8)}, {}, ValueError, "k and v must have the same B, Tk and Hkv"),
    ({"q": (2, 3, 5, 8)}, {}, ValueError, "Hq must be a multiple of Hkv, got Hq=5, Hkv=2"),
    ({}, {"softcap": -1.0}, ValueError, "softcap must be a finite number >= 0, got softcap=-1.0"),
    (
        {},
        {"dropout_p": 1.5},
        ValueError,
        "dropout_p must be a finite number >= 0 and <= 1, got dropout_p=1.5",
    ),
    ({}, {"dropout_p": 0.5, "seed": torch.zeros(3)}, ValueError, "seed must be an int64 tensor"),
    ({}, {"scale": math.nan}, ValueError, "scale must be a finite number, got scale=nan"),
    ({}, {"window_size": (-2, 0)}, ValueError, "window_size must be"),
    ({}, {"mask": torch.zeros(3, 5)}, TypeError, "mask must be bool"),
    ({}, {"mask": torch.ones(3, 4) > 0}, ValueError, r"got mask.shape=\(3, 4\)"),
    (
        {},
        {"mask": masks.KeyLengths(torch.tensor([1, 1, 1]))},
        ValueError,
        r"got lengths.shape=\(3,\)",
    ),
    (
        {},
        {"mask": masks.All((masks.Causal(),) * 8), "causal": True},
        ValueError,
        r"mask must have at most 8 rules .* got 9 rules of mask=All",
    ),
    (
        {},
        {"mask": masks.Strided(2**40, 1)},
        ValueError,
        r"numbers of a mask must be at most .* got mask=Strided\(stride=1099511627776",
    ),
    ({}, {"bias": torch.zeros(5, 3, 5)}, ValueError, r"got bias.shape=\(5, 3, 5\)"),
    ({}, {"bias": torch.zeros(3, 5, dtype=F64)}, TypeError, "bias must not be float64"),
    ({}, {"backend": "cuda"}, ValueError, "backend must match"),
]


@pytest.mark.parametrize("shapes,options,error,message", BAD_CALLS)
def test_errors_name_argument_and_value(shapes, options, error, message):
    sizes = {"q": (2, 3, 4, 8), "k": (2, 5, 2, 8), "v": (2, 5, 2, 8)} | shapes
    with pytest.raises(error, match="attention: .*" + message):
        attention(*(torch.zeros(sizes[n]) for n in "qkv"), **options)


def test_options_of_other_libraries_are_pointed_to_ours():
    q = torch.zeros(1, 2, 1, 4)
    for name, ours in (
        ("is_causal", "causal"),
        ("softmax_scale", "scale"),
        ("dropout", "dropout_p"),
    ):
        with pytest.raises(TypeError, match=f"attention.*argument '{name}'; did you mean '{ours}'"):
            attention(q, q, q, **{name: 1})
    with pytest.raises(TypeError, match=r"attention_weights.*argument 'dropout'$"):
        attention_weights(q, q, torch.zeros(1, 1, 2), dropout=0.1)


sizes = st.integers(0, 70)
few = st.integers(0, 3)
dtypes = st.sampled_from([F64, F32, BF16, F16, torch.int64, torch.bool])
numbers = st.integers(-3, 5) | st.integers(-(2**63), 2**63 - 1)


@st.composite
def raw_calls(draw):
    """Arguments of the raw op: each part right or, now and then, wrong."""
    b, h, tq, tk, d, dv = (draw(s) for s in (few, few, sizes, sizes, few, few))
    dtype = draw(st.sampled_from([F64, F32, BF16]))
    shapes = [[b, tq, h, d], [b, tk, h, d], [b, tk, h, dv]]
    if draw(st.integers(0, 3)) == 0:
        shapes[draw(st.integers(0, 2))][draw(st.integers(0, 3))] = draw(sizes)
    q, k, v = (
        torch.randn(s).to(draw(dtypes) if draw(st.integers(0, 9)) == 0 else dtype) for s in shapes
    )
    side = [draw(st.sampled_from([1, n])) for n in (b, h, tq)]
    aux = [
        torch.randn(*side, tk).to(dtype),
        torch.rand(*side, draw(st.sampled_from([tk, tk, tk, 1]))) < 0.5,
        torch.randint(-(2**40), 2**40, (b,)),
    ]
    mask = draw(
        st.sampled_from(
            [
                [],
                [MaskKind.WINDOW, -1, 0, -1],
                [MaskKind.TENSOR, 0, 0, 1],
                [MaskKind.KEY_LENGTHS, 0, 0, 2],
                [MaskKind.WINDOW_TOP_LEFT, 3, 4, -1, MaskKind.KEY_LENGTHS, 0, 0, 2],
            ]
        )
        | st.lists(numbers, max_size=8)
    )
    score = draw(
        st.sampled_from(
            [
                [],
                [ScoreKind.BIAS, 0, -1],
                [ScoreKind.SOFTCAP, -1, 2],
                [ScoreKind.SOFTCAP, -1, 2, ScoreKind.BIAS, 0, -1],
            ]
        )
        | st.lists(numbers, max_size=6)
    )
    params = draw(
        st.sampled_from([[0.5, 0.0, 3.0], [1.0, 0.5, 1.0]]) | st.lists(st.floats(), max_size=4)
    )
    seed = draw(st.sampled_from([torch.tensor([1, 2]), torch.tensor([1]), None]))
    return q, k, v, aux, seed, mask, score, params


@settings(max_examples=300, deadline=None)
@given(raw_calls())
def test_raw_op_raises_or_is_right(args):
    q, k, v, aux, seed, mask, score, params = args
    try:
        out, lse, tail = torch.ops.omniattn.attention_raw(*args)
    except (RuntimeError, TypeError) as error:
        assert "attention: " in str(error) or "expected" in str(error).lower(), error
        return
    assert out.shape == (*q.shape[:3], v.shape[3]) and lse.shape == (
        q.shape[0],
        q.shape[2],
        q.shape[1],
    )
    wanted = [i for kind, i, _ in zip(*[iter(score)] * 3, strict=True) if kind == ScoreKind.BIAS]
    grads = torch.ops.omniattn.attention_backward(
        torch.ones_like(out), None, q, k, v, aux, seed, out, lse, tail, mask, score, params, wanted
    )
    assert [g.shape for g in grads[:3]] == [q.shape, k.shape, v.shape]
    assert [g.shape for g in grads[3]] == [aux[i].shape for i in wanted]


@pytest.mark.parametrize("name", ["sinks", "head_scale", "alibi_slopes", "bias", "mask", "rows"])
def test_options_are_strided(name):
    q, t = torch.randn(1, 3, 2, 4), torch.ones(2)
    if name in ("bias", "mask"):
        t = torch.ones(3, 3, dtype=torch.bool if name == "mask" else None)
    with pytest.raises(TypeError, match=f"{name} must be strided, got {name}.layout="):
        if name == "rows":
            scores.DistanceRows(torch.ones(3, 2, 4).to_sparse(), 1)
        attention(q, q, q, **{name: t.to_sparse()})


def test_what_is_no_option_of_a_kind_is_named():
    q = torch.randn(1, 3, 2, 4)
    with pytest.raises(TypeError, match=r"a mask is neither true nor false; .* &, \| and ~"):
        attention(q, q, q, mask=masks.Causal() and masks.Chunked(3))
    with pytest.raises(
        TypeError, match="attention_weights: column_sums must be True or False, got column_sums=5"
    ):
        attention_weights(q, q, torch.zeros(1, 2, 3), column_sums=5)
    with pytest.raises(
        TypeError, match=r"rms_norm_gated: gate must be a torch.Tensor, got gate=None"
    ):
        rms_norm_gated(q, None)


Q4 = torch.zeros(2, 5, 4, 8)
REAL = torch.ones(2, 6, dtype=torch.bool)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": REAL}, r"padding, \(B, Tk\), is masks.KeyPadding\(mask\), got mask.shape=\(2, 6"),
        ({"mask": REAL[:, None]}, r"is masks.KeyPadding\(mask\), got mask.shape=\(2, 1, 6\)"),
        ({"mask": REAL.long()}, r"is masks.KeyPadding\(mask\)\), got mask.dtype=torch.int64"),
        ({"mask": REAL.float()}, r"\(additive masks go to bias; .*masks.KeyPadding\(mask\)\), got"),
        ({"mask": REAL[:, None].expand(2, 5, 6)}, r"one without heads, .*got mask.shape=\(2, 5, 6"),
        ({"bias": REAL.float()}, r"a bias of keys \(B, Tk\) is bias\[:, None, None\], got bias"),
        ({"mask": masks.Causal}, "mask must be an instance of Causal, got the class"),
    ],
    ids=range(7),
)
def test_masks_of_other_shapes_are_told_what_to_become(options, message):
    k = torch.zeros(2, 6, 4, 8)
    with pytest.raises((TypeError, ValueError), match=message):
        attention(Q4, k, k, **options)
