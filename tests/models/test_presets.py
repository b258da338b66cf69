"""The architectures: parameter counts of the releases, logits of transformers, decoding."""

import json
import re

import pytest
import torch
import transformers as hf

from omniattn.models import (
    PRESETS,
    BertConfig,
    DeepSeekConfig,
    GPT2Config,
    MixtralConfig,
    SwinConfig,
    T5Config,
    ViTConfig,
    generate,
)
from omniattn.models.presets import TRAINED

_SIZES = {"vocab_size": 97, "dim": 48, "num_layers": 2, "hidden_dim": 40}
_PREFIX = (r"^(?!lm_head)", "model.")
_HF = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "experts_implementation": "eager",
}


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("gpt2-small", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("bert-base", 109_514_298),
        ("t5-small", 60_506_624),
        ("t5-base", 222_903_552),
        ("t5-large", 737_668_096),
        ("t5-v1.1-base", 247_577_856),
        ("vit-b-16", 86_567_656),
        ("vit-l-16", 304_326_632),
        ("vit-h-14", 632_045_800),
        ("swin-t", 28_288_354),
        ("swin-s", 49_606_258),
        ("swin-b", 87_768_224),
        ("mixtral-8x7b", 46_702_792_704),
        ("mixtral-8x22b", 140_620_634_112),
        ("deepseek-v3", 671_026_419_200 - 58 * 256),  # the release counts the routers' biases
    ],
)
def test_parameter_counts_of_the_releases(name, count):
    assert PRESETS[name].num_parameters == count


@pytest.mark.parametrize("name", PRESETS)
def test_a_config_survives_json(name):
    config = PRESETS[name]
    assert type(config).from_dict(json.loads(json.dumps(config.to_dict()))) == config


