"""Requirements of decoding that every mixer must meet."""

import copy
import re

import pytest
import torch
from average_mixer import Average
from mixer_cases import MIXERS
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from omniattn.modules import (
    H2O,
    Attention,
    CrossCache,
    CSAState,
    DecoderBlock,
    DSAState,
    EvictingCache,
    ForgettingCache,
    GatedMLP,
    KVCache,
    LatentCache,
    Mixer,
    NSAState,
    PagedCache,
    PagePool,
    PathCache,
    QueryCache,
    RecurrentState,
    RMSNorm,
    RollingCache,
    RotaryEmbedding,
    RWKV6TimeMix,
    RWKV7TimeMix,
    RWKVChannelMix,
    SelectiveCache,
    State,
)
from omniattn.modules.base.layer import Layer


def test_every_mixer_is_tried():
    mixers = {c for c in Layer.layers.values() if issubclass(c, Mixer)}
    ours = {c for c in mixers if c.__module__.startswith("omniattn.modules")}
    assert ours <= {config.layer for config in MIXERS}


@torch.no_grad()
@pytest.mark.parametrize("config", MIXERS, ids=lambda config: config.layer.__name__)
def test_every_mixer_works_in_a_block(config):
    """Steps equal the whole; the state can be copied, reordered and counted."""
    torch.manual_seed(0)
    block = DecoderBlock.Config(config, GatedMLP.Config(24, 32), RMSNorm.Config(24))
    block = block.build(dtype=torch.float64)
    x, rotary = torch.randn(2, 9, 24, dtype=torch.float64), RotaryEmbedding(6)
    full = sum(block(x, rope=rotary(torch.arange(9))))
    state, parts = block.mixer.new_state(2, 9), []
    for a, b in ((0, 4), (4, 5), (5, 9)):
        assert state.length == a
        state = copy.deepcopy(state)
        state.reorder(torch.tensor([1, 0]))
        state.reorder(torch.tensor([1, 0]))
        parts.append(sum(block(x[:, a:b], state=state, rope=rotary(torch.arange(a, b)))))
    torch.testing.assert_close(torch.cat(parts, 1), full)


@torch.no_grad()
@pytest.mark.parametrize(
    "config",
    [config for config in MIXERS if config.layer is not Average],
    ids=lambda config: config.layer.__name__,
)
def test_every_mixer_refuses_states_that_are_not_its_own(config):
    """States of other sequences, layers and dtypes raise errors of this package: never a wrong
    result, never an error of torch."""
    mixer, x = config.build(dtype=torch.float64), torch.randn(2, 3, 24, dtype=torch.float64)
    rope = RotaryEmbedding(6)(torch.arange(3))
    recurrent = isinstance(mixer.new_state(2, 9), RecurrentState)
    own = f"{type(mixer).__name__}: state must be" if recurrent else r"\w+: \w+ must have shape"
    with pytest.raises(ValueError, match=f"^{own} .*got"):
        mixer(x, rope=rope, state=mixer.new_state(3, 9))
    others = {"h": torch.zeros(2, 3)}, {"s": torch.zeros(2, 1, 3)}
    for state in (*(RecurrentState(**t) for t in others), KVCache(2, 9, 5, 7), {}):
        with pytest.raises((ValueError, TypeError), match=r"^\w+: \w+ must .*got"):
            mixer(x, rope=rope, state=state)
    if recurrent:
        tensors = mixer.new_state(2, 9).state_dict()
        del tensors["length"]
        wrong = RecurrentState(**{name: t.long() for name, t in tensors.items()})
        with pytest.raises(ValueError, match=f"^{own} floating-point"):
            mixer(x, rope=rope, state=wrong)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "config",
    [config for config in MIXERS if config.layer is not Average],
    ids=lambda config: config.layer.__name__,
)
def test_a_state_of_another_dtype_is_refused_when_it_is_made_or_works(config, dtype):
    torch.manual_seed(0)
    mixer, rotary = config.build(), RotaryEmbedding(6)
    x = torch.randn(2, 6, 24)
    try:
        state = mixer.new_state(2, 6, dtype=dtype)
    except TypeError as error:
        wanted = (
            "must be that of the parameters, .*, got dtype=torch.*, parameters of torch.float32"
        )
        assert re.fullmatch(rf"\w+: dtype of new_state {wanted}", str(error))
        assert not isinstance(mixer.new_state(2, 6), RecurrentState)
    else:
        steps = [
            mixer(x[:, i : i + 1], state=state, rope=rotary(torch.tensor([i]))) for i in range(6)
        ]
        expected = mixer(x, rope=rotary(torch.arange(6)))
        torch.testing.assert_close(torch.cat(steps, 1), expected, rtol=0.1, atol=0.1)


