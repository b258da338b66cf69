"""The architectures: parameter counts of the releases, logits of transformers."""

import json
import math
from dataclasses import replace

import pytest
import torch
import transformers
from small_presets import SMALL

from omniattn.models import (
    PRESETS,
    Bert,
    Model,
    SwinConfig,
    T5Config,
    ViTConfig,
    hybrid_schedule,
)
from omniattn.models.presets import TRAINED


@pytest.mark.parametrize("name", PRESETS)
def test_a_config_survives_json(name):
    config = PRESETS[name]
    assert type(config).from_dict(json.loads(json.dumps(config.to_dict()))) == config


#: Settings in the releases' config files that differ from transformers' defaults.
FILES = {
    "llama-2-7b": {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    "gpt2-small": {},
    "mamba-130m": {"num_hidden_layers": 24},
    "bert-base": {},
    "t5-small": {},
    "t5-v1.1-base": {
        "d_model": 768,
        "num_layers": 12,
        "num_heads": 12,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    },
    "vit-b-16": {"num_labels": 1000, "layer_norm_eps": 1e-6},
    "swin-t": {"num_labels": 1000, "drop_path_rate": 0.2},
    "mixtral-8x7b": {"max_position_embeddings": 32768},
    "deepseek-v3": {
        "max_position_embeddings": 163840,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
}


@pytest.mark.parametrize("name", FILES)
def test_configs_of_transformers_become_those_of_the_releases(name):
    ours = PRESETS[name]
    theirs = getattr(transformers, ours.hf.model).config_class(**FILES[name])
    assert type(ours).from_hf(theirs) == ours


def inputs(config):
    if isinstance(config, ViTConfig | SwinConfig):
        return {"pixel_values": torch.rand(2, 3, 32, 32, dtype=torch.float64)}
    tokens = {"input_ids": torch.randint(97, (2, 33))}
    if isinstance(config, T5Config):
        tokens["decoder_input_ids"] = torch.randint(97, (2, 17))
    return tokens


@pytest.mark.parametrize("name", SMALL)
@torch.no_grad()
def test_transformers_gives_the_same_logits(name):
    torch.manual_seed(0)
    ours = SMALL[name].build(dtype=torch.float64).eval()
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    theirs = ours.to_hf()
    if name in ("mixtral", "deepseek", "jamba"):
        theirs.set_experts_implementation("eager")  # the default one has no fp64
    given = inputs(ours.config)
    expected = theirs(**given).logits.double()  # those of Mamba-2 are fp32
    # 1e-5: theirs computes rotary tables, scans, some norms and routers in fp32.
    torch.testing.assert_close(ours(*given.values()), expected, rtol=1e-5, atol=1e-5)

    back = Model.from_hf(theirs)
    assert not back.training
    assert back.config == ours.config
    torch.testing.assert_close(back.state_dict(), ours.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("mixtral", "sliding_window", 4),
        ("deepseek", "norm_topk_prob", False),
        ("gpt2", "attn_pdrop", 0.2),
        ("gpt2", "n_inner", 50),
        ("mamba2", "hidden_act", "gelu"),
        ("mamba", "hidden_act", "gelu"),
        ("mamba", "intermediate_size", 80),
        ("falcon-mamba", "hidden_act", "gelu"),
        ("zamba2", "hidden_act", "silu"),
        ("zamba2", "use_long_context", True),
        ("jamba", "attention_dropout", 0.1),
        ("t5", "scale_decoder_outputs", False),
        ("bert", "hidden_act", "relu"),
        ("bert-classifier", "classifier_dropout", 0.3),
        ("vit", "intermediate_size", 100),
        ("swin", "mlp_ratio", 2.0),
    ],
)
def test_from_hf_rejects_what_it_does_not_compute(name, option, value):
    config = SMALL[name].to_hf()
    assert type(SMALL[name]).from_hf(config) == SMALL[name]
    setattr(config, option, value)
    with pytest.raises(NotImplementedError, match=f"got {option}={value!r}"):
        type(SMALL[name]).from_hf(config)


@pytest.mark.parametrize(("name", "other"), [("mamba", "falcon-mamba"), ("gpt2", "jamba")])
def test_from_hf_rejects_configs_of_other_architectures(name, other):
    """FalconMamba's has all options of Mamba's, and norms that this does not compute."""
    theirs = SMALL[other].to_hf()
    message = f"model_type must be '{name}', got model_type='{theirs.model_type}'"
    with pytest.raises(NotImplementedError, match=message):
        type(SMALL[name]).from_hf(theirs)


@pytest.mark.parametrize(
    ("name", "options", "changes"),
    [
        ("mamba2", {"hidden_act": "swish"}, {}),
        ("mixtral", {"hidden_act": "swish"}, {}),
        ("mamba2", {"time_step_limit": [-math.inf, 2.0]}, {"dt_limit": (-math.inf, 2.0)}),
    ],
)
def test_other_ways_to_say_the_same(name, options, changes):
    config = SMALL[name].to_hf()
    for option, value in options.items():
        setattr(config, option, value)
    assert type(SMALL[name]).from_hf(config) == replace(SMALL[name], **changes)


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("mixtral", {"bos_token_id": 5, "eos_token_id": [3, 4], "pad_token_id": 6}),
        ("mamba2", {"bos_token_id": None, "eos_token_id": 3, "pad_token_id": 3}),
        ("t5", {"eos_token_id": 2, "pad_token_id": 3, "decoder_start_token_id": 3}),
        ("bert", {"pad_token_id": 7}),
    ],
)
def test_ids_of_special_tokens_come_back(name, ids):
    theirs = SMALL[name].to_hf()
    for key, value in ids.items():
        setattr(theirs, key, value)
    ours = type(SMALL[name]).from_hf(theirs)
    saved = type(ours).from_dict(json.loads(json.dumps(ours.to_dict())))
    back = saved.build().to_hf().config
    assert {key: getattr(back, key) for key in ids} == ids
    assert ours == SMALL[name]


