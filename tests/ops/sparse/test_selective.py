"""selective_attention: a loop over queries, budgets, calls in parts, memory, module, errors."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from omniattn.functional import attention, selective_attention
from omniattn.modules import KVCache, RotaryEmbedding, SelectiveAttention, SelectiveCache

F64 = torch.float64


def qkv(tq=30, tk=30, heads=4, kv_heads=2, batch=2, dtype=F64):
    make = torch.Generator().manual_seed(0)
    shapes = ((batch, tq, heads, 8), (batch, tk, kv_heads, 8), (batch, tk, kv_heads, 5))
    return [torch.randn(s, generator=make, dtype=F64).to(dtype) for s in shapes]


def by_hand(q, k, v, budget=None):
    """One query after another; penalties are what earlier queries have left on each key."""
    (batch, tq, heads, dim), tk, group = q.shape, k.shape[1], q.shape[2] // k.shape[2]
    out = torch.zeros(batch, tq, heads, v.shape[3], dtype=q.dtype)
    left = torch.zeros(batch, tk, dtype=q.dtype)
    for b in range(batch):
        for n in range(tq):
            i = n + tk - tq
            keys = sorted(range(i + 1), key=lambda j: (float(left[b, j]), -j))[:budget]
            for h in range(heads):
                logits = k[b, keys, h // group] @ q[b, n, h] / math.sqrt(dim) - left[b, keys]
                out[b, n, h] = logits.softmax(-1) @ v[b, keys, h // group]
            own = k[b, : i + 1, 0] @ q[b, n, 0] / math.sqrt(dim)
            left[b, 1:i] += own[1:i].clamp(min=0)
    return out, left


@pytest.mark.parametrize("budget", [None, 1, 4, 29, 40])
@pytest.mark.parametrize("sizes", [(30, 30), (7, 30), (1, 5), (1, 1)])
def test_the_definition(sizes, budget):
    inputs = qkv(*sizes)
    want = by_hand(*inputs, budget)
    for backend in (None, "reference"):
        found = selective_attention(*inputs, budget=budget, return_penalty=True, backend=backend)
        for got, expected in zip(found, want, strict=True):
            torch.testing.assert_close(got, expected)


def test_gradients_go_through_what_hides():
    inputs = [t.requires_grad_() for t in qkv(12, 12, 2, 1, 1)]
    weight = torch.linspace(-1, 1, 120, dtype=F64).view(1, 12, 2, 5)
    got = torch.autograd.grad(selective_attention(*inputs), inputs, weight)

    def loss(*inputs):  # of tensors that may have gradients, without writing in place
        q, k, v = inputs
        rows, left = [], torch.zeros(12, dtype=F64)
        for i in range(12):
            logits = torch.stack([k[0, : i + 1, 0] @ q[0, i, h] / math.sqrt(8) for h in range(2)])
            rows.append((logits - left[: i + 1]).softmax(-1) @ v[0, : i + 1, 0])
            mine = logits[0].relu() * torch.tensor([0 < j < i for j in range(i + 1)])
            left = left + torch.nn.functional.pad(mine, (0, 11 - i))
        return torch.stack(rows)[None]

    want = torch.autograd.grad(loss(*inputs), inputs, weight)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    plain = torch.autograd.grad(attention(*inputs, causal=True), inputs, weight)
    assert not torch.allclose(plain[0], got[0])


def test_calls_in_parts_are_the_whole():
    q, k, v = qkv(40, 40)
    whole, last = selective_attention(q, k, v, budget=9, return_penalty=True)
    penalty, parts = torch.zeros(2, 0, dtype=F64), []
    for a, b in ((0, 17), (17, 18), (18, 30), (30, 40)):
        start = torch.nn.functional.pad(penalty, (0, b - a))
        out, penalty = selective_attention(
            q[:, a:b], k[:, :b], v[:, :b], penalty=start, budget=9, return_penalty=True
        )
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    torch.testing.assert_close(penalty, last)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for t in tree_leaves(made):
            if isinstance(t, torch.Tensor):
                self.elements = max(self.elements, t.numel())
        return made


@pytest.mark.parametrize("train", [False, True])
def test_no_tensor_has_all_pairs(train):
    length = 2048
    inputs = [t.requires_grad_(train) for t in qkv(length, length, 2, 1, 1, torch.float32)]
    with Largest() as largest:
        out = selective_attention(*inputs, budget=64)
        if train:
            torch.autograd.grad(out.sum(), inputs)
    assert 0 < largest.elements < length * length / 4


@pytest.mark.parametrize("budget", [None, 5])
@torch.no_grad()
def test_a_layer_decodes_what_it_computes_at_once(budget):
    torch.manual_seed(0)
    config = SelectiveAttention.Config(24, 4, 2, budget=budget, init_std=0.5, softcap=4.0)
    layer = SelectiveAttention(config, dtype=F64)
    rotary = RotaryEmbedding(RotaryEmbedding.Config(6))
    x = torch.randn(2, 12, 24, dtype=F64)
    full = layer(x, rope=rotary(torch.arange(12)))
    state, parts = layer.new_state(2, 12), []
    for a, b in ((0, 5), (5, 6), (6, 9), (9, 12)):
        parts.append(layer(x[:, a:b], rope=rotary(torch.arange(a, b)), state=state))
        saved, state = state.state_dict(), layer.new_state(2, 12)
        state.load_state_dict(saved)
        state.reorder(torch.tensor([1, 0]))
        state.reorder(torch.tensor([1, 0]))
    torch.testing.assert_close(torch.cat(parts, 1), full)
    assert state.nbytes == 2 * 12 * (2 * 2 * 6 + 1) * 8
    state.crop(12)
    with pytest.raises(ValueError, match=r"must be 0 or 12, got length=3"):
        state.crop(3)
    state.crop(0)
    again = layer(x, rope=rotary(torch.arange(12)), state=state)
    torch.testing.assert_close(again, full)


def test_errors_name_the_argument():
    q, k, v = qkv(3, 4)
    with pytest.raises(ValueError, match="selective_attention: budget must be an int >= 1"):
        selective_attention(q, k, v, budget=0)
    with pytest.raises(ValueError, match=r"penalty must have shape \(2, 4\)"):
        selective_attention(q, k, v, penalty=torch.zeros(2, 3, dtype=F64))
    with pytest.raises(TypeError, match=r"penalty must be torch.float64"):
        selective_attention(q, k, v, penalty=torch.zeros(2, 4))
    with pytest.raises(TypeError, match="return_penalty must be True or False"):
        selective_attention(q, k, v, return_penalty=1)
    with pytest.raises(ValueError, match="num_heads must be a multiple"):
        SelectiveAttention.Config(24, 3, 2)
    layer = SelectiveAttention(SelectiveAttention.Config(24, 2))
    x = torch.ones(1, 3, 24)
    with pytest.raises(ValueError, match="mask must be None"):
        layer(x, mask=torch.ones(1).bool())
    with pytest.raises(TypeError, match=r"must be a SelectiveCache, got type.state.=KVCache"):
        layer(x, state=KVCache(1, 4, 2, 12))
    with pytest.raises(ValueError, match="x must have shape"):
        layer(x[0])
    cache = SelectiveCache(1, 4, 2, 3)
    with pytest.raises(ValueError, match="missing="):
        cache.load_state_dict(KVCache(1, 4, 2, 3).state_dict())
    empty = {"k": torch.zeros(1, 2, 2, 3), "v": torch.zeros(1, 2, 2, 3)}
    with pytest.raises(ValueError, match=r"penalty must have shape \(1, 2\)"):
        cache.load_state_dict(empty | {"penalty": torch.zeros(1, 3)})
