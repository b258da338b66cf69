"""transformers models with attn_implementation="omniattn" against their own eager attention."""

import copy

import pytest
import torch
import transformers as hf
from torch import nn

from omniattn.hf import patch

_DECODER = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WINDOW = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
_ENCODER = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
}

DECODERS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_DECODER)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**_DECODER, sliding_window=5)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(**_DECODER, **_WINDOW, head_dim=12, attn_logit_softcapping=2.0)
    ),
    "qwen2": lambda: hf.Qwen2ForCausalLM(
        hf.Qwen2Config(**_DECODER, **_WINDOW, use_sliding_window=True)
    ),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**_DECODER, head_dim=20)),
    "gpt_oss": lambda: hf.GptOssForCausalLM(
        hf.GptOssConfig(
            **_DECODER, **_WINDOW, head_dim=12, num_local_experts=4, num_experts_per_tok=2
        )
    ),
    "deepseek_v3": lambda: hf.DeepseekV3ForCausalLM(
        hf.DeepseekV3Config(
            **{**_DECODER, "num_key_value_heads": 4},
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
    """The same random weights twice: with eager attention and with ours."""
    torch.manual_seed(seed)
    eager = make().eval()
    for name, p in eager.named_parameters():
        if "sinks" in name or "bias" in name:
            nn.init.normal_(p)
    ours = copy.deepcopy(eager)
    eager.set_attn_implementation("eager")
    ours.set_attn_implementation("omniattn")
    return eager, ours


def assert_equal_training(eager, ours, run) -> None:
    """`run(model)` gives a loss and the outputs that count; both and all gradients agree."""
    losses = []
    for model in (eager, ours):
        loss, out = run(model)
        loss.backward()
        losses.append((loss.detach(), out.detach()))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-4)
    for (name, a), e in zip(ours.named_parameters(), eager.parameters(), strict=True):
        assert (a.grad is None) == (e.grad is None), name
        if a.grad is not None:
            scale = e.grad.abs().max().item()
            torch.testing.assert_close(
                a.grad,
                e.grad,
                rtol=1e-3,
                atol=1e-4 * scale + 1e-6,
                msg=lambda m, n=name: f"{n}: {m}",
            )


def tokens(batch: int = 2, length: int = 19) -> torch.Tensor:
    return torch.randint(3, 97, (batch, length))


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("padding", ["none", "left", "right", "packed"])
def test_decoders_train_as_with_eager_attention(name, padding):
    eager, ours = pair(DECODERS[name])
    x = tokens()
    real = torch.ones_like(x, dtype=torch.bool)
    extra = {}
    if padding == "left":
        real[0, :6] = False
    elif padding == "right":
        real[1, 11:] = False
    elif padding == "packed":
        positions = torch.cat([torch.arange(8), torch.arange(11)])[None].expand(2, -1)
        extra["position_ids"] = positions
    if padding in ("left", "right"):
        extra["attention_mask"] = real.long()
        extra["position_ids"] = (real.cumsum(-1) - 1).clamp(min=0)

    # The first real token would be predicted from a padded one, whose state is arbitrary.
    labels = x.masked_fill(~real | ~real.roll(1, 1), -100)

    def run(model):
        out = model(x, labels=labels, use_cache=False, **extra)
        return out.loss, out.logits[real]

    assert_equal_training(eager, ours, run)


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize(
    "options",
    [{}, {"cache_implementation": "static"}, {"num_beams": 3}],
    ids=["dynamic", "static", "beams"],
)
@torch.no_grad()
def test_decoders_generate_as_with_eager_attention(name, options):
    eager, ours = pair(DECODERS[name])
    x = tokens(2, 7)
    real = torch.ones_like(x)
    real[0, :3] = 0
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, **options}
    expected = eager.generate(x, attention_mask=real, **options)
    actual = ours.generate(x, attention_mask=real, **options)
    assert actual.shape == (2, 15)
    assert torch.equal(actual, expected)


def bert(x, real):
    def make():
        return hf.BertForMaskedLM(hf.BertConfig(**_ENCODER, vocab_size=97))

    def run(model):
        out = model(x, attention_mask=real.long(), labels=x.masked_fill(~real, -100))
        return out.loss, out.logits[real]

    return make, run


