"""Decoders of this package as causal language models of transformers: Trainer, PEFT, lm-eval."""

import copy
import json
import os
import subprocess
import sys
from dataclasses import replace

import peft
import pytest
import torch
from small_presets import FAMILIES, SMALL
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    Trainer,
    TrainingArguments,
)

from omniattn.hf import OmniattnConfig, OmniattnForCausalLM, patch
from omniattn.hf.no_logits import NO_LOGITS
from omniattn.models import (
    BertConfig,
    BlocksConfig,
    CheckpointError,
    Decoder,
    Routers,
    generate,
)
from omniattn.modules import (
    Attention,
    DecoderBlock,
    GatedDeltaNet,
    GatedMLP,
    Mamba,
    MoE,
    MultiHeadLatentAttention,
    RMSNorm,
    RotaryEmbedding,
)

DIM, STD = 24, {"init_std": 0.4}
NORM, MLP = RMSNorm.Config(DIM), GatedMLP.Config(DIM, 16, init_std=0.4)
CONFIG = BlocksConfig(
    vocab_size=61,
    dim=DIM,
    num_layers=3,
    blocks=(
        DecoderBlock.Config(Attention.Config(DIM, 4, 2, **STD), MLP, NORM),
        DecoderBlock.Config(Mamba.Config(DIM, **STD), None, NORM),
        DecoderBlock.Config(GatedDeltaNet.Config(DIM, 2, **STD), MLP, NORM),
    ),
    rope=RotaryEmbedding.Config(6),
    init_std=0.4,
)
LATENT = DecoderBlock.Config(MultiHeadLatentAttention.Config(DIM, 2, None, 8, 8, 6, 8), MLP, NORM)
CONFIGS = {
    "hybrid": CONFIG,
    "latent": replace(CONFIG, blocks=(LATENT,)),
    **{name: c for name, c in SMALL.items() if isinstance(c, Decoder.Config)},
    **{name: FAMILIES[name] for name in ("gemma2", "bloom")},  # capped logits, normed embeddings
}
GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def made(config=CONFIG, dtype=torch.float64) -> OmniattnForCausalLM:
    return OmniattnForCausalLM.wrap(config.build(dtype=dtype).eval())


def tokens_of(model, *shape: int) -> torch.Tensor:
    return torch.randint(1, model.config.vocab_size, shape)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_loss_and_tokens_are_those_of_the_decoder(name):
    config = CONFIGS[name]
    if hasattr(config, "dropout_p"):
        config = replace(config, dropout_p=0.0)
    model = made(config)
    decoder, tokens = model.model, tokens_of(model, 2, 7)
    with torch.no_grad():
        logits = decoder(tokens)
        torch.testing.assert_close(model(tokens).logits, logits)
        torch.testing.assert_close(model(tokens, logits_to_keep=2).logits, logits[:, -2:])
        out = model(tokens, labels=tokens)
        torch.testing.assert_close(out.loss, decoder(tokens[:, :-1], tokens[:, 1:]))
        everything = {**GREEDY, "attention_mask": torch.ones_like(tokens), "max_new_tokens": 6}
        found = model.generate(tokens, **everything)
        assert torch.equal(found, generate(decoder, tokens, 6))
        assert torch.equal(model.generate(tokens, use_cache=False, **everything), found)
    loss = model.train()(tokens, labels=tokens).loss
    loss.backward()
    own = decoder.auxiliary_loss() + Routers(decoder).loss()
    assert loss.item() >= float(own)
    assert all(p.grad is not None for p in decoder.parameters() if p.requires_grad)


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding_changes_nothing(side):
    model = made()
    rows = [tokens_of(model, n) for n in (7, 3, 5)]
    tokens, mask = torch.zeros(3, 7, dtype=torch.long), torch.zeros(3, 7, dtype=torch.long)
    for b, row in enumerate(rows):
        place = slice(7 - len(row), 7) if side == "left" else slice(0, len(row))
        tokens[b, place], mask[b, place] = row, 1
    logits = model(tokens, attention_mask=mask).logits
    for b, row in enumerate(rows):
        torch.testing.assert_close(logits[b, mask[b] == 1], model(row[None]).logits[0])
    labels = tokens.masked_fill(mask == 0, -100)
    losses = [model(row[None], labels=row[None]).loss * (len(row) - 1) for row in rows]
    loss = model(tokens, attention_mask=mask, labels=labels).loss
    torch.testing.assert_close(loss, sum(losses) / sum(len(row) - 1 for row in rows))
    if side == "left":
        out = model.generate(tokens, attention_mask=mask, max_new_tokens=5, **GREEDY)
        for b, row in enumerate(rows):
            assert torch.equal(out[b, 7:], generate(model.model, row[None], 5)[0, len(row) :])


