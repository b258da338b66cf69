"""Sinusoidal, 2-D sin-cos, resized learned tables and ALiBi against published code and values."""

import math

import pytest
import torch

import omniattn.functional as F


def test_sinusoidal_worked_values():
    expected = [[0.0, 1.0, 0.0, 1.0], [0.841471, 0.540302, 0.00999983, 0.99995]]
    got = F.sinusoidal(torch.arange(2, dtype=torch.int16), 4)
    torch.testing.assert_close(got, torch.tensor(expected), rtol=0, atol=1e-6)
    odd = F.sinusoidal(torch.arange(3), 5)
    assert odd.shape == (3, 5)
    torch.testing.assert_close(odd[2, 4].item(), math.sin(2 * 1e4**-0.8), rtol=1e-6, atol=0)


def test_sinusoidal_layouts_equal_hugging_face():
    from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding
    from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

    positions = torch.arange(9)
    for dim in (6, 7):
        marian = MarianSinusoidalPositionalEmbedding(9, dim).create_weight()
        torch.testing.assert_close(F.sinusoidal(positions, dim, layout="concat"), marian)
    fairseq = M2M100SinusoidalPositionalEmbedding.get_embedding(9, 6)
    got = F.sinusoidal(positions, 6, layout="concat", freqs="fairseq")
    torch.testing.assert_close(got, fairseq)


def test_sinusoidal_products_depend_on_the_distance_only():
    p = torch.tensor([3, 10, 1_000_003, 1_000_010])
    table = F.sinusoidal(p, 32, dtype=torch.float64)
    products = table @ table.T
    torch.testing.assert_close(products[0, 1], products[2, 3])
    assert products[0, 1] < products[0, 0] - 1


def test_sincos_2d_orders_and_prefix():
    wide = F.sincos_2d(8, 3, 5, prefix=2)
    assert wide.shape == (17, 8) and (wide[:2] == 0).all()
    row, column = 2, 4
    patch = wide[2 + 5 * row + column]
    omega = torch.tensor([1.0, 0.01])
    halves = [torch.cat([(n * omega).sin(), (n * omega).cos()]) for n in (column, row)]
    torch.testing.assert_close(patch, torch.cat(halves))
    swapped = F.sincos_2d(8, 3, 5, order="hw")[5 * row + column]
    torch.testing.assert_close(swapped, torch.cat(halves[::-1]))


def test_packed_and_masked_positions():
    cu = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    assert F.packed_positions(cu, 7).tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert F.packed_positions(torch.zeros(1, dtype=torch.int64), 0).tolist() == []
    mask = torch.tensor([[False, True, False, True], [True, True, True, False]])
    assert F.masked_positions(mask).tolist() == [[0, 0, 0, 1], [0, 1, 2, 2]]


def test_packed_sequences_turn_as_alone():
    theta = F.rope_frequencies(4)
    q = torch.randn(1, 7, 2, 4)
    tables = F.rotary_tables(theta, F.packed_positions(torch.tensor([0, 3, 7]), 7))
    packed, _ = F.apply_rotary(q, None, *tables)
    for begin, end in ((0, 3), (3, 7)):
        alone = F.rotary_tables(theta, torch.arange(end - begin))
        turned, _ = F.apply_rotary(q[:, begin:end], None, *alone)
        assert torch.equal(packed[:, begin:end], turned)


def test_interpolated_positions():
    table = torch.randn(5, 3, dtype=torch.float32, requires_grad=True)
    assert torch.equal(F.interpolate_positions(table, 5), table)
    wide = F.interpolate_positions(table, 12)
    for i in range(12):
        at = min(max((i + 0.5) * 5 / 12 - 0.5, 0.0), 4.0)
        low = min(int(at), 3)
        expected = table[low] + (at - low) * (table[low + 1] - table[low])
        torch.testing.assert_close(wide[i], expected)
    assert torch.autograd.grad(wide.sum(), table)[0].sum() == pytest.approx(36.0)
    assert F.interpolate_positions(table.bfloat16(), 12).dtype == torch.bfloat16


def test_tables_in_fp64_are_interpolated_in_fp64():
    ramp = torch.arange(6, dtype=torch.float64)[:, None] / 3
    for resized in (F.interpolate_positions(ramp, 3), F.interpolate_grid(ramp, (6, 1), (3, 1))):
        exact = torch.tensor([[1.0], [5.0], [9.0]], dtype=torch.float64) / 6
        torch.testing.assert_close(resized[1:2], exact[1:2], rtol=1e-15, atol=0)


def test_interpolated_grid_equals_hugging_face():
    from transformers import Dinov2Config
    from transformers.models.dinov2.modeling_dinov2 import Dinov2Embeddings

    config = Dinov2Config(hidden_size=6, image_size=56, patch_size=14)
    embeddings = Dinov2Embeddings(config)
    table = torch.randn(1, 17, 6)
    embeddings.position_embeddings.data = table
    expected = embeddings.interpolate_pos_encoding(torch.zeros(1, 16, 6), 42, 98)[0]
    got = F.interpolate_grid(table[0], (4, 4), (3, 7), prefix=1)
    torch.testing.assert_close(got, expected)


def cubic(values, at):
    """values at a fractional index by the cubic kernel with a = -0.75, ends repeated."""
    low, total = math.floor(at), 0.0
    for j in range(low - 1, low + 3):
        t = abs(at - j)
        inner = 1.25 * t**3 - 2.25 * t**2 + 1
        outer = -0.75 * (t**3 - 5 * t**2 + 8 * t - 4)
        total += values[min(max(j, 0), len(values) - 1)] * (inner if t <= 1 else outer)
    return total


