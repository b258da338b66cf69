"""Families of decoders compute what transformers computes: values, gradients, tokens."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_presets import FAMILIES, SMALL

from omniattn.models import BlocksConfig, CheckpointError, Model, from_hf, generate
from omniattn.modules import Attention, DecoderBlock, LayerNorm, RWKV4TimeMix, RWKVChannelMix


def pair(config, dtype=torch.float64, std=0.2):
    """Returns our model of random weights, and that of transformers with copies of them."""
    torch.manual_seed(0)
    ours = config.build(dtype=dtype).eval()
    with torch.no_grad():
        for parameter in ours.parameters():
            torch.nn.init.normal_(parameter, std=std)
    theirs = ours.to_hf()
    if any(name.endswith("experts") for name, _ in theirs.named_modules()):
        theirs.set_experts_implementation("eager")  # the default one has no fp64
    if theirs.config.model_type == "rwkv":
        theirs.config.use_cache = False  # the cache is written in place, which autograd refuses
        theirs.config.rescale_every = 0
    return ours, theirs


#: Error of gradients relative to the largest; theirs computes delta rules in fp32.
ROUNDING = {"qwen3-next": 1e-4, "rwkv-4": 1e-4, "kimi-linear": 1e-4, "xlstm": 1e-4, "zamba": 1e-4}


def assert_same_state(back, ours):
    """Requires equal weights; those that are 1 minus theirs were rounded twice."""
    twice = {name for name, _ in ours.config.counterpart.complements(ours)}
    own = ours.state_dict()
    for name, weight in back.state_dict().items():
        torch.testing.assert_close(weight, own[name], rtol=0, atol=3e-7 if name in twice else 0)


def assert_same_gradients(ours, theirs, rounding):
    for model in (ours, theirs):
        for parameter in model.parameters():
            unused = parameter.grad is None  # DeepSeek-V3.2's indexer
            parameter.data = torch.zeros_like(parameter) if unused else parameter.grad
    for name, _ in ours.config.counterpart.complements(ours):
        ours.state_dict()[name].neg_()
    for own, other in ours.config.counterpart.pairs(ours, theirs):
        got, want = (torch.cat([t.flatten() for t in side]) for side in (own, other))
        got = got.to(want.dtype)  # biases of routers
        scale = max(want.abs().max().item(), 1e-4)  # those of keys' biases are 0
        torch.testing.assert_close(got, want, rtol=1e-4, atol=rounding * scale)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_loss_and_gradients_are_those_of_transformers(name):
    ours, theirs = pair(FAMILIES[name])
    back = Model.from_hf(theirs)
    assert back.config == ours.config
    assert_same_state(back, ours)

    tokens = torch.randint(1, 97, (2, 33))  # Gemma 2 trains no input embedding of id 0
    out = theirs(tokens, labels=tokens)
    # transformers computes rotary tables, norms, routers and gated delta rules in fp32.
    atol = ROUNDING.get(name, 1e-5)
    torch.testing.assert_close(ours(tokens), out.logits.double(), rtol=1e-5, atol=atol)
    loss = ours(tokens[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(loss, out.loss.double(), rtol=1e-5, atol=1e-5)
    loss.backward()
    out.loss.backward()
    assert_same_gradients(ours, theirs, ROUNDING.get(name, 1e-5))


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_tokens_are_those_of_transformers_and_of_the_full_forward(name):
    ours, theirs = pair(FAMILIES[name])
    tokens = torch.randint(97, (2, 7))
    options = {"eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 9, "do_sample": False}
    found = generate(ours, tokens, 9)
    # Theirs mixes the sequences of a batch in RWKV-4.
    rows = tokens.split(1 if name == "rwkv-4" else 2)
    assert torch.equal(found, torch.cat([theirs.generate(row, **options) for row in rows]))
    assert torch.equal(found[:, 7:], ours(found[:, :-1]).argmax(-1)[:, 6:])


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("mistral", "hidden_act", "gelu"),
        ("mistral", "attention_dropout", 0.1),
        ("qwen3", "attention_bias", True),
        ("qwen2-moe", "qkv_bias", False),
        ("qwen3-moe", "use_sliding_window", True),
        ("deepseek-v2", "topk_method", "noaux_tc"),
        ("deepseek-v2", "rms_norm_eps", 1e-5),
        ("bloom", "apply_residual_connection_post_layernorm", True),
        ("mpt", "expansion_ratio", 2),
        ("falcon-7b", "hidden_dropout", 0.1),
        ("falcon-7b", "num_ln_in_parallel_attn", 2),
        ("falcon-40b", "parallel_attn", False),
        ("gemma2", "hidden_activation", "silu"),
        ("gemma2", "attention_bias", True),
        ("gemma2", "use_bidirectional_attention", True),
    ],
)
def test_options_that_are_absent_here_are_named(name, option, value):
    config = FAMILIES[name].to_hf()
    setattr(config, option, value)
    with pytest.raises(NotImplementedError, match=f"{option} must be .*, got {option}={value!r}"):
        type(FAMILIES[name]).from_hf(config)


def test_options_of_attention_are_named():
    config = FAMILIES["mpt"].to_hf()
    config.attn_config.clip_qkv = 8.0
    with pytest.raises(NotImplementedError, match="clip_qkv of attn_config must be None, got clip"):
        type(FAMILIES["mpt"]).from_hf(config)
    with pytest.raises(ValueError, match="Attention: alibi must be None with cross=True"):
        Attention.Config(8, 2, causal=False, cross=True, alibi=8.0)
    with pytest.raises(ValueError, match="alibi_slopes must be None, as the config has alibi=8"):
        Attention(8, 2, alibi=8.0)(torch.ones(1, 3, 8), alibi_slopes=torch.ones(2))


def test_options_that_transformers_lacks_are_named():
    for option, value in (("window", 5), ("shared_dim", 8)):
        config = replace(FAMILIES["qwen3-moe"], **{option: value})
        with pytest.raises(NotImplementedError, match=f"{option} must be .*, got {option}={value}"):
            config.to_hf()
    with pytest.raises(NotImplementedError, match="norm_eps must be 1e-06, got norm_eps=1e-05"):
        replace(FAMILIES["deepseek-v2"], norm_eps=1e-5).to_hf()
    with pytest.raises(NotImplementedError, match=r"qk_dim must be a multiple of 64 .* qk_dim=32"):
        replace(FAMILIES["xlstm"], qk_dim=32).to_hf()
    with pytest.raises(NotImplementedError, match="num_kv_heads must be 1 or num_heads, got num_k"):
        replace(FAMILIES["falcon-40b"], placement="pre").to_hf()
    with pytest.raises(ValueError, match=r"FalconConfig: placement must be .*'sandwich'"):
        replace(FAMILIES["falcon-40b"], placement="sandwich")
    block = FAMILIES["falcon-40b"].block(0)
    with pytest.raises(ValueError, match="placement='parallel_norms' needs mlp and no cross"):
        replace(block, mlp=None)
    with pytest.raises(ValueError, match=r"alibi_scale needs alibi, got alibi_scale=2\.0"):
        replace(block.mixer, alibi_scale=2.0)
    with pytest.raises(ValueError, match="Qwen3NextConfig: schedule must be kinds of layers"):
        replace(FAMILIES["qwen3-next"], schedule=("swa",))
    with pytest.raises(ValueError, match="Qwen2Config: window must be given for layers of kind"):
        replace(FAMILIES["qwen2"], schedule=("swa",))


@torch.no_grad()
def test_a_norm_of_the_embeddings_is_what_the_first_block_reads():
    torch.manual_seed(0)
    norm = LayerNorm.Config(24)
    mixer, mlp = RWKV4TimeMix.Config(24, 0, 1), RWKVChannelMix.Config(24, 0, 1, receptance=True)
    blocks = (DecoderBlock.Config(mixer, mlp, norm),)
    config = BlocksConfig(dim=24, num_layers=1, blocks=blocks, embedding_norm=norm)
    assert BlocksConfig.from_dict(config.to_dict()) == config
    model, tokens = config.build(dtype=torch.float64), torch.randint(256, (2, 9))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    plain = replace(config, embedding_norm=None).build(dtype=torch.float64)
    state = model.state_dict()
    first = model.embed_norm(state["embed_tokens.weight"])
    weights = {n: t for n, t in state.items() if not n.startswith("embed_norm")}
    plain.load_state_dict(weights | {"embed_tokens.weight": first})
    torch.testing.assert_close(model(tokens), plain(tokens))
    states = model.new_state(2, 9)
    steps = [model(part, state=states) for part in tokens.split([5, 1, 3], 1)]
    torch.testing.assert_close(torch.cat(steps, 1), model(tokens))
    with pytest.raises(
        TypeError, match=r"BlocksConfig: embedding_norm must be the Config of .*LayerNorm"
    ):
        replace(config, embedding_norm=mlp)


@torch.no_grad()
def test_rwkv_4_has_the_weights_that_transformers_divides_in_its_first_forward():
    ours, theirs = pair(replace(FAMILIES["rwkv-4"], num_layers=5), torch.float32, std=0.1)
    theirs.config.rescale_every, tokens = 2, torch.randint(97, (2, 9))
    # Theirs divides the stream too, but not the epsilon of its norms.
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-2, atol=3e-3)
    with pytest.raises(NotImplementedError, match=r"RWKV4Config: .* got rescale_every=2"):
        from_hf(theirs)
    with pytest.raises(NotImplementedError, match=r"norm_eps must be 1e-05 .*, got norm_eps=0\.1"):
        replace(ours.config, norm_eps=0.1).to_hf()


def test_l2_wrap_pulls_the_largest_logit_towards_zero_in_the_gradient_alone():
    """Compares with the definition, a backward that adds c y_max / N at the largest logits y."""
    config = FAMILIES["rwkv-4"]
    plain, _ = pair(config)
    wrapped = replace(config, l2_wrap=1e-2).build(dtype=torch.float64)
    wrapped.load_state_dict(plain.state_dict())
    tokens, targets = torch.randint(97, (2, 2, 9))
    assert torch.equal(wrapped(tokens, targets), plain(tokens, targets))
    logits = plain(tokens)
    grad = torch.zeros_like(logits)
    largest, place = logits.detach().max(-1, keepdim=True)
    grad.scatter_(-1, place, 1e-2 / 18 * largest)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.autograd.backward([loss, logits], [torch.ones_like(loss), grad])
    wrapped(tokens, targets).backward()
    for own, other in zip(wrapped.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-5, atol=1e-8)


FOLDERS = (
    "mistral",
    "qwen2-moe",
    "gemma2",
    "gpt2",
    "t5",
    "bert-classifier",
    "mamba2",
    "deepseek",
    "rwkv-4",
)


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_of_transformers_become_the_same_model(name, tmp_path):
    ours, theirs = pair((FAMILIES | SMALL)[name], torch.float32)
    theirs.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    found = from_hf(tmp_path)
    assert found.config == ours.config and not found.training
    assert_same_state(found, ours)
    storages = {p.untyped_storage().data_ptr() for p in found.parameters()}
    assert len(storages) == len(list(found.parameters()))
    again = from_hf(theirs)
    assert again.config == ours.config
    assert_same_state(again, ours)


def test_folders_that_are_not_those_of_a_model_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"^from_hf: model_or_folder must be a model of"):
        from_hf(tmp_path)
    _, theirs = pair(FAMILIES["qwen2"], torch.bfloat16)
    theirs.config.architectures = None
    theirs.save_pretrained(tmp_path)
    assert from_hf(str(tmp_path), backend="reference").config.backend == "reference"
    assert next(from_hf(tmp_path).parameters()).dtype == torch.bfloat16

    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    for change, message in (
        ({name: None}, f"1 weights in .* are missing: {name}"),
        ({"model.more": torch.ones(2)}, "1 weights in .* are unknown: model.more"),
        ({name: torch.ones(3, 48)}, f"shape: {name} .3, 48. in place of .40, 48."),
    ):
        changed = {n: t for n, t in (weights | change).items() if t is not None}
        save_file(changed, file, {"format": "pt"})
        with pytest.raises(CheckpointError, match=message):
            from_hf(tmp_path)
    config = tmp_path / "config.json"
    text = config.read_text()
    config.write_text(text.replace('"qwen2"', '"olmo2"'))
    with pytest.raises(NotImplementedError, match="got model_type='olmo2'"):
        from_hf(tmp_path)
    config.write_text(text.replace('"hidden_act": "silu"', '"hidden_act": "relu"'))
    with pytest.raises(
        NotImplementedError, match="Qwen2Config: hidden_act must be 'silu', got hid"
    ):
        from_hf(tmp_path)