@torch.no_grad()
def test_packed_sequences_are_separate():
    model = made()
    rows = [tokens_of(model, n).tolist() for n in (7, 3, 5)]
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    batch = collate([{"input_ids": row} for row in rows])
    out = model(**batch)
    expected = [model(torch.tensor([row])).logits for row in rows]
    torch.testing.assert_close(out.logits, torch.cat(expected, 1))
    losses = [model(torch.tensor([r]), labels=torch.tensor([r])).loss * (len(r) - 1) for r in rows]
    torch.testing.assert_close(out.loss, sum(losses) / sum(len(r) - 1 for r in rows))
    tokens, boundaries = batch["input_ids"], ("cu_seq_lens_q", "seq_idx")
    for given in ({name: batch[name]} for name in boundaries):  # without position_ids
        torch.testing.assert_close(model(tokens, **given).logits, out.logits)
        message = f"attention_mask and cache must be None .* got {next(iter(given))}"
        with pytest.raises(NotImplementedError, match=message):
            model(tokens, attention_mask=torch.ones_like(tokens), **given)
    with pytest.raises(ValueError, match="cu_seq_lens_q must grow from 0 to the number of tokens"):
        model(tokens, cu_seq_lens_q=torch.tensor([0, 7, 10]))
    for given in (
        {"position_ids": torch.zeros(3, 1, 15, dtype=torch.long)},
        {"position_ids": torch.arange(14)[None]},
        {"attention_mask": torch.ones(1, 14, dtype=torch.long)},
    ):
        message = f"{next(iter(given))} must have shape .* with T=15, got {next(iter(given))}.shape"
        with pytest.raises(ValueError, match=message):
            model(tokens, **given)
    message = r"must be in one row, got input_ids.shape=\(2, 4\)"
    with pytest.raises(NotImplementedError, match=message):
        model(tokens_of(model, 2, 4), position_ids=torch.tensor([[0, 1, 0, 1]] * 2))
    with pytest.raises(NotImplementedError, match="use_cache must be False with"):
        model(**batch, use_cache=True)


@torch.no_grad()
def test_steps_go_on_past_the_first_storage():
    model = made()
    tokens, out = tokens_of(model, 1, 70), None
    expected = model(tokens).logits
    for i in range(70):
        out = model(tokens[:, i : i + 1], cache=None if out is None else out[1], use_cache=True)
        torch.testing.assert_close(out.logits, expected[:, i : i + 1])
    assert out[1].get_seq_length() == 70 and out[1].max_length == 128


@torch.no_grad()
def test_beams_and_samples():
    model = made()
    tokens = tokens_of(model, 2, 5)
    given = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 6, "pad_token_id": 0}
    beams = [model.generate(tokens, num_beams=3, use_cache=c, **given) for c in (True, False)]
    assert torch.equal(*beams)
    several = model.generate(tokens, do_sample=True, num_return_sequences=3, **given)
    assert several.shape == (6, 11)
    first = model.generate(tokens, return_dict_in_generate=True, **GREEDY | given)
    longer = torch.cat([first.sequences, tokens], 1)
    states = getattr(first, "cache", None) or first.past_key_values
    given["attention_mask"] = torch.ones_like(longer)
    again = model.generate(longer, cache=states, **GREEDY | given)
    assert torch.equal(again, model.generate(longer, **GREEDY | given))


def test_files(tmp_path):
    model = made(dtype=torch.float32)
    tokens = tokens_of(model, 2, 7)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is OmniattnForCausalLM and not loaded.training
    assert loaded.model.config == CONFIG and AutoConfig.from_pretrained(tmp_path).vocab_size == 61
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    expected = {n: p.dtype for n, p in CONFIG.build(dtype=torch.bfloat16).named_parameters()}
    assert {n: p.dtype for n, p in half.model.named_parameters()} == expected
    torch.manual_seed(0)
    drawn = AutoModelForCausalLM.from_config(OmniattnConfig(CONFIG))
    torch.manual_seed(0)
    expected = CONFIG.build().state_dict()
    torch.testing.assert_close(drawn.model.state_dict(), expected, rtol=0, atol=0)


