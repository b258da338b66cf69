"""MoBA and NSA: the formulas of the papers written as loops, gradients of the choice, errors."""

from __future__ import annotations

import copy

import pytest
import torch

from omniattn.functional import moba_attention, nsa_attention
from omniattn.modules import NSA, KVCache, MoBA
from omniattn.reference.sparse.selected_blocks import nsa_scores


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64
    )


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One query (D) and the keys that it sees."""
    return torch.softmax(k @ q * q.shape[0] ** -0.5, 0) @ v


def test_moba_is_the_naive_loop() -> None:
    """As moba_naive.py of the paper's authors: gates by block means, the own block always."""
    (t, heads, size, topk), q = (29, 4, 6, 3), normal(1, 29, 4, 8)
    k, v = normal(1, 29, 2, 8).flip(1), normal(1, 29, 2, 8)
    out = moba_attention(q, k, v, block_size=size, topk=topk)
    for i in range(t):
        for h in range(heads):
            g, own = h // 2, i // size
            gates = [
                float(q[0, i, h] @ k[0, n * size : (n + 1) * size, g].mean(0)) for n in range(own)
            ]
            best = sorted(range(own), key=lambda n: -gates[n])[: topk - 1]
            keys = [j for j in range(i + 1) if j // size in (*best, own)]
            want = attend(q[0, i, h], k[0, keys, g], v[0, keys, g])
            torch.testing.assert_close(out[0, i, h], want)


@pytest.mark.parametrize(("size", "stride", "block"), [(8, 2, 6), (4, 4, 4), (24, 2, 4), (6, 3, 9)])
def test_scores_of_blocks_are_equation_9(size: int, stride: int, block: int) -> None:
    """The double sum of the paper, with weights outside of the compressed keys 0."""
    tk = 50
    count = (tk - size) // stride + 1
    p = torch.rand(1, 2, 3, count, dtype=torch.float64)
    ends = torch.tensor([49, 30, 11])
    scores, past = nsa_scores(p, ends, tk, size, stride, block)
    for g in range(2):
        for i, end in enumerate(ends.tolist()):
            for j in range(-(-tk // block)):
                assert bool(past[0, g, i, j]) == (j * block <= end)
                if j in (0, end // block, end // block - 1) and j * block <= end:
                    assert scores[0, g, i, j] == torch.inf
                    continue
                places = [
                    (j + 1) * block // stride - 1 - m - n
                    for m in range(block // stride)
                    for n in range(size // stride)
                ]
                want = sum(float(p[0, g, i, n]) for n in places if 0 <= n < count)
                assert float(scores[0, g, i, j]) == pytest.approx(want)


def test_nsa_trains_compressed_keys_by_their_own_branch_only() -> None:
    q, k, pooled = (normal(1, 40, h, 8).requires_grad_() for h in (4, 1, 1))
    pooled = pooled.detach()[:, :10].requires_grad_()
    sizes = {"compress_size": 4, "compress_stride": 4, "block_size": 4, "topk": 4, "window": 5}
    gates = torch.ones(1, 40, 4, 3, dtype=torch.float64)
    gates[..., 0] = 0
    out = nsa_attention(q, k, k, pooled, pooled, gates, **sizes)
    assert not torch.autograd.grad(out.sum(), pooled)[0].any()
    out = nsa_attention(q, k, k, pooled, pooled, torch.ones_like(gates), **sizes)
    assert torch.autograd.grad(out.sum(), pooled)[0].abs().sum() > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"compress_size": 6}, "compress_size must be a multiple of compress_stride"),
        ({"block_size": 6}, "block_size must be a multiple of compress_stride"),
        ({"topk": 0}, "topk must be an int >= 1"),
        ({"window": 0}, "window must be an int >= 1"),
        ({"gates": torch.ones(1, 40, 4, 2)}, "gates must have shape"),
        ({"k_compressed": torch.ones(1, 5, 2, 8)}, "k_compressed must have shape"),
        ({"v_window": torch.ones(1, 39, 1, 8)}, "v_window must have shape"),
        ({"backend": "tpu"}, "backend must be one of"),
    ],
)
def test_wrong_arguments_of_nsa(change: dict, message: str) -> None:
    given = {"q": torch.ones(1, 40, 4, 8), "gates": torch.ones(1, 40, 4, 3)}
    given |= {name: torch.ones(1, 40, 1, 8) for name in ("k", "v")}
    given |= {name: torch.ones(1, 10, 1, 8) for name in ("k_compressed", "v_compressed")}
    given |= {"compress_size": 4, "compress_stride": 4, "block_size": 8, "topk": 2, "window": 5}
    with pytest.raises((ValueError, TypeError), match="nsa_attention: " + message):
        nsa_attention(**given | change)


@torch.no_grad()
def test_moba_decodes_in_full_by_default() -> None:
    torch.manual_seed(0)
    layer = MoBA(dim=16, num_heads=4, block_size=4, topk=2, init_std=0.5).double()
    x = normal(1, 21, 16)
    wide = MoBA(dim=16, num_heads=4, block_size=4, topk=9, init_std=0.5).double()
    wide.load_state_dict(layer.state_dict())
    state = layer.new_state(1, 21)
    first = layer(x[:, :20], state=state)
    torch.testing.assert_close(first, layer(x[:, :20]))
    step = layer(x[:, 20:], state=state)
    full = wide.new_state(1, 21)
    wide(x[:, :20], state=full)
    # Compares with full attention to the same keys.
    full.load_state_dict(
        {"k": state.state_dict()["k"][:, :20], "v": state.state_dict()["v"][:, :20]}
    )
    torch.testing.assert_close(step, wide(x[:, 20:], state=full))
    with pytest.raises(ValueError, match="MoBA: decode must be one of"):
        MoBA(dim=16, num_heads=4, decode="none")


@torch.no_grad()
def test_state_of_nsa_goes_back_and_is_restored() -> None:
    torch.manual_seed(0)
    layer = NSA(16, 4, 1, None, 4, 2, 4, 3, 5, init_std=0.5).double()
    x = normal(2, 30, 16)
    full = layer(x)
    state = layer.new_state(2, 30)
    layer(x[:, :17], state=state)
    saved = copy.deepcopy(state.state_dict())
    layer(x[:, 20:25], state=state)
    state.crop(17)
    torch.testing.assert_close(layer(x[:, 17:], state=state), full[:, 17:])
    other = layer.new_state(2, 30)
    other.load_state_dict(saved)
    assert (other.length, other.compressed.length) == (17, 7)
    other.reorder(torch.tensor([1, 0]))
    torch.testing.assert_close(layer(x[[1, 0], 17:], state=other), full[[1, 0], 17:])
    with pytest.raises(TypeError, match="NSA: state must be an NSAState"):
        layer(x, state=KVCache(2, 30, 1, 4))
    with pytest.raises(ValueError, match="NSA: mask must be None"):
        layer(x, mask=torch.ones(1, dtype=torch.bool))
    with pytest.raises(ValueError, match="NSA: compress_size must be a multiple of compress_str"):
        NSA(16, 4, compress_size=5, compress_stride=2)


def test_attention_without_heads() -> None:
    q, gates = torch.ones(1, 6, 0, 4), torch.ones(1, 6, 0, 3)
    assert moba_attention(q, q, q, block_size=2, topk=2).shape == q.shape
    sizes = {"compress_size": 2, "compress_stride": 1, "block_size": 2}
    assert nsa_attention(q, q, q, q[:, :5], q[:, :5], gates, **sizes).shape == q.shape


def test_mean_keys_that_a_cache_has() -> None:
    q, k = torch.randn(2, 1, 4, 8), torch.randn(2, 11, 2, 8)
    means = k[:, :8].unflatten(1, (2, 4)).mean(2)
    sizes = {"block_size": 4, "topk": 2}
    want = moba_attention(q, k, k, **sizes)
    torch.testing.assert_close(moba_attention(q, k, k, block_keys=means, **sizes), want)
    with pytest.raises(
        ValueError, match=r"moba_attention: block_keys must have shape \(2, 2, 2, 8"
    ):
        moba_attention(q, k, k, block_keys=means[:, :1], **sizes)
    with pytest.raises(TypeError, match="moba_attention: block_keys must be float32"):
        moba_attention(q, k, k, block_keys=means.double(), **sizes)