@pytest.mark.parametrize("offset", [0.0, 0.1])
def test_offset_of_official_dino(offset):
    column = torch.randn(6).double()
    table = column.repeat_interleave(6)[:, None]
    grid = F.interpolate_grid(table, (6, 6), (8, 6), offset=offset).view(8, 6)
    expected = [cubic(column, (i + 0.5) * 6 / (8 + offset) - 0.5) for i in range(8)]
    torch.testing.assert_close(grid[:, 2], torch.stack(expected), rtol=1e-5, atol=1e-5)


def test_antialias_averages_over_more_rows():
    comb = torch.tensor([1.0, -1.0]).repeat(8).repeat_interleave(16)[:, None]
    plain, smooth = (
        F.interpolate_grid(comb, (16, 16), (5, 5), antialias=a).view(5, 5) for a in (False, True)
    )
    assert smooth[1].abs().max() < 0.1 * plain[1].abs().max()


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 16, 20, 71])
def test_alibi_slopes_equal_hugging_face(heads):
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    slopes = F.alibi_slopes(heads)
    bloom = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(slopes, bloom)
    mpt = build_mpt_alibi_tensor(heads, 2, alibi_bias_max=6)[:, 0, 0]
    torch.testing.assert_close(F.alibi_slopes(heads, max_exponent=6), -mpt)


def test_alibi_slopes_of_the_specification():
    assert F.alibi_slopes(6).tolist() == pytest.approx([0.25, 0.0625, 2**-6, 2**-8, 0.5, 0.125])
    assert F.alibi_slopes(12)[8:].tolist() == pytest.approx(
        [0.70711, 0.35355, 0.17678, 0.08839], abs=1e-5
    )


def test_alibi_forms_agree_under_a_causal_mask():
    q, k, v = torch.randn(3, 1, 9, 6, 8).unbind()
    slopes = F.alibi_slopes(6)
    whole = F.attention(q, k, v, causal=True, bias=F.alibi_bias(slopes, 9, 9))
    bloom = F.attention(q, k, v, causal=True, bias=F.alibi_bias(slopes, 9, 9, form="bloom"))
    torch.testing.assert_close(whole, bloom, rtol=1e-4, atol=1e-5)
    last = F.attention(q[:, -1:], k, v, bias=F.alibi_bias(slopes, 1, 9))
    torch.testing.assert_close(last, whole[:, -1:], rtol=1e-4, atol=1e-5)
    both = F.alibi_bias(torch.tensor([0.2]), 3, 3)[0, 0]
    torch.testing.assert_close(both, both.T)


def test_alibi_slopes_can_be_trained():
    slopes = F.alibi_slopes(2).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda s: F.alibi_bias(s, 2, 4), (slopes,))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: F.sinusoidal(torch.ones(2), 4), TypeError, "positions must be integers"),
        (lambda: F.sinusoidal(torch.arange(2), 0), ValueError, "dim must be an int >= 1"),
        (lambda: F.sinusoidal(torch.arange(2), 4, layout="x"), ValueError, "layout must be"),
        (lambda: F.sinusoidal(torch.arange(2), 4, freqs="x"), ValueError, "freqs must be"),
        (lambda: F.sinusoidal(torch.arange(2), 3, freqs="fairseq"), ValueError, "dim must be even"),
        (lambda: F.sinusoidal(torch.arange(2), 4, base=-1), ValueError, "base must be"),
        (lambda: F.sinusoidal(torch.arange(2), 4, dtype=torch.int8), TypeError, "dtype must be"),
        (lambda: F.sincos_2d(6, 2, 2), ValueError, "dim must be a multiple of 4"),
        (lambda: F.sincos_2d(8, -1, 2), ValueError, "height must be an int >= 0"),
        (lambda: F.sincos_2d(8, 1, 2, order="x"), ValueError, "order must be"),
        (lambda: F.packed_positions(torch.tensor([0, 3, 2]), 2), ValueError, "must grow from 0"),
        (
            lambda: F.packed_positions(torch.tensor([0, 3]), 4),
            ValueError,
            "tokens, 4, got .* without tokens 3$",
        ),
        (lambda: F.packed_positions(torch.ones(2), 1), TypeError, "must be integers"),
        (lambda: F.packed_positions(torch.zeros(0).long(), 0), ValueError, "shape"),
        (lambda: F.masked_positions(torch.ones(1, 2)), TypeError, "mask must be integers"),
        (lambda: F.interpolate_positions(torch.ones(3), 2), ValueError, "table must have shape"),
        (lambda: F.interpolate_positions(torch.ones(3, 2), 0), ValueError, "length must be"),
        (lambda: F.interpolate_grid(torch.ones(5, 2), (2, 2), (3, 3)), ValueError, "4 rows"),
        (lambda: F.interpolate_grid(torch.ones(4, 2), (2, 2), (0, 3)), ValueError, "new must be"),
        (
            lambda: F.interpolate_grid(torch.ones(4, 2), (2, 2), (3, 3), offset=1.0),
            ValueError,
            "offset must be",
        ),
        (
            lambda: F.interpolate_grid(torch.ones(4, 2), (2, 2), (3, 3), antialias="no"),
            TypeError,
            "antialias must be True or False",
        ),
        (lambda: F.interpolate_positions(torch.ones(3, 0), 2), ValueError, "P, d > 0"),
        (lambda: F.alibi_slopes(0), ValueError, "num_heads must be"),
        (lambda: F.alibi_bias(torch.ones(2, 2), 1, 1), ValueError, "slopes must have shape"),
        (lambda: F.alibi_bias(torch.ones(2), 1, -1), ValueError, "k_len must be an int >= 0"),
        (lambda: F.alibi_bias(torch.ones(2), 1, 1, form="mpt"), ValueError, "form must be"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