def test_what_a_checkpoint_lacks_is_drawn_by_the_layers(tmp_path):
    model = made(dtype=torch.float32)
    lacking = ("model.layers.1.mixer.dt_proj.bias", "model.layers.2.mlp.up_proj.weight")
    state = {n: t for n, t in model.state_dict().items() if n not in lacking}
    model.save_pretrained(tmp_path, state_dict=state)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    for name, value in state.items():
        assert torch.equal(loaded[name], value), name
    steps = torch.nn.functional.softplus(loaded[lacking[0]])
    assert steps.min() >= 1e-4 and steps.max() <= 0.1 and 0.3 < loaded[lacking[1]].std() < 0.5


def test_lm_eval_loads_it_without_an_import(tmp_path):
    """Calls the model as HFLM does, in a process that has not imported this package."""
    model = made(dtype=torch.float32)
    model.save_pretrained(tmp_path)
    tokens = tokens_of(model, 2, 7)
    code = f"""
import torch, transformers
config = transformers.AutoConfig.from_pretrained({str(tmp_path)!r}, trust_remote_code=True)
assert config.model_type in ("omniattn",)
model = transformers.AutoModelForCausalLM.from_pretrained(
    {str(tmp_path)!r}, dtype="auto", trust_remote_code=True, device_map=None
).eval()
model.tie_weights()
tokens = torch.tensor({tokens.tolist()})
with torch.no_grad():
    print(model(tokens).logits.double().sum().item())
    out = model.generate(
        input_ids=tokens, attention_mask=torch.ones_like(tokens), max_length=10, do_sample=False,
        stopping_criteria=transformers.StoppingCriteriaList([]), pad_token_id=0, use_cache=True,
    )
    print(out.tolist())
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"HF_HOME": str(tmp_path / "home")},
    )
    assert result.returncode == 0, result.stderr
    *_, total, out = result.stdout.splitlines()
    with torch.no_grad():
        assert float(total) == pytest.approx(model(tokens).logits.double().sum().item(), rel=1e-4)
        assert json.loads(out) == generate(model.model, tokens, 3).tolist()


class Rows(torch.utils.data.Dataset):
    """Data set that repeats the same few tokens, which are soon learned."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(12) + i % 3) % 5 + 1
        return {"input_ids": tokens, "attention_mask": torch.ones(12).long(), "labels": tokens}


def trained(model, path, **options):
    arguments = TrainingArguments(
        path,
        max_steps=6,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        **options,
    )
    trainer = Trainer(model, arguments, train_dataset=Rows(), eval_dataset=Rows())
    trainer.train()
    return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 2, "bf16": True},
        {"gradient_checkpointing": True},
    ],
    ids=["plain", "accumulated-bf16", "checkpointed"],
)
def test_trainer(tmp_path, options):
    model = made(dtype=torch.float32)
    trainer, losses = trained(model, tmp_path, **options)
    assert losses[-1] < 0.8 * losses[0]
    assert trainer.evaluate()["eval_loss"] < losses[0]
    trainer.save_model(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_peft(tmp_path):
    base = made(dtype=torch.float32)
    again = copy.deepcopy(base)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=16, target_modules="all-linear")
    model = peft.get_peft_model(base, config)
    assert not any("lm_head" in n for n, _ in model.named_parameters() if "lora" in n)
    _, losses = trained(model, tmp_path)
    assert losses[-1] < losses[0]
    model.save_pretrained(tmp_path / "adapter")
    tokens = tokens_of(base, 2, 7)
    with torch.no_grad():
        model.eval()
        loaded = peft.PeftModel.from_pretrained(again, tmp_path / "adapter").eval()
        expected = model(tokens).logits
        torch.testing.assert_close(loaded(tokens).logits, expected)
        given = {**GREEDY, "attention_mask": torch.ones_like(tokens), "max_new_tokens": 4}
        out = model.generate(input_ids=tokens, **given)
        merged = model.merge_and_unload()
        torch.testing.assert_close(merged(tokens).logits, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(merged.generate(tokens, **given), out)


def test_checkpointing_and_accumulated_losses_are_the_same():
    model = made().train()
    tokens, labels = tokens_of(model, 3, 7), tokens_of(model, 3, 7)
    labels[1, 3:] = -100
    whole = model(tokens, labels=labels, num_items_in_batch=15).loss
    rows = zip(tokens[:, None], labels[:, None], strict=True)
    parts = [model(row, labels=asked, num_items_in_batch=15) for row, asked in rows]
    torch.testing.assert_close(sum(part.loss for part in parts), whole)
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    torch.testing.assert_close(
        model(tokens, shift_labels=shifted, num_items_in_batch=15).loss, whole
    )
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing and model.model.config.gradient_checkpointing
    torch.testing.assert_close(model(tokens, labels=labels, num_items_in_batch=15).loss, whole)
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing
    assert model(tokens, labels=labels).logits is model(tokens, labels=labels)[1] is NO_LOGITS
    assert model(tokens, labels=labels, skip_logits=False).logits.shape == (3, 7, 61)
    assert len(model(tokens, labels=labels, skip_logits=False, return_dict=False)) == 2


@pytest.mark.parametrize("tie", [False, True])
def test_more_tokens(tie, tmp_path):
    model = made(replace(CONFIG, tie_embeddings=tie), torch.float32)
    assert (model.get_output_embeddings() is None) == tie
    before = model(tokens := tokens_of(model, 2, 5)).logits
    model.resize_token_embeddings(70)
    assert model.config.vocab_size == model.model.config.vocab_size == 70
    torch.testing.assert_close(model(tokens).logits[..., :61], before)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again(tokens).logits, model(tokens).logits, rtol=0, atol=0)


