"""What decoding asks of any mixer, shown with a recurrence that is defined here."""

import copy
import json
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from omniattn.models import (
    T5,
    BlocksConfig,
    Decoder,
    T5Config,
    generate,
    layer_schedule,
    load_model,
    save_model,
)
from omniattn.modules import (
    H2O,
    MLSTM,
    NSA,
    S4,
    S4D,
    SLSTM,
    Attention,
    BigBirdAttention,
    BlockSparseAttention,
    CrossCache,
    DecoderBlock,
    DeepSeekSparseAttention,
    DeltaAttention,
    DeltaNet,
    DeterministicSparseAttention,
    DifferentialAttention,
    DSAState,
    DualChunkAttention,
    EvictingCache,
    GatedAttentionUnit,
    GatedDeltaNet,
    GatedLinearAttention,
    GatedMLP,
    HubSpokeAttention,
    KimiDeltaAttention,
    KVCache,
    LatentCache,
    Linear,
    LinearAttention,
    LocalStridedAttention,
    LongformerAttention,
    Mamba,
    Mamba2,
    Mixer,
    MoBA,
    MultiHeadLatentAttention,
    MultiScaleRetention,
    NeighborhoodAttention1D,
    NSAState,
    PagedCache,
    PagePool,
    Performer,
    RecurrentState,
    RMSNorm,
    RollingCache,
    RotaryEmbedding,
    RoutedBlockAttention,
    RWKV4TimeMix,
    RWKV5TimeMix,
    RWKV6TimeMix,
    RWKV7TimeMix,
    RWKVChannelMix,
    SelectiveAttention,
    SelectiveCache,
    SimpleSelectiveSSM,
    State,
    TransformerXLAttention,
)
from omniattn.modules.layer import Layer, LayerConfig, config_or_fields
from omniattn.modules.state import StatePair
from omniattn.reference import LinearScaling