def test_vision_has_no_special_tokens():
    assert ViTConfig.from_hf(SMALL["vit"].to_hf()).token_ids == ()


@pytest.mark.parametrize("wrong", [("eos_token_id", 2), (("eos", 2),)])
def test_ids_of_special_tokens_are_checked(wrong):
    with pytest.raises(ValueError, match=r"^GPT2Config: token_ids must be pairs of bos_token_id, "):
        replace(SMALL["gpt2"], token_ids=wrong)


def test_conversion_says_what_it_cannot_do():
    bert = SMALL["bert"].build()
    with pytest.raises(NotImplementedError, match=r"BertForMaskedLM, .*, got BertModel"):
        Model.from_hf(bert.to_hf().bert)
    with pytest.raises(NotImplementedError, match="must become a Bert, got GPT2LMHeadModel"):
        Bert.from_hf(SMALL["gpt2"].build().to_hf())
    more = bert.to_hf()
    more.extra = torch.nn.Linear(1, 1)
    with pytest.raises(NotImplementedError, match=r"got \['extra.weight', 'extra.bias'\]"):
        Model.from_hf(more)
    with pytest.raises(NotImplementedError, match="transformers has no such model"):
        TRAINED["switch"].build().to_hf()
    with pytest.raises(NotImplementedError, match="mscale must be that of rope_scaling"):
        replace(SMALL["deepseek"], mscale=1.0).to_hf()
    with pytest.raises(NotImplementedError, match="got mtp_depths=1"):
        replace(SMALL["deepseek"], mtp_depths=1).to_hf()
    with pytest.raises(NotImplementedError, match="shares the transformers only then"):
        replace(SMALL["zamba2"], tie_embeddings=False).to_hf()
    with pytest.raises(NotImplementedError, match="num_kv_heads must be num_heads"):
        replace(SMALL["zamba2"], num_kv_heads=2).to_hf()


def test_hybrids_have_the_layers_of_transformers():
    jamba, zamba = transformers.JambaConfig(), transformers.ZambaConfig()
    layers = hybrid_schedule("jamba", 32)
    assert [layer.mixer for layer in layers] == jamba.layers_block_type
    assert [16 if layer.mlp == "experts" else 1 for layer in layers] == jamba.layers_num_experts
    shared = [layer.shared for layer in hybrid_schedule("zamba", 76)]
    assert shared == [kind == "hybrid" for kind in zamba.layers_block_type]
    assert [layer.mixer for layer in hybrid_schedule("samba", 3)] == ["mamba", "window", "mamba"]
    assert [layer.mixer[0] for layer in hybrid_schedule("ratio", 9, ratio=3)] == [*"mmmammmam"]
    with pytest.raises(ValueError, match="hybrid_schedule: kind must be one of"):
        hybrid_schedule("mamba", 1)


