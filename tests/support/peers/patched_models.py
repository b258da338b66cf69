"""Small models of transformers, what patching swaps in them, and what it must not change."""

import pytest
import torch
import transformers as hf
from torch import nn

import omniattn.hf

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
}

HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
}

#: Models, with the number of modules of each kind that patching swaps: 2 layers of 7 linears and
#: the head, ...
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
    "qwen3_next": (  # one layer of delta rules, one of attention, as the next two
        lambda: hf.Qwen3NextForCausalLM(
            hf.Qwen3NextConfig(
                **SIZES,
                **HYBRID,
                head_dim=12,
                linear_num_key_heads=2,
                linear_num_value_heads=4,
                linear_key_head_dim=8,
                linear_value_head_dim=8,
                mlp_only_layers=[0, 1],
            )
        ),
        {"mixer": 1, "linear": 14, "mlp": 2, "norm": 7, "rope": 1, "loss": 1, "attention": 1},
    ),
    "kimi_linear": (
        lambda: hf.KimiLinearForCausalLM(
            hf.KimiLinearConfig(
                **{**SIZES, **HYBRID, "num_key_value_heads": 4},
                q_lora_rank=None,
                kv_lora_rank=16,
                qk_nope_head_dim=8,
                qk_rope_head_dim=4,
                v_head_dim=10,
                linear_num_heads=4,
                linear_head_dim=8,
                first_k_dense_replace=2,
            )
        ),
        {"mixer": 1, "linear": 20, "mlp": 2, "norm": 6, "loss": 1, "attention": 1},
    ),
    "olmo_hybrid": (
        lambda: hf.OlmoHybridForCausalLM(
            hf.OlmoHybridConfig(
                **SIZES,
                **HYBRID,
                linear_num_key_heads=4,
                linear_num_value_heads=4,
                linear_key_head_dim=8,
                linear_value_head_dim=16,
            )
        ),
        {"mixer": 1, "linear": 18, "mlp": 2, "norm": 7, "rope": 1, "loss": 1, "attention": 1},
    ),
    "rwkv": (
        lambda: hf.RwkvForCausalLM(
            hf.RwkvConfig(
                vocab_size=97,
                hidden_size=48,
                num_hidden_layers=2,
                attention_hidden_size=48,
                intermediate_size=64,
            )
        ),
        {"mixer": 2, "linear": 15, "norm": 6, "loss": 1},
    ),
    "xlstm": (  # its states have the sizes of its layers where those are multiples of 64
        lambda: hf.xLSTMForCausalLM(
            hf.xLSTMConfig(
                vocab_size=97, hidden_size=128, embedding_dim=128, num_hidden_layers=2, num_heads=4
            )
        ),
        {"mixer": 2, "linear": 21, "norm": 5, "loss": 1},
    ),
    "bloom": (
        lambda: hf.BloomForCausalLM(
            hf.BloomConfig(vocab_size=97, hidden_size=48, n_layer=2, n_head=4)
        ),
        {"attention": 2, "linear": 9, "norm": 6, "loss": 1},
    ),
}

#: How many recurrent layers are swapped in the model of `small_models` of a type.
RECURRENT = {
    "qwen3_next": 1,
    "qwen3_5_text": 1,
    "qwen3_5_moe_text": 1,
    "kimi_linear": 1,
    "olmo_hybrid": 1,
    "lfm2_moe": 1,
    "mamba": 2,
    "jamba": 1,
    "rwkv": 2,
    "xlstm": 2,
    "falcon_mamba": 2,
    "zamba": 3,
    "zamba2": 3,
    "mamba2": 2,
    "bamba": 1,
    "falcon_h1": 2,
    "nemotron_h": 1,
    "granitemoehybrid": 1,
    "minimax": 1,
}


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
