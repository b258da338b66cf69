"""Parameters, operations and memory, against torch's counter and the models themselves."""

import math
import re
from dataclasses import replace

import pytest
import torch
from small_presets import SMALL
from torch.utils.flop_counter import FlopCounterMode

from omniattn import calculate
from omniattn.calculate import op_costs
from omniattn.calculate.trace import forward_calls, meta_model, trace
from omniattn.calculate.trace import inputs_of as trace_inputs
from omniattn.functional import expert_capacity
from omniattn.models import (
    PRESETS,
    BlocksConfig,
    EncoderDecoder,
    GPT2Config,
    LlamaConfig,
    T5Config,
    ViTConfig,
)
from omniattn.models.presets import TRAINED
from omniattn.modules import Attention, DecoderBlock, GatedMLP, RMSNorm
from omniattn.modules.base.state import Stateful, parts_of
from omniattn.ops.dispatch import library as _library

TOKENS = 33
LLAMA = LlamaConfig(97, 48, 2, num_heads=4, num_kv_heads=2, hidden_dim=96)
#: Models whose eager form consists of matrix products that torch counts.
COUNTED = {
    "llama": LLAMA,
    **{name: SMALL[name] for name in ("gpt2", "bert", "t5", "vit", "mixtral", "deepseek")},
}


def windowed(left: int, layers: int = 2) -> BlocksConfig:
    mixer = Attention.Config(32, 2, window_size=(left, 0))
    block = DecoderBlock.Config(mixer, GatedMLP.Config(32, 32), RMSNorm.Config(32))
    return BlocksConfig(dim=32, num_layers=layers, blocks=(block,))


def inputs_of(config) -> list[torch.Tensor]:
    if isinstance(config, ViTConfig):
        return [torch.rand(2, config.channels, config.image, config.image)]
    return [torch.zeros(2, TOKENS, dtype=torch.long)] * (1 + isinstance(config, T5Config))


@pytest.mark.parametrize("name", COUNTED)
def test_torch_counts_the_same_operations_in_eager_models(name, one_thread):
    config = replace(COUNTED[name], backend="reference")
    model = config.build().eval()
    inputs = inputs_of(config)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(*inputs)
    found = calculate.flops(COUNTED[name], TOKENS, batch=2, pairs="dense")
    assert found.forward == counter.get_total_flops()
    assert found.backward == 2 * found.forward


@pytest.mark.parametrize("name", COUNTED)
def test_torch_counts_the_same_operations_in_backwards(name, one_thread):
    """Images need no gradient, so that the first product of a ViT has only that of its weight."""
    model = replace(COUNTED[name], backend="reference").build()
    inputs = inputs_of(COUNTED[name])
    with FlopCounterMode(display=False) as forward:
        y = model(*inputs)
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    found = calculate.flops(COUNTED[name], TOKENS, batch=2, pairs="dense")
    assert found.forward == forward.get_total_flops()
    unneeded = forward.get_flop_counts().get("ViT.embed_patches", {})
    assert found.backward == backward.get_total_flops() + sum(unneeded.values())


@pytest.mark.parametrize("name", TRAINED)
def test_every_preset_has_all_numbers(name):
    config = PRESETS[name]
    counts = calculate.parameters(name)
    assert counts.total == config.num_parameters == sum(counts.parts.values())
    assert counts.active <= counts.total
    if name == "dino":
        with pytest.raises(NotImplementedError, match="inputs must be tokens, source or images"):
            calculate.flops(name, 192)
        return
    tokens = min(192, config.longest or 192)
    costs, dense = (calculate.flops(name, tokens, pairs=p) for p in ("exact", "dense"))
    assert 0 < costs.forward <= dense.forward
    assert costs.forward == sum(costs.modules.values())
    of_images = ("vit", "swin", "deit", "mae", "clip")
    if name not in of_images:
        assert 0 < calculate.receptive_field(name, tokens).tokens <= tokens
    if isinstance(config, EncoderDecoder.Config):
        with pytest.raises(NotImplementedError, match="config must be of a decoder alone, got"):
            calculate.step_cost(name, tokens - 1)
    elif name not in (*of_images, "bert", "electra", "deberta"):
        assert calculate.step_cost(name, tokens - 1).ratio > 1


