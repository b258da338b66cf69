"""Recurrences of bf16, which run on AMX tiles where a machine has them (test_emulated_isas.py runs
this file on software tiles): their products are those of fp32, not of rounded numbers."""

import pytest
import torch
from recurrence_cases import decays, draw
from tile_cases import VECTORS
from torch.nn import functional as nnf

from omniattn import functional as F
from omniattn import testing
from omniattn.encoding.sequences import Sequences
from omniattn.functional.recurrences._common import run

#: Bound on the relative error (root mean square) of splitting numbers into pieces.
LEFT_OUT = 2.0**-15


def error(found, exact) -> float:
    """Relative, in the mean of squares."""
    return ((found.double() - exact).norm() / exact.norm()).item()


def inputs(steps, heads, v_heads, size, width, batch=2):
    """q, k, v, g, beta and a skip of fp64, the first three of them numbers of bf16."""
    q, k = draw(batch, steps, heads, size), draw(batch, steps, heads, size, seed=1)
    v = draw(batch, steps, v_heads, width, seed=2)
    q, k, v = (t.bfloat16().double() for t in (q, nnf.normalize(k, dim=-1), v))
    g = decays(batch, steps, v_heads).float().double()
    beta = draw(batch, steps, v_heads, seed=4).sigmoid().float().double()
    return q, k, v, g, beta, draw(v_heads, width, seed=5)


#: By name, of an update: whether it is a delta rule, has a decay, a beta and a skip.
UPDATES = {
    "delta": (True, False, True, False),
    "gated delta": (True, True, True, False),
    "plain": (False, False, False, False),
    "decayed": (False, True, False, False),
    "ssd": (False, True, True, True),
}


def results(update, given, start, bounds, *, half, fp32_output=False):
    """o, the final state and the gradients of all inputs, of fp64 or of bf16 with fp32, which
    `fp32_output` outputs and their gradients are in, too."""
    delta, decayed, scaled, skipped = UPDATES[update]
    leaves = [t.bfloat16() if half and n < 3 else t.float() if half else t
              for n, t in enumerate((*given, start))]  # fmt: skip
    leaves = [t.detach().requires_grad_() for t in leaves]
    q, k, v, g, beta, skip, state = leaves
    sequences = q.shape[0] if bounds is None else len(bounds) - 1
    o, final = run(
        "op", q, k, v, g if decayed else None, None,
        Sequences(state, bounds, None if half else "reference"),
        beta=beta if scaled else None, delta=delta,
        skip=skip.expand(sequences, *skip.shape) if skipped else None, fp32_output=fp32_output,
    )  # fmt: skip
    used = [q, k, v, *([g] if decayed else []), *([beta] if scaled else []),
            *([skip] if skipped else []), state]  # fmt: skip
    weight, of_state = draw(*o.shape, seed=6).float(), draw(*final.shape, seed=7).float()
    weight = weight if fp32_output else weight.bfloat16()
    loss = (o.double() * weight.double()).sum() + (final.double() * of_state.double()).sum()
    return [o, final, *torch.autograd.grad(loss, used)]


def assert_close(found, exact):
    """No more than a rounding to the dtype of each result and what pieces leave out."""
    for n, (a, b) in enumerate(zip(found, exact, strict=True)):
        if b.norm() > 0:
            assert error(a, b) < error(b.to(a.dtype), b) + LEFT_OUT, n


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize(
    ("steps", "heads", "v_heads", "size", "width"),
    [
        (16, 2, 2, 32, 32),
        (33, 1, 1, 5, 3),
        (70, 2, 4, 48, 40),
        (100, 1, 4, 65, 17),
        (64, 2, 2, 128, 128),
    ],
)
def test_products_are_those_of_fp32(update, steps, heads, v_heads, size, width):
    given = inputs(steps, heads, v_heads, size, width)
    start = draw(2, v_heads, size, width, seed=8).float().double()
    found, exact = (results(update, given, start, None, half=half) for half in (True, False))
    assert_close(found, exact)


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("steps", [3, 70])
def test_outputs_may_stay_in_fp32(update, steps):
    """For a gate, or a norm, that follows."""
    given = inputs(steps, 2, 4, 40, 24)
    start = draw(2, 4, 40, 24, seed=8).float().double()
    found, exact = (
        results(update, given, start, None, half=half, fp32_output=True) for half in (True, False)
    )
    assert found[0].dtype == torch.float32
    assert_close(found, exact)


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("fp32_output", [False, True])
def test_packed_sequences(update, fp32_output):
    """Sequences have one token, none, few tokens and several chunks."""
    bounds = torch.tensor([0, 1, 1, 4, 70, 120])
    given = inputs(120, 2, 4, 20, 24, batch=1)
    start = draw(5, 4, 20, 24, seed=8).float().double()
    found, exact = (
        results(update, given, start, bounds, half=half, fp32_output=fp32_output)
        for half in (True, False)
    )
    assert_close(found, exact)