def modernbert(x, real):
    def make():
        config = hf.ModernBertConfig(
            **_ENCODER,
            vocab_size=97,
            local_attention=6,
            global_attn_every_n_layers=2,
            pad_token_id=0,
        )
        return hf.ModernBertForMaskedLM(config)

    def run(model):
        out = model(x, attention_mask=real.long(), labels=x.masked_fill(~real, -100))
        return out.loss, out.logits[real]

    return make, run


def gpt2(x, real):
    def make():
        return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=97, n_embd=48, n_layer=2, n_head=4))

    def run(model):
        out = model(x, attention_mask=real.long(), labels=x.masked_fill(~real, -100))
        return out.loss, out.logits[real]

    return make, run


def t5(x, real):
    def make():
        config = hf.T5Config(
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
        return hf.T5ForConditionalGeneration(config)

    def run(model):
        out = model(input_ids=x, attention_mask=real.long(), labels=x[:, :9].contiguous())
        return out.loss, out.logits

    return make, run


def bart(x, real):
    def make():
        config = hf.BartConfig(
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
        return hf.BartForConditionalGeneration(config)

    def run(model):
        out = model(input_ids=x, attention_mask=real.long(), labels=x[:, :9].contiguous())
        return out.loss, out.logits

    return make, run


def vit(x, real):
    del x, real
    pixels = torch.randn(2, 3, 20, 20)

    def make():
        config = hf.ViTConfig(**_ENCODER, image_size=20, patch_size=4, num_labels=5)
        return hf.ViTForImageClassification(config)

    def run(model):
        out = model(pixel_values=pixels, labels=torch.tensor([1, 4]))
        return out.loss, out.logits

    return make, run


def swin(x, real):
    del x, real
    pixels = torch.randn(2, 3, 32, 32)

    def make():
        config = hf.SwinConfig(
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
        return hf.SwinForImageClassification(config)

    def run(model):
        out = model(pixel_values=pixels, labels=torch.tensor([1, 4]))
        return out.loss, out.logits

    return make, run


def clip(x, real):
    pixels = torch.randn(2, 3, 20, 20)

    def make():
        sizes = {"hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4}
        config = hf.CLIPConfig(
            text_config={**sizes, "vocab_size": 97, "num_hidden_layers": 2, "eos_token_id": 96},
            vision_config={**sizes, "num_hidden_layers": 2, "image_size": 20, "patch_size": 4},
            projection_dim=24,
        )
        return hf.CLIPModel(config)

    def run(model):
        ids = x.clone()
        ids[:, -9] = 96
        out = model(
            input_ids=ids, pixel_values=pixels, attention_mask=real.long(), return_loss=True
        )
        return out.loss, out.logits_per_image

    return make, run


@pytest.mark.parametrize("case", [bert, modernbert, gpt2, t5, bart, vit, swin, clip])
def test_other_models_train_as_with_eager_attention(case):
    x = tokens()
    real = torch.ones_like(x, dtype=torch.bool)
    real[0, 13:] = False
    make, run = case(x, real)
    eager, ours = pair(make)
    assert_equal_training(eager, ours, run)


@torch.no_grad()
def test_encoder_decoder_generates_as_with_eager_attention():
    x = tokens(2, 9)
    real = torch.ones_like(x)
    real[1, 6:] = 0
    make, _ = t5(x, real)
    eager, ours = pair(make)
    for options in ({}, {"num_beams": 3}, {"cache_implementation": "static"}):
        options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, **options}
        expected = eager.generate(x, attention_mask=real, **options)
        assert torch.equal(ours.generate(x, attention_mask=real, **options), expected)


def test_a_compiled_patched_model_trains_as_an_eager_one():
    config = hf.MistralConfig(**{**_DECODER, "num_hidden_layers": 1}, sliding_window=5)
    eager, ours = pair(lambda: hf.MistralForCausalLM(config))
    x = tokens()
    real = torch.ones_like(x)
    real[1, 13:] = 0
    batch = {"labels": x.masked_fill(real == 0, -100), "attention_mask": real, "use_cache": False}

    def run(model):
        out = model(x, **batch)
        return out.loss, out.logits[real == 1]

    patch(ours)
    ours.forward = torch.compile(ours.forward, backend="aot_eager", fullgraph=True)
    assert_equal_training(eager, ours, run)
