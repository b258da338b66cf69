"""Caches: prefill and steps equal the full forward, bytes, beams, crop, sharing, saved state."""

import pytest
import torch
from layer_checks import functions_of_positions

from omniattn.modules import (
    H2O,
    NSA,
    Attention,
    BlockKeyCache,
    CrossCache,
    DifferentialAttention,
    DualChunkAttention,
    GatedAttentionUnit,
    KVCache,
    LatentCache,
    MoBA,
    MultiHeadLatentAttention,
    PagedCache,
    PagePool,
    RollingCache,
    RotaryEmbedding,
    SelectiveAttention,
)
from omniattn.modules.base.state import RecurrentState

WINDOW = 4
LAYER = Attention.Config(24, 4, 2, window_size=(WINDOW - 1, 0), init_std=0.5)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def new_cache(kind: str, batch: int = 2):
    if kind == "standard":
        return KVCache(batch, 20, 2, 6)
    if kind == "paged":
        return PagedCache(PagePool(12, 3, 2, 6), batch)
    return RollingCache(batch, WINDOW, 2, 6, sort=kind == "rolling-sorted")


def tokens(n: int, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, n, 2, 6), torch.randn(batch, n, 2, 6)


@pytest.mark.parametrize("kind", ["standard", "rolling", "rolling-sorted", "paged"])
@pytest.mark.parametrize("cuts", [(5, 6, 7, 8, 9, 10, 11, 12), (1, 2, 3, 9, 10), (7, 9, 13)])
@torch.no_grad()
def test_prefill_and_steps_equal_the_full_forward(kind, cuts):
    layer = Attention(LAYER)
    rotary = RotaryEmbedding(RotaryEmbedding.Config(6))
    x = torch.randn(2, cuts[-1], 24)
    full = layer(x, rope=rotary(torch.arange(cuts[-1])))
    cache = new_cache(kind)
    parts = []
    for a, b in zip((0, *cuts), cuts, strict=False):
        parts.append(layer(x[:, a:b], rope=rotary(torch.arange(a, b)), state=cache))
        if b == cuts[1]:  # the state goes to another cache, the beams are swapped twice
            state, cache = cache.state_dict(), new_cache(kind)
            cache.load_state_dict(state)
            cache.reorder(torch.tensor([1, 0]))
            cache.reorder(torch.tensor([1, 0]))
    assert cache.length == cuts[-1]
    torch.testing.assert_close(torch.cat(parts, 1), full, rtol=1e-4, atol=2e-5)