def test_rows_of_any_stride():
    given = inputs(40, 2, 2, 24, 24)
    q, k, v, g, beta, _ = (t.bfloat16() if n < 3 else t.float() for n, t in enumerate(given))
    expected = F.gated_delta_rule(q, k, v, g, beta)
    spread = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v, g, beta)]
    torch.testing.assert_close(F.gated_delta_rule(*spread), expected, rtol=0, atol=0)
    columns = [t.mT.contiguous().mT for t in (q, k, v)]
    torch.testing.assert_close(F.gated_delta_rule(*columns, g, beta), expected, rtol=0, atol=0)


def test_bits_do_not_depend_on_threads():
    given = inputs(70, 2, 6, 40, 24)
    start = draw(2, 6, 40, 24, seed=8)
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(results("gated delta", given, start, None, half=True))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("scale", [1e-30, 1e15, 1e30])
def test_ends_of_the_range(scale):
    """States of numbers whose first piece is theirs rounded would be infinite, and second pieces of
    small ones are lost only where the first ones are as small."""
    q, k, v, g, _, _ = inputs(40, 2, 2, 32, 32)
    v = (v * scale).bfloat16().double()
    half = [t.bfloat16() for t in (q, k, v)]
    o, state = F.gated_linear_attention(*half, g.float())
    exact, end = F.gated_linear_attention(q, k, v, g, backend="reference")
    assert_close((o, state), (exact, end))


def test_largest_state():
    """Near the largest number of fp32, which a rounding to bf16 would make infinite."""
    q, k, v, g, _, _ = inputs(16, 1, 1, 16, 16, batch=1)
    start = torch.full((1, 1, 16, 16), torch.finfo(torch.float32).max)
    q, v, g = q * 2**-6, v * 0, g * 0
    half = [t.bfloat16() for t in (q, k, v)]
    o, state = F.gated_linear_attention(*half, g.float(), scale=1.0, initial_state=start)
    exact = q.sum(-1, keepdim=True) * start[0, 0, 0].double()
    torch.testing.assert_close(o.double(), exact, rtol=2**-8, atol=float(exact.abs().max()) / 2**12)
    assert torch.equal(state, start)


@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_nan_stays_behind_its_token_and_in_its_head(where):
    given = dict(zip("qkv", inputs(70, 2, 2, 24, 24)[:3], strict=True))
    g, beta = (t.float() for t in inputs(70, 2, 2, 24, 24)[3:5])
    half = {name: t.bfloat16() for name, t in given.items()}
    expected, _ = F.gated_delta_rule(**half, g=g, beta=beta)
    half[where][0, 40, 0, 3] = torch.nan
    o, _ = F.gated_delta_rule(**half, g=g, beta=beta)
    touched = torch.zeros(o.shape[:3], dtype=torch.bool)
    touched[0, 32:, 0] = True  # the chunk of the token
    assert torch.equal(o[~touched], expected[~touched])
    assert o[0, 40, 0].isnan().any()


@pytest.mark.skipif("amx_bf16" not in testing.isas(), reason="needs amx_bf16")
def test_levels_differ_by_less_than_a_rounding():
    """Most outputs have the same bits with and without tiles."""
    given = inputs(100, 2, 2, 64, 64)
    start = draw(2, 2, 64, 64, seed=8)
    tiles = results("gated delta", given, start, None, half=True)
    with testing.isa(VECTORS):
        vectors = results("gated delta", given, start, None, half=True)
    assert not torch.equal(tiles[1], vectors[1])
    for a, b in zip(tiles, vectors, strict=True):
        if a.dtype == torch.bfloat16:
            assert (a == b).float().mean() > 0.97
