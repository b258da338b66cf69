"""Layers under what finds them by class: adapters (PEFT), quantisation, sharding, weight decay.

An op that reads the weight of a layer in place of calling it would leave an adapter out silently.
"""

import copy
from dataclasses import replace

import peft
import pytest
import torch
from mixer_cases import MIXERS
from small_presets import SMALL
from torch import nn

from omniattn import modules
from omniattn.models import BertClassifierConfig, BlocksConfig, EncoderDecoder
from omniattn.models.vision import VisionConfig
from omniattn.modules import (
    MLP,
    Attention,
    DecoderBlock,
    GatedMLP,
    LayerNorm,
    Linear,
    Mamba,
    MoE,
    MultiHeadLatentAttention,
    RMSNorm,
    RotaryEmbedding,
    RWKVChannelMix,
)
from omniattn.modules.base.layer import Layer
from omniattn.modules.base.linear import is_plain
from omniattn.modules.experts.auxiliary import AuxiliaryLoss

pytestmark = pytest.mark.usefixtures("one_thread")
DIM = 24
#: Layers of this package and what of torch's each is.
CLASSES = {
    "BitLinear": nn.Linear,
    "Linear": nn.Linear,
    "LayerNorm": nn.LayerNorm,
    "RMSNorm": nn.RMSNorm,
}


def adapted(module: nn.Module, kind: type = nn.Linear, **options) -> nn.Module:
    """The module with random LoRA on all layers of a class."""
    names = [name for name, each in module.named_modules() if isinstance(each, kind)]
    config = peft.LoraConfig(target_modules=names, r=2, init_lora_weights=False, **options)
    return peft.get_peft_model(module, config)


def check(module: nn.Module, run, kind: type = nn.Linear) -> None:
    """The adapters act, all of them get gradients, and merging them changes nothing."""
    plain = run(module).detach()
    model = adapted(module, kind)
    model.train()
    y = run(model)
    assert not torch.allclose(y, plain)
    y.square().sum().backward()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
    torch.testing.assert_close(run(model.merge_and_unload()), y)


@pytest.mark.parametrize("name", [n for n in modules.__all__ if n in Layer.layers])
def test_layers_are_of_torchs_classes(name):
    """By which optimizers, sharding, quantisation and adapters find them."""
    layer = getattr(modules, name)
    assert not issubclass(layer, CLASSES.get(name, ())) or name in CLASSES
    for kind in (nn.Linear, nn.Embedding, nn.Conv1d, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm):
        assert issubclass(layer, kind) == (CLASSES.get(name) is kind)


@pytest.mark.parametrize(
    ("name", "sizes", "options"),
    [
        ("Linear", (8, 4), {"bias": False}),
        ("Linear", (8, 4), {"bias": True}),
        ("LayerNorm", (8, 1e-3), {"bias": False}),
        ("LayerNorm", (8,), {}),
        ("RMSNorm", (8, 1e-3), {}),
    ],
)
def test_layers_have_what_torchs_have(name, sizes, options):
    """All attributes of an instance, with the same values."""
    ours, theirs = getattr(modules, name)(*sizes, **options), CLASSES[name](*sizes, **options)
    attributes = {n: v for n, v in vars(theirs).items() if not n.startswith("_")}
    assert {n: getattr(ours, n) for n in attributes} == attributes
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert all(isinstance(v, nn.Parameter) or v is None for v in ours._parameters.values())
    x = torch.randn(3, 8)
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("config", MIXERS, ids=lambda config: config.layer.__name__)
def test_lora_acts_on_every_linear_layer_of_a_mixer(config):
    torch.manual_seed(0)
    mixer = config.build(dtype=torch.float64)
    if not any(isinstance(each, nn.Linear) for each in mixer.modules()):
        pytest.skip("it has none")
    x, rope = torch.randn(2, 9, DIM, dtype=torch.float64), RotaryEmbedding(6)(torch.arange(9))

    def run(mixer: nn.Module) -> torch.Tensor:
        y = mixer(x, rope=rope)
        apart = [m.auxiliary for m in mixer.modules() if isinstance(m, AuxiliaryLoss)]
        return y + sum(loss for loss in apart if loss is not None)

    check(mixer, run)