def mixtral():
    config = hf.MixtralConfig(
        **_HF,
        intermediate_size=40,
        num_key_value_heads=2,
        num_local_experts=6,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    ours = MixtralConfig(**_SIZES, norm_eps=1e-6, num_heads=4, experts=6)
    return hf.MixtralForCausalLM(config), ours, [_PREFIX]


def deepseek():
    config = hf.DeepseekV3Config(
        **_HF,
        intermediate_size=40,
        moe_intermediate_size=20,
        num_key_value_heads=4,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        first_k_dense_replace=1,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    ours = DeepSeekConfig(
        **_SIZES,
        norm_eps=1e-6,
        num_heads=4,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_dim=8,
        qk_rope_dim=4,
        v_dim=8,
        expert_dim=20,
        experts=8,
        top_k=3,
        groups=4,
        top_groups=2,
        route_scale=2.5,
    )
    return hf.DeepseekV3ForCausalLM(config), ours, [_PREFIX]


def gpt2():
    config = hf.GPT2Config(
        vocab_size=97,
        n_positions=40,
        n_embd=48,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    ours = GPT2Config(vocab_size=97, dim=48, num_layers=2, num_heads=4, max_positions=40)
    names = [
        (r"^embed_tokens", "transformer.wte"),
        (r"^embed_positions", "transformer.wpe"),
        (r"^norm", "transformer.ln_f"),
        (r"^layers", "transformer.h"),
        (r"input_layernorm", "ln_1"),
        (r"post_attention_layernorm", "ln_2"),
        (r"self_attn\.o_proj", "attn.c_proj"),
        (r"self_attn\.(.)_proj", r"attn.c_attn.\1"),
        (r"up_proj", "c_fc"),
        (r"down_proj", "c_proj"),
    ]
    return hf.GPT2LMHeadModel(config), ours, names


def t5(version="relu"):
    config = hf.T5Config(
        vocab_size=97,
        d_model=48,
        d_kv=12,
        d_ff=40,
        num_layers=2,
        num_heads=5,
        feed_forward_proj=version,
        tie_word_embeddings=version == "relu",
    )
    ours = T5Config(**_SIZES, num_heads=5, head_dim=12, gated=version == "gated-gelu")
    names = [
        (r"^embed_tokens", "shared"),
        (r"coder\.relative", "coder.block.0.layer.0.SelfAttention.relative"),
        (r"coder\.norm", "coder.final_layer_norm"),
        (r"layers", "block"),
        (r"input_layernorm", "layer.0.layer_norm"),
        (r"self_attn\.(.)_proj", r"layer.0.SelfAttention.\1"),
        (r"cross_attention_layernorm", "layer.1.layer_norm"),
        (r"cross_attn\.(.)_proj", r"layer.1.EncDecAttention.\1"),
        (r"(encoder.*)post_attention_layernorm", r"\1layer.1.layer_norm"),
        (r"(encoder.*)mlp", r"\1layer.1.DenseReluDense"),
        (r"(decoder.*)post_attention_layernorm", r"\1layer.2.layer_norm"),
        (r"(decoder.*)mlp", r"\1layer.2.DenseReluDense"),
        (r"gate_proj", "wi_0"),
        (r"up_proj", "wi" if version == "relu" else "wi_1"),
        (r"down_proj", "wo"),
    ]
    theirs = hf.T5ForConditionalGeneration(config)
    if ours.gated:  # the head of version 1.1 is loaded from its own weight
        theirs.lm_head.weight = torch.nn.Parameter(theirs.lm_head.weight.clone())
    return theirs, ours, names


def t5_gated():
    return t5("gated-gelu")


def bert():
    config = hf.BertConfig(
        vocab_size=97,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=40,
        max_position_embeddings=40,
    )
    ours = BertConfig(
        vocab_size=97, dim=48, num_layers=2, num_heads=4, hidden_dim=40, max_positions=40
    )
    names = [
        (r"^embed_tokens", "bert.embeddings.word_embeddings"),
        (r"^embed_positions", "bert.embeddings.position_embeddings"),
        (r"^embed_types", "bert.embeddings.token_type_embeddings"),
        (r"^embed_norm", "bert.embeddings.LayerNorm"),
        (r"^attentions\.(\d+)\.norm", r"bert.encoder.layer.\1.attention.output.LayerNorm"),
        (r"^attentions\.(\d+)\.layer\.o_proj", r"bert.encoder.layer.\1.attention.output.dense"),
        (r"^attentions\.(\d+)\.layer", r"bert.encoder.layer.\1.attention.self"),
        (r"q_proj", "query"),
        (r"k_proj", "key"),
        (r"v_proj", "value"),
        (r"^mlps\.(\d+)\.norm", r"bert.encoder.layer.\1.output.LayerNorm"),
        (r"^mlps\.(\d+)\.layer\.up_proj", r"bert.encoder.layer.\1.intermediate.dense"),
        (r"^mlps\.(\d+)\.layer\.down_proj", r"bert.encoder.layer.\1.output.dense"),
        (r"^head_transform", "cls.predictions.transform.dense"),
        (r"^head_norm", "cls.predictions.transform.LayerNorm"),
        (r"^head_bias", "cls.predictions.bias"),
    ]
    return hf.BertForMaskedLM(config), ours, names


_VISION_NAMES = [
    (r"input_layernorm|norm1", "layernorm_before"),
    (r"post_attention_layernorm|norm2", "layernorm_after"),
    (r"self_attn|attn\b", "attention"),
    (r"up_proj", "fc1"),
    (r"down_proj", "fc2"),
    (r"^head", "classifier"),
]


def vit():
    config = hf.ViTConfig(
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=192,
        image_size=32,
        patch_size=8,
        layer_norm_eps=1e-6,
        num_labels=10,
    )
    ours = ViTConfig(channels=3, image=32, patch=8, dim=48, num_layers=2, num_heads=4)
    names = [
        (r"^class_token", "vit.embeddings.cls_token"),
        (r"^embed_positions.weight", "vit.embeddings.position_embeddings"),
        (r"^embed_patches", "vit.embeddings.patch_embeddings.projection"),
        (r"^norm", "vit.layernorm"),
        (r"^layers", "vit.layers"),
        *_VISION_NAMES,
    ]
    return hf.ViTForImageClassification(config), ours, names


def swin():
    config = hf.SwinConfig(
        embed_dim=24,
        depths=[2, 2],
        num_heads=[2, 4],
        image_size=32,
        patch_size=4,
        window_size=4,
        drop_path_rate=0.0,
        num_labels=10,
    )
    ours = SwinConfig(channels=3, image=32, patch=4, dim=24)
    names = [
        (r"^embed_patches", "swin.embeddings.patch_embeddings.projection"),
        (r"^embed_norm", "swin.embeddings.norm"),
        (r"^norm", "swin.layernorm"),
        # A stage starts with the merging that transformers puts at the end of the one before.
        (r"^stages\.1\.0\.(norm|reduction)", r"swin.encoder.layers.0.downsample.\1"),
        (r"^stages\.1\.1", "swin.encoder.layers.1.blocks.0"),
        (r"^stages\.1\.2", "swin.encoder.layers.1.blocks.1"),
        (r"^stages\.0\.", "swin.encoder.layers.0.blocks."),
        *_VISION_NAMES,
        (r"attention\.proj", "attention.o_proj"),
        (r"relative_position", "relative_position_bias.relative_position"),
    ]
    return hf.SwinForImageClassification(config), ours, names


def inputs(config):
    if isinstance(config, ViTConfig | SwinConfig):
        return {"pixel_values": torch.rand(2, 3, 32, 32, dtype=torch.float64)}
    tokens = {"input_ids": torch.randint(97, (2, 33))}
    if isinstance(config, T5Config):
        tokens["decoder_input_ids"] = torch.randint(97, (2, 17))
    return tokens


def translate(ours, names, theirs):
    """Our weights under the names and in the shapes of transformers."""
    shapes = {name: t.shape for name, t in theirs.state_dict().items()}
    state = {}
    for name, tensor in ours.state_dict().items():
        for pattern, replacement in names:
            name = re.sub(pattern, replacement, name)
        state[name] = tensor
    for name in list(state):
        if ".c_attn.q" in name:  # one matrix for queries, keys and values
            parts = [state.pop(name.replace("c_attn.q", f"c_attn.{p}")) for p in "qkv"]
            state[name.replace(".q", "")] = torch.cat(parts)
        elif ".qkv." in name:
            for part, tensor in zip("qkv", state.pop(name).chunk(3), strict=True):
                state[name.replace(".qkv.", f".{part}_proj.")] = tensor
    for name, tensor in state.items():
        transposed = ".c_" in name and tensor.dim() == 2
        state[name] = (tensor.T if transposed else tensor).reshape(shapes[name])
    return state


@pytest.mark.parametrize(
    "make", [mixtral, deepseek, gpt2, t5, t5_gated, bert, vit, swin], ids=lambda f: f.__name__
)
@torch.no_grad()
def test_transformers_gives_the_same_logits(make):
    torch.manual_seed(0)
    theirs, config, names = make()
    ours = config.build(dtype=torch.float64).eval()
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    theirs = theirs.double().eval()
    missing, unexpected = theirs.load_state_dict(translate(ours, names, theirs), strict=False)
    assert not unexpected
    # Heads and embeddings that are tied come back under their other names.
    tied = ("lm_head.weight", "embed_tokens.weight", "decoder.weight", "decoder.bias")
    assert all(name.endswith(tied) for name in missing), missing
    given = inputs(config)
    # 1e-5: theirs computes rotary tables, some norms and routers in fp32.
    torch.testing.assert_close(ours(*given.values()), theirs(**given).logits, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_t5_generates_with_caches_what_the_full_forward_prefers():
    torch.manual_seed(0)
    model = T5Config(**_SIZES, num_heads=4, head_dim=12).build().eval()
    source = torch.randint(97, (3, 20))
    out = generate(model, torch.zeros(3, 1, dtype=torch.long), 8, source=source)
    full = model(source, out[:, :-1]).argmax(-1)
    assert torch.equal(out[:, 1:], full)


@pytest.mark.parametrize("name", ["mixtral", "deepseek-moe", "gpt2", "mla", "differential"])
@torch.no_grad()
def test_prefill_and_steps_equal_the_full_forward(name):
    torch.manual_seed(0)
    model = TRAINED[name].build().eval()
    tokens = torch.randint(256, (2, 20))
    cache = model.new_cache(2, 20)
    parts = [model(tokens[:, a:b], cache=cache) for a, b in ((0, 13), (13, 14), (14, 20))]
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens), rtol=1e-4, atol=1e-4)
