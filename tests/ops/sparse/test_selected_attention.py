"""selected_attention: the same as masks, lists in any form, hidden keys, wrong arguments."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from omniattn.functional import attention, selected_attention
from omniattn.reference.sparse.selected_attention import selected_keys

OP = "selected_attention: "


def qkv(b: int = 1, tq: int = 40, tk: int = 100, h: int = 4, g: int = 2, d: int = 16):
    generator = torch.Generator().manual_seed(0)
    shapes = ((b, tq, h, d), (b, tk, g, d), (b, tk, g, d))
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def lists(b: int, heads: int, queries: int, blocks: int, n: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(b, heads, queries, blocks, generator=generator).argsort(-1)[..., :n]


def gradients(out: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=out.dtype)
    return torch.autograd.grad(out, leaves, weight)


@pytest.mark.parametrize("block_size", [1, 5, 16, 30, 128])
def test_equals_a_mask(block_size: int) -> None:
    """The dense kernel with the mask of the lists, dropout, sinks and softcap included."""
    q, k, v = (t.requires_grad_() for t in qkv(2))
    index = lists(2, 2, 40, -(-100 // block_size), 2 if block_size > 5 else 9)[..., :7]
    mask = selected_keys(index, block_size, 1, (40, 100)).repeat_interleave(2, 1)
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    options = {
        "causal": True,
        "softcap": 2.0,
        "dropout_p": 0.2,
        "seed": torch.tensor([3, 4]),
        "sinks": sinks,
    }
    want, want_lse = attention(q, k, v, mask=mask, return_lse=True, **options)
    got, lse = selected_attention(q, k, v, index, block_size=block_size, return_lse=True, **options)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(lse, want_lse)
    for a, b in zip(
        gradients(got, [q, k, v, sinks]), gradients(want, [q, k, v, sinks]), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_all_blocks_are_attention() -> None:
    q, k, v = qkv(tq=100)
    index = torch.arange(7).expand(1, 1, 100, -1)
    got = selected_attention(q, k, v, index, block_size=16, causal=True)
    torch.testing.assert_close(got, attention(q, k, v, causal=True))


def test_order_and_padding_do_not_matter() -> None:
    q, k, v = qkv()
    index = lists(1, 2, 40, 7, 3)
    want = selected_attention(q, k, v, index, block_size=16)
    padded = torch.full((1, 2, 40, 8), -1)
    padded[..., [6, 1, 3]] = index
    got = selected_attention(q, k, v, padded.int(), block_size=16)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [1, 16])
def test_hidden_keys_are_not_read(block_size: int, dtype: torch.dtype) -> None:
    """NaN in keys of no list, and after the query, reaches neither results nor gradients."""
    q, k, v = (t.to(dtype).requires_grad_() for t in qkv(tq=3, tk=35))
    entries = [0, 2] if block_size == 16 else [0, 32, 33, 34]
    index = torch.tensor(entries).expand(1, 1, 3, -1)
    used = torch.zeros(35, dtype=torch.bool)
    for n in index[0, 0, 0].tolist():
        used[n * block_size : (n + 1) * block_size] = True
    hidden = [t.detach().clone() for t in (k, v)]
    for t in hidden:
        t[:, ~used] = math.nan
        t.requires_grad_()
    want = selected_attention(q, k, v, index, block_size=block_size, causal=True)
    got = selected_attention(q, *hidden, index, block_size=block_size, causal=True)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    # The first query sees key 32 alone of the last ones.
    late = [t.detach().clone() for t in (k, v)]
    for t in late:
        t[:, 33:] = math.nan
    both = selected_attention(q, *late, index, block_size=block_size, causal=True)
    torch.testing.assert_close(both[:, :1], want[:, :1], rtol=0, atol=0)
    for a, b in zip(gradients(got, [q, *hidden]), gradients(want, [q, k, v]), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("block_size", "query_block"), [(16, 1), (64, 1), (64, 5), (200, 20)])
def test_rows_of_many_lists_meet(block_size: int, query_block: int, dtype: torch.dtype) -> None:
    """Several items, whose rows meet blocks that few, many and all of them name, some twice."""
    length = 450
    q, k, v = (t.to(dtype).requires_grad_() for t in qkv(2, length, length, 3, 1))
    index = lists(2, 3, -(-length // query_block), -(-length // block_size), 2)
    index = torch.cat((index, index.masked_fill(index > 1, -1)), -1)  # twice: they count twice
    options = {"block_size": block_size, "query_block": query_block, "causal": True}
    got = selected_attention(q, k, v, index, **options)
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    seen = selected_keys(index[..., :2], block_size, query_block, (length, length))
    again = selected_keys(index[..., 2:], block_size, query_block, (length, length))
    bias = again.double().log1p().masked_fill(~seen, -math.inf)
    want = attention(*wide, bias=bias, causal=True)
    tolerance = {"rtol": 0.02, "atol": 0.02} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(got.double(), want, **tolerance)
    weight = torch.randn_like(got)
    found = torch.autograd.grad(got, (q, k, v), weight)
    for a, b in zip(found, torch.autograd.grad(want, wide, weight.double()), strict=True):
        scale = b.abs().max() if dtype == torch.bfloat16 else 1
        torch.testing.assert_close(a.double() / scale, b / scale, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_later_keys_are_not_read(dtype: torch.dtype) -> None:
    """NaN after any query does not reach it, though the next queries of its item see it."""
    q, k, v = (t.to(dtype) for t in qkv(1, 120, 120, 2, 1))
    index = torch.stack((torch.arange(120) // 64, torch.full((120,), -1)), -1)[None, None]
    want = selected_attention(q, k, v, index, block_size=64, causal=True)
    for last in (0, 31, 63, 64, 100):
        late = [t.clone() for t in (k, v)]
        for t in late:
            t[:, last + 1 :] = math.nan
        got = selected_attention(q, *late, index, block_size=64, causal=True)
        torch.testing.assert_close(got[:, : last + 1], want[:, : last + 1], rtol=0, atol=0)
        assert got[:, last + 1 :].isnan().all()


def test_latents_are_values() -> None:
    """MLA in its absorbed form: v is a view of the first columns of k."""
    latent = torch.randn(1, 50, 1, 24)
    q = torch.randn(1, 50, 32, 24)
    index = lists(1, 1, 50, 50, 20)
    got = selected_attention(q, latent, latent[..., :16], index, block_size=1, causal=True)
    want = selected_attention(
        q, latent, latent[..., :16].clone(), index, block_size=1, causal=True, backend="reference"
    )
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 0}, "block_size must be an int >= 1"),
        ({"block_size": 2.0}, "block_size must be an int"),
        ({"query_block": 0}, "query_block must be an int >= 1"),
        ({"query_block": 2}, "indices must have shape"),
        ({"indices": torch.zeros(1, 3, 40, 2, dtype=torch.int64)}, "indices must have shape"),
        ({"indices": torch.zeros(40, 2, dtype=torch.int64)}, "indices must have shape"),
        ({"indices": torch.zeros(1, 1, 40, 2)}, "indices must be an int32 or int64 tensor"),
        ({"indices": torch.full((1, 1, 40, 2), 7)}, r"indices must be -1 or .*\[0, 7\), got 7"),
        ({"indices": torch.full((1, 1, 40, 2), -2)}, r"indices must be -1 or .*\[0, 7\), got -2"),
        ({"indices": torch.full((1, 1, 40, 2), 2**40)}, "indices must be -1 or"),
        (
            {"indices": torch.ones(1, 1, 40, 2).long(), "debug": True},
            "indices must name each block once",
        ),
        ({"indices": torch.full((1, 1, 40, 2), 7), "debug": True}, "indices must be -1 or"),
        ({"causal": 1}, "causal must be True or False"),
        ({"scale": math.inf}, "scale must be a finite number"),
        ({"softcap": -1.0}, "softcap must be a finite number"),
        ({"dropout_p": 1.5}, "dropout_p must be a finite number"),
        ({"sinks": torch.zeros(3)}, "sinks must have shape"),
        ({"debug": 1}, "debug must be True or False"),
    ],
)
def test_wrong_arguments(change: dict, message: str) -> None:
    q, k, v = (t.float() for t in qkv())
    options = {"indices": lists(1, 2, 40, 7, 2), "block_size": 16} | change
    for backend in (None, "reference"):
        with pytest.raises((ValueError, TypeError, RuntimeError), match=OP + message):
            selected_attention(q, k, v, **options, backend=backend)


def test_debug_accepts_padding() -> None:
    q, k, v = qkv()
    index = torch.tensor([3, -1, -1]).expand(1, 1, 40, 3)
    want = selected_attention(q, k, v, index[..., :1], block_size=16)
    got = selected_attention(q, k, v, index, block_size=16, debug=True)
    torch.testing.assert_close(got, want)


def test_memory_of_training() -> None:
    """Training makes no (Tq, Tk) mask and no (Tq, n, D) copy, only a few copies of k and v."""
    q, k, v = (torch.randn(1, 512, h, 64, requires_grad=True) for h in (16, 1, 1))
    index = lists(1, 1, 512, 32, 8)
    saved = {}

    def keep(t):
        saved[t.data_ptr()] = t.numel()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        selected_attention(q, k, v, index, block_size=16)
    assert sum(saved.values()) <= 2 * q.numel() + 2 * k.numel() + index.numel() + 2 * 16 * 512
