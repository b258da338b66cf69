"""transformers models with attn_implementation="omniattn" against their own eager attention."""

import copy

import pytest
import torch
import transformers as hf
from eager_models import DECODER, DECODERS, OTHERS, SIZES, batch, pair, tokens

from omniattn.hf import patch


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


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_train_as_with_eager_attention(name):
    kind, make = OTHERS[name]
    eager, ours = pair(make)
    real = torch.ones(2, 19, dtype=torch.bool)
    real[0, 13:] = False
    given = batch(kind, eager.config, real)

    def run(model):
        out = model(**given)
        if kind == "captions":
            return out.loss, out.logits_per_image
        return out.loss, out.logits[real] if kind == "text" else out.logits

    assert_equal_training(eager, ours, run)


@pytest.mark.parametrize("name", [*DECODERS, "t5"])
@pytest.mark.parametrize(
    "options",
    [{}, {"cache_implementation": "static"}, {"num_beams": 3}],
    ids=["dynamic", "static", "beams"],
)
@torch.no_grad()
def test_models_generate_as_with_eager_attention(name, options):
    eager, ours = pair(DECODERS[name] if name in DECODERS else OTHERS[name][1])
    x = tokens(2, 7)
    real = torch.ones_like(x)
    real[0, :3] = 0
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, **options}
    expected = eager.generate(x, attention_mask=real, **options)
    actual = ours.generate(x, attention_mask=real, **options)
    assert actual.shape == (2, 8 + (1 if name == "t5" else 7))
    assert torch.equal(actual, expected)


_NLLB = {
    **{"vocab_size": 97, "d_model": 48, "encoder_layers": 2, "decoder_layers": 2},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64},
    **{"decoder_ffn_dim": 64, "num_experts": 4, "expert_capacity": 8, "init_std": 0.2},
    **{"encoder_sparse_step": 1, "decoder_sparse_step": 1, "dropout": 0.0, "pad_token_id": 1},
}
_SHORT = {**DECODER, "num_key_value_heads": 1, "q_lora_rank": 24, "o_lora_rank": 12}
#: Models in which modules outside attention read the mask.
MASK_READERS = {
    "nllb_moe": lambda: hf.NllbMoeForConditionalGeneration(hf.NllbMoeConfig(**_NLLB)),
    "deepseek_v4": lambda: hf.DeepseekV4ForCausalLM(
        hf.DeepseekV4Config(
            **{k: v for k, v in _SHORT.items() if k != "intermediate_size"},
            head_dim=16,
            qk_rope_head_dim=8,
            moe_intermediate_size=24,
            n_routed_experts=4,
            num_experts_per_tok=2,
            num_hash_layers=0,
            o_groups=2,
            index_n_heads=2,
            index_head_dim=8,
            index_topk=2,
            sliding_window=8,
        )
    ),
}


@pytest.mark.parametrize("name", MASK_READERS)
def test_modules_outside_attention_read_the_mask_of_eager_attention(name):
    eager, ours = pair(MASK_READERS[name])
    x = tokens()
    real = torch.ones_like(x)
    real[1, 13:] = 0
    given = {"input_ids": x, "attention_mask": real}
    if name == "nllb_moe":
        given |= {"decoder_input_ids": x[:, :9], "decoder_attention_mask": real[:, 5:14]}
    with torch.no_grad():
        expected, actual = (model(**given).logits for model in (eager, ours))
    kept = given.get("decoder_attention_mask", real) == 1
    torch.testing.assert_close(actual[kept], expected[kept], rtol=1e-4, atol=1e-4)


_OLD = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
#: Models that never ask the AttentionInterface, and the layer that an error names.
OWN_ATTENTION = {
    "bloom": (hf.BloomForCausalLM, hf.BloomConfig(**_OLD), "BloomAttention"),
    "mpt": (hf.MptForCausalLM, hf.MptConfig(vocab_size=97, d_model=32, n_heads=2), "MptAttention"),
    "falcon": (hf.FalconForCausalLM, hf.FalconConfig(**_OLD), "FalconAttention"),
    "deberta": (hf.DebertaModel, hf.DebertaConfig(**_OLD), "DisentangledSelfAttention"),
    "git": (hf.GitForCausalLM, hf.GitConfig(**_OLD, vision_config=SIZES), "GIT_SELF_ATTENTION"),
}


