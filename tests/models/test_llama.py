"""Llama: parity with Hugging Face, decoding, compile, checkpointing, files, pooled heads."""

import sys
from dataclasses import replace
from pathlib import Path
from subprocess import run

import average_mixer
import pytest
import torch
from average_mixer import Average

from omniattn import reference
from omniattn.models import (
    PRESETS,
    BlocksConfig,
    CheckpointError,
    GPT2Config,
    Llama,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    load_model,
    pool_kv_heads,
    save_model,
)
from omniattn.modules import DecoderBlock, RMSNorm

TEST = replace(PRESETS["llama-test"], init_std=0.2)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def tokens(batch: int = 2, length: int = 33) -> torch.Tensor:
    return torch.randint(TEST.vocab_size, (batch, length))


@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"tie_embeddings": True, "num_kv_heads": 1, "head_dim": 20},
        {"rope_scaling": reference.LinearScaling(2.0)},
        {"rope_scaling": reference.YarnScaling(4.0, 8)},
        {"rope_scaling": reference.Llama3Scaling(8.0, 1.0, 4.0, 16), "rope_base": 5e5},
    ],
    ids=["gqa", "tied-mqa-head20", "linear", "yarn", "llama3"],
)
def test_hugging_face_gives_the_same_logits_and_gradients(variant):
    ours = Llama(replace(TEST, **variant), dtype=torch.float64)
    hf = ours.to_hf()
    x = tokens()
    # 1e-6: Hugging Face computes the rotary tables and its norms in fp32.
    torch.testing.assert_close(ours(x), hf(x).logits, rtol=1e-5, atol=1e-5)

    targets = tokens()
    loss = ours(x, targets)
    expected = torch.nn.functional.cross_entropy(hf(x).logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    loss.backward()
    expected.backward()
    theirs = dict(hf.named_parameters())
    for name, p in ours.named_parameters():
        key = name if name.startswith("lm_head") else f"model.{name}"
        key = key.replace("mixer", "self_attn")
        torch.testing.assert_close(p.grad, theirs[key].grad, rtol=1e-4, atol=1e-6)

    back = Llama.from_hf(hf)
    assert back.config == ours.config
    torch.testing.assert_close(back.state_dict(), ours.state_dict(), rtol=0, atol=0)


def test_from_hf_rejects_what_it_does_not_compute():
    config = TEST.to_hf()
    config.attention_bias = True
    with pytest.raises(NotImplementedError, match="attention_bias=True"):
        LlamaConfig.from_hf(config)
    config = TEST.to_hf()
    config.rope_parameters = {"rope_type": "spiral", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ValueError, match="rope_type='spiral'"):
        LlamaConfig.from_hf(config)


def test_native_and_reference_backends_agree():
    native = Llama(TEST)
    eager = Llama(replace(TEST, backend="reference"))
    eager.load_state_dict(native.state_dict())
    x, targets = tokens(), tokens()
    torch.testing.assert_close(native(x), eager(x), rtol=1e-4, atol=1e-4)
    native(x, targets).backward()
    eager(x, targets).backward()
    for a, e in zip(native.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, e.grad, rtol=1e-3, atol=1e-5)


@torch.no_grad()
def test_prefill_and_steps_equal_the_full_forward():
    model = Llama(TEST)
    x = tokens()
    cache = model.new_state(2, 33)
    parts = [model(x[:, a:b], state=cache) for a, b in ((0, 20), (20, 21), (21, 30), (30, 33))]
    torch.testing.assert_close(torch.cat(parts, 1), model(x), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_left_padding_with_positions_and_mask():
    model = Llama(TEST)
    x = tokens(1, 9)
    padded = torch.cat([x.new_zeros(1, 4), x], 1)
    positions = (torch.arange(13) - 4).clamp(min=0)
    mask = (torch.arange(13) >= 4)[None, None, None]
    out = model(padded, positions=positions, mask=mask)
    torch.testing.assert_close(out[:, 4:], model(x), rtol=1e-4, atol=1e-4)


def test_gradient_checkpointing_changes_no_bit():
    x, targets = tokens(), tokens()
    grads = []
    for checkpointing in (False, True):
        torch.manual_seed(1)
        model = Llama(replace(TEST, gradient_checkpointing=checkpointing))
        model(x, targets).backward()
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


def test_compiles_as_one_graph():
    model = Llama(TEST)
    x, targets = tokens(), tokens()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    loss = compiled(x, targets)
    torch.testing.assert_close(loss, model(x, targets))
    loss.backward()
    compiled_grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x, targets).backward()
    for p, g in zip(model.parameters(), compiled_grads, strict=True):
        torch.testing.assert_close(p.grad, g, rtol=1e-4, atol=1e-6)


def test_autocast_trains_in_bf16_with_fp32_weights():
    model = Llama(TEST)
    x, targets = tokens(), tokens()
    exact = model(x, targets)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x, targets)
    torch.testing.assert_close(loss.float(), exact, rtol=2e-2, atol=0)
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize(
    "variant", [{}, {"tie_embeddings": True, "rope_scaling": reference.Llama3Scaling()}]
)
def test_save_and_load(tmp_path, variant):
    model = Llama(replace(TEST, **variant), dtype=torch.bfloat16)
    save_model(model, tmp_path / "model.safetensors")
    loaded = load_model(tmp_path / "model.safetensors")
    assert loaded.config == model.config
    assert not loaded.training
    x = tokens()
    assert torch.equal(loaded(x), model(x))