def test_experts_and_their_losses():
    gate = {"router": "sigmoid", "balance_coefficient": 0.1}
    block = DecoderBlock.Config(
        Attention.Config(DIM, 4), MoE.Config.of(DIM, 16, 4, 2, **gate), NORM
    )
    model = made(replace(CONFIG, blocks=(block,))).train()
    tokens = tokens_of(model, 2, 7)
    loss = model(tokens, labels=tokens).loss
    routers = Routers(model.model).loss()
    assert routers > 0
    plain = model.model(tokens[:, :-1], tokens[:, 1:])
    assert loss > plain


def test_layers_of_this_package_are_left_alone_by_patch():
    model = made(dtype=torch.float32)
    tokens = tokens_of(model, 2, 7)
    expected = model(tokens).logits
    patch(model)
    torch.testing.assert_close(model(tokens).logits, expected)


def test_errors(tmp_path):
    model = made()
    tokens = tokens_of(model, 2, 4)
    with pytest.raises(TypeError, match=r"such as PRESETS.*, got model='llama-test'"):
        OmniattnConfig("llama-test")
    with pytest.raises(TypeError, match=r"model must be the config of a decoder, .* model=BertC"):
        OmniattnConfig(BertConfig())
    with pytest.raises(TypeError, match="decoder must be a Decoder, got Linear"):
        OmniattnForCausalLM.wrap(torch.nn.Linear(2, 2))
    with pytest.raises(NotImplementedError, match="output_attentions is not supported"):
        model(tokens, output_attentions=True)
    with pytest.raises(NotImplementedError, match="inputs_embeds is not supported"):
        model(tokens, inputs_embeds=torch.zeros(2, 4, DIM))
    with pytest.raises(TypeError, match=r"got label=Tensor.*; did you mean 'labels'"):
        model(tokens, label=tokens)
    with pytest.raises(NotImplementedError, match=r"attention_mask must be .*, or bool where"):
        model(tokens, attention_mask=torch.zeros(2, 1, 4, 4))
    with pytest.raises(TypeError, match="input_ids must be a tensor, got None"):
        model()
    model.save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"Mamba"', '"Mamba9"'))
    with pytest.raises((ValueError, CheckpointError), match="got type='Mamba9'; import the module"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_keys_and_values_in_int8(tmp_path):
    torch.manual_seed(0)
    config = OmniattnConfig(CONFIG, kv_dtype="int8")
    model = OmniattnForCausalLM(config).eval()
    prompt = torch.randint(61, (2, 7))
    expected = generate(model.model, prompt, 5, kv_dtype=torch.int8)
    assert torch.equal(model.generate(prompt, max_new_tokens=5, do_sample=False), expected)
    config.save_pretrained(tmp_path)
    assert OmniattnConfig.from_pretrained(tmp_path).kv_dtype == "int8"
    with pytest.raises(ValueError, match=r"kv_dtype must be 'int8' or None, got kv_dtype='fp8'"):
        OmniattnConfig(CONFIG, kv_dtype="fp8")
