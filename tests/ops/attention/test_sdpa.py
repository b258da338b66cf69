"""scaled_dot_product_attention is torch's."""

import pytest
import torch
import torch.nn.functional as torch_F
from attention_cases import BF16, F32, F64, TOLERANCE
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from omniattn.functional import attention, scaled_dot_product_attention


def assert_sdpa_is_torch_s(inputs, of_torch=torch_F.scaled_dot_product_attention, **options):
    """Outputs and all gradients, of a float mask too."""
    mask = options.get("attn_mask")
    learnt = type(mask) is torch.Tensor and mask.is_floating_point()
    results = []
    for function in (scaled_dot_product_attention, of_torch):
        leaves = [t.detach().clone().requires_grad_() for t in (*inputs, mask)[: 3 + learnt]]
        out = function(*leaves[:3], **(options | ({"attn_mask": leaves[3]} if learnt else {})))
        grad = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)
        results.append((out.detach(), *torch.autograd.grad(out, leaves, grad)))
    dtype = inputs[0].dtype
    for a, w in zip(*results, strict=True):
        torch.testing.assert_close(
            a, w, rtol=2e-2 if dtype == BF16 else 1e-4, atol=TOLERANCE[dtype] * 2
        )


@pytest.mark.parametrize("shape", [(2, 4, 33, 8), (3, 33, 8), (2, 3, 4, 33, 8)], ids=str)
@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
def test_sdpa_is_torch_s(shape, dtype):
    q = torch.randn(shape, dtype=F64).to(dtype)
    k, v = (torch.randn(*shape[:-2], 50, 8, dtype=F64).to(dtype) for _ in range(2))
    for options in (
        {},
        {"is_causal": True},
        {"attn_mask": torch.rand(33, 50) < 0.7},
        {"attn_mask": torch.randn(33, 50, dtype=F64).to(dtype), "scale": 0.2},
    ):
        assert_sdpa_is_torch_s((q, k, v), **options)


# Everything before (T, D) of query, key and value.
SDPA_SHAPES = {
    "one-head": ((), (), ()),
    "keys-of-one-sequence": ((2, 4), (1, 4), (1, 4)),
    "values-of-one-sequence": ((2, 4), (2, 4), (1, 4)),
    "queries-of-one-sequence": ((1, 4), (2, 4), (2, 4)),
    "one-kv-head": ((2, 4), (2, 1), (2, 1)),
    "one-key-head": ((2, 4), (2, 1), (2, 4)),
    "one-value-head": ((2, 4), (2, 4), (2, 1)),
    "one-query-head": ((2, 1), (2, 4), (2, 4)),
    "3d-queries": ((4,), (2, 4), (2, 4)),
    "3d-keys-and-values": ((2, 4), (4,), (4,)),
    "3d-values": ((2, 4), (2, 4), (4,)),
    "2d-keys-and-values": ((2, 4), (), ()),
    "5d": ((3, 2, 4), (3, 2, 4), (3, 2, 4)),
    "5d-broadcast": ((3, 1, 4), (1, 2, 1), (2, 4)),
    "7d": ((1, 2, 1, 3, 4), (1, 2, 1, 3, 4), (1, 2, 1, 3, 4)),
    "no-sequence": ((0, 4), (1, 4), (1, 4)),
    "no-head": ((2, 0), (2, 0), (2, 1)),
}
SDPA_GROUPED = {
    "grouped": ((2, 4), (2, 2), (2, 2)),
    "grouped-3d": ((4,), (2,), (2,)),
    "grouped-3d-keys": ((2, 4), (2,), (2,)),
    "grouped-keys-of-one-sequence": ((2, 4), (1, 2), (1, 2)),
    "grouped-differently": ((2, 8), (2, 4), (2, 2)),
    "grouped-keys-only": ((2, 4), (2, 2), (2, 4)),
    "grouped-5d": ((3, 2, 4), (3, 1, 2), (3, 1, 1)),
}


@pytest.mark.parametrize("name", [*SDPA_SHAPES, *SDPA_GROUPED])
def test_sdpa_broadcasts_as_torch_s(name):
    grouped = name in SDPA_GROUPED
    lead_q, lead_k, lead_v = (SDPA_SHAPES | SDPA_GROUPED)[name]
    q, k = torch.randn(*lead_q, 6, 8), torch.randn(*lead_k, 9, 8)
    v = torch.randn(*lead_v, 9, 5)
    for options in (
        {},
        {"is_causal": True},
        {"attn_mask": torch.rand(6, 9) < 0.7},
        {"attn_mask": torch.randn(*lead_q, 6, 9), "scale": -0.2},
        {"attn_mask": torch.randn(6, 1)},
        {"attn_mask": causal_upper_left(6, 9)},
        {"attn_mask": causal_lower_right(6, 9)},
    ):
        assert_sdpa_is_torch_s((q, k, v), enable_gqa=grouped, **options)


def test_sdpa_broadcasts_where_there_is_no_query():
    q, k, v = torch.zeros(1, 1, 0, 8), torch.zeros(2, 4, 5, 8), torch.zeros(2, 4, 5, 3)
    for backend in (None, "reference"):
        assert scaled_dot_product_attention(q, k, v, backend=backend).shape == (2, 4, 0, 3)


@pytest.mark.parametrize("sizes", [(6, 6), (6, 9), (9, 6), (1, 9), (9, 1)], ids=str)
@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")
def test_causal_bias_of_torch(sizes):
    """torch's CausalBias is a tensor whose memory is uninitialised."""
    q, k = torch.randn(2, 4, sizes[0], 8), torch.randn(2, 4, sizes[1], 8)
    for bias in (causal_upper_left(*sizes), causal_lower_right(*sizes)):
        assert_sdpa_is_torch_s((q, k, k), attn_mask=bias)
        want = torch_F.scaled_dot_product_attention(q, k, k, bias)
        got = attention(*(t.transpose(1, 2) for t in (q, k, k)), mask=bias).transpose(1, 2)
        torch.testing.assert_close(got, want)


def test_sdpa_joins_mask_and_is_causal():
    """As torch's CPU kernel did before torch 2.14, which refuses the two together."""

    def joined(*inputs, attn_mask, is_causal):
        seen = torch.ones(6, 9, dtype=torch.bool).tril()
        hidden = False if attn_mask.dtype == torch.bool else -torch.inf
        mask = attn_mask.masked_fill(~seen, hidden)
        return torch_F.scaled_dot_product_attention(*inputs, attn_mask=mask)

    q, k = torch.randn(2, 4, 6, 8), torch.randn(2, 4, 9, 8)
    for mask in (torch.rand(6, 9) < 0.7, torch.randn(6, 9)):
        assert_sdpa_is_torch_s((q, k, k), joined, attn_mask=mask, is_causal=True)
