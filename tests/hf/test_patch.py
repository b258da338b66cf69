"""Patched models train along the same curve as unpatched ones, and can be restored."""

import copy
import importlib
import io
import logging
import pickle
from types import MethodType

import peft
import pytest
import torch
import torch.distributed as dist
import transformers as hf
from torch import nn
from torch.ao.quantization import quantize_dynamic
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4MLP
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkTextInputScaledRMSNorm
from transformers.models.vitdet.modeling_vitdet import VitDetLayerNorm

import omniattn.hf
from omniattn.hf.layers import causal_lm_loss
from omniattn.hf.rotary import rotary_forward

#: The file, whose name `omniattn.hf.patch` is that of the function.
patch_module = importlib.import_module("omniattn.hf.patch")

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
}
#: What patching swaps: 2 layers of 7 linears and the head, ...
MODELS = {
    "llama": (
        lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)),
        {"linear": 15, "norm": 5, "mlp": 2, "rope": 2, "loss": 1, "attention": 2},
    ),
    "gemma2": (
        lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**SIZES, head_dim=12)),
        {"linear": 15, "norm": 9, "mlp": 2, "rope": 2, "loss": 1, "attention": 2},
    ),
    "qwen3": (
        lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES, head_dim=12)),
        {"linear": 15, "norm": 9, "mlp": 2, "rope": 2, "loss": 1, "attention": 2},
    ),
    "gpt_oss": (
        lambda: hf.GptOssForCausalLM(
            hf.GptOssConfig(**SIZES, head_dim=12, num_local_experts=2, num_experts_per_tok=1)
        ),
        {"linear": 9, "norm": 5, "rope": 2, "loss": 1, "attention": 2, "experts": 2},
    ),
    "mixtral": (
        lambda: hf.MixtralForCausalLM(
            hf.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
        ),
        {"linear": 9, "norm": 5, "rope": 2, "loss": 1, "attention": 2, "experts": 2},
    ),
    "deepseek_v3": (  # its rotary function reorders the dimensions and is left alone
        lambda: hf.DeepseekV3ForCausalLM(
            hf.DeepseekV3Config(
                **{**SIZES, "num_key_value_heads": 4},
                q_lora_rank=24,
                kv_lora_rank=16,
                qk_nope_head_dim=8,
                qk_rope_head_dim=4,
                v_head_dim=10,
                first_k_dense_replace=2,
            )
        ),
        {"linear": 17, "norm": 9, "mlp": 2, "loss": 1, "attention": 2},
    ),
    "phi3": (  # one linear less a layer for q, k and v, and one for the gate and up
        lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**SIZES, pad_token_id=0, eos_token_id=1)),
        {"linear": 9, "norm": 5, "mlp": 2, "rope": 2, "loss": 1, "attention": 2},
    ),
    "glm4": (
        lambda: hf.Glm4ForCausalLM(hf.Glm4Config(**SIZES, head_dim=12, pad_token_id=0)),
        {"linear": 13, "norm": 9, "mlp": 2, "rope": 2, "loss": 1, "attention": 2},
    ),
    "cohere2": (  # its second layer has no positions
        lambda: hf.Cohere2ForCausalLM(
            hf.Cohere2Config(
                **SIZES, layer_types=["sliding_attention", "full_attention"], logit_scale=1.0
            )
        ),
        {"linear": 15, "norm": 3, "mlp": 2, "rope": 2, "loss": 1, "attention": 2},
    ),
    "t5": (  # v1.1: encoder and decoder of one layer
        lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(
                vocab_size=97,
                d_model=48,
                d_kv=12,
                d_ff=64,
                num_layers=1,
                num_heads=4,
                feed_forward_proj="gated-gelu",
                tie_word_embeddings=False,
                decoder_start_token_id=0,
                dropout_rate=0.0,
            )
        ),
        {"linear": 19, "norm": 7, "mlp": 2, "loss": 1, "attention": 3},
    ),
    "bert": (
        lambda: hf.BertForMaskedLM(
            hf.BertConfig(
                **{k: v for k, v in SIZES.items() if k != "num_key_value_heads"},
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        ),
        {"linear": 14, "norm": 6, "attention": 2},
    ),
    "modernbert": (  # its call of the rotary function says where the heads are
        lambda: hf.ModernBertForMaskedLM(
            hf.ModernBertConfig(
                vocab_size=97,
                hidden_size=48,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                **{f"{token}_token_id": 0 for token in ("pad", "cls", "sep", "bos", "eos")},
            )
        ),
        {"linear": 10, "norm": 6, "rope": 2, "attention": 2},
    ),
    "esm": (
        lambda: hf.EsmForMaskedLM(
            hf.EsmConfig(
                **{k: v for k, v in SIZES.items() if k != "num_key_value_heads"},
                pad_token_id=1,
                mask_token_id=2,
                position_embedding_type="rotary",
                token_dropout=False,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        ),
        {"linear": 15, "norm": 6, "rope": 2, "attention": 2},
    ),
    "bloom": (  # not its attention, which it computes itself
        lambda: hf.BloomForCausalLM(
            hf.BloomConfig(vocab_size=97, hidden_size=48, n_layer=2, n_head=4)
        ),
        {"linear": 9, "norm": 6, "loss": 1},
    ),
}


def train(model: nn.Module, steps: int = 8) -> list[float]:
    """Losses of a few steps on one repeated batch."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(3, 97, (2, 17), generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x, labels=x).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", MODELS)
def test_a_patched_model_trains_along_the_same_curve(name):
    make, swapped = MODELS[name]
    model = make().train()
    patched = copy.deepcopy(model)
    before = omniattn.hf.patch(patched)
    assert before == swapped
    assert list(patched.state_dict()) == list(model.state_dict())
    expected = train(model)
    assert expected[-1] < 0.8 * expected[0]
    torch.testing.assert_close(train(patched), expected, rtol=2e-3, atol=0)


def run(model: nn.Module) -> list[torch.Tensor]:
    """Logits, loss and gradients on one batch, always with the same dropout."""
    torch.manual_seed(1)
    x = torch.randint(3, 97, (2, 9))
    output = model(x, labels=x)
    gradients = torch.autograd.grad(output.loss, list(model.parameters()))
    return [output.logits, output.loss, *gradients]


@pytest.mark.parametrize("name", ["phi3", "glm4", "cohere2", "t5", "modernbert"])
def test_logits_loss_and_gradients_are_those_of_the_model(name):
    model = MODELS[name][0]().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
    expected = run(model)
    omniattn.hf.patch(model, attention=False)  # attention draws its dropout in its own way
    torch.testing.assert_close(run(model), expected, rtol=1e-4, atol=1e-5)
    omniattn.hf.unpatch(model)
    assert all(map(torch.equal, run(model), expected))


def test_unpatch_restores_the_model():
    model = MODELS["llama"][0]()
    x = torch.randint(3, 97, (1, 9))
    expected = model(x, labels=x)
    classes = [type(module) for module in model.modules()]
    omniattn.hf.patch(model)
    inner = copy.deepcopy(model)
    with pytest.raises(TypeError, match="must be a PreTrainedModel, got Linear"):
        omniattn.hf.patch(model.lm_head)
    with pytest.raises(ValueError, match="patched already"):
        omniattn.hf.patch(model)
    for each in (model, inner):
        assert each.config._attn_implementation == "omniattn"
        omniattn.hf.unpatch(each)
        assert [type(module) for module in each.modules()] == classes
        assert each.config._attn_implementation == "sdpa"
        actual = each(x, labels=x)
        assert torch.equal(actual.logits, expected.logits)
        assert torch.equal(actual.loss, expected.loss)
    omniattn.hf.unpatch(model)
    assert omniattn.hf.patch(model, attention=False, linear=False, rope=False, loss=False) == {
        "norm": 5,
        "mlp": 2,
    }


def test_experts_go_by_their_interface_and_back():
    model = MODELS["mixtral"][0]()
    before = model.config._experts_implementation
    assert "experts" not in omniattn.hf.patch(model, experts=False)
    assert model.config._experts_implementation == before
    omniattn.hf.unpatch(model)
    others = ("attention", "linear", "norm", "rope", "loss")
    assert omniattn.hf.patch(model, **dict.fromkeys(others, False)) == {"experts": 2}
    assert model.config._experts_implementation == "omniattn"
    omniattn.hf.unpatch(model)
    assert model.config._experts_implementation == before
    model.model.layers[0].mlp.experts.act_fn = nn.Tanh()  # without a kernel here
    assert "experts" not in omniattn.hf.patch(model)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_patched_model_survives_pickle(name, monkeypatch):
    model = MODELS[name][0]().eval()
    classes = [type(module) for module in model.modules()]
    x = torch.randint(3, 97, (1, 9))
    original = model(x).logits
    omniattn.hf.patch(model)
    stored = io.BytesIO()
    torch.save(model, stored)
    # As in a process that has not patched yet.
    monkeypatch.delitem(hf.AttentionInterface._global_mapping, "omniattn")
    patch_module._subclass.cache_clear()
    rotary_forward.cache_clear()
    loaded = torch.load(io.BytesIO(stored.getvalue()), weights_only=False)
    for each in (loaded, copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded))):
        patched = [hasattr(type(module), "omniattn_original") for module in each.modules()]
        assert patched == [hasattr(type(module), "omniattn_original") for module in model.modules()]
        assert torch.equal(each(x).logits, model(x).logits)
        omniattn.hf.unpatch(each)
        assert [type(module) for module in each.modules()] == classes
        assert torch.equal(each(x).logits, original)


def test_layers_that_compute_something_else_are_left_alone():
    class ScaledRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))
            self.eps = 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 1.01 * nn.functional.rms_norm(x, (8,), self.weight, self.eps)

    class WeightlessRMSNorm(nn.Module):  # FalconMamba's
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.ones(8))
            self.eps = 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.rms_norm(x, x.shape[-1:], None, self.eps)

    class DropoutMLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wi_0, self.wi_1, self.wo = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
            self.dropout = nn.Dropout(0.1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.dropout(self.wo(nn.functional.silu(self.wi_0(x)) * self.wi_1(x)))

    class UpFirstMLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj, self.down_proj = nn.Linear(8, 32), nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            up, gate = self.gate_up_proj(x).chunk(2, -1)
            return self.down_proj(nn.functional.silu(gate) * up)

    class AdaptedMLP(UpFirstMLP):
        def forward(self, x: torch.Tensor, layer: int) -> torch.Tensor:
            return layer * super().forward(x)

    class ChannelsLayerNorm(nn.LayerNorm):  # DINOv3's ConvNeXt
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    model = MODELS["llama"][0]()
    model.other_norms = nn.ModuleList([ScaledRMSNorm(), WeightlessRMSNorm(), ChannelsLayerNorm(8)])
    model.other_mlp = DropoutMLP().eval()
    model.more_mlps = nn.ModuleList([UpFirstMLP(), AdaptedMLP()])
    swapped = omniattn.hf.patch(model)
    assert (swapped["norm"], swapped["mlp"]) == (5, 2)
    assert not model.other_mlp.training
    with torch.device("meta"):
        empty = MODELS["llama"][0]()
    with pytest.raises(ValueError, match="meta"):
        omniattn.hf.patch(empty)


def test_parameters_at_their_initial_values_hide_nothing():
    """Weights of one and biases of zero, and activations too small for a clamp."""
    assert patch_module._find_norm(LlamaRMSNorm(24)).__name__ == "rms_norm_llama"
    config = hf.DeepseekV4Config(hidden_size=24, intermediate_size=40, moe_intermediate_size=40)
    layers = [VitDetLayerNorm(24), MuseSparkTextInputScaledRMSNorm(24)]
    for left in map(patch_module._find_norm, layers):
        assert left.reason == "it computes something else"
    left = patch_module._find_mlp(DeepseekV4MLP(config))
    assert left.reason == "it computes something else"


def test_rounding_is_the_layers_own_in_half_precision():
    norm = MODELS["llama"][0]()
    nn.init.normal_(norm.model.norm.weight)
    expected = copy.deepcopy(norm).bfloat16()
    omniattn.hf.patch(norm)
    x = torch.randn(50, 48, dtype=torch.bfloat16)
    different = norm.bfloat16().model.norm(x) != expected.model.norm(x)
    assert different.double().mean() < 2e-3


def test_rotary_calls_say_where_the_heads_are():
    from transformers.models.dinov3_vit.modeling_dinov3_vit import DINOv3ViTAttention
    from transformers.models.efficientloftr.modeling_efficientloftr import EfficientLoFTRAttention
    from transformers.models.pixtral.modeling_pixtral import PixtralAttention

    theirs = EfficientLoFTRAttention.forward.__globals__["apply_rotary_pos_emb"]
    ours = rotary_forward(EfficientLoFTRAttention).__globals__["apply_rotary_pos_emb"]
    q, k, angles = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 2, 8), torch.randn(2, 3, 4)
    table = angles.repeat_interleave(2, -1)
    for a, e in zip(
        *(f(q, k, table.cos(), table.sin(), unsqueeze_dim=2) for f in (ours, theirs)), strict=True
    ):
        torch.testing.assert_close(a, e)
    left = rotary_forward(PixtralAttention)  # unsqueeze_dim=0
    assert left.reason == "it calls apply_rotary_pos_emb with arguments that ours does not have"
    left = rotary_forward(DINOv3ViTAttention)  # prefix tokens do not turn
    assert left.reason == "its apply_rotary_pos_emb computes something else"


def test_learned_rotary_tables_get_gradients():
    from transformers.models.lightglue.modeling_lightglue import LightGlueAttention

    theirs = LightGlueAttention.forward.__globals__["apply_rotary_pos_emb"]
    ours = rotary_forward(LightGlueAttention).__globals__["apply_rotary_pos_emb"]
    q, k, angles = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 3, 8), torch.randn(2, 3, 4)
    angles.requires_grad_()
    table = angles.repeat_interleave(2, -1)
    results = [torch.cat(f(q, k, table.cos(), table.sin()), 1) for f in (ours, theirs)]
    torch.testing.assert_close(*results)
    weights = torch.randn_like(results[0])
    gradients = [torch.autograd.grad(r, angles, weights, retain_graph=True) for r in results]
    torch.testing.assert_close(*gradients)


def test_half_weights_and_fp32_streams_keep_working():
    model = MODELS["llama"][0]().bfloat16()
    omniattn.hf.patch(model)
    x = torch.randint(3, 97, (1, 9))
    model(x, labels=x).loss.backward()
    norm = model.model.norm
    stream = torch.randn(2, 48)
    assert torch.equal(norm(stream), norm.omniattn_original.forward(norm, stream))


@pytest.mark.parametrize("items", [None, 5, torch.tensor(7)])
def test_the_loss_is_that_of_transformers(items):
    from transformers.loss.loss_utils import ForCausalLMLoss

    logits = torch.randn(2, 6, 11, requires_grad=True)
    labels = torch.randint(11, (2, 6))
    labels[0, 3:] = -100
    for given in ({"labels": labels}, {"labels": None, "shift_labels": labels}):
        ours = causal_lm_loss(logits, vocab_size=11, num_items_in_batch=items, **given)
        theirs = ForCausalLMLoss(logits, vocab_size=11, num_items_in_batch=items, **given)
        torch.testing.assert_close(ours, theirs)
        for a, e in zip(
            torch.autograd.grad(ours, logits), torch.autograd.grad(theirs, logits), strict=True
        ):
            torch.testing.assert_close(a, e)


def messages(caplog) -> list[tuple[str, str]]:
    """Level and text of what was logged, which is taken out."""
    found = [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "omniattn"]
    caplog.clear()
    return found


def check(model: nn.Module, **swapped: int) -> None:
    """Patched, `model` computes the same with its gradients; unpatched, it is the same again."""
    parameters = [p for p in model.parameters() if p.requires_grad]

    def run() -> list[torch.Tensor]:
        x = torch.arange(3, 21).view(2, 9)
        output = model(input_ids=x, labels=x)
        return [output.logits, *torch.autograd.grad(output.loss, parameters)]

    model.eval()
    expected, classes = run(), [type(module) for module in model.modules()]
    found = omniattn.hf.patch(model)
    assert found == MODELS["llama"][1] | swapped
    with pytest.raises(ValueError, match="patched already"):
        omniattn.hf.patch(model)
    torch.testing.assert_close(run(), expected, rtol=1e-4, atol=1e-5)
    omniattn.hf.unpatch(model)
    assert [type(module) for module in model.modules()] == classes
    assert all(map(torch.equal, run(), expected))


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


WRAPPERS = {
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "ddp": nn.parallel.DistributedDataParallel,
    "compiled ddp": lambda model: torch.compile(
        nn.parallel.DistributedDataParallel(model), backend="eager"
    ),
    "dp": nn.DataParallel,
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrapped_models(wrapper, one_process):
    check(WRAPPERS[wrapper](MODELS["llama"][0]()))


@pytest.mark.parametrize("wrapper", ["linear", "other"])
def test_what_is_no_model_inside_is_refused(wrapper):
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="must be a PreTrainedModel, got"):
        omniattn.hf.patch(nn.DataParallel(model) if wrapper == "other" else model)


@pytest.mark.parametrize("first", ["adapters", "patch"])
@pytest.mark.parametrize("dora", [False, True])
def test_adapters_act(dora, first):
    """Each linear gets an adapter that starts with a random value; all MLPs are patched."""
    config = peft.LoraConfig(
        target_modules="all-linear", use_dora=dora, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    model = MODELS["llama"][0]()
    if first == "adapters":
        check(peft.get_peft_model(model, config), linear=1 + 3 * 14)
        return
    x = torch.randint(3, 97, (2, 9))
    plain = model(input_ids=x).logits
    omniattn.hf.patch(model)
    model = peft.get_peft_model(model, config)
    patched = model(input_ids=x).logits
    omniattn.hf.unpatch(model)
    expected = model(input_ids=x).logits
    torch.testing.assert_close(patched, expected, rtol=1e-4, atol=1e-5)
    assert (expected - plain).abs().max() > 0.1


def test_merged_adapters_stay_patched():
    model = peft.get_peft_model(
        MODELS["llama"][0](), peft.LoraConfig(target_modules=["gate_proj"], init_lora_weights=False)
    )
    x = torch.randint(3, 97, (2, 9))
    expected = model(input_ids=x).logits
    omniattn.hf.patch(model)
    merged = model.merge_and_unload()
    assert hasattr(type(merged.model.layers[0].mlp.gate_proj), "omniattn_original")
    torch.testing.assert_close(merged(x).logits, expected, rtol=1e-4, atol=1e-5)


def shard(model: nn.Module, each: bool) -> None:
    """FSDP2 by layer, or by each linear, norm and MLP."""
    for layer in model.model.layers:
        if each:
            inner = [m for m in layer.modules() if type(m).__name__.endswith(("Linear", "RMSNorm"))]
            for module in (*inner, layer.mlp):
                fully_shard(module)
        fully_shard(layer)
    fully_shard(model)


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_sharded_models(name, each, one_process):
    make, swapped = MODELS[name]
    model = make()
    late = copy.deepcopy(model)
    x = torch.randint(3, 97, (2, 9))
    expected = model(x, labels=x).logits
    shard(model, each)
    classes = [type(module) for module in model.modules()]
    assert omniattn.hf.patch(model) == swapped
    assert omniattn.hf.patch(late) == swapped
    shard(late, each)
    for sharded in (model, late):
        output = sharded(x, labels=x)
        output.loss.backward()
        assert all(p.grad is not None for p in sharded.parameters())
        torch.testing.assert_close(output.logits, expected, rtol=1e-4, atol=1e-5)
        omniattn.hf.unpatch(sharded)
        assert torch.equal(sharded(x, labels=x).logits, expected)
    assert [type(module) for module in model.modules()] == classes
    assert [type(m).__mro__[1:] for m in late.modules()] == [c.__mro__[1:] for c in classes]


def test_parametrised_models():
    model = MODELS["llama"][0]()
    omniattn.hf.patch(model)
    nn.utils.parametrizations.weight_norm(model.lm_head)
    omniattn.hf.unpatch(model)
    check(model)
    nn.utils.parametrize.remove_parametrizations(model.lm_head, "weight")
    assert type(model.lm_head) is nn.Linear


def test_weights_of_tensor_parallel_linears_stay(one_process, caplog):
    model = MODELS["llama"][0]()
    plan = {"model.layers.*.self_attn.q_proj": ColwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (1,)), plan)
    check(model, linear=13)
    warning = ("WARNING", "patch: linear: 2 Linear unchanged: its weight is a DTensor")
    assert messages(caplog) == [warning]


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
def test_quantised_models():
    x = torch.randint(3, 97, (2, 9))
    for name, linears in (("llama", 15), ("t5", 19)):
        make, swapped = MODELS[name]
        model = make().eval()
        given = {"input_ids": x, "labels": x}
        quantised = quantize_dynamic(model, {nn.Linear})
        expected = quantised(**given).logits
        assert swapped["linear"] == linears
        without = {key: n for key, n in swapped.items() if key != "linear"}
        assert omniattn.hf.patch(quantised) == without
        torch.testing.assert_close(quantised(**given).logits, expected, rtol=1e-3, atol=1e-3)
        omniattn.hf.unpatch(quantised)
        assert torch.equal(quantised(**given).logits, expected)
        omniattn.hf.patch(model)
        with pytest.raises(RuntimeError, match="unpatch, quantise, and patch again"):
            quantize_dynamic(model, {nn.Linear})
        omniattn.hf.unpatch(model)
        assert torch.equal(quantize_dynamic(model, {nn.Linear})(**given).logits, expected)


SMALL = {"vocab_size": 97, "bos_token_id": 0, "eos_token_id": 0}
OWN_ATTENTION = {
    "BloomAttention": lambda: MODELS["bloom"][0](),
    "MptAttention": lambda: hf.MptForCausalLM(
        hf.MptConfig(vocab_size=97, d_model=48, n_layers=2, n_heads=4)
    ),
    "FalconAttention": lambda: hf.FalconForCausalLM(
        hf.FalconConfig(**SMALL, hidden_size=48, num_hidden_layers=2, num_attention_heads=4)
    ),
    "GPTJAttention": lambda: hf.GPTJForCausalLM(
        hf.GPTJConfig(**SMALL, n_embd=48, n_layer=2, n_head=4, rotary_dim=4)
    ),
    "DisentangledSelfAttention": lambda: hf.DebertaV2ForMaskedLM(
        hf.DebertaV2Config(
            vocab_size=97,
            hidden_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            relative_attention=True,
            pos_att_type=["c2p", "p2c"],
        )
    ),
    None: lambda: hf.MambaForCausalLM(
        hf.MambaConfig(vocab_size=97, hidden_size=48, num_hidden_layers=2, state_size=4)
    ),
}


@pytest.mark.parametrize("kind", OWN_ATTENTION)
def test_models_that_compute_their_attention_say_so(kind, caplog):
    model = OWN_ATTENTION[kind]().eval()
    x = torch.randint(3, 97, (2, 9))
    expected, before = model(x).logits, model.config._attn_implementation
    swapped = omniattn.hf.patch(model)
    assert "attention" not in swapped and {"linear", "norm"} <= swapped.keys()
    reason = "it does not ask transformers' AttentionInterface"
    warning = ("WARNING", f"patch: attention: 2 {kind} unchanged: {reason}")
    assert messages(caplog) == ([warning] if kind else [])
    assert model.config._attn_implementation == before
    torch.testing.assert_close(model(x).logits, expected, rtol=1e-4, atol=1e-5)
    assert "attention" not in omniattn.hf.patch(OWN_ATTENTION[kind](), attention=False)
    assert messages(caplog) == []


def test_layers_left_alone_are_logged(caplog):
    class Scaled(nn.LayerNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    caplog.set_level(logging.DEBUG, logger="omniattn")
    model = MODELS["mixtral"][0]()
    model.other = nn.ModuleList([type("ScaledLayerNorm", (Scaled,), {})(8) for _ in range(3)])
    model.lm_head.forward = MethodType(nn.Linear.forward, model.lm_head)
    model.mlp = MODELS["llama"][0]().model.layers[0].mlp
    hook = model.mlp.act_fn.register_forward_hook(lambda *_: None)
    model.model.layers[0].mlp.experts.act_fn = nn.Tanh()
    assert omniattn.hf.patch(model) == {
        "linear": 11, "norm": 5, "rope": 2, "loss": 1, "attention": 2
    }  # fmt: skip
    replaced = "its forward was replaced on the instance, as accelerate and kernelize do"
    tanh = "experts_forward: no kernel for the activation of MixtralExperts (Tanh)"
    hooked = "its activation has a hook, which would not be called"
    assert sorted(messages(caplog)) == [
        ("DEBUG", "patch: norm: 3 ScaledLayerNorm unchanged: it computes something else"),
        (
            "WARNING",
            f"patch: experts: 2 MixtralExperts unchanged: {tanh}; "
            'use experts_implementation="eager"',
        ),
        ("WARNING", f"patch: linear: 1 Linear unchanged: {replaced}"),
        ("WARNING", f"patch: mlp: 1 LlamaMLP unchanged: {hooked}"),
    ]
    hook.remove()
    omniattn.hf.unpatch(model)
    assert omniattn.hf.patch(model)["mlp"] == 1


def test_inputs_of_another_dtype_are_logged_once(caplog):
    patch_module._log_once.cache_clear()
    model = MODELS["llama"][0]().bfloat16()
    omniattn.hf.patch(model)
    for _ in range(2):
        model.model.norm(torch.randn(2, 48))
    reason = "its input is torch.float32 and its weight torch.bfloat16"
    assert messages(caplog) == [("WARNING", f"patch: LlamaRMSNorm runs its own forward: {reason}")]


def test_hooks_of_patched_layers_are_called():
    model, seen = MODELS["llama"][0](), []
    layer = model.model.layers[0]
    for module in (layer.input_layernorm, layer.mlp, layer.mlp.gate_proj, layer.self_attn):
        module.register_forward_hook(lambda module, *_: seen.append(module))
        module.register_forward_pre_hook(lambda module, *_: seen.append(module))
    omniattn.hf.patch(model)
    model(torch.randint(3, 97, (1, 4)))
    assert len(seen) == 8