@pytest.mark.parametrize("name", OWN_ATTENTION)
def test_models_that_do_not_ask_the_interface_are_named(name):
    kind, config, layer = OWN_ATTENTION[name]
    advice = '"sdpa" and omniattn.hf.patch' if name == "falcon" else '"eager"'
    message = rf"{kind.__name__[:3]}.*\({layer}.*{advice}"
    with torch.device("meta"):
        with pytest.raises(NotImplementedError, match=message):
            kind._from_config(copy.deepcopy(config), attn_implementation="omniattn")
        model = kind._from_config(config, attn_implementation="eager")
    with pytest.raises(NotImplementedError, match=message):
        model.set_attn_implementation("omniattn")
    assert model.config._attn_implementation == "eager"


def test_a_part_that_does_not_ask_the_interface_can_be_left_out():
    sizes = {"hidden_size": 16, "image_size": 32, "patch_size": 16}
    config = hf.SamConfig(
        vision_config={**_OLD, "image_size": 32, "output_channels": 16},
        prompt_encoder_config=sizes,
        mask_decoder_config={"hidden_size": 16},
    )
    chosen = {"": "omniattn", "vision_config": "eager"}
    with torch.device("meta"):
        model = hf.SamModel._from_config(config, attn_implementation=chosen)
    assert model.mask_decoder.config._attn_implementation == "omniattn"
    assert model.vision_encoder.config._attn_implementation == "eager"
    model.set_attn_implementation(chosen)
    with pytest.raises(NotImplementedError, match="SamVisionEncoder"):
        model.set_attn_implementation("omniattn")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"return_seq_idx": True},
        {"return_flash_attn_kwargs": True},
        {"return_flash_attn_kwargs": True, "return_seq_idx": True},
        {"return_flash_attn_kwargs": True, "return_position_ids": False},
    ],
    ids=lambda options: "-".join(options) or "default",
)
def test_flattened_batches_are_those_of_single_sequences(options):
    _, model = pair(DECODERS["llama"])
    model.double()  # whose rounding does not hide an error
    rows = [tokens(1, n)[0] for n in (7, 5, 9)]
    collate = hf.DataCollatorWithFlattening(**options)
    batch = collate([{"input_ids": row.tolist()} for row in rows], return_tensors="pt")
    with torch.no_grad():
        packed = model(**batch, use_cache=False)
        single = [model(row[None], labels=row[None]) for row in rows]
    expected = torch.cat([out.logits for out in single], 1)
    torch.testing.assert_close(packed.logits, expected, rtol=0, atol=2e-6)
    counts = [len(row) - 1 for row in rows]
    mean = sum(out.loss * n for out, n in zip(single, counts, strict=True)) / sum(counts)
    torch.testing.assert_close(packed.loss, mean, rtol=0, atol=2e-6)


@torch.no_grad()
def test_keywords_of_a_loss_do_not_concern_attention():
    eager, ours = pair(DECODERS["llama"])
    x = tokens()
    given = {"shift_labels": x.roll(-1, 1), "ignore_index": 5, "label_smoothing": 0.1}
    losses = [model(x, labels=x, **given).loss for model in (eager, ours)]
    torch.testing.assert_close(losses[1], losses[0])


@torch.no_grad()
@pytest.mark.parametrize("lowest", [-torch.inf, torch.finfo(torch.float32).min], ids=["inf", "min"])
def test_additive_masks_of_users(lowest):
    """Left-padded: what a padded query, which sees nothing, computes does not count."""
    eager, ours = pair(DECODERS["llama"])
    x = tokens()
    real = torch.ones_like(x, dtype=torch.bool)
    real[0, :6] = False
    seen = real[:, None, None] & torch.ones(19, 19, dtype=torch.bool).tril()
    given = {
        "attention_mask": torch.zeros(seen.shape).masked_fill(~seen, lowest),
        "position_ids": (real.cumsum(-1) - 1).clamp(min=0),
    }
    expected, actual = (model(x, **given).logits[real] for model in (eager, ours))
    if lowest == -torch.inf:  # eager makes NaN of a row of it, which spreads over the values
        given["attention_mask"] = seen
        expected = ours(x, **given).logits[real]
    assert actual.isfinite().all()
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_a_compiled_patched_model_trains_as_an_eager_one():
    config = hf.MistralConfig(**{**DECODER, "num_hidden_layers": 1}, sliding_window=5)
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
