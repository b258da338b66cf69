"""The architectures: parameter counts of the releases, logits of transformers, decoding."""

import json

import pytest
import torch
import transformers as hf

from omniattn.models import PRESETS, DeepSeekConfig, MixtralConfig
from omniattn.models.presets import TRAINED

_SIZES = {
    "vocab_size": 97,
    "dim": 48,
    "num_layers": 2,
    "hidden_dim": 40,
    "norm_eps": 1e-6,
    "init_std": 0.2,
}
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
    ours = MixtralConfig(**_SIZES, num_heads=4, experts=6)
    return hf.MixtralForCausalLM(config), ours


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
    return hf.DeepseekV3ForCausalLM(config), ours


@pytest.mark.parametrize("make", [mixtral, deepseek])
@torch.no_grad()
def test_transformers_gives_the_same_logits(make):
    torch.manual_seed(0)
    theirs, config = make()
    ours = config.build(dtype=torch.float64)
    # Our names are theirs without the prefix.
    prefixed = {
        n if n.startswith("lm_head") else f"model.{n}": t for n, t in ours.state_dict().items()
    }
    theirs.double().load_state_dict(prefixed)
    tokens = torch.randint(97, (2, 33))
    # 1e-5: theirs computes rotary tables, norms and routers in fp32.
    torch.testing.assert_close(ours(tokens), theirs.eval()(tokens).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["mixtral", "deepseek-moe"])
@torch.no_grad()
def test_prefill_and_steps_equal_the_full_forward(name):
    torch.manual_seed(0)
    model = TRAINED[name].build().eval()
    tokens = torch.randint(256, (2, 20))
    cache = model.new_cache(2, 20)
    parts = [model(tokens[:, a:b], cache=cache) for a, b in ((0, 13), (13, 14), (14, 20))]
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens), rtol=1e-4, atol=1e-4)