class Average(Mixer):
    """y_t = W h_t, h_t = decay h_{t-1} + (1 - decay) (x_t - x_{t-1})."""

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Sizes; `decay` in [0, 1]."""

        dim: int
        decay: float = 0.8

    @config_or_fields(Config)
    def __init__(self, config, *, device=None, dtype=None):
        super().__init__()
        self.config = config
        self.proj = Linear(config.dim, config.dim, init_std=0.5, device=device, dtype=dtype)

    def new_state(self, batch, max_length, *, device=None, dtype=None):
        like = self.proj.weight.new_zeros(batch, self.config.dim, device=device, dtype=dtype)
        return RecurrentState(h=like, last=like.clone())

    def forward(self, x: Tensor, *, state=None, rope=None, mask=None) -> Tensor:
        if mask is not None:
            raise ValueError("Average: mask must be None")
        before = self.new_state(len(x), 0, dtype=x.dtype) if state is None else state
        h, steps = before["h"], []
        for change in (x - torch.cat([before["last"][:, None], x[:, :-1]], 1)).unbind(1):
            h = self.config.decay * h + (1 - self.config.decay) * change
            steps.append(h)
        if state is not None:
            state.advance(x.shape[1], h=h, last=x[:, -1])
        return self.proj(torch.stack(steps, 1))


MLP, NORM = GatedMLP.Config(24, 32, init_std=0.5), RMSNorm.Config(24)
#: Attention in every other layer.
HYBRID = BlocksConfig(
    vocab_size=61,
    dim=24,
    num_layers=3,
    init_std=0.5,
    blocks=(
        DecoderBlock.Config(Average.Config(24), MLP, NORM),
        DecoderBlock.Config(Attention.Config(24, 4, 2, init_std=0.5), MLP, NORM),
    ),
    rope=RotaryEmbedding.Config(6, scaling=LinearScaling(2.0)),
)


@pytest.fixture
def model() -> Decoder:
    torch.manual_seed(0)
    return HYBRID.build(dtype=torch.float64)


def test_a_layer_joins_by_being_defined():
    assert Layer.layers["Average"] is Average
    assert isinstance(Average.Config(8).build(), Average)
    with pytest.raises(TypeError, match=r"mixer must be the Config of .*, Average, got .*RMSNorm"):
        DecoderBlock.Config(RMSNorm.Config(8), GatedMLP.Config(8, 8), RMSNorm.Config(8))
    with pytest.raises(TypeError, match=r"norm must be the Config of RMSNorm, LayerNorm, got "):
        DecoderBlock.Config(Average.Config(8), GatedMLP.Config(8, 8), Average.Config(8))
    with pytest.raises(ValueError, match="names must be unique, got name='Attention' of omniattn"):

        class Second(Mixer, name="Attention"):
            Config = type("Config", (LayerConfig,), {})

    assert Layer.layers["Attention"] is Attention


def test_a_hybrid_trains(model):
    tokens = torch.randint(61, (2, 12))
    loss = model(tokens, tokens.roll(-1, 1))
    loss.backward()
    torch.optim.SGD(model.parameters(), 0.05).step()
    assert model(tokens, tokens.roll(-1, 1)) < loss
    assert model.layers[0].mixer.proj.weight.grad.abs().max() > 0


@torch.no_grad()
def test_a_hybrid_decodes_step_by_step_what_it_computes_at_once(model):
    tokens = torch.randint(61, (2, 12))
    state = model.new_state(2, 12)
    parts = [model(tokens[:, a:b], state=state) for a, b in ((0, 5), (5, 6), (6, 12))]
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens))
    assert [each.length for each in state] == [12] * 3

    out = generate(model, tokens, 8)
    assert torch.equal(out[:, 12:], model.eval()(out[:, :-1]).argmax(-1)[:, 11:])


@torch.no_grad()
def test_beams_and_copies_of_a_hybrid(model):
    tokens = torch.randint(61, (2, 12))
    full = model(tokens)
    state = model.new_state(2, 12)
    model(tokens[:, :5], state=state)

    before = copy.deepcopy(state)  # a guess that is taken back
    model(tokens[:, :3], state=state)
    with pytest.raises(ValueError, match=r"deepcopy made before them; .* 8, got length=5"):
        state[0].crop(5)
    state[1].crop(5)
    assert (state[1].length, before[1].length) == (5, 5)

    other = model.new_state(2, 12)
    for each, saved in zip(other, before, strict=True):
        each.load_state_dict(saved.state_dict())
    for each in before:
        each.reorder(torch.tensor([1, 1, 0]))
    torch.testing.assert_close(model(tokens[[1, 1, 0], 5:], state=before), full[[1, 1, 0], 5:])
    torch.testing.assert_close(model(tokens[:, 5:], state=other), full[:, 5:])


@torch.no_grad()
def test_states_are_checked_before_one_changes(model):
    """A call that fails in a later layer must not leave the states of earlier ones ahead."""
    tokens, state, more = torch.randint(61, (2, 9)), model.new_state(2, 5), model.new_state(2, 9)
    model(tokens[:, :1], state=more)
    pair = StatePair(state[0], more[0])
    for wrong, error, message in (
        (state, ValueError, r"new tokens, got state\[1\].max_length=5, state\[1\].length=0, T=9"),
        ([more[0], *state[1:]], ValueError, r"state\[0\].length=1, state\[1\].length=0"),
        ([pair, *state[1:]], ValueError, r"state\[0\].length=0, state\[0\].length=1"),
        ([*state, state[0]], ValueError, r"each of 3 layers, got len\(state\)=4"),
        (state[:2], ValueError, r"each of 3 layers, got len\(state\)=2"),
        (state[1], TypeError, r"the list of .*, got type\(state\)=KVCache"),
        ([None, *state[1:]], TypeError, r"got type\(state\[0\]\)=NoneType"),
    ):
        with pytest.raises(error, match=f"^Decoder: state must .*{message}$"):
            model(tokens, state=wrong)
    assert [each.length for each in state] == [0] * 3
    torch.testing.assert_close(model(tokens[:, :5], state=state), model(tokens)[:, :5])

    t5 = T5(T5Config(dim=8, num_layers=2, num_heads=2, head_dim=4, hidden_dim=8))
    memory, state = t5.encode(tokens), t5.new_state(2, 5)
    with pytest.raises(ValueError, match=r"^T5: state must .* got state\[0\].max_length=5"):
        t5.hidden(tokens, memory, state=state)
    assert not state[0][1].filled


def test_checkpointing_does_not_leave_out_a_state(model):
    model.config = replace(HYBRID, gradient_checkpointing=True)
    tokens, state = torch.randint(61, (1, 3)), model.new_state(1, 3)
    with pytest.raises(RuntimeError, match=r"wrap the call in torch\.no_grad"):
        model(tokens, state=state)
    model(tokens, tokens).backward()


STD = {"init_std": 0.5}
MIXERS = [
    Attention.Config(24, 4, 2, init_std=0.5),
    Average.Config(24),
    BigBirdAttention.Config(24, 4, 2, block=2, n_random=0, causal=True, max_length=30, **STD),
    BigBirdAttention.Config(24, 4, 2, block=1, n_random=1, causal=True, max_length=30, **STD),
    BlockSparseAttention.Config(24, 4, 2, block_size=3, global_index=(1,), **STD),
    DeterministicSparseAttention.Config(24, 4, 2, window=2, stride=2, **STD),
    DeterministicSparseAttention.Config(
        24, 4, window=2, stride=2, anchor="absolute", representative="mean", **STD
    ),
    DualChunkAttention.Config(24, 4, 2, chunk_size=4, local_window=1, **STD),
    HubSpokeAttention.Config(24, 4, 2, window=2, global_every=3, **STD),
    HubSpokeAttention.Config(24, 4, 2, window=2, global_every=3, dual="disjoint", **STD),
    HubSpokeAttention.Config(24, 4, window=2, global_every=3, dual="longformer", **STD),
    LocalStridedAttention.Config(24, 4, 2, window=3, stride=2, **STD),
    LocalStridedAttention.Config(
        24, 4, window=2, stride=3, gate="headwise", residual_inside=True, **STD
    ),
    LongformerAttention.Config(24, 4, 2, window=4, causal=True, global_index=(0, 6), **STD),
    LongformerAttention.Config(24, 4, window=4, causal=True, dual=False, global_index=(), **STD),
    DeltaAttention.Config(24, 2, init_std=0.5),
    DeltaNet.Config(24, 2, init_std=0.5),
    DifferentialAttention.Config(24, 2, depth=1, head_dim=6, init_std=0.5),
    GatedAttentionUnit.Config(24, key_dim=6, norm_n=16, init_std=0.5),
    GatedDeltaNet.Config(24, 2, init_std=0.5),
    GatedLinearAttention.Config(24, 2, init_std=0.5),
    KimiDeltaAttention.Config(24, 2, init_std=0.5),
    LinearAttention.Config(24, 2, init_std=0.5),
    MoBA.Config(24, 4, 2, block_size=2, topk=2, decode="moba", init_std=0.5),
    NeighborhoodAttention1D.Config(24, 4, kernel_size=2, dilation=3, is_causal=True, **STD),
    NSA.Config(24, 4, 2, None, 2, 1, 2, 4, 3, init_std=0.5),
    NSA.Config(24, 4, 1, None, 4, 2, 2, 3, 3, "mean", separate_kv=False, init_std=0.5),
    RoutedBlockAttention.Config(24, 4, 2, block_size=2, topk=2, router_dim=4, **STD),
    RoutedBlockAttention.Config(24, 4, block_size=2, topk=3, router_grad="distill", **STD),
    MultiHeadLatentAttention.Config(24, 2, None, 8, 8, 6, 8, init_std=0.5),
    DeepSeekSparseAttention.Config(
        *(24, 2, None, 8, 8, 6, 8), index_heads=2, index_dim=8, index_topk=3, **STD
    ),
    DeepSeekSparseAttention.Config(
        *(24, 2, 10, 8, 8, 6, 8), indexer="single", index_dim=4, index_topk=3, **STD
    ),
    MultiScaleRetention.Config(24, 4, init_std=0.5),
    MultiScaleRetention.Config(24, 4, normalize=True, init_std=0.5),
    MLSTM.Config(24, 2),
    Mamba2.Config(24, 8, headdim=12, ngroups=2, init_std=0.5),
    Mamba.Config(24, init_std=0.5),
    Mamba.Config(24, 3, norm_eps=1e-6, init_std=0.5),
    Performer.Config(24, 2, init_std=0.5),
    RWKV4TimeMix.Config(24, init_std=0.5),
    S4.Config(24, 8, init_std=0.5),
    S4D.Config(24, 8, init_std=0.5),
    SLSTM.Config(24, 2),
    RWKV5TimeMix.Config(24, head_dim=8, init_std=0.5),
    RWKV6TimeMix.Config(24, head_dim=8, init_std=0.5),
    RWKV7TimeMix.Config(24, head_dim=8, init_std=0.5),
    SelectiveAttention.Config(24, 4, 2, init_std=0.5),
    SimpleSelectiveSSM.Config(24, 5, init_std=0.5),
    SimpleSelectiveSSM.Config(24, 5, a_dep=True, init_std=0.5),
    TransformerXLAttention.Config(24, 4, init_std=0.5),
    TransformerXLAttention.Config(24, 4, memory_length=4, same_length=True, init_std=0.5),
]


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
    """Of other sequences, of other layers, of other dtypes: never a wrong result, nor torch's
    words."""
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
        ((2, 9), {"dtyp": 1}, "options of new_state must be of .*device, dtype, got dtyp=1"),
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
        NSAState([KVCache(1, 8, 1, 2)], KVCache(1, 3, 1, 2), 4, 2),
        DSAState(LatentCache(1, 4, 2, 2), KVCache(1, 4, 1, 2, v_head_dim=0)),
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


def test_generate_takes_any_model_with_the_methods(model):
    with pytest.raises(ValueError, match="source must be None, since Decoder has no encoder"):
        generate(model, torch.zeros(1, 1, dtype=torch.long), 1, source=torch.zeros(1, 1).long())
    assert model.training

    class Counter(nn.Module):
        """Its state counts how often each token was read; the next one is the rarest."""

        config = replace(HYBRID, vocab_size=4)

        def new_state(self, batch, max_length):
            return torch.zeros(batch, 4)

        def hidden(self, tokens, *, state):
            state += nn.functional.one_hot(tokens, 4).sum(1)
            return state[:, None].clone()

        def head(self, x):
            return -x

    out = generate(Counter(), torch.tensor([[0, 0, 1, 3]]), 4)
    assert out[0, 4:].tolist() == [2, 1, 2, 3]


def test_a_hybrid_goes_into_files(model, tmp_path):
    assert BlocksConfig.from_dict(json.loads(json.dumps(HYBRID.to_dict()))) == HYBRID
    with pytest.raises(ValueError, match="class is defined, got type='Median'"):
        BlocksConfig.from_dict({"blocks": [{"type": "Median"}]})
    save_model(model, tmp_path / "hybrid")
    again, tokens = load_model(tmp_path / "hybrid", backend="reference"), torch.arange(5)[None]
    assert again.layers[1].mixer.config.backend == again.norm.config.backend == "reference"
    torch.testing.assert_close(again(tokens), model(tokens))


def test_blocks_must_fit():
    with pytest.raises(ValueError, match=r"mixer\.dim=24, dim=16"):
        replace(HYBRID, dim=16)
    with pytest.raises(ValueError, match="blocks must not be empty"):
        BlocksConfig()


def test_schedules_of_two_kinds_of_layers():
    near, far = HYBRID.blocks
    for schedule, full in (
        ("gpt3", [0, 2, 4]),
        ("gemma2", [1, 3, 5]),
        ("gemma3", [5]),
        ("1:1", [1, 3, 5]),
        ("2:1", [2, 5]),
        (("swa", "full_attention", "full"), [1, 2, 4, 5]),
    ):
        config = replace(HYBRID, num_layers=6, schedule=schedule)
        config = BlocksConfig.from_dict(json.loads(json.dumps(config.to_dict())))
        assert [n for n in range(6) if config.block(n) == far] == full
        assert [n for n in range(6) if config.block(n) == near] == sorted({*range(6)} - {*full})
        assert [n for n, kind in enumerate(layer_schedule(schedule, 6)) if kind == "full"] == full
    for wrong in ("gemma", "0:0", "1:", (), ("near",), 3, (1, 0)):
        with pytest.raises(ValueError, match="schedule must be one of gpt3, gemma2, gemma3, 'n:m'"):
            replace(HYBRID, schedule=wrong)
    with pytest.raises(ValueError, match="schedule needs two blocks, for 'swa' and for 'full'"):
        replace(HYBRID, blocks=HYBRID.blocks[:1], schedule="1:1")


def test_replaced_configs_keep_their_layer():
    assert replace(Average.Config(8), decay=0.5).layer is Average