@pytest.mark.parametrize(
    "config",
    [
        MLP.Config(DIM, 16, "gelu_tanh", init_std=0.5),
        GatedMLP.Config(DIM, 16, "geglu", init_std=0.5, recompute=True),
        GatedMLP.Config(DIM, 16, "clamped_swiglu", bias=True, init_std=0.5),
        MoE.Config.of(DIM, 16, 4, 2, shared_hidden_dim=16, shared_gate=True),
        RWKVChannelMix.Config(DIM, init_std=0.5),
    ],
    ids=lambda config: config.layer.__name__,
)
def test_lora_acts_on_every_linear_layer_of_a_channel_mixer(config):
    torch.manual_seed(0)
    x = torch.randn(2, 9, DIM, dtype=torch.float64)
    check(config.build(dtype=torch.float64), lambda mixer: mixer(x))


@torch.no_grad()
def test_lora_acts_on_decoding():
    """Steps read what calls read: MLA attends to its latents by the weights of kv_b_proj."""
    torch.manual_seed(0)
    for config in MIXERS:
        mixer = config.build(dtype=torch.float64)
        if not any(isinstance(each, nn.Linear) for each in mixer.modules()):
            continue
        model = adapted(mixer).eval()
        x, rotary = torch.randn(2, 5, DIM, dtype=torch.float64), RotaryEmbedding(6)
        state, steps = model.base_model.model.new_state(2, 5), []
        for i in range(5):
            steps.append(model(x[:, i : i + 1], state=state, rope=rotary(torch.arange(i, i + 1))))
        torch.testing.assert_close(torch.cat(steps, 1), model(x, rope=rotary(torch.arange(5))))


def _inputs(config) -> tuple[torch.Tensor, ...]:
    if isinstance(config, VisionConfig):
        return torch.randn(2, 3, 32, 32, dtype=torch.float64), torch.tensor([0, 1])
    tokens = torch.randint(97, (2, 9))
    if isinstance(config, BertClassifierConfig):
        return tokens, torch.tensor([0, 1])
    return (
        (tokens, tokens, tokens) if isinstance(config, EncoderDecoder.Config) else (tokens, tokens)
    )


@pytest.mark.parametrize("name", SMALL)
def test_lora_acts_on_every_linear_layer_of_a_model(name):
    """The head among them, whose loss makes no logits without an adapter."""
    torch.manual_seed(0)
    config = replace(
        SMALL[name], **({"dropout_p": 0.0} if hasattr(SMALL[name], "dropout_p") else {})
    )
    model, inputs = config.build(dtype=torch.float64), _inputs(config)
    # Only global tokens have the other projections of Longformer.
    given = {"global_index": torch.tensor([[0], [3]])} if name == "longformer" else {}

    def run(model: nn.Module) -> torch.Tensor:
        return model(*inputs, **given)

    check(model, run)


def small_decoder(**options) -> nn.Module:
    """A block of each kind of layer."""
    norm, mlp = RMSNorm.Config(DIM), GatedMLP.Config(DIM, 16)
    latent = MultiHeadLatentAttention.Config(DIM, 2, None, 8, 8, 6, 8)
    blocks = (
        DecoderBlock.Config(Attention.Config(DIM, 4), mlp, norm),
        DecoderBlock.Config(latent, MoE.Config.of(DIM, 16, 4, 2), LayerNorm.Config(DIM)),
        DecoderBlock.Config(Mamba.Config(DIM), None, norm),
    )
    rope = RotaryEmbedding.Config(6)
    config = BlocksConfig(dim=DIM, num_layers=3, blocks=blocks, rope=rope, **options)
    return config.build(dtype=torch.float64)