@torch.no_grad()
def test_under_autocast_a_cache_may_have_its_dtype():
    mixer, x = Attention(24, 4), torch.randn(1, 3, 24)
    with torch.autocast("cpu", torch.bfloat16):
        state = mixer.new_state(1, 3, dtype=torch.bfloat16)
        assert mixer(x, state=state).dtype == torch.bfloat16


@torch.no_grad()
@pytest.mark.parametrize("config", MIXERS, ids=lambda config: config.layer.__name__)
def test_every_mixer_names_the_wrong_argument(config):
    mixer, name = config.build(), config.layer.__name__
    x, tables = torch.randn(2, 3, 24), RotaryEmbedding(6)(torch.arange(3))
    if config.layer is not Average:
        for wrong in (None, "x", [1.0]):
            with pytest.raises(TypeError, match=f"^{name}: x must be a torch.Tensor, got x="):
                mixer(wrong, rope=tables)
        for rope in ("a", torch.zeros(2), (None, None)):
            with pytest.raises(TypeError, match=f"^{name}: rope must be the tensors .* rope="):
                mixer(x, rope=rope)
        for dtype in (torch.int64, torch.bfloat16):
            with pytest.raises(TypeError, match=r"^\w+: \w+ must .*x.dtype=|u.dtype=|got weight.d"):
                mixer(x.to(dtype), rope=tables)
    for sizes, wrong, got in (
        ((2.5, 9), {}, "batch must be an int >= 0, got batch=2.5"),
        ((-1, 9), {}, "batch must be an int >= 0, got batch=-1"),
        ((2, "a"), {}, "max_length must be an int >= 0, got max_length='a'"),
        ((2, 9), {"dtype": torch.int64}, "dtype must be float64, .* got dtype=torch.int64"),
        ((2, 9), {"dtype": "float32"}, "dtype must be float64, .* got dtype='float32'"),
        ((2, 9), {"dtyp": 1}, "options of new_state must be among .*device, dtype, got dtyp=1"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{name}: {got}"):
            mixer.new_state(*sizes, **wrong)
    if config.layer is not Attention:
        with pytest.raises(TypeError, match=f"^{name}: options of .* got eviction=H2O"):
            mixer.new_state(2, 9, eviction=H2O(2, 2))
    state = mixer.new_state(2, 9)
    for index in (torch.tensor([0, 2]), torch.tensor([-1]), torch.tensor([[0]])):
        with pytest.raises(ValueError, match=r"^\w+: index must "):
            state.reorder(index)
    for index in (torch.tensor([0.0]), [0, 1]):
        with pytest.raises(TypeError, match=r"^\w+: index must "):
            state.reorder(index)


@pytest.mark.parametrize(
    "config",
    [*MIXERS, RWKVChannelMix.Config(24, init_std=0.5)],
    ids=lambda config: config.layer.__name__,
)
def test_every_mixer_takes_other_parameters_in_a_functional_call(config):
    """As ensembles do: the parameters are tensors then, not nn.Parameter."""
    torch.manual_seed(0)
    mixer, x = config.build(dtype=torch.float64), torch.randn(1, 5, 24, dtype=torch.float64)
    mixes = isinstance(mixer, Mixer)
    rope = {"rope": RotaryEmbedding(6)(torch.arange(5))} if mixes else {}
    others = {name: p.detach() * 1.5 for name, p in mixer.named_parameters()}
    y = torch.func.functional_call(mixer, others, (x,), rope)
    mixer.load_state_dict(others, strict=False)
    torch.testing.assert_close(y, mixer(x, **rope))


def test_a_recurrence_refuses_the_state_of_another_one_of_the_same_shapes():
    seven, six = RWKV7TimeMix(24, head_dim=8), RWKV6TimeMix(24, head_dim=8)
    state = copy.deepcopy(seven.new_state(1, 9))
    with pytest.raises(ValueError, match=r"^RWKV6TimeMix: state must .*of a RWKV7TimeMix$"):
        six(torch.zeros(1, 2, 24), state=state)
    weight_norm(seven, "k_k")  # changes the class of the module
    with torch.no_grad():
        seven(torch.zeros(1, 2, 24), state=state)
    assert state.length == 2


@pytest.mark.parametrize(
    "state",
    [
        KVCache(1, 4, 1, 2),
        RollingCache(1, 4, 1, 2),
        LatentCache(1, 4, 2, 2),
        CrossCache(),
        PagedCache(PagePool(4, 4, 1, 2)),
        EvictingCache(H2O(1, 2), 1, 4, 1, 2),
        SelectiveCache(1, 4, 1, 2),
        ForgettingCache(1, 4, 1, 2, num_heads=2),
        PathCache(1, 4, 1, 2, num_heads=2, taps=2),
        QueryCache(1, 4, 1, 2, num_heads=2),
        NSAState([KVCache(1, 8, 1, 2)], KVCache(1, 3, 1, 2), 4, 2),
        DSAState(LatentCache(1, 4, 2, 2), KVCache(1, 4, 1, 2, v_head_dim=0)),
        CSAState(
            *(1, 4),
            **{"head_dim": 2, "index_dim": 2, "width": 8, "rope_dim": 2},
            **{"window": 2, "compress_rate": 2, "overlap": True},
        ),
        RecurrentState(h=torch.zeros(1, 2)),
    ],
    ids=lambda state: type(state).__name__,
)
def test_all_states_have_what_decoding_needs(state):
    assert isinstance(state, State)
    assert isinstance(copy.deepcopy(state), State)
    assert not isinstance(torch.zeros(1), State)


def test_states_reject_what_does_not_fit():
    state = RecurrentState(h=torch.zeros(2, 3))
    for wrong, message in (
        ({"h": torch.zeros(2, 4)}, r"h must have shape \(2, 3\), got h=\(2, 4\)"),
        ({}, r"missing=\['h'\]"),
        ({"h": torch.zeros(2, 3), "n": torch.zeros(2)}, r"unexpected=\['n'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            state.advance(1, **wrong)
    with pytest.raises(RuntimeError, match="no_grad"):
        state.advance(1, h=torch.zeros(2, 3, requires_grad=True))
    with pytest.raises(ValueError, match=r"missing=\['length'\]"):
        state.load_state_dict({"h": torch.zeros(2, 3)})
    assert state.length == 0
    with pytest.raises(
        TypeError, match=r"Attention: state must be a Cache, got type\(state\)=RecurrentState"
    ):
        Attention(8, 2)(torch.zeros(1, 2, 8), state=state)


@torch.no_grad()
def test_former_names():
    """`cache`, `new_cache`, `self_attn`: from when every mixer was an attention."""
    torch.manual_seed(0)
    block = DecoderBlock(Attention.Config(8, 2), GatedMLP.Config(8, 8), RMSNorm.Config(8))
    stack, x = nn.ModuleList([block]), torch.randn(1, 3, 8)
    cache, state = block.mixer.new_cache(1, 3, torch.float32), block.mixer.new_state(1, 3)
    torch.testing.assert_close(block(x, cache=cache), block(x, state=state), rtol=0, atol=0)
    assert cache.length == state.length == 3
    with pytest.raises(TypeError, match="Attention: state must not be given as cache too"):
        block.mixer(x, cache=cache, state=state)

    former = {name.replace("mixer", "self_attn"): t for name, t in stack.state_dict().items()}
    assert "0.self_attn.q_proj.weight" in former
    again = nn.ModuleList([DecoderBlock(block.config)])
    again.load_state_dict(former)
    torch.testing.assert_close(again.state_dict(), stack.state_dict(), rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.parametrize(
    "config",
    [config for config in MIXERS if config.layer is not Average],
    ids=lambda config: config.layer.__name__,
)
def test_every_mixer_takes_its_state_as_cache(config):
    torch.manual_seed(0)
    mixer, x = config.build(dtype=torch.float64), torch.randn(1, 3, 24, dtype=torch.float64)
    rope = RotaryEmbedding(6)(torch.arange(3))
    state, cache = mixer.new_state(1, 3), mixer.new_cache(1, 3, torch.float64)
    expected = mixer(x, state=state, rope=rope)
    torch.testing.assert_close(mixer(x, cache=cache, rope=rope), expected, rtol=0, atol=0)
    assert cache.length == state.length == 3
    with pytest.raises(TypeError, match=f"{type(mixer).__name__}: state must not be given as"):
        mixer(x, cache=cache, state=state, rope=rope)


def test_layers_are_counted_apart_by_the_compiler():
    """torch.compile limits how often it compiles one code object."""
    forwards = {config.layer.forward for config in MIXERS}
    assert len({id(forward.__code__) for forward in forwards}) == len(forwards)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"length": "abc"}, "RecurrentState: length must be an int >= 0, got length=.abc"),
        ({"length": -1}, "RecurrentState: length must be an int >= 0, got length=-1"),
        ({"h": None}, "RecurrentState: h must be a torch.Tensor, got h=None"),
        ({"h": torch.ones(2, 3) + 0j}, "RecurrentState: h must be float64, .*=torch.complex64"),
        ({"h": torch.ones(2, 3).to_sparse()}, "RecurrentState: h must be strided"),
    ],
)
def test_saved_states_that_are_wrong_change_nothing(changed, message):
    state = RecurrentState(last=torch.zeros(2, 3), h=torch.zeros(2, 3))
    saved = {"last": torch.ones(2, 3), "h": torch.ones(2, 3), "length": 4}
    with pytest.raises((TypeError, ValueError), match=message):
        state.load_state_dict(saved | changed)
    assert state.length == 0 and not any(state.state_dict()[name].any() for name in ("last", "h"))
    state.load_state_dict(saved)
    assert state.length == 4 and state.state_dict()["h"].all()