def test_only_models_of_this_package_are_saved(tmp_path):
    message = "save_model: model must be a model of omniattn.models, got type"
    with pytest.raises(TypeError, match=rf"{message}\(model\)=Linear"):
        save_model(torch.nn.Linear(2, 2), tmp_path / "model.safetensors")


def test_load_names_what_is_wrong(tmp_path):
    path = tmp_path / "model.safetensors"
    with pytest.raises(FileNotFoundError):
        load_model(path)
    save_model(Llama(TEST), path)
    content = bytearray(path.read_bytes())
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match="damaged"):
        load_model(path)
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="checksum"):
        load_model(path)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="damaged"):
        load_model(path)


#: Loads a model before and after its layers are defined, and prints the error of the first time.
LOADS = """
import sys
from omniattn.models import CheckpointError, load_model
path, support = sys.argv[1:]
try:
    load_model(path)
except CheckpointError as error:
    print(error)
sys.path.insert(0, support)
import average_mixer
assert type(load_model(path).layers[0].mixer) is average_mixer.Average
"""


def test_a_model_of_own_layers_says_what_to_import(tmp_path):
    """Another process has not defined them."""
    block = DecoderBlock.Config(Average.Config(8), None, RMSNorm.Config(8))
    path = tmp_path / "average"
    save_model(BlocksConfig(dim=8, num_layers=1, blocks=(block,)).build(), path)
    folder = Path(average_mixer.__file__).parent
    done = run([sys.executable, "-c", LOADS, path, folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "loaded: import average_mixer first, got type='Average'" in done.stdout


#: Kinds of models whose key and value heads are averaged by groups.
KINDS = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config}


def model_of(kind, **options):
    torch.manual_seed(0)
    sizes = {"vocab_size": 37, "dim": 48, "num_layers": 2, "num_heads": 6, "hidden_dim": 64}
    model = KINDS[kind](**sizes | {"num_kv_heads": 6} | options).build(dtype=torch.float64)
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(p)
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 2, 6])
@torch.no_grad()
def test_equal_heads_of_a_group_give_the_same_model(kind, count):
    model, tokens = model_of(kind), torch.randint(37, (2, 9))
    for layer in model.layers:
        for p in (*layer.mixer.k_proj.parameters(), *layer.mixer.v_proj.parameters()):
            heads = p.unflatten(0, (count, 6 // count, -1))
            heads.copy_(heads[:, :1].clone().expand_as(heads))
    pooled = pool_kv_heads(model, count)
    assert pooled.config.num_kv_heads == count and pooled.training
    torch.testing.assert_close(pooled(tokens), model(tokens))


def test_heads_are_means_of_neighbours():
    model = model_of("qwen2").eval()
    pooled = pool_kv_heads(model, 3)
    assert not pooled.training
    for ours, theirs in zip(pooled.layers, model.layers, strict=True):
        k, both = ours.mixer.k_proj.weight[8:16], theirs.mixer.k_proj.weight[16:32]
        torch.testing.assert_close(k, (both[:8] + both[8:]) / 2)
        b, both = ours.mixer.v_proj.bias[16:], theirs.mixer.v_proj.bias[32:]
        torch.testing.assert_close(b, (both[:8] + both[8:]) / 2)
        assert ours.mixer.q_proj.weight.equal(theirs.mixer.q_proj.weight)
        assert ours.mixer.q_proj.weight is not theirs.mixer.q_proj.weight
    pooled.train()(torch.zeros(1, 3, dtype=torch.long)).sum().backward()
    assert all(p.grad is not None for p in pooled.parameters())
    assert all(p.grad is None for p in model.parameters())


def test_errors_of_pooled_heads():
    model = model_of("llama")
    with pytest.raises(ValueError, match="must divide the model's 6, got num_kv_heads=4"):
        pool_kv_heads(model, 4)
    with pytest.raises(ValueError, match="num_kv_heads must be an int >= 1"):
        pool_kv_heads(model, 0)
    with pytest.raises(NotImplementedError, match="got a Decoder with num_kv_heads=None"):
        pool_kv_heads(GPT2Config(dim=32, num_heads=2, num_layers=1).build(), 1)
