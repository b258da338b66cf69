"""Patched models train along the same curve as unpatched ones, and can be restored."""

import copy
import importlib
import io
import pickle
from unittest import mock

import pytest
import torch
import transformers as hf
from patched_models import MODELS, messages
from torch import nn

import omniattn.hf
from omniattn.hf.attention.rotary import _rotary_half_twice, rotary_forward
from omniattn.hf.loss import causal_lm_loss
from omniattn.hf.patching import layers
from omniattn.hf.patching.find import _norm
from omniattn.hf.patching.patch import is_patched
from omniattn.hf.patching.subclass import _log_once, subclass


def train(model: nn.Module, steps: int = 8) -> list[float]:
    """Losses of a few steps on one repeated batch."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(3, 97, (2, 17), generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x, labels=x).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", MODELS)
def test_a_patched_model_trains_along_the_same_curve(name):
    make, swapped = MODELS[name]
    model = make().train()
    patched = copy.deepcopy(model)
    before = omniattn.hf.patch(patched)
    assert before == swapped
    assert list(patched.state_dict()) == list(model.state_dict())
    expected = train(model)
    assert expected[-1] < 0.8 * expected[0]
    torch.testing.assert_close(train(patched), expected, rtol=2e-3, atol=0)


def run(model: nn.Module) -> list[torch.Tensor]:
    """Logits, loss and gradients on one batch, always with the same dropout."""
    torch.manual_seed(1)
    x = torch.randint(3, 97, (2, 9))
    output = model(x, labels=x)
    gradients = torch.autograd.grad(output.loss, list(model.parameters()))
    return [output.logits, output.loss, *gradients]


@pytest.mark.parametrize("name", ["phi3", "glm4", "cohere2", "t5", "modernbert"])
def test_logits_loss_and_gradients_are_those_of_the_model(name):
    model = MODELS[name][0]().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
    expected = run(model)
    # Attention draws its dropout in its own way, and logits are compared.
    omniattn.hf.patch(model, attention=False, linear_cross_entropy=False)
    torch.testing.assert_close(run(model), expected, rtol=1e-4, atol=1e-5)
    omniattn.hf.unpatch(model)
    assert all(map(torch.equal, run(model), expected))


def test_unpatch_restores_the_model():
    model = MODELS["llama"][0]()
    x = torch.randint(3, 97, (1, 9))
    expected = model(x, labels=x)
    classes = [type(module) for module in model.modules()]
    omniattn.hf.patch(model)
    inner = copy.deepcopy(model)
    with pytest.raises(TypeError, match="must be a PreTrainedModel, got Linear"):
        omniattn.hf.patch(model.lm_head)
    with pytest.raises(ValueError, match="patched already"):
        omniattn.hf.patch(model)
    for each in (model, inner):
        assert each.config._attn_implementation == "omniattn"
        omniattn.hf.unpatch(each)
        assert [type(module) for module in each.modules()] == classes
        assert each.config._attn_implementation == "sdpa"
        actual = each(x, labels=x)
        assert torch.equal(actual.logits, expected.logits)
        assert torch.equal(actual.loss, expected.loss)
    omniattn.hf.unpatch(model)
    assert omniattn.hf.patch(model, attention=False, linear=False, rope=False, loss=False) == {
        "norm": 5,
        "mlp": 2,
    }


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_options_are_bools(value):
    model = MODELS["llama"][0]()
    with pytest.raises(
        TypeError, match=f"attention must be True or False, got attention={value!r}"
    ):
        omniattn.hf.patch(model, attention=value)
    assert not is_patched(model)


def test_a_model_without_labels_has_no_loss(caplog):
    model = MODELS["llama"][0]().model
    assert "loss" not in omniattn.hf.patch(model)
    assert not messages(caplog)


def test_only_modules_are_unpatched():
    with pytest.raises(
        TypeError, match=r"unpatch: model must be a torch.nn.Module, got model=None"
    ):
        omniattn.hf.unpatch(None)


def test_experts_go_by_their_interface_and_back():
    model = MODELS["mixtral"][0]()
    before = model.config._experts_implementation
    assert "experts" not in omniattn.hf.patch(model, experts=False)
    assert model.config._experts_implementation == before
    omniattn.hf.unpatch(model)
    others = ("attention", "linear", "norm", "rope", "loss")
    assert omniattn.hf.patch(model, **dict.fromkeys(others, False)) == {"experts": 2}
    assert model.config._experts_implementation == "omniattn"
    omniattn.hf.unpatch(model)
    assert model.config._experts_implementation == before
    model.model.layers[0].mlp.experts.act_fn = nn.Tanh()  # without a kernel here
    assert "experts" not in omniattn.hf.patch(model)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_patched_model_survives_pickle(name, monkeypatch):
    model = MODELS[name][0]().eval()
    classes = [type(module) for module in model.modules()]
    x = torch.randint(3, 97, (1, 9))
    original = model(x).logits
    omniattn.hf.patch(model)
    stored = io.BytesIO()
    torch.save(model, stored)
    # As in a process that has not patched yet.
    monkeypatch.delitem(hf.AttentionInterface._global_mapping, "omniattn")
    subclass.cache_clear()
    rotary_forward.cache_clear()
    loaded = torch.load(io.BytesIO(stored.getvalue()), weights_only=False)
    for each in (loaded, copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded))):
        patched = [hasattr(type(module), "omniattn_original") for module in each.modules()]
        assert patched == [hasattr(type(module), "omniattn_original") for module in model.modules()]
        assert torch.equal(each(x).logits, model(x).logits)
        omniattn.hf.unpatch(each)
        assert [type(module) for module in each.modules()] == classes
        assert torch.equal(each(x).logits, original)


def test_half_weights_and_fp32_streams_keep_working():
    model = MODELS["llama"][0]().bfloat16()
    omniattn.hf.patch(model)
    x = torch.randint(3, 97, (1, 9))
    model(x, labels=x).loss.backward()
    norm = model.model.norm
    stream = torch.randn(2, 48)
    assert torch.equal(norm(stream), norm.omniattn_original.forward(norm, stream))


@pytest.mark.parametrize("items", [None, 5, torch.tensor(7)])
def test_the_loss_is_that_of_transformers(items):
    from transformers.loss.loss_utils import ForCausalLMLoss

    logits = torch.randn(2, 6, 11, requires_grad=True)
    labels = torch.randint(11, (2, 6))
    labels[0, 3:] = -100
    for given in ({"labels": labels}, {"labels": None, "shift_labels": labels}):
        ours = causal_lm_loss(logits, vocab_size=11, num_items_in_batch=items, **given)
        theirs = ForCausalLMLoss(logits, vocab_size=11, num_items_in_batch=items, **given)
        torch.testing.assert_close(ours, theirs)
        for a, e in zip(
            torch.autograd.grad(ours, logits), torch.autograd.grad(theirs, logits), strict=True
        ):
            torch.testing.assert_close(a, e)


def test_inputs_of_another_dtype_are_logged_once(caplog):
    _log_once.cache_clear()
    model = MODELS["llama"][0]().bfloat16()
    omniattn.hf.patch(model)
    for _ in range(2):
        model.model.norm(torch.randn(2, 48))
    reason = "its input is torch.float32 and its weight torch.bfloat16"
    assert messages(caplog) == [("WARNING", f"patch: LlamaRMSNorm runs its own forward: {reason}")]


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize(
    "path",
    [
        "llama.LlamaRMSNorm",
        "qwen3.Qwen3RMSNorm",
        "qwen3_moe.Qwen3MoeRMSNorm",
        "deepseek_v3.DeepseekV3RMSNorm",
        "t5.T5LayerNorm",
        "idefics.IdeficsRMSNorm",
        "gpt_oss.GptOssRMSNorm",
        "olmo2.Olmo2RMSNorm",
        "gemma.GemmaRMSNorm",
        "helium.HeliumRMSNorm",
    ],
)
def test_norms_of_bf16_rows_with_fp32_weights(path, autocast):
    """The numbers and the dtype of the layer's own forward, which does not run."""
    file, name = path.split(".")
    module = importlib.import_module(f"transformers.models.{file}.modeling_{file}")
    theirs = getattr(module, name)(48)
    nn.init.normal_(theirs.weight)
    forward = _norm(theirs)
    assert forward in layers.WIDENING_NORMS
    ours = copy.deepcopy(theirs)
    ours.__class__ = subclass(type(theirs), forward)
    x, found = torch.randn(7, 48).bfloat16().requires_grad_(), []
    for norm in (theirs, ours):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = norm(x)
        found.append((y, *torch.autograd.grad(y.float().square().sum(), (x, norm.weight))))
    (y, *grads), (same, *others) = found
    torch.testing.assert_close(same, y)
    for grad, other in zip(grads, others, strict=True):
        assert grad.dtype == other.dtype
        assert (grad - other).norm() <= 1e-2 * grad.norm()
    with mock.patch.object(type(theirs), "forward", side_effect=AssertionError):
        ours(x)


def test_rotary_functions_under_autocast_take_two_dtypes():
    original = hf.models.llama.modeling_llama.apply_rotary_pos_emb
    q, k, angle = torch.randn(1, 2, 3, 8).bfloat16(), torch.randn(1, 2, 3, 8), torch.randn(1, 3, 4)
    cos, sin = (torch.cat((t, t), -1) for t in (angle.cos(), angle.sin()))
    pairs = zip(_rotary_half_twice(q, k, cos, sin), original(q, k, cos, sin), strict=True)
    for ours, same in pairs:
        torch.testing.assert_close(ours.float(), same.float(), rtol=1e-2, atol=1e-2)


def test_hooks_of_patched_layers_are_called():
    model, seen = MODELS["llama"][0](), []
    layer = model.model.layers[0]
    for module in (layer.input_layernorm, layer.mlp, layer.mlp.gate_proj, layer.self_attn):
        module.register_forward_hook(lambda module, *_: seen.append(module))
        module.register_forward_pre_hook(lambda module, *_: seen.append(module))
    omniattn.hf.patch(model)
    model(torch.randint(3, 97, (1, 4)))
    assert len(seen) == 8