def test_pairs_of_masks_with_values():
    """Longformer: windows of 32 keys before the query, three global tokens, causal.

    The rows of global tokens are computed with both projections.
    """
    at = torch.arange(192)
    i, j = at[:, None], at[None]
    is_global = torch.isin(at, torch.tensor([0, 64, 128]))
    local = ((j >= i - 32) | is_global) & (j <= i)
    pairs = int(local.sum()) + int((j <= i)[is_global].sum())
    assert calculate.flops("longformer", 192).pairs == 4 * 6 * pairs
    with pytest.raises(NotImplementedError, match=r"up to 16,777,216 pairs, got q.shape="):
        calculate.flops("detsa", 5000)


#: Products of a recurrence with its whole state, per token.
PRODUCTS = {
    **dict.fromkeys(("gla", "retnet", "rwkv5", "rwkv6", "mamba", "mamba2"), 2),
    **dict.fromkeys(("deltanet", "gated-deltanet", "kda"), 3),
    "rwkv7": 4,
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_recurrences_multiply_their_states(name):
    states = meta_model(PRESETS[name]).new_state(1, TOKENS)
    shapes = [parts_of(state)[0].shapes for state in states]
    numbers = sum(math.prod(s[n]) for s in shapes for n in ("s", "ssm", "wkv") if n in s)
    calls = forward_calls(PRESETS[name], TOKENS)
    found = sum(c.cost.flops for c in calls if c.op.startswith(("recurrence", "selective_scan")))
    assert found == 2 * TOKENS * PRODUCTS[name] * numbers


def test_blocks_that_are_not_run_again_cost_the_same():
    model = meta_model(PRESETS["jamba"])
    args = trace_inputs(PRESETS["jamba"], model, 1, 40, None)
    each = trace(model, lambda: model(*args), each=True)
    assert sorted(each, key=str) == sorted(trace(model, lambda: model(*args)), key=str)
    assert "forward" not in vars(model.layers[0])


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "windows", "mamba", "gla", "rwkv7"])
def test_a_step_costs_what_a_longer_forward_adds(name):
    config = {"llama": LLAMA, "windows": windowed(7)}.get(name) or SMALL.get(name) or PRESETS[name]
    more = calculate.flops(config, TOKENS + 1).forward - calculate.flops(config, TOKENS).forward
    assert calculate.step_cost(config, TOKENS).cached == more
    uncached = calculate.step_cost(config, TOKENS).uncached
    assert uncached == calculate.flops(config, TOKENS + 1).forward


def test_latent_attention_absorbs_its_projections_in_a_step():
    c = PRESETS["mla"].attention(0)
    modules = calculate.step_cost("mla", 99).modules
    pair = 2 * c.num_heads * (2 * c.kv_lora_rank + c.qk_rope_dim)
    absorbed = 2 * c.num_heads * c.kv_lora_rank * (c.qk_nope_dim + c.v_dim)
    assert modules["layers.0.mixer"] == 100 * pair + absorbed


@pytest.mark.parametrize("name", ["llama", "jamba", "mamba2", "nsa", "dsa", "rwkv7", "longformer"])
def test_caches_have_the_bytes_of_new_state(name):
    model = PRESETS[name].build(dtype=torch.bfloat16)
    assert isinstance(model, Stateful)
    states = model.new_state(2, 50)
    found = calculate.cache_bytes(name, 50, batch=2)
    assert found.layers == tuple(state.nbytes for state in states)
    assert calculate.kv_bytes(name, 50, batch=2) == found.total


def test_a_window_keeps_no_more_than_it_sees():
    per_token = 2 * 2 * 32 * 2  # k and v, two layers, 32 numbers of two bytes
    for tokens, kept in ((5, 5), (8, 8), (500, 8)):
        assert calculate.cache_bytes(windowed(7), tokens).total == per_token * kept
    assert calculate.cache_bytes(windowed(7), 500).per_token == 0


def test_cross_attention_keeps_its_source():
    c = SMALL["t5"]
    one = 2 * c.num_heads * c.head_dim * 4
    found = calculate.cache_bytes(c, 10, dtype="fp32", source_tokens=7)
    assert found.layers == (17 * one,) * c.num_layers
    assert found.per_token == c.num_layers * one


def test_the_length_of_the_source_counts_in_a_report():
    c = SMALL["t5"]
    short, long = (calculate.report(c, 10, source_tokens=n) for n in (7, 14))
    assert (short["source"], calculate.report(c, 10)["source"]) == (7, 10)
    more = calculate.flops(c, 10, source_tokens=14).forward
    assert long["flops"]["forward"] == more > short["flops"]["forward"]
    numbers = 7 * 2 * c.num_layers * c.num_heads * c.head_dim
    assert long["cache"]["total"] - short["cache"]["total"] == 2 * numbers
    assert long["scores"]["largest"] == 14**2 * c.num_heads * 2
    with pytest.raises(ValueError, match=r"source_tokens must be None .*got source_tokens=7"):
        calculate.report("llama", 10, source_tokens=7)


