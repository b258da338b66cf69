"""Models of transformers with sparse attention on this package's: logits, gradients and tokens."""

import copy
import pickle
from unittest import mock

import pytest
import small_models
import torch
import transformers as hf
from patched_models import messages
from torch import nn

import omniattn.hf
from omniattn import functional
from omniattn.hf.attention.attention import attention_forward
from omniattn.hf.attention.masks import RuleMask, attention_mask

SIZES = {
    **{"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"intermediate_size": 48, "pad_token_id": 1, "max_position_embeddings": 160},
    **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}
SEQ2SEQ = {
    **{"vocab_size": 97, "d_model": 32, "encoder_layers": 2, "decoder_layers": 1},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "pad_token_id": 1},
    **{"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "dropout": 0.0},
}
BLOCKS = {"block_size": 4, "num_random_blocks": 2}


def longformer(**given) -> nn.Module:
    config = hf.LongformerConfig(**SIZES | given, attention_window=[4, 8])
    return hf.LongformerForMaskedLM(config)


def led(**given) -> nn.Module:
    window = {"attention_window": [4, 8], "max_encoder_position_embeddings": 160}
    return hf.LEDForConditionalGeneration(hf.LEDConfig(**SEQ2SEQ | window | given))


def big_bird(**given) -> nn.Module:
    return hf.BigBirdForMaskedLM(hf.BigBirdConfig(**SIZES | BLOCKS | given))


def pegasus(**given) -> nn.Module:
    sizes = SEQ2SEQ | BLOCKS | {"max_position_embeddings": 160}
    return hf.BigBirdPegasusForConditionalGeneration(hf.BigBirdPegasusConfig(**sizes | given))


#: A model, and the layers of attention that are ours when it is patched; LED's decoder keeps its.
MODELS = {
    "longformer": (longformer, 2),
    "led": (led, 2),
    "big_bird": (big_bird, 2),
    "pegasus": (pegasus, 4),
}


def pair(name: str, **given) -> tuple[nn.Module, nn.Module]:
    """Returns a model with random weights, and a copy with our attention."""
    make, layers = MODELS[name]
    model = make(**given).eval()
    for p in model.parameters():
        nn.init.normal_(p, std=0.15)
    patched = copy.deepcopy(model)
    others = dict.fromkeys(("linear", "norm", "mlp", "rope", "loss", "mixer", "experts"), False)
    assert omniattn.hf.patch(patched, **others) == {"attention": layers}
    return model, patched


def inputs(name: str, length: int) -> dict[str, torch.Tensor]:
    """Tokens with padding, global ones for Longformer and LED, in which each row has others."""
    x = torch.randint(3, 97, (2, length))
    real = torch.ones_like(x)
    real[1, length - 7 :] = 0
    found = {"input_ids": x.where(real > 0, 1), "attention_mask": real}
    if name in ("longformer", "led"):
        marked = torch.zeros_like(x)
        marked[0, 0], marked[1, 0], marked[1, length // 2] = 1, 1, 1
        found["global_attention_mask"] = marked
    if name in ("led", "pegasus"):
        found["decoder_input_ids"] = torch.randint(3, 97, (2, 5))
    return found


def assert_same(model: nn.Module, patched: nn.Module, given: dict[str, torch.Tensor]) -> None:
    """Logits of real tokens, and all gradients."""
    grads = []
    kept = given["attention_mask"] > 0 if "decoder_input_ids" not in given else ...
    for each in (model, patched):
        logits = each(**given).logits[kept]
        parameters = list(each.parameters())
        found = torch.autograd.grad(logits.sin().sum(), parameters, allow_unused=True)
        grads.append((logits, *found))
    largest = max(g.abs().max() for g in grads[0][1:] if g is not None)
    for expected, actual in zip(*grads, strict=True):
        if expected is None:
            assert actual is None
        else:
            # The gradient of a bias of the keys is zero up to rounding.
            torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-5 * largest + 1e-4)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("length", [15, 64])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_the_models(name, length, training):
    """BigBird attends to all of 15 tokens, and to blocks of 64, in training to random ones."""
    model, patched = (each.train(training) for each in pair(name))
    sliding = name in ("longformer", "led")
    op = "longformer_attention" if sliding else "bigbird_attention"
    module = "attention.longformer" if sliding else "patching.bigbird"
    ours = mock.Mock(wraps=getattr(functional, op))
    with mock.patch(f"omniattn.hf.{module}.{op}", ours):
        assert_same(model, patched, inputs(name, length))
    assert ours.call_count == (0 if "bigbird" in op and length == 15 else 2)


def test_no_global_tokens_and_no_mask():
    model, patched = pair("longformer")
    given = inputs("longformer", 33)
    del given["global_attention_mask"]
    assert_same(model, patched, given)
    x = torch.randint(3, 97, (1, 20))
    torch.testing.assert_close(patched(x).logits, model(x).logits, rtol=1e-3, atol=1e-4)


def test_random_blocks_of_the_papers_plans():
    """For 1024 tokens they are drawn in another way, from the longest length."""
    sizes = {"block_size": 64, "max_position_embeddings": 4096, "num_hidden_layers": 1}
    model = big_bird(**sizes).train()
    patched = copy.deepcopy(model)
    omniattn.hf.patch(patched)
    x = torch.randint(3, 97, (1, 1024))
    with torch.no_grad():
        expected, actual = (each(x).logits for each in (model, patched))
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_dropout_acts_in_training(name):
    dropout = "attention_dropout" if name in ("led", "pegasus") else "attention_probs_dropout_prob"
    _, patched = pair(name, **{dropout: 0.5})
    given = inputs(name, 15)
    evaluated = [patched(**given).logits for _ in range(2)]
    assert torch.equal(*evaluated)
    trained = [patched.train()(**given).logits for _ in range(2)]
    assert not torch.allclose(*trained)


@pytest.mark.parametrize("name", MODELS)
def test_layers_are_pickled_and_restored(name, caplog):
    model, patched = pair(name)
    warned = [text for level, text in messages(caplog) if level == "WARNING"]
    reason = "it does not ask transformers' AttentionInterface"
    left = f"patch: attention: 2 LEDDecoderAttention unchanged: {reason}"
    assert warned == ([left] if name == "led" else [])
    given = inputs(name, 64)
    short = inputs(name, 15)
    again = pickle.loads(pickle.dumps(patched))
    assert torch.equal(again(**given).logits, patched(**given).logits)
    assert torch.equal(again(**short).logits, patched(**short).logits)
    omniattn.hf.unpatch(patched)
    assert not any(hasattr(type(each), "omniattn_original") for each in patched.modules())
    assert torch.equal(patched(**short).logits, model(**short).logits)


def test_weights_are_refused_or_given():
    for name in ("longformer", "led"):
        _, patched = pair(name)
        with pytest.raises(NotImplementedError, match="SelfAttention gives no output_attentions"):
            patched(**inputs(name, 15), output_attentions=True)
    model, patched = pair("big_bird")
    given = inputs("big_bird", 15)
    expected, actual = (
        each(**given, output_attentions=True).attentions for each in (model, patched)
    )
    real = given["attention_mask"] > 0
    for e, a in zip(expected, actual, strict=True):
        torch.testing.assert_close(a.mT[real], e.mT[real], rtol=1e-3, atol=1e-5)
    model, patched = pair("big_bird")
    with pytest.raises(
        NotImplementedError, match="BlockSparseAttention gives no output_attentions"
    ):
        patched(**inputs("big_bird", 64), output_attentions=True)


def test_a_decoder_generates_the_same():
    sizes = SIZES | BLOCKS | {"is_decoder": True, "attention_type": "original_full"}
    model = hf.BigBirdForCausalLM(hf.BigBirdConfig(**sizes)).eval()
    patched = copy.deepcopy(model)
    assert omniattn.hf.patch(patched)["attention"] == 2
    x = torch.randint(3, 97, (2, 7))
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(x)}
    assert torch.equal(patched.generate(x, **options), model.generate(x, **options))