EVERY = {
    "linear": {"target_modules": "all-linear"},
    "embedding": {"target_modules": ["embed_tokens"]},
    "experts": {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "gate.weight"]},
    "saved": {
        "target_modules": ["q_proj"],
        "modules_to_save": ["conv1d", "input_layernorm", "lm_head"],
    },
}


@pytest.mark.parametrize("options", EVERY.values(), ids=EVERY)
def test_a_decoder_is_fine_tuned_saved_and_merged(options, tmp_path):
    torch.manual_seed(0)
    base = small_decoder()
    again = copy.deepcopy(base)
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, **options))
    tokens = torch.randint(256, (2, 9))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    model.save_pretrained(tmp_path)
    model.eval()
    loaded = peft.PeftModel.from_pretrained(again, tmp_path).eval()
    torch.testing.assert_close(loaded(tokens), model(tokens))
    expected = model(tokens)
    torch.testing.assert_close(model.merge_and_unload()(tokens), expected)


def test_ia3_acts():
    torch.manual_seed(0)
    base, tokens = small_decoder(), torch.randint(256, (2, 9))
    config = peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"],
        feedforward_modules=["down_proj"],
        init_ia3_weights=False,
    )
    plain = base(tokens)
    model = peft.get_peft_model(base, config)
    y = model(tokens)
    assert not torch.allclose(y, plain)
    torch.testing.assert_close(model.merge_and_unload()(tokens), y)


def test_hooks_of_every_linear_layer_are_called():
    """As calibration, pruning and FSDP2 need: also where a fused op could read the weight."""
    model, tokens, called = small_decoder(), torch.randint(256, (2, 9)), set()
    expected = model(tokens, tokens)
    linear = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    for name, layer in linear.items():
        layer.register_forward_hook(lambda *_, name=name: called.add(name))
    torch.testing.assert_close(model(tokens, tokens), expected)
    assert called == set(linear)


class Quantized(torch.Tensor):
    """A weight that is stored as int8 and multiplied by a function of its own, as torchao's."""

    @staticmethod
    def __new__(cls, weight: torch.Tensor) -> torch.Tensor:
        return torch.Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype)

    def __init__(self, weight: torch.Tensor) -> None:
        self.scale = weight.abs().amax(1, keepdim=True) / 127
        self.codes = (weight / self.scale).round().to(torch.int8)

    def __tensor_flatten__(self):
        return ["scale", "codes"], None

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is nn.functional.linear:
            x, weight, *bias = args
            return function(x, weight.codes.to(x.dtype) * weight.scale, *bias)
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(str(function))


def test_quantised_weights_are_multiplied_by_their_own_function():
    torch.manual_seed(0)
    norm, mlp = RMSNorm.Config(DIM), GatedMLP.Config(DIM, 16)
    blocks = (DecoderBlock.Config(Attention.Config(DIM, 4), mlp, norm),)
    model = BlocksConfig(dim=DIM, num_layers=1, blocks=blocks).build(dtype=torch.float64).eval()
    rounded, tokens = copy.deepcopy(model), torch.randint(256, (2, 9))
    for module, other in zip(model.modules(), rounded.modules(), strict=True):
        if isinstance(module, nn.Linear):
            weight = Quantized(module.weight.detach())
            module.weight = nn.Parameter(weight, requires_grad=False)
            other.weight.data = weight.codes * weight.scale
            assert not is_plain(module)
    torch.testing.assert_close(model(tokens), rounded(tokens))
    torch.testing.assert_close(model(tokens, tokens), rounded(tokens, tokens))


def test_a_plain_layer_is_one_that_an_op_may_read():
    layer = Linear(4, 4)
    assert is_plain(layer)
    for change in (
        lambda each: each.register_forward_pre_hook(lambda *_: None),
        lambda each: each.register_full_backward_hook(lambda *_: None),
        lambda each: setattr(each, "forward", each.forward),
    ):
        other = copy.deepcopy(layer)
        change(other)
        assert not is_plain(layer, other)
    assert not is_plain(nn.Linear(4, 4))
