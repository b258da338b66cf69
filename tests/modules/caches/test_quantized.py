"""Caches in int8: what they store, that every way to read them agrees, and generation."""

import copy

import pytest
import torch

from omniattn import functional
from omniattn.models import PRESETS, Llama, generate
from omniattn.modules import (
    H2O,
    Attention,
    DecoderBlock,
    DifferentialAttention,
    GatedMLP,
    KVCache,
    Mamba2,
    MultiHeadLatentAttention,
    PagedCache,
    PagePool,
    QuantizedCache,
    RMSNorm,
    RotaryEmbedding,
)

LAYER = Attention.Config(24, 4, 2, init_std=0.5)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def new_cache(kind: str, batch: int = 2):
    if kind == "contiguous":
        return QuantizedCache(batch, 20, 2, 6)
    return PagedCache(PagePool(12, 3, 2, 6, kv_dtype=torch.int8), batch)


def tokens(n: int, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, n, 2, 6), torch.randn(batch, n, 2, 6)


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
@pytest.mark.parametrize("cuts", [(5, 6, 7, 8, 9, 10, 11, 12), (1, 2, 3, 9, 10), (7, 9, 13)])
@torch.no_grad()
def test_the_cut_of_the_tokens_does_not_matter(kind, cuts):
    """Each query attends to its rounded keys, however many are appended at once."""
    layer = Attention(LAYER)
    rotary = RotaryEmbedding(RotaryEmbedding.Config(6))
    x = torch.randn(2, cuts[-1], 24)
    rope = rotary(torch.arange(cuts[-1]))
    whole = layer(x, rope=rope, state=new_cache(kind))
    cache = new_cache(kind)
    parts = []
    for a, b in zip((0, *cuts), cuts, strict=False):
        parts.append(layer(x[:, a:b], rope=rotary(torch.arange(a, b)), state=cache))
        if b == cuts[1]:  # the state goes to another cache, the beams are swapped twice
            state, cache = cache.state_dict(), new_cache(kind)
            cache.load_state_dict(state)
            cache.reorder(torch.tensor([1, 0]))
            cache = copy.deepcopy(cache)
            cache.reorder(torch.tensor([1, 0]))
    assert cache.length == cuts[-1]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=2e-5)
    exact = layer(x, rope=rope)
    assert (whole - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_rows_are_stored_as_quantize_int8_gives_them(kind):
    cache = new_cache(kind)
    k, v = tokens(5)
    k[0, 0] = 0
    views = cache.append(k, v)
    for view, rows in zip(views, (k, v), strict=True):
        codes, scale = functional.quantize_int8(rows)
        assert view.dtype == torch.float32
        assert torch.equal(view, codes * scale[..., None])
    assert views[0][0, 0].abs().max() == 0
    cache.crop(3)
    assert cache.append(k[:, 3:], v[:, 3:])[0].shape == k.shape
    assert torch.equal(cache.views()[0], views[0])


def test_bytes():
    half = KVCache(2, 32, 2, 128, dtype=torch.bfloat16)
    cache = QuantizedCache(2, 32, 2, 128, dtype=torch.bfloat16)
    assert cache.nbytes == 2 * 32 * 2 * 2 * (128 + 4)
    assert cache.nbytes / half.nbytes == (128 + 4) / 256
    pool = PagePool(4, 8, 2, 128, dtype=torch.bfloat16, kv_dtype=torch.int8)
    assert pool.nbytes == 4 * 8 * 2 * 2 * (128 + 4)
    pages = PagedCache(pool)
    pages.append(*(torch.ones(1, 9, 2, 128, dtype=torch.bfloat16),) * 2)
    assert pages.nbytes == pool.nbytes / 2


@torch.no_grad()
def test_pages_are_shared_and_joined():
    layer = Attention(LAYER)
    pool = PagePool(20, 3, 2, 6, kv_dtype=torch.int8)
    x = torch.randn(1, 9, 24)
    prefix = PagedCache(pool)
    layer(x[:, :4], state=prefix)
    forks = [prefix.fork() for _ in range(2)]
    layer(x[:, 4:7], state=forks[0])
    layer(x[:, 4:5], state=forks[1])
    alone = [copy.deepcopy(fork) for fork in forks]
    batch = PagedCache.join(forks)
    assert batch.lengths.tolist() == [7, 5]
    out = layer(x[:, 7:8].expand(2, -1, -1), state=batch)
    for row, fork in enumerate(alone):
        expected = layer(x[:, 7:8], state=fork)
        torch.testing.assert_close(out[row : row + 1], expected)
    with pytest.raises(ValueError, match="mask must be None for pages in int8"):
        layer(x[:, 8:].expand(2, -1, -1), state=batch, mask=torch.ones(1, 8, dtype=torch.bool))


@torch.no_grad()
def test_options_of_the_layer():
    """Windows, sinks, masks, biases and functions of the score, in steps and at once."""
    x = torch.randn(2, 9, 24)
    seen = torch.rand(2, 1, 9, 9) < 0.8
    slopes = functional.alibi_slopes(4)
    for options, given in (
        ({"window_size": (3, 0), "sinks": True, "softcap": 5.0}, {}),
        ({"head_scale": True}, {"mask": seen, "alibi_slopes": slopes}),
        ({}, {"bias": torch.randn(1, 4, 9, 9)}),
        ({}, {"score_mod": lambda s, b, h, q, k: s - 0.1 * (q - k)}),
        ({}, {"mask": lambda b, h, q, k: q - k < 4}),
        ({"backend": "reference"}, {}),
    ):
        layer = Attention(Attention.Config(24, 4, 2, init_std=0.5, **options))
        exact = layer(x, **given)
        cache = layer.new_state(2, 9, kv_dtype=torch.int8)
        assert isinstance(cache, QuantizedCache)
        steps = []
        for t in range(9):
            own = {
                name: value[:, :, t : t + 1, : t + 1] if torch.is_tensor(value) else value
                for name, value in given.items()
                if name != "alibi_slopes"
            }
            if "alibi_slopes" in given:
                own["alibi_slopes"] = slopes
            steps.append(layer(x[:, t : t + 1], state=cache, **own))
        steps = torch.cat(steps, 1)
        whole = layer(x, state=layer.new_state(2, 9, kv_dtype=torch.int8), **given)
        torch.testing.assert_close(steps, whole, rtol=1e-4, atol=2e-5)
        assert (whole - exact).norm() < 0.02 * exact.norm()


def decoder(**changes):
    config = PRESETS["llama-test"]
    return Llama(config).eval(), torch.randint(config.vocab_size, (2, 12))


#: Largest relative error of the logits of a small Llama, see the page on caches.
LOGITS = 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_logits_of_a_model_are_within_the_budget(dtype):
    model, prompt = decoder()
    exact = copy.deepcopy(model).double()(prompt)
    model = model.to(dtype)
    state = model.new_state(2, 12, kv_dtype=torch.int8)
    parts = [model(prompt[:, :5], state=state)]
    parts += [model(prompt[:, t : t + 1], state=state) for t in range(5, 12)]
    error = (torch.cat(parts, 1).double() - exact).norm() / exact.norm()
    plain = (model(prompt).double() - exact).norm() / exact.norm()
    assert error < LOGITS + plain, (error, plain)
    assert sum(s.nbytes for s in state) < 0.8 * sum(s.nbytes for s in model.new_state(2, 12))


def test_generation():
    model, prompt = decoder()
    for options in ({}, {"num_beams": 2}, {"temperature": 0.8, "top_k": 5}):
        out = generate(model, prompt, 6, kv_dtype=torch.int8, **options)
        assert out.shape == (2, 18)
    greedy = generate(model, prompt, 6, kv_dtype=torch.int8)
    state = model.new_state(2, 18, kv_dtype=torch.int8)
    with torch.no_grad():
        logits = model(greedy, state=state)
    assert torch.equal(logits[:, 11:-1].argmax(-1), greedy[:, 12:])


def test_what_does_not_combine_is_named():
    layer = Attention(LAYER)
    rolling = Attention(Attention.Config(24, 4, 2, window_size=(3, 0)))
    cross = Attention(Attention.Config(24, 4, 2, cross=True, causal=False))
    for call, message in (
        (lambda: layer.new_state(1, 4, kv_dtype=torch.float16), "kv_dtype must be torch.int8"),
        (lambda: layer.new_state(1, 4, kv_dtype=torch.int8, eviction=H2O(2, 2)), "eviction="),
        (lambda: rolling.new_state(1, 4, rolling=True, kv_dtype=torch.int8), "rolling=True"),
        (lambda: cross.new_state(1, 4, kv_dtype=torch.int8), "cross=True"),
        (lambda: PagePool(4, 2, 2, 6, kv_dtype=torch.bfloat16), "PagePool: kv_dtype must be"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    other = DifferentialAttention(24, 2, 0)
    given = {"state": QuantizedCache(2, 4, 4, 6, v_head_dim=12)}
    with torch.no_grad(), pytest.raises(ValueError, match="keys and values in int8 are for Atten"):
        other(torch.randn(2, 1, 24), **given)
    cache = QuantizedCache(2, 4, 2, 6)
    with pytest.raises(RuntimeError, match="inference only"):
        cache.append(*(t.requires_grad_() for t in tokens(2)))
    with pytest.raises(ValueError, match="length must not exceed max_length=4, got length=5"):
        cache.append(*tokens(5))
    with pytest.raises((KeyError, ValueError)):
        cache.load_state_dict(KVCache(2, 4, 2, 6).state_dict())
    training = Attention(Attention.Config(24, 4, 2, dropout_p=0.5)).train()
    with torch.no_grad(), pytest.raises(ValueError, match="dropout_p must be 0"):
        training(torch.randn(2, 1, 24), state=cache)


def test_blocks_with_other_states():
    mlp, norm = GatedMLP.Config(24, 32), RMSNorm.Config(24)
    mamba = DecoderBlock(DecoderBlock.Config(Mamba2.Config(24, headdim=12), mlp, norm))
    mamba.new_state(1, 4, kv_dtype=torch.int8)  # of constant size
    latent = MultiHeadLatentAttention.Config(24, 4, 8, 8, 6, 0, 5)
    block = DecoderBlock(DecoderBlock.Config(latent, mlp, norm))
    with pytest.raises(ValueError, match=r"kv_dtype needs Attention .*MultiHeadLatentAttention"):
        block.new_state(1, 4, kv_dtype=torch.int8)