def minimax(**given) -> nn.Module:
    """MiniMax-M3: the second layer chooses blocks of four keys for each group of heads."""
    config = hf.MiniMaxM3VLTextConfig(
        **{"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "head_dim": 16},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48},
        **{"dense_intermediate_size": 48, "index_n_heads": 2, "index_head_dim": 16},
        **{"index_block_size": 4, "index_topk_blocks": 3, "index_local_blocks": 1},
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 1},
        layer_types=["full_attention", "minimax_m3_sparse"],
        mlp_layer_types=["dense", "dense"],
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    )
    return hf.MiniMaxM3VLForCausalLM(config)


def choosing(name: str) -> tuple[nn.Module, nn.Module]:
    """A model whose layers choose keys, with eager attention and with ours."""
    if name == "minimax_m3":
        model = minimax().eval()
        for p in model.parameters():
            nn.init.normal_(p, std=0.2)
        model.set_attn_implementation("eager")
    else:
        model = small_models.make(name).float()
        for module in model.modules():
            if hasattr(module, "index_topk"):
                module.index_topk = 6
    ours = copy.deepcopy(model)
    ours.set_attn_implementation("omniattn")
    return model, ours


CHOOSING = ["deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "mistral_large4_text", "minimax_m3"]


#: MiniMax's indexer scores padded tokens as well, which hold the results of padded queries.
SIDES = [(name, side) for name in CHOOSING for side in ("none", "right", "left")]
SIDES.remove(("minimax_m3", "left"))


@pytest.mark.parametrize(("name", "side"), SIDES)
def test_chosen_keys_give_the_models_logits_and_gradients(name, side):
    model, ours = choosing(name)
    x = torch.randint(5, 90, (2, 33))
    real = torch.ones_like(x)
    if side != "none":
        real[1, slice(22, None) if side == "right" else slice(9)] = 0
    found = []
    with mock.patch.object(
        functional, "selected_attention", mock.Mock(wraps=functional.selected_attention)
    ) as calls:
        for each in (model, ours):
            y = each(x, attention_mask=real, use_cache=False)[0][real > 0]
            parameters = list(each.parameters())
            found.append((y, *torch.autograd.grad(y.sin().sum(), parameters, allow_unused=True)))
    assert calls.call_count == (1 if name == "minimax_m3" else 2)
    largest = max(g.abs().max() for g in found[0][1:] if g is not None)
    for e, a in zip(*found, strict=True):
        assert (e is None) == (a is None)
        if e is not None:
            torch.testing.assert_close(a, e, rtol=1e-3, atol=1e-5 * largest + 1e-4)


@torch.no_grad()
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", [name for name in CHOOSING if "text" not in name])
def test_models_that_choose_keys_generate_the_same(name, cache):
    model, ours = choosing(name)
    x = torch.randint(5, 90, (2, 13))
    real = torch.ones_like(x)
    real[1, :4] = int(name == "minimax_m3")
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    options |= {"attention_mask": real, "cache_implementation": cache, "disable_compile": True}
    assert torch.equal(ours.generate(x, **options), model.generate(x, **options))


@torch.no_grad()
@pytest.mark.parametrize("name", ["deepseek_v32", "minimax_m3"])
def test_weights_of_chosen_keys(name):
    x = torch.randint(5, 90, (2, 21))
    expected, actual = (each(x, output_attentions=True).attentions for each in choosing(name))
    for e, a in zip(expected, actual, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-3, atol=1e-5)


class Layer(nn.Module):
    is_causal = True


@pytest.mark.parametrize("side", ["none", "right", "left"])
def test_masks_as_rules_hide_chosen_keys(side):
    """In a static cache of 12 keys, of which 9 are filled, for the last 4 queries."""
    q, k, v = torch.randn(2, 4, 4, 8), torch.randn(2, 2, 12, 8), torch.randn(2, 2, 12, 8)
    real = torch.ones(2, 12, dtype=torch.bool)
    if side != "none":
        real[1, slice(7, None) if side == "right" else slice(3)] = False
    mask = attention_mask(2, 4, 12, q_offset=5, attention_mask=real)
    seen = mask & True
    indices = torch.rand(2, 4, 12).argsort(-1)[..., :7].int()
    calls = mock.Mock(wraps=RuleMask.visible)
    with mock.patch.object(RuleMask, "visible", calls):
        out, _ = attention_forward(Layer(), q, k, v, mask, indices=indices)
    assert not calls.called  # no mask of all pairs is made
    expected, _ = attention_forward(Layer(), q, k, v, seen, indices=indices)
    assert torch.equal(out, expected)
    chosen = torch.zeros(2, 1, 4, 12, dtype=torch.bool).scatter(3, indices[:, None].long(), True)
    dense, _ = attention_forward(Layer(), q, k, v, seen & chosen)
    torch.testing.assert_close(out, dense)


def test_masks_of_chosen_keys():
    q, k, v = (torch.randn(2, 2, 9, 8) for _ in range(3))
    indices = torch.rand(2, 9, 9).argsort(-1)[..., :4].int()
    chosen = torch.zeros(2, 1, 9, 9, dtype=torch.bool).scatter(3, indices[:, None].long(), True)
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    sparse = (torch.rand(2, 1, 9, 9) < 0.7) & causal
    sdpa = nn.functional.scaled_dot_product_attention
    additive = torch.zeros(2, 1, 9, 9).masked_fill(~sparse, torch.finfo(torch.float32).min)
    ends = torch.tensor([0, 4, 9])
    blocks = torch.block_diag(torch.ones(4, 4), torch.ones(5, 5)).bool()
    for mask, seen in ((None, causal), (sparse, sparse), (additive, sparse)):
        out, _ = attention_forward(Layer(), q, k, v, mask, indices=indices)
        expected = sdpa(q, k, v, attn_mask=seen & chosen).nan_to_num()
        torch.testing.assert_close(out.transpose(1, 2), expected)
    last, _ = attention_forward(Layer(), q[:, :, -1:], k, v, None, indices=indices[:, -1:])
    expected = sdpa(q[:, :, -1:], k, v, attn_mask=chosen[:, :, -1:])
    torch.testing.assert_close(last.transpose(1, 2), expected)
    one = [x[:1] for x in (q, k, v)]
    out, _ = attention_forward(
        Layer(), *one, None, indices=indices[:1], cu_seq_lens_q=ends, cu_seq_lens_k=ends
    )
    expected = sdpa(*one, attn_mask=chosen[:1] & causal & blocks).nan_to_num()
    torch.testing.assert_close(out.transpose(1, 2), expected)
    with pytest.raises(NotImplementedError, match="Layer attends to chosen keys with an attention"):
        attention_forward(Layer(), q, k, v, additive + 1.0, indices=indices)
    with pytest.raises(NotImplementedError, match="Layer passes position_bias with chosen keys"):
        attention_forward(Layer(), q, k, v, None, indices=indices, position_bias=additive)


@torch.no_grad()
@pytest.mark.parametrize("name", ["longformer", "deepseek_v32"])
def test_compiled_models_give_the_same(name):
    model, ours = pair(name) if name == "longformer" else choosing(name)
    given = inputs(name, 33)
    real = given["attention_mask"] > 0
    actual = torch.compile(ours, backend="aot_eager")(**given).logits[real]
    torch.testing.assert_close(actual, model(**given).logits[real], rtol=1e-3, atol=1e-4)