@torch.no_grad()
def test_bert_pools_the_first_token_as_transformers_does():
    torch.manual_seed(0)
    ours = SMALL["bert-classifier"].build(dtype=torch.float64).eval()
    tokens, labels = torch.randint(97, (2, 33)), torch.tensor([4, 0])
    theirs = ours.to_hf()
    torch.testing.assert_close(ours.pooled(tokens), theirs.bert(tokens).pooler_output)
    torch.testing.assert_close(ours(tokens, labels), theirs(tokens, labels=labels).loss)


@torch.no_grad()
def test_vit_pools_by_the_mean_of_the_patches():
    torch.manual_seed(0)
    model = replace(SMALL["vit"], pool="mean").build(dtype=torch.float64)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    assert "class_token" not in model.state_dict()
    images = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    x = model.patches(images).flatten(1, 2) + model.embed_positions.weight
    for layer in model.layers:
        x = sum(layer(x))
    torch.testing.assert_close(model(images), model.head(model.norm(x).mean(1)))
    with pytest.raises(ValueError, match="ViTConfig: pool must be one of"):
        replace(SMALL["vit"], pool="max")
    with pytest.raises(NotImplementedError, match="pool must be 'token' in transformers"):
        model.to_hf()


@pytest.mark.parametrize("name", TRAINED)
def test_every_model_is_built_within_a_device(name):
    with torch.device("meta"):
        model = TRAINED[name].build()
    assert all(p.is_meta for p in model.parameters())


def test_a_device_need_not_reach_linspace(monkeypatch):
    """transformers replaces torch.linspace while it builds models. If torch.device is used first
    then, torch keeps the replacement in its list of functions that make tensors."""
    linspace = torch.linspace
    monkeypatch.setattr(torch, "linspace", lambda *a, **k: linspace(*a, **({"device": "cpu"} | k)))
    test_every_model_is_built_within_a_device("rwkv7")


@pytest.mark.parametrize("name", [*SMALL, *(n for n in TRAINED if n not in SMALL)])
def test_reset_parameters_draws_as_the_constructor_does(name):
    """FSDP2 calls reset_parameters after construction on the meta device."""
    config = SMALL[name] if name in SMALL else TRAINED[name]
    torch.manual_seed(0)
    built, reset = config.build(), config.build(device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for p in reset.parameters():
            p.fill_(math.nan)
    for module in reset.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for (path, want), got in zip(built.named_parameters(), reset.parameters(), strict=True):
        want, got = want.detach(), got.detach()
        noise = 6 * want.numel() ** -0.5 if want.numel() > 1 else 6  # six sigmas of mean and std
        std = want.std(correction=0).item()
        if want.numel() < 8:  # whose deviation says little
            std = max(std, want.square().mean().sqrt().item())
        assert got.mean().item() == pytest.approx(want.mean().item(), abs=2 * noise * std), path
        assert got.std(correction=0).item() == pytest.approx(std, rel=2 * noise), path


def test_the_layers_of_jamba():
    config = TRAINED["jamba"]
    mixers = [type(config.block(layer).mixer).__qualname__ for layer in range(4)]
    assert mixers == ["Mamba.Config", "Mamba.Config", "Attention.Config", "Mamba.Config"]
    mlps = [type(config.block(layer).mlp).__qualname__ for layer in range(4)]
    assert mlps == ["GatedMLP.Config", "MoE.Config"] * 2
    with pytest.raises(ValueError, match=r"expert_offset must be in \[0, expert_period\), got "):
        replace(config, expert_offset=2)
    with pytest.raises(ValueError, match="attention_period=0"):
        replace(config, attention_period=0)


def test_configs_check_their_fields():
    for field, value in (
        ("dim", -1),
        ("num_layers", 0),
        ("num_heads", "2"),
        ("norm_eps", math.nan),
    ):
        with pytest.raises(
            (TypeError, ValueError), match=f"ViTConfig: {field} must be .*={value!r}"
        ):
            replace(SMALL["vit"], **{field: value})


@pytest.mark.parametrize("wrong", [-1, 97])
def test_tokens_outside_the_vocabulary_are_named(wrong):
    tokens, bad = torch.tensor([[3, 4, 5, 1]]), torch.tensor([[3, wrong, 5, 1]])
    low, high = min(wrong, 1), max(wrong, 5)
    message = rf"Embedding: tokens must be in \[0, 97\), got tokens from {low} to {high}"
    calls = [(name, (bad,)) for name in ("mixtral", "gpt2", "bert")]
    calls += [("t5", (tokens, bad)), ("t5", (bad, tokens))]
    for name, arguments in calls:
        with pytest.raises(ValueError, match=message):
            SMALL[name].build()(*arguments)
    with pytest.raises(TypeError, match=r"tokens must be integers, got tokens.dtype=torch.float32"):
        SMALL["gpt2"].build()(tokens.float())
    with pytest.raises(ValueError, match=r"token_types must be in \[0, 2\), got token_types from"):
        SMALL["bert"].build()(tokens, token_types=tokens)


def test_tokens_of_another_device_are_named():
    message = "^Embedding: tokens must be on the device of weight, got tokens.device=cpu, weight"
    with pytest.raises(ValueError, match=message):
        SMALL["gpt2"].build(device="meta")(torch.tensor([[1]]))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.uint16])
