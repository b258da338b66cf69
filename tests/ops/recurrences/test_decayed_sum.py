"""decayed_sum against the recurrence token by token: final states, gradients of initial states."""

import math

import pytest
import torch

from omniattn import reference
from omniattn.ops.recurrence import FEATURE_MAPS, decayed_sum

B, KEY_HEADS, HEADS, K, V = 2, 2, 4, 5, 3
STEPS = [0, 1, 63, 64, 65, 130]
#: Channels of the decays of keys, whether values decay, whether there is a beta.
FORMS = {
    "none": (0, False, False),
    "beta": (0, False, True),
    "heads": (1, False, True),
    "channels": (K, False, True),
    "values": (0, True, False),
    "both": (K, True, False),
}
#: The native op, and the definition, which takes its place on CUDA.
IMPLEMENTATIONS = {"native": decayed_sum, "definition": decayed_sum.formula}


def draw(form, steps, dtype=torch.float64):
    torch.manual_seed(0)
    channels, of_values, betas = FORMS[form]
    wide = torch.promote_types(dtype, torch.float32)
    k = torch.randn(B, steps, KEY_HEADS, K).to(dtype)
    v = torch.randn(B, steps, HEADS, V).to(dtype)
    g = -torch.rand(B, steps, HEADS, channels, dtype=wide) / 8 if channels else None
    gv = -torch.rand(B, steps, HEADS, V, dtype=wide) / 8 if of_values else None
    beta = torch.rand(B, steps, HEADS, dtype=wide) if betas else None
    return k, v, g, beta, gv


def final_state(k, v, g, beta, gv, feature_map="identity"):
    g = g[..., 0] if g is not None and g.shape[-1] == 1 else g
    return reference.recurrence(k, k, v, g, beta, gv=gv, feature_map=feature_map)[1]


@pytest.mark.parametrize("run", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("steps", STEPS)
def test_is_the_final_state(form, steps, run):
    given = draw(form, steps)
    total, decay, value_decay = run(*given, 1, False, False)
    torch.testing.assert_close(total, final_state(*given, feature_map=FEATURE_MAPS[1]))
    k, _, g, _, gv = given
    expected = torch.ones(B, HEADS, K) if g is None else g.sum(1).exp().expand(B, HEADS, K)
    torch.testing.assert_close(decay, expected.double())
    expected = k.new_empty(0) if gv is None else gv.sum(1).exp()
    torch.testing.assert_close(value_decay, expected)


@pytest.mark.parametrize("run", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
@pytest.mark.parametrize("form", ["none", "heads", "channels", "both", "bonus"])
@pytest.mark.parametrize("steps", STEPS)
def test_is_the_gradient_of_the_initial_state(form, steps, run):
    before_own = form == "bonus"
    q, pull, g, _, gv = draw("channels" if before_own else form, steps)
    bonus = torch.rand(B, HEADS, K, dtype=torch.float64) if before_own else None
    state = torch.zeros(B, HEADS, K, V, dtype=torch.float64, requires_grad=True)
    gates = g[..., 0] if g is not None and g.shape[-1] == 1 else g
    options = {"gv": gv, "bonus": bonus, "initial_state": state}
    o, _ = reference.recurrence(q, q, pull, gates, **options)
    (expected,) = torch.autograd.grad((o * pull).sum() + 0 * state.sum(), state)
    found = run(q, pull, g, None, gv, 0, True, before_own)[0]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("from_start", [False, True])
def test_dtypes(dtype, wide, from_start):
    k, v, *rest = draw("both", 130, dtype)
    v = v.float() if wide else v
    found = decayed_sum(k, v, *rest, 0, from_start, False)
    doubles = [t if t is None else t.double() for t in (k, v, *rest)]
    expected = decayed_sum.formula(*doubles, 0, from_start, False)
    for t, exact in zip(found, expected, strict=True):
        assert t.dtype == torch.float32
        torch.testing.assert_close(t.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["heads", "channels", "values"])
@pytest.mark.parametrize("from_start", [False, True])
def test_tokens_beyond_a_decay_of_zero(form, from_start):
    k, v, g, beta, gv = draw(form, 200)
    (gv if g is None else g)[:, 100] = -math.inf
    found = decayed_sum(k, v, g, beta, gv, 0, from_start, False)
    expected = decayed_sum.formula(k, v, g, beta, gv, 0, from_start, False)
    torch.testing.assert_close(found, expected)
    assert not (found[1] if g is not None else found[2]).any()


def test_no_subnormal_products():
    k, v, g, _, _ = draw("channels", 2000, torch.float32)
    g = torch.full_like(g, -1.0)
    total, decay, _ = decayed_sum(k, v, g, None, None, 0, False, False)
    assert not decay.any()
    expected = decayed_sum.formula(k.double(), v.double(), g.double(), None, None, 0, False, False)[
        0
    ]
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-5)


def test_rows_between_others_and_threads():
    k, v, g, beta, _ = draw("channels", 130)
    expected = decayed_sum(k, v, g, beta, None, 0, False, False)[0]
    spread = [torch.cat((t, t), -1)[:, :, :, : t.shape[-1]] for t in (k, v, g)]
    cut = [torch.stack((t, t), -1)[..., 0] for t in (k, v, g)]  # without unit strides
    for tensors in (spread, cut):
        assert torch.equal(decayed_sum(*tensors, beta, None, 0, False, False)[0], expected)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(decayed_sum(k, v, g, beta, None, 0, False, False)[0], expected)
    finally:
        torch.set_num_threads(threads)


def test_nan_gates_stay():
    k, v, g, _, _ = draw("channels", 100)
    g[:, 50] = math.nan
    assert decayed_sum(k, v, g, None, None, 0, False, False)[0].isnan().all()


def test_sizes_of_zero():
    for shape in ((0, 3, 2, 4), (1, 3, 0, 4), (1, 3, 2, 0)):
        k, v = torch.ones(shape), torch.ones(*shape[:3], 5)
        total, decay, _ = decayed_sum(k, v, None, None, None, 0, False, False)
        assert total.shape == (shape[0], shape[2], shape[3], 5) and decay.numel() == 0
