"""transformers models with experts_implementation="omniattn" against their own eager experts."""

import copy

import pytest
import torch
import transformers as hf
from transformers.integrations.moe import use_experts_implementation

from omniattn import functional
from omniattn.hf.patching.experts import experts_forward

_SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,
}
_QWEN = {"num_experts": 5, "moe_intermediate_size": 33, "decoder_sparse_step": 1}

MODELS = {
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**_SIZES, num_local_experts=4)),
    "qwen2_moe": lambda: hf.Qwen2MoeForCausalLM(
        hf.Qwen2MoeConfig(**_SIZES, **_QWEN, shared_expert_intermediate_size=24)
    ),
    "qwen3_moe": lambda: hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(**_SIZES, **_QWEN, norm_topk_prob=True)
    ),
    "gpt_oss": lambda: hf.GptOssForCausalLM(
        hf.GptOssConfig(
            **_SIZES,
            num_local_experts=4,
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention"],
        )
    ),
    "deepseek_v3": lambda: hf.DeepseekV3ForCausalLM(
        hf.DeepseekV3Config(
            **{**_SIZES, "num_key_value_heads": 4, "head_dim": 4},
            q_lora_rank=24,
            kv_lora_rank=16,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=10,
            moe_intermediate_size=24,
            n_routed_experts=8,
            n_group=4,
            topk_group=2,
            first_k_dense_replace=1,
        )
    ),
}


def results(model, tokens):
    out = model(tokens, labels=tokens)
    grads = torch.autograd.grad(out.loss, [p for p in model.parameters() if p.requires_grad])
    return out.logits, grads


@pytest.mark.parametrize("name", sorted(MODELS))
def test_logits_and_gradients_equal_eager(name, monkeypatch):
    eager = MODELS[name]().double()
    for parameter in eager.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    ours = copy.deepcopy(eager)
    eager.set_experts_implementation("eager")
    ours.set_experts_implementation("omniattn")
    calls = []
    monkeypatch.setattr(
        functional,
        "moe_experts",
        lambda *args, real=functional.moe_experts, **kw: calls.append(1) or real(*args, **kw),
    )
    tokens = torch.randint(97, (2, 13))
    (logits, grads), (expected, wanted) = results(ours, tokens), results(eager, tokens)
    assert len(calls) == (1 if name == "deepseek_v3" else 2)
    # Routers and norms compute in fp32, whatever the model's dtype.
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(grads, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * b.abs().max().item())


def _experts(**options):
    class Plain(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            self.num_experts = 3
            self.up_proj = torch.nn.Parameter(torch.randn(3, 6, 4))
            self.gate_up_proj = torch.nn.Parameter(torch.randn(3, 12, 4))
            self.down_proj = torch.nn.Parameter(torch.randn(3, 4, 6))
            self.act_fn = config.act

    return use_experts_implementation(Plain, **options)


class _Config:
    def __init__(self, act):
        self.act = act


def test_experts_without_a_gate_and_the_sentinel_of_other_ranks():
    module = _experts(has_gate=False)(_Config(torch.nn.ReLU()))
    x, weights = torch.randn(5, 4), torch.rand(5, 2)
    index = torch.tensor([[0, 3], [1, 2], [3, 3], [2, 0], [1, 1]])
    y = experts_forward(module, x, index, weights)
    expected = functional.moe_experts(
        x, index.masked_fill(index == 3, -1), weights, module.up_proj, module.down_proj,
        activation="relu",
    )  # fmt: skip
    assert torch.equal(y, expected) and not y[2].any()


def test_what_is_not_ours_raises():
    x, index, weights = torch.randn(1, 4), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
    for module, message in (
        (_experts()(_Config(torch.nn.Mish())), r"activation of Plain \(Mish\)"),
        (_experts(has_post_expert_norm=True)(_Config(torch.nn.SiLU())), "norm after each expert"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            experts_forward(module, x, index, weights)
    odd = _experts()
    odd._apply_gate = lambda self, pre: pre[..., :6]
    with pytest.raises(NotImplementedError, match="its own _apply_gate"):
        experts_forward(odd(_Config(torch.nn.SiLU())), x, index, weights)
