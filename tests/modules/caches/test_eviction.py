"""Evicting caches: equal to a loop over heads and queries; beams, crop, saved state, errors."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from omniattn import functional, reference
from omniattn.models import PRESETS, generate
from omniattn.modules import (
    H2O,
    NSA,
    Attention,
    DecoderBlock,
    EvictingCache,
    Eviction,
    KVCache,
    MoBA,
    MultiHeadLatentAttention,
    RMSNorm,
    RollingCache,
    RotaryEmbedding,
    SnapKV,
    Streaming,
    Threshold,
    Window,
)

POLICIES = {
    "mean": Threshold(eps=0.06, grace=2, sinks=1, recent=2),
    "ema": Threshold(eps=0.4, stat="ema", grace=3, sinks=1, recent=1, rho=0.8),
    "sum": Threshold(eps=0.7, stat="sum", grace=4, sinks=0, recent=0),
    "h2o": H2O(heavy=3, recent=2),
    "streaming": Streaming(sinks=2, recent=4),
    "before": Streaming(sinks=1, recent=3, evict="before"),
    "snapkv": SnapKV(size=6, window=2, kernel=3),
    "snapkv-max": SnapKV(size=5, window=3, kernel=5, pooling="max"),
}
CALLS = {
    "steps": (1,) * 14,
    "prompt": (9,) + (1,) * 8,
    "chunks": (3, 4, 1, 1, 5, 1, 1, 1),
}
HEADS, KV_HEADS, DIM = 4, 2, 6


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def inputs(n, batch=2, heads=HEADS, kv_heads=KV_HEADS):
    def rows(h, d):
        return torch.randn(batch, n, h, d, dtype=torch.float64)

    return 2 * rows(heads, DIM), rows(kv_heads, DIM), rows(kv_heads, DIM + 1)


def new_cache(eviction, batch=2, max_length=32, kv_heads=KV_HEADS):
    sizes = {"v_head_dim": DIM + 1, "dtype": torch.float64}
    return EvictingCache(eviction, batch, max_length, kv_heads, DIM, **sizes)


def run(cache, qkv, calls, **options):
    """The outputs of calls of so many tokens; rows of `rope` go with their tokens."""
    rope, outs, first = options.pop("rope", None), [], cache.length
    for n in calls:
        part = slice(first, first + n)
        rows = {} if rope is None else {"rope": tuple(t[part] for t in rope)}
        outs.append(cache.attend(*(t[:, part] for t in qkv), **rows, **options))
        first += n
    return torch.cat(outs, 1)


def kept_by(cache):
    return [[sorted(p for p in head if p >= 0) for head in row] for row in cache.positions.tolist()]


def definition(policy, qkv, calls, rotate=None):
    name = type(policy).__name__.lower()
    sizes = {key: value for key, value in vars(policy).items()}
    return reference.evicting_attention(*qkv, name, calls=calls, rotate=rotate, **sizes)


@pytest.mark.parametrize("calls", CALLS)
@pytest.mark.parametrize("name", POLICIES)
def test_a_cache_is_the_loop_over_its_definition(name, calls):
    policy, calls = POLICIES[name], CALLS[calls]
    if isinstance(policy, Streaming) and len(calls) == 8:
        calls = (3, 4) + (1,) * 10  # a full cache reads several tokens as steps
    qkv = inputs(sum(calls))
    expected, kept = definition(policy, qkv, calls)
    cache = new_cache(policy)
    torch.testing.assert_close(run(cache, qkv, calls), expected, rtol=1e-10, atol=1e-12)
    assert kept_by(cache) == kept
    gone = [[[p not in head for p in range(cache.length)] for head in row] for row in kept]
    assert cache.evicted.tolist() == gone
    assert cache.evicted.any() or (isinstance(policy, SnapKV) and calls[0] <= policy.size)


def test_every_policy_is_compared():
    """A policy that this file does not know has no test."""
    known = {type(p) for p in POLICIES.values()} | {Window}
    assert set(Eviction.__subclasses__()) == known


@pytest.mark.parametrize("name", ["streaming", "before"])
def test_streaming_gives_tokens_the_positions_of_the_cache(name):
    policy = POLICIES[name]
    angles = torch.arange(40)[:, None] * torch.tensor([1.0, 0.3, 0.05], dtype=torch.float64)
    rope = angles.cos(), angles.sin()

    def rotate(x, position):
        rows = (t[position : position + 1] for t in rope)
        y, _ = reference.apply_rotary(x.reshape(1, 1, -1, DIM), None, *rows)
        return y.view(x.shape)

    qkv = inputs(18)
    calls = (5, *(1,) * 13)
    expected, _ = definition(policy, qkv, calls, rotate)
    given = tuple(t[:18] for t in rope)
    cache = new_cache(policy)
    torch.testing.assert_close(run(cache, qkv, calls, rope=given), expected)
    # Several tokens for a full cache are read one after another.
    several = run(new_cache(policy), qkv, (5, 3, 1, 4, 5), rope=given)
    steps = run(new_cache(policy), qkv, (5, 3, *(1,) * 10), rope=given)
    torch.testing.assert_close(several, steps)
    # The rows of far positions are not needed: nothing depends on them.
    far = tuple(torch.cat([t[:8], torch.full_like(t[8:], math.nan)]) for t in given)
    assert torch.equal(
        run(new_cache(policy), qkv, calls, rope=far), run(new_cache(policy), qkv, calls, rope=given)
    )


def test_a_window_is_the_rolling_cache():
    layer = Attention(Attention.Config(24, 4, 2, init_std=0.5), dtype=torch.float64)
    windowed = Attention(replace(layer.config, window_size=(4, 0)), dtype=torch.float64)
    windowed.load_state_dict(layer.state_dict())
    x = torch.randn(2, 12, 24, dtype=torch.float64)
    cache = layer.new_state(2, 12, eviction=Window(5))
    assert isinstance(cache, RollingCache)
    with torch.no_grad():
        steps = [layer(x[:, t : t + 1], state=cache) for t in range(12)]
        torch.testing.assert_close(torch.cat(steps, 1), windowed(x))
    assert cache.evicted.tolist() == [[[True] * 7 + [False] * 5] * 2] * 2
    assert cache.positions.tolist() == [[[10, 11, 7, 8, 9]] * 2] * 2
    assert RollingCache(1, 4, 1, 2).evicted.shape == (1, 1, 0)


def test_heads_may_have_policies_of_their_own():
    policies = (H2O(2, 2), Window(4))
    qkv = inputs(14)
    calls = CALLS["steps"]
    cache = new_cache(policies)
    out = run(cache, qkv, calls)
    for head, policy in enumerate(policies):
        mine = [qkv[0][:, :, 2 * head : 2 * head + 2], *(t[:, :, head : head + 1] for t in qkv[1:])]
        alone = new_cache(policy, kv_heads=1)
        torch.testing.assert_close(run(alone, mine, calls), out[:, :, 2 * head : 2 * head + 2])
        assert [row[0] for row in kept_by(alone)] == [row[head] for row in kept_by(cache)]
    full = functional.attention(
        *(t[:, :, 2:] if i == 0 else t[:, :, 1:] for i, t in enumerate(qkv)),
        causal=True,
        window_size=(3, 0),
    )
    torch.testing.assert_close(out[:, :, 2:], full)


@pytest.mark.parametrize("name", POLICIES)
def test_states_go_on_where_they_were_saved_and_beams_reorder(name):
    policy = POLICIES[name]
    qkv = inputs(20)
    angles = torch.arange(20)[:, None] * torch.tensor([1.0, 0.3, 0.05], dtype=torch.float64)
    options = {"rope": (angles.cos(), angles.sin())} if policy.moves else {}
    cache = new_cache(policy)
    run(cache, qkv, (8, 1, 1), **options)
    other, twin = new_cache(policy), copy.deepcopy(cache)
    other.load_state_dict(cache.state_dict())
    index = torch.tensor([1, 0, 1])
    cache.reorder(index)
    rest = run(cache, [t[index] for t in qkv], (1, 1, 1), **options)
    assert torch.equal(run(other, qkv, (1, 1, 1), **options)[index], rest)
    assert torch.equal(run(twin, qkv, (1, 1, 1), **options)[index], rest)
    assert kept_by(cache) == [kept_by(other)[b] for b in index]
    assert torch.equal(cache.evicted, other.evicted[index])


def test_bytes_follow_the_tokens_that_are_kept():
    row = 2 * (6 * 8 + 7 * 8 + 8 + 8)  # kv heads: k, v, position, weight
    qkv = inputs(600, batch=1)
    bounded = new_cache(H2O(8, 8), batch=1, max_length=600)
    assert bounded.nbytes == 0
    run(bounded, qkv, (200, *(1,) * 40))
    assert bounded.nbytes == 17 * row  # a step sees one token more
    never, soon = (new_cache(Threshold(eps, grace=0), batch=1, max_length=600) for eps in (0, 0.5))
    for cache in (never, soon):
        run(cache, qkv, (400, *(1,) * 100))
    assert 500 * row <= never.nbytes <= 600 * row
    assert soon.nbytes <= 2 * 60 * row
    soon.crop(0)
    assert soon.length == 0 and soon.positions.numel() == 0
    torch.testing.assert_close(
        run(soon, qkv, (30,)), run(new_cache(Threshold(), batch=1), qkv, (30,))
    )


def test_crop():
    qkv = inputs(16)
    for policy in (SnapKV(size=6, window=2), Streaming(2, 10)):
        cache = new_cache(policy)
        run(cache, qkv, (8, 1, 1))
        expected = run(copy.deepcopy(cache), qkv, (1, 1))
        run(cache, [-t for t in qkv], (2,))
        cache.crop(10)
        torch.testing.assert_close(run(cache, qkv, (1, 1)), expected)
    cache = new_cache(H2O(3, 3))
    run(cache, qkv, (4,))
    cache.crop(4)
    with pytest.raises(ValueError, match=r"have determined which tokens are kept.*length=3"):
        cache.crop(3)
    with pytest.raises(ValueError, match="length=5"):
        cache.crop(5)
    cache.crop(0)
    assert torch.equal(run(cache, qkv, (4,)), run(new_cache(H2O(3, 3)), qkv, (4,)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_do_not_depend_on_threads_nor_grow_with_the_dtype(dtype):
    q, k, v = (t.to(dtype) for t in inputs(300, batch=1))
    found = []
    threads = torch.get_num_threads()
    for n in (1, 2):
        torch.set_num_threads(n)
        cache = EvictingCache(H2O(20, 20), 1, 300, KV_HEADS, DIM, v_head_dim=DIM + 1, dtype=dtype)
        found.append((run(cache, (q, k, v), (250, *(1,) * 50)), cache.positions))
        assert cache.state_dict()["weight"].dtype == torch.float32
    torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


OPTIONS = {
    "plain": {},
    "capped": {"softcap": 3.0, "sinks": True, "head_scale": True, "qk_norm": "rms"},
    "gated": {"gate": "headwise", "rope_interleaved": True, "scale": 0.3},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", POLICIES)
@torch.no_grad()
def test_a_layer_that_forgets_nothing_is_the_full_one(name, options):
    config = Attention.Config(24, 4, 2, init_std=0.5, **OPTIONS[options])
    layer = Attention(config, dtype=torch.float64).eval()
    rotary = RotaryEmbedding(RotaryEmbedding.Config(6))
    large = {"size": 99, "heavy": 50, "recent": 50}
    policy = replace(POLICIES[name], **{n: large[n] for n in vars(POLICIES[name]) if n in large})
    x = torch.randn(2, 12, 24, dtype=torch.float64)
    cache = layer.new_state(2, 12, eviction=policy)
    parts = [
        layer(x[:, a:b], rope=rotary(torch.arange(a, b)), state=cache)
        for a, b in ((0, 5), (5, 6), (6, 9), (9, 10), (10, 12))
    ]
    torch.testing.assert_close(torch.cat(parts, 1), layer(x, rope=rotary(torch.arange(12))))
    assert not cache.evicted.any()


@pytest.mark.parametrize("preset", ["llama-test", "jamba"])
@pytest.mark.parametrize("policy", [H2O(6, 6), Streaming(2, 10), Threshold(), Window(12)])
def test_models_generate_with_an_eviction(preset, policy):
    model = PRESETS[preset].build().eval()
    tokens = torch.randint(model.config.vocab_size, (2, 10))
    full = generate(model, tokens, 12)
    out = generate(model, tokens, 12, eviction=policy)
    assert out.shape == full.shape
    assert torch.equal(out[:, :12], full[:, :12])  # nothing is forgotten yet
    ample = {Threshold: Threshold(eps=0), H2O: H2O(20, 20), Streaming: Streaming(2, 30)}
    if type(policy) in ample:
        assert torch.equal(generate(model, tokens, 12, eviction=ample[type(policy)]), full)


def test_errors_name_what_is_wrong():
    with pytest.raises(ValueError, match="H2O: recent must be an int >= 1"):
        H2O(3, 0)
    with pytest.raises(ValueError, match="Threshold: stat must be one of"):
        Threshold(stat="median")
    with pytest.raises(ValueError, match="SnapKV: kernel must be odd, got kernel=4"):
        SnapKV(40, kernel=4)
    with pytest.raises(ValueError, match="SnapKV: size must be an int >= 33"):
        SnapKV(32)
    layer = Attention(Attention.Config(24, 4, 2))
    with pytest.raises(ValueError, match="heads 2 to 3 share their keys"):
        layer.new_state(1, 8, eviction=[H2O(2, 2)] * 3 + [H2O(2, 3)])
    with pytest.raises(ValueError, match=r"len\(eviction\)=2"):
        layer.new_state(1, 8, eviction=[H2O(2, 2)] * 2)
    with pytest.raises(TypeError, match="eviction must be an Eviction"):
        layer.new_state(1, 8, eviction="h2o")
    with pytest.raises(ValueError, match="must be the same for all heads"):
        layer.new_state(1, 8, eviction=[Streaming(1, 2)] * 2 + [H2O(2, 2)] * 2)
    mixed = layer.new_state(1, 8, eviction=[H2O(2, 1)] * 2 + [H2O(2, 2)] * 2)
    assert mixed.capacity == 4
    for change in ({"window_size": (3, 0)}, {"causal": False}, {"normalizer": "sigmoid"}):
        other = Attention(replace(layer.config, **change))
        with pytest.raises(ValueError, match="eviction needs causal self-attention"):
            other.new_state(1, 8, eviction=H2O(2, 2))
    latent = MultiHeadLatentAttention.Config(24, 2, None, 8, 4, 4, 4)
    block = DecoderBlock(latent, None, RMSNorm.Config(24))
    with pytest.raises(ValueError, match="got mixer=MultiHeadLatentAttention"):
        block.new_state(1, 8, eviction=H2O(2, 2))
    with pytest.raises(ValueError, match="needs a layer of Attention, got none"):
        PRESETS["mamba"].build().new_state(1, 8, eviction=H2O(2, 2))


@torch.no_grad()
def test_states_and_calls_that_do_not_fit_are_refused():
    layer = Attention(Attention.Config(24, 4, 2))
    x = torch.randn(1, 3, 24)
    cache = layer.new_state(1, 8, eviction=H2O(2, 2))
    for options in ({"bias": torch.zeros(1)}, {"mask": torch.ones(1).bool()}):
        with pytest.raises(ValueError, match="slots are unordered"):
            layer(x, state=cache, **options)
    windowed = Attention(replace(layer.config, window_size=(3, 0)))
    with pytest.raises(ValueError, match="without a window"):
        windowed(x, state=cache)
    assert cache.length == 0
    layer(x, state=cache)
    state = cache.state_dict()
    other = layer.new_state(1, 8, eviction=H2O(2, 3))
    with pytest.raises(ValueError, match=r"same policies.*recent=3.*recent=2"):
        other.load_state_dict(state)
    with pytest.raises(ValueError, match="missing="):
        other.load_state_dict(KVCache(1, 8, 2, 6).state_dict())
    with pytest.raises(ValueError, match="weight must have shape"):
        cache.load_state_dict(state | {"weight": torch.zeros(1, 2, 9)})
    with pytest.raises(ValueError, match="append has no attention weights"):
        cache.append(torch.zeros(1, 1, 2, 6), torch.zeros(1, 1, 2, 6))
    with pytest.raises(ValueError, match="k must have shape"):
        cache.attend(*torch.zeros(3, 1, 1, 3, 6))
    full = layer.new_state(1, 2, eviction=Threshold(eps=0))
    with pytest.raises(ValueError, match="at most max_length=2"):
        layer(x, state=full)
    with torch.enable_grad(), pytest.raises(RuntimeError, match="no_grad"):
        layer(x, state=cache)


@pytest.mark.parametrize("mixer", [NSA.Config(32, 4), MoBA.Config(32, 4)])
def test_blocks_refuse_a_policy_that_their_mixer_would_ignore(mixer):
    block = DecoderBlock(mixer, None, RMSNorm.Config(32))
    with pytest.raises(ValueError, match=r"^DecoderBlock: eviction needs Attention or a mixer"):
        block.new_state(1, 8, eviction=H2O(2, 2))
