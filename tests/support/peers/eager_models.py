"""Small models of transformers that are run with eager attention and with ours."""

import copy

import torch
import transformers as hf
from torch import nn

SIZES = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
ENCODER = {**SIZES, "initializer_range": 0.2}
DECODER = {
    **ENCODER,
    "vocab_size": 97,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}

DECODERS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**DECODER, sliding_window=5)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(**DECODER, **WINDOW, head_dim=12, attn_logit_softcapping=2.0)
    ),
    "qwen2": lambda: hf.Qwen2ForCausalLM(
        hf.Qwen2Config(**DECODER, **WINDOW, use_sliding_window=True)
    ),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**DECODER, head_dim=20)),
    "gpt_oss": lambda: hf.GptOssForCausalLM(
        hf.GptOssConfig(
            **DECODER, **WINDOW, head_dim=12, num_local_experts=4, num_experts_per_tok=2
        )
    ),
    "deepseek_v3": lambda: hf.DeepseekV3ForCausalLM(
        hf.DeepseekV3Config(
            **{**DECODER, "num_key_value_heads": 4},
            q_lora_rank=24,
            kv_lora_rank=16,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=10,
            moe_intermediate_size=24,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
        )
    ),
}


def pair(make, seed: int = 0) -> tuple[nn.Module, nn.Module]:
    """Returns two models with the same random weights: with eager attention and with ours."""
    torch.manual_seed(seed)
    eager = make().eval()
    for name, p in eager.named_parameters():
        if "sinks" in name or "bias" in name:
            nn.init.normal_(p)
    ours = copy.deepcopy(eager)
    eager.set_attn_implementation("eager")
    ours.set_attn_implementation("omniattn")
    return eager, ours


def tokens(batch: int = 2, length: int = 19) -> torch.Tensor:
    return torch.randint(3, 97, (batch, length))


#: Other models, each with what it reads: see `batch`.
OTHERS = {
    "bert": ("text", lambda: hf.BertForMaskedLM(hf.BertConfig(**ENCODER, vocab_size=97))),
    "modernbert": (
        "text",
        lambda: hf.ModernBertForMaskedLM(
            hf.ModernBertConfig(
                **ENCODER,
                vocab_size=97,
                local_attention=6,
                global_attn_every_n_layers=2,
                pad_token_id=0,
            )
        ),
    ),
    "gpt2": (
        "text",
        lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=97, n_embd=48, n_layer=2, n_head=4)),
    ),
    "t5": (
        "pairs",
        lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(
                vocab_size=97,
                d_model=48,
                d_kv=12,
                d_ff=64,
                num_layers=2,
                num_heads=4,
                relative_attention_num_buckets=8,
                relative_attention_max_distance=12,
                decoder_start_token_id=0,
                dropout_rate=0.0,
            )
        ),
    ),
    "bart": (
        "pairs",
        lambda: hf.BartForConditionalGeneration(
            hf.BartConfig(
                vocab_size=97,
                d_model=48,
                encoder_layers=1,
                decoder_layers=1,
                encoder_attention_heads=4,
                decoder_attention_heads=4,
                encoder_ffn_dim=64,
                decoder_ffn_dim=64,
                init_std=0.2,
                dropout=0.0,
            )
        ),
    ),
    "vit": (
        "images",
        lambda: hf.ViTForImageClassification(
            hf.ViTConfig(**ENCODER, image_size=20, patch_size=4, num_labels=5)
        ),
    ),
    "swin": (
        "images",
        lambda: hf.SwinForImageClassification(
            hf.SwinConfig(
                image_size=32,
                patch_size=2,
                embed_dim=12,
                depths=[2, 2],
                num_heads=[2, 3],
                window_size=4,
                num_labels=5,
                drop_path_rate=0.0,
                initializer_range=0.2,
            )
        ),
    ),
    "clip": (
        "captions",
        lambda: hf.CLIPModel(
            hf.CLIPConfig(
                text_config={**SIZES, "vocab_size": 97, "eos_token_id": 96},
                vision_config={**SIZES, "image_size": 20, "patch_size": 4},
                projection_dim=24,
            )
        ),
    ),
}


def batch(kind: str, config, real: torch.Tensor) -> dict[str, torch.Tensor]:
    """Arguments of a model that give a loss; of text, (B, T), only the `real` tokens count."""
    if kind == "images":
        pixels = torch.randn(2, 3, config.image_size, config.image_size)
        return {"pixel_values": pixels, "labels": torch.tensor([1, 4])}
    x = tokens()
    text = {"input_ids": x, "attention_mask": real.long()}
    if kind == "text":
        return text | {"labels": x.masked_fill(~real, -100)}
    if kind == "pairs":
        return text | {"labels": x[:, :9].contiguous()}
    x[:, -9] = 96
    return text | {"pixel_values": torch.randn(2, 3, 20, 20), "return_loss": True}