def test_tokens_of_any_integer_dtype(dtype):
    tokens = torch.tensor([[3, 96, 5, 1]])
    for name in ("gpt2", "bert", "t5"):
        model, copies = SMALL[name].build().eval(), 1 + (name == "t5")
        got, want = (model(*[t] * copies) for t in (tokens.to(dtype), tokens))
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("bert", (None,), "Bert: tokens must be a torch.Tensor, got tokens=None"),
        ("bert", (torch.tensor([1]),), r"tokens must have shape \(B, T\), got .*=\(1,\)"),
        ("t5", (None, None), "T5: source must be a torch.Tensor, got source=None"),
        ("t5", (torch.tensor([[1]]), None), "T5: tokens must be a torch.Tensor, got tokens=None"),
        (
            "t5",
            (torch.tensor([[1]]), torch.tensor([[1], [2]])),
            r"T5: the encoder's states must .*, got \(1, 1, .*, tokens.shape=\(2, 1\)",
        ),
        ("vit", (None,), "ViT: images must be a torch.Tensor, got images=None"),
        ("swin", (None,), "Swin: images must be a torch.Tensor, got images=None"),
        ("vit", (torch.ones(2, 3, 7, 8),), r"images must have .*=\(2, 3, 7, 8\), patch=8"),
        ("vit", (torch.ones(2, 3, 8, 16),), "images must have 4 x 4 patches, .*, got 1 x 2"),
        ("swin", (torch.ones(2, 8, 8),), r"images must have shape \(B, 3, H, W\)"),
        ("swin", (torch.ones(2, 3, 8, 8, dtype=torch.uint8),), "images.dtype=torch.uint8"),
        ("vit", (torch.ones(2, 3, 8, 8).to_sparse(),), "images must be strided"),
    ],
)
def test_wrong_inputs_are_named(name, arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        SMALL[name].build()(*arguments)


def test_token_types_belong_to_the_tokens():
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"Bert: token_types must have the shape of tokens"):
        SMALL["bert"].build()(tokens, token_types=tokens[:, :3])


@pytest.mark.parametrize("name", ["mixtral", "deepseek", "t5", "bert", "mamba"])
def test_shapes_without_weights(name):
    """On the meta device, which has no autocast, every op says what it would give."""
    model = SMALL[name].build(device="meta")
    tokens = torch.zeros(2, 9, dtype=torch.int64, device="meta")
    loss = model(*[tokens] * (1 + (name == "t5"))).square().mean()
    loss.backward()
    assert loss.is_meta and all(p.grad.shape == p.shape for p in model.parameters())