FUNCTIONS = {
    "attention": Attention.Config(24, 4, 2, qk_norm="rms", init_std=0.5),
    "sigmoid": Attention.Config(24, 4, 2, normalizer="sigmoid", norm_n=9, init_std=0.5),
    "differential": DifferentialAttention.Config(24, 4, 0, init_std=0.5),
    "latent": MultiHeadLatentAttention.Config(24, 4, 8, 8, 6, 0, 5, init_std=0.5),
    "gated-unit": GatedAttentionUnit.Config(24, key_dim=8, norm_n=9, init_std=0.5),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@torch.no_grad()
def test_functions_of_positions_in_steps(name):
    """A score_mod and a mask that is a function see the positions of tokens."""
    layer = FUNCTIONS[name].build(dtype=torch.float64)
    functions, _ = functions_of_positions(1 if name == "gated-unit" else 4)
    x = torch.randn(2, 12, 24, dtype=torch.float64)
    full, state = layer(x, **functions), layer.new_state(2, 20)
    steps = [layer(part, state=state, **functions) for part in x.split([6, 1, 1, 3, 1], 1)]
    torch.testing.assert_close(torch.cat(steps, 1), full)
    rows = torch.arange(12)
    b, h, q, k = torch.meshgrid(*map(torch.arange, (2, 4)), rows, rows, indexing="ij")
    seen = functions["mask"](b, h, q, k)[:, :1]
    torch.testing.assert_close(layer(x, mask=functions["mask"]), layer(x, mask=seen))
    if name in ("attention", "differential"):
        bias = functions["score_mod"](torch.zeros(1, dtype=x.dtype), b, h, q, k)
        mod = functions["score_mod"]
        added = layer(x, score_mod=lambda s, *at: s + mod(torch.zeros_like(s), *at))
        torch.testing.assert_close(added, layer(x, bias=bias))


@pytest.mark.parametrize("kind", ["rolling-sorted", "paged", "gathered"])
@torch.no_grad()
def test_functions_of_positions_in_other_caches(kind):
    layer, (functions, _) = Attention(LAYER, dtype=torch.float64), functions_of_positions(4)
    x = torch.randn(2, 12, 24, dtype=torch.float64)
    options = {"bias": torch.randn(1, 4, 1, 1, dtype=x.dtype)} if kind == "gathered" else {}
    full = layer(x, **functions, **options)
    pool = PagePool(12, 3, 2, 6, dtype=x.dtype)
    if kind == "rolling-sorted":
        cache = RollingCache(2, WINDOW, 2, 6, sort=True, dtype=x.dtype)
        layer(x[:, :4], state=cache)
    else:  # sequences of 4 and 2 tokens
        both = PagedCache(pool, 1), PagedCache(pool, 1)
        for n, own in enumerate(both):
            layer(x[n : n + 1, : 4 - 2 * n], state=own)
        cache = PagedCache.join(both)
    at = 4 - 2 * torch.arange(2) * (kind != "rolling-sorted")
    for new in (1, 3, 1):
        rows = (at[:, None] + torch.arange(new))[..., None].expand(-1, -1, 24)
        out = layer(x.gather(1, rows), state=cache, **functions, **options)
        torch.testing.assert_close(out, full.gather(1, rows))
        at = at + new


@torch.no_grad()
def test_functions_of_positions_need_them():
    layer, (functions, _) = Attention(LAYER), functions_of_positions(4)
    x, caches = torch.randn(1, 1, 24), []
    caches.append((layer, layer.new_state(1, 20, rolling=True), "sorted by position"))
    whole = Attention(Attention.Config(24, 4, 2))
    caches.append((whole, whole.new_state(1, 20, eviction=H2O(2, 2)), "must be None, since"))
    for module, cache, message in caches:
        for name, function in functions.items():
            with pytest.raises(ValueError, match=message):
                module(x, state=cache, **{name: function})


def test_bytes_are_those_of_the_tokens():
    sizes = {"v_head_dim": 5, "dtype": torch.bfloat16}
    assert KVCache(3, 10, 2, 6, **sizes).nbytes == 3 * 10 * 2 * (6 + 5) * 2
    assert RollingCache(3, 4, 2, 6, **sizes).nbytes == 3 * 4 * 2 * (6 + 5) * 2
    # DeepSeek-V2: 576 numbers a token and layer, whatever the number of heads.
    assert LatentCache(1, 7, 512, 64, dtype=torch.bfloat16).nbytes == 7 * 576 * 2
    cross = CrossCache()
    assert cross.nbytes == 0
    cross.append(torch.ones(2, 5, 3, 4), torch.ones(2, 5, 3, 4))
    assert cross.nbytes == 2 * 5 * 3 * (4 + 4) * 4
    pool = PagePool(12, 3, 2, 6, **sizes)
    page = 3 * 2 * (6 + 5) * 2
    assert pool.nbytes == 12 * page
    cache = PagedCache(pool, 2)
    cache.append(torch.ones(2, 4, 2, 6).bfloat16(), torch.ones(2, 4, 2, 5).bfloat16())
    assert cache.nbytes == 2 * 2 * page
    layer = Attention(LAYER)
    assert layer.new_state(2, 100, rolling=True).nbytes == 2 * WINDOW * 2 * (6 + 6) * 4
    assert layer.new_state(2, 3, rolling=True).nbytes == 2 * 3 * 2 * (6 + 6) * 4


STATES = [
    *(lambda kind=kind: new_cache(kind) for kind in ("standard", "rolling", "paged")),
    CrossCache,
    lambda: RecurrentState(h=torch.zeros(2, 3)),
    lambda: Attention(Attention.Config(24, 4)).new_state(1, 8, eviction=H2O(2, 2)),
    lambda: SelectiveAttention(24, 4).new_state(1, 8),
]


@pytest.mark.parametrize("new", STATES)
def test_wrong_arguments_of_states_are_named(new):
    state = new()
    for length in (1.5, True, "x", None):
        with pytest.raises(TypeError, match="length must be an int, got length="):
            state.crop(length)
    for saved in (None, 5):
        with pytest.raises(TypeError, match=f"state must be .* got state={saved}"):
            state.load_state_dict(saved)


@torch.no_grad()
def test_a_failed_call_of_a_layer_leaves_its_state():
    layer, x = Attention(Attention.Config(24, 4)), torch.randn(1, 5, 24)
    state = layer.new_state(1, 5)
    first = layer(x[:, :3], state=state)
    with pytest.raises(ValueError, match="mask must be broadcastable"):
        layer(x[:, 3:], mask=torch.ones(1, 1, 2, 99, dtype=torch.bool), state=state)
    torch.testing.assert_close(torch.cat((first, layer(x[:, 3:], state=state)), 1), layer(x))


@pytest.mark.parametrize("kind", ["standard", "rolling", "paged"])
def test_crop_and_reorder(kind):
    k, v = tokens(4)
    cache = new_cache(kind)
    cache.append(k, v)
    cache.crop(2)
    cache.reorder(torch.tensor([1, 1, 0]))
    seen_k, seen_v = cache.views()
    assert torch.equal(seen_k, k[[1, 1, 0], :2])
    assert torch.equal(seen_v, v[[1, 1, 0], :2])
    with pytest.raises(ValueError, match="length=3"):
        cache.crop(3)
    more = tokens(1, 3)
    seen_k, _ = cache.append(*more)
    assert torch.equal(seen_k, torch.cat([k[[1, 1, 0], :2], more[0]], 1))


def test_block_key_cache_has_the_means_of_whole_blocks():
    k, v = tokens(11)
    cache = BlockKeyCache(2, 12, 2, 6, block_size=4)
    for part in (slice(0, 3), slice(3, 5), slice(5, 11)):
        cache.append(k[:, part], v[:, part])
    cache.crop(6)
    k[:, 6:] += 1
    cache.append(k[:, 6:], v[:, 6:])
    cache.reorder(torch.tensor([1, 0]))
    other = BlockKeyCache(2, 12, 2, 6, block_size=4)
    other.load_state_dict(cache.state_dict())
    expected = k[[1, 0], :8].unflatten(1, (2, 4)).mean(2)
    for found in (cache.means(), other.means()):
        torch.testing.assert_close(found, expected)
    assert cache.nbytes == KVCache(2, 12, 2, 6).nbytes + 2 * 3 * 2 * 6 * 4


def test_states_of_layers_with_other_sizes_are_refused():
    sizes = {"dim": 16, "num_heads": 2}
    nsa = {"compress_size": 8, "compress_stride": 4, "block_size": 8, "topk": 3, "window": 8}
    x = torch.randn(1, 20, 16)
    for layer, other, message in (
        (NSA(**sizes, **nsa), NSA(**sizes, **nsa | {"compress_size": 4}),
         r"compress_stride \(3, 4, 4\), got \(3, 8, 4\)"),
        (NSA(**sizes, **nsa), NSA(**sizes, **nsa, separate_kv=False),
         r"branches.* \(1, 8, 4\), got \(3, 8, 4\)"),
        (DualChunkAttention(**sizes, chunk_size=6, local_window=2),
         DualChunkAttention(**sizes, chunk_size=8, local_window=2), "period=.*6.* period=4"),
        (MoBA(**sizes, block_size=4, decode="moba"), MoBA(**sizes, block_size=8, decode="moba"),
         "block_size=8, got block_size=4"),
    ):  # fmt: skip
        state = layer.new_state(1, 32)
        with torch.no_grad():
            layer(x, state=state)
            with pytest.raises(ValueError, match=message):
                other(x[:, :1], state=state)
        if not isinstance(layer, MoBA):  # whose means are computed from the keys
            with pytest.raises(ValueError, match=message):
                other.new_state(1, 32).load_state_dict(state.state_dict())
    dual = DualChunkAttention(**sizes, chunk_size=6, local_window=2)
    with pytest.raises(ValueError, match=r"period=.*4, got a KVCache with period=None"):
        dual(x, state=KVCache(1, 32, 2, 8))


def test_rolling_cache_keeps_the_window_and_no_more():
    k, v = tokens(9)
    cache = RollingCache(2, WINDOW, 2, 6, sort=True)
    cache.append(k[:, :3], v[:, :3])
    attended, _ = cache.append(k[:, 3:8], v[:, 3:8])
    assert torch.equal(attended, k[:, :8])
    attended, _ = cache.append(k[:, 8:], v[:, 8:])
    assert torch.equal(attended, k[:, 5:])
    slots, _ = RollingCache(2, WINDOW, 2, 6).append(k[:, :1], v[:, :1])
    assert torch.equal(slots, k[:, :1])
    with pytest.raises(ValueError, match="overwritten"):
        cache.crop(8)
    cache.crop(9)
    with pytest.raises(ValueError, match="page_size=0"):
        PagePool(4, 0, 2, 8)
    with pytest.raises(ValueError, match="window=0"):
        RollingCache(1, 0, 1, 1)
    with pytest.raises(ValueError, match="last min"):
        cache.load_state_dict({"k": k, "v": v, "length": 9})


@torch.no_grad()
def test_masks_and_biases_need_a_cache_in_order():
    layer = Attention(LAYER)
    x = torch.randn(1, 1, 24)
    with pytest.raises(ValueError, match="sort=False"):
        layer(x, state=layer.new_state(1, 20, rolling=True), bias=torch.zeros(1))
    cache = PagedCache(PagePool(4, 4, 2, 6))
    for options in ({"bias": torch.zeros(1)}, {"mask": torch.ones(1).bool()}, {}):
        layer(x, state=cache, **options)
    assert cache.length == 3
    with pytest.raises(ValueError, match="left window"):
        Attention(Attention.Config(24, 4, 2)).new_state(1, 20, rolling=True)


def test_latent_rows_are_key_and_value():
    cache = LatentCache(2, 5, 8, 3)
    rows = torch.randn(2, 4, 1, 11)
    k, v = cache.append(rows, rows[..., :8])
    assert torch.equal(k, rows)
    assert torch.equal(v, rows[..., :8])
    assert v.data_ptr() == k.data_ptr()
    other = LatentCache(2, 5, 8, 3)
    other.load_state_dict(cache.state_dict())
    other.crop(2)
    other.reorder(torch.tensor([1]))
    assert torch.equal(other.views()[0], rows[1:, :2])
    with pytest.raises(ValueError, match="first 8 columns"):
        cache.append(rows, rows)


@torch.no_grad()
def test_cross_cache_holds_one_source():
    layer = Attention(Attention.Config(8, 2, causal=False, cross=True))
    cache = layer.new_state(2, 0)
    with pytest.raises(ValueError, match="none"):
        cache.views()
    x, source = torch.randn(2, 3, 8), torch.randn(2, 5, 8)
    expected = layer(x, source, state=cache)
    cache.crop(0)
    cache.reorder(torch.tensor([1, 0]))
    torch.testing.assert_close(layer(x.flip(0), state=cache), expected.flip(0))
    with pytest.raises(ValueError, match="one source"):
        cache.append(*tokens(2))
    other = CrossCache()
    other.load_state_dict(cache.state_dict())
    assert torch.equal(other.views()[1], cache.views()[1])


@torch.no_grad()
def test_cross_cache_holds_a_source_without_tokens():
    layer = Attention(Attention.Config(8, 2, causal=False, cross=True))
    cache = layer.new_state(2, 0)
    x = torch.randn(2, 3, 8)
    with pytest.raises(ValueError, match="source must be given"):
        layer(x, state=cache)
    assert torch.equal(layer(x, torch.randn(2, 0, 8), state=cache), torch.zeros(2, 3, 8))
    cache.crop(0)
    cache.reorder(torch.tensor([1, 0, 1]))
    other = CrossCache()
    other.load_state_dict(cache.state_dict())
    for filled in (cache, other):
        assert (filled.length, filled.nbytes) == (0, 0)
        assert filled.views()[0].shape == (3, 0, 2, 4)
        assert torch.equal(layer(torch.randn(3, 1, 8), state=filled), torch.zeros(3, 1, 8))
        with pytest.raises(ValueError, match="one source"):
            filled.append(*tokens(2))


def test_forks_share_pages_until_one_writes():
    pool = PagePool(12, 3, 2, 6)
    prompt = PagedCache(pool)
    k, v = tokens(7, 1)
    prompt.append(k, v)
    assert pool.used_pages == 3
    branches = [prompt.fork(), prompt.fork(5), prompt.fork(3)]
    assert pool.used_pages == 3
    more = [tokens(2, 1) for _ in branches]
    for branch, new in zip(branches, more, strict=True):
        branch.append(*new)
    # 7 + 2 writes to a copy of the last page, 5 + 2 to one of the second and a new one, 3 + 2
    # shares the full first page and needs a new one.
    assert pool.used_pages == 3 + 1 + 2 + 1
    assert torch.equal(prompt.views()[0], k)
    for branch, new, kept in zip(branches, more, (7, 5, 3), strict=True):
        assert torch.equal(branch.views()[0], torch.cat([k[:, :kept], new[0]], 1))
    for cache in (prompt, *branches):
        cache.free()
    assert pool.used_pages == 0


def test_beams_of_one_page_copy_it_once_less_than_there_are_beams():
    pool = PagePool(4, 4, 2, 6)
    cache = PagedCache(pool)
    cache.append(*tokens(2, 1))
    cache.reorder(torch.tensor([0, 0, 0]))
    assert pool.used_pages == 1
    cache.append(*tokens(1, 3))
    assert pool.used_pages == 3
    before = cache.views()[0].clone()
    cache.reorder(torch.tensor([2, 2, 1]))
    with pytest.raises(ValueError, match="free_pages=2"):
        cache.append(*tokens(6, 3))
    assert torch.equal(cache.views()[0], before[[2, 2, 1]])


@torch.no_grad()
def test_sequences_of_different_lengths_decode_together():
    layer = Attention(LAYER)
    rotary = RotaryEmbedding(RotaryEmbedding.Config(6))
    x = torch.randn(3, 12, 24)
    lengths = (2, 9, 5)
    pool = PagePool(20, 3, 2, 6)
    caches = []
    for row, n in zip(x, lengths, strict=True):
        caches.append(PagedCache(pool))
        layer(row[None, :n], rope=rotary(torch.arange(n)), state=caches[-1])
    cache = PagedCache.join(caches)
    assert cache.lengths.tolist() == list(lengths)
    full = layer(x, rope=rotary(torch.arange(12)))
    for new in (1, 2):
        positions = cache.lengths[:, None] + torch.arange(new)
        at = positions[..., None].expand(-1, -1, 24)
        out = layer(x.gather(1, at), rope=rotary(positions), state=cache)
        torch.testing.assert_close(out, full.gather(1, at), rtol=1e-4, atol=2e-5)
    state = cache.state_dict()
    again = PagedCache(PagePool(20, 3, 2, 6), 1)
    again.load_state_dict(state)
    assert torch.equal(again.views()[0], cache.views()[0])
    assert again.nbytes == cache.nbytes == again.pool.used_pages * 3 * 2 * 12 * 4
    with pytest.raises(ValueError, match="must share one pool"):
        PagedCache.join([cache, again])
    for name, bad in (("block_table", 99), ("lengths", 99), ("k", state["k"][:, :1])):
        broken = {name: bad if isinstance(bad, torch.Tensor) else torch.full_like(state[name], bad)}
        with pytest.raises(ValueError, match="must"):
            again.load_state_dict({**state, **broken})


@torch.no_grad()
def test_paged_attention_is_the_contiguous_one_bit_for_bit(monkeypatch):
    layer = Attention(Attention.Config(24, 4, 2, init_std=0.5))
    x = torch.randn(2, 10, 24)
    results = []
    for kind in ("standard", "paged"):
        cache = new_cache(kind)
        if kind == "paged":  # nothing is gathered
            monkeypatch.setattr(PagedCache, "views", None)
        results.append(torch.cat([layer(x[:, :7], state=cache), layer(x[:, 7:], state=cache)], 1))
    assert torch.equal(*results)


@pytest.mark.parametrize("kind", ["standard", "rolling", "paged"])
def test_caches_reject_what_does_not_fit(kind):
    cache = new_cache(kind)
    k, v = tokens(2)
    with pytest.raises(ValueError, match="v must have shape"):
        cache.append(k, v[..., :2])
    with pytest.raises(ValueError, match="k must have shape"):
        cache.append(k[:1], v[:1])
    with pytest.raises(RuntimeError, match="no_grad"):
        cache.append(k.requires_grad_(), v)
    assert cache.length == 0
    cache.append(*tokens(2))
    state = cache.state_dict()
    for broken, named in (
        ({}, "missing=\\['k', 'v'"),
        ({n: t for n, t in state.items() if n != "v"}, "missing=\\['v'\\], unexpected=\\[\\]"),
        ({**state, "window": 1}, "missing=\\[\\], unexpected=\\['window'\\]"),
    ):
        with pytest.raises(ValueError, match=named):
            cache.load_state_dict(broken)
    assert cache.length == 2