def test_scores_and_receptive_field_of_windows():
    found = calculate.score_bytes(LLAMA, 50, batch=3, dtype="bf16")
    assert (found.largest, found.total) == (3 * 4 * 50**2 * 2, 2 * 3 * 4 * 50**2 * 2)
    field = calculate.receptive_field(windowed(7, 3), 500)
    assert (field.tokens, field.layers) == (22, (7, 7, 7))
    assert calculate.receptive_field(windowed(7, 3), 10).tokens == 10
    assert calculate.receptive_field("s4d", 50).tokens == 50


def test_capacity_is_that_of_the_router():
    (load, *_) = calculate.capacity("switch", 100).values()
    c = PRESETS["switch"].block(1).mlp.gate
    assert load.capacity == expert_capacity(100, c.experts, 1, 1.25)
    assert load.slots == load.capacity * c.experts
    (free, *_) = calculate.capacity("mixtral", 100).values()
    assert (free.capacity, free.slots, free.even) == (None, 200, 200 / free.experts)
    (limited, *_) = calculate.capacity("mixtral", 100, capacity_factor=2.0).values()
    assert limited.capacity == expert_capacity(100, free.experts, 2, 2.0)
    assert calculate.capacity("llama", 100) == {}


def test_roofline():
    found = calculate.roofline(10**12, 10**9, peak_flops=1e12, bandwidth=1e12)
    assert (found.intensity, found.ridge, found.seconds, found.bound) == (1e3, 1.0, 1.0, "compute")
    ceilings = {"peak_flops": 1e15, "bandwidth": 1e12}
    step = calculate.decode("llama", 1000, **ceilings)
    assert step.bound == "memory"
    weights = 2 * PRESETS["llama"].num_parameters
    assert step.bytes == weights + calculate.kv_bytes("llama", 1001)
    assert calculate.prefill("llama", 1000, **ceilings).intensity > 100 * step.intensity


def test_recomputation_adds_a_forward():
    plain, again = (calculate.flops(LLAMA, 20, recompute=r) for r in (False, True))
    assert again.training == 4 * plain.forward == plain.training + plain.forward


def test_every_op_of_a_forward_has_an_entry():
    """Without gradients, sums of ranks, and the losses of which only training knows."""
    training = re.compile("backward|tangents|^decayed_sum|^jsd|^linear_jsd|^dsa_indexer_loss")
    names = [name for name in _library._registered("cpu") if not training.search(name)]
    known = {re.sub("(_only|_raw|_)$", "", name) for name in names}
    known |= {
        "atlas_orthogonal",
        "deltaformer_attention",
        "mesa_net",
        "sparsemax_attention",
        "titans_mlp",
    }  # their kernels are in Python
    assert known == set(op_costs.COSTS) | op_costs.ELEMENTWISE


def test_an_op_without_an_entry_is_named():
    with pytest.raises(NotImplementedError, match=r"omniattn::new_op_raw has no entry"):
        op_costs.op_cost("new_op_raw", {})


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: calculate.flops("lama", 8), ValueError, "got config='lama'; did you mean 'llama"),
        (lambda: calculate.parameters(3), TypeError, "config must be a config.*got config=3"),
        (lambda: calculate.flops(LLAMA, 0), ValueError, "flops: tokens must be .*got tokens=0"),
        (lambda: calculate.flops(LLAMA, 8, pairs="all"), ValueError, "pairs must be .*'all'"),
        (lambda: calculate.flops(LLAMA, 8.0), TypeError, "flops: tokens must be .*tokens=8.0"),
        (lambda: calculate.flops(GPT2Config(), 10**6), ValueError, "at most .*tokens=1000000"),
        (lambda: calculate.kv_bytes(LLAMA, 8, dtype="bf17"), ValueError, "dtype must be .*'bf17'"),
        (lambda: calculate.kv_bytes("bert", 8), NotImplementedError, "generates, got BertConfig"),
        (lambda: calculate.receptive_field("vit", 8), NotImplementedError, "got ViTConfig"),
        (
            lambda: calculate.roofline(1, 1, peak_flops=0, bandwidth=1),
            ValueError,
            "peak_flops must be > 0",
        ),
    ],
)
def test_bad_input_is_named(call, error, text):
    with pytest.raises(error, match=text):
        call()
