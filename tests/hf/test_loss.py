"""Patched causal language models train without logits: the same loss and gradients as theirs."""

import contextlib
import copy
import pickle
from unittest import mock

import accelerate
import numpy as np
import peft
import pytest
import torch
import transformers as hf
from patched_models import SIZES, messages
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers.trainer_pt_utils import nested_detach

import omniattn.hf
from omniattn import functional
from omniattn.hf.loss import DeferredLogits, causal_lm_loss, head
from omniattn.hf.no_logits import NO_LOGITS
from omniattn.hf.patching.subclass import subclass

MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)),
    "tied": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(**SIZES, head_dim=12, final_logit_softcapping=1.5)
    ),
    "cohere": lambda: hf.CohereForCausalLM(
        hf.CohereConfig(**SIZES, logit_scale=0.3, pad_token_id=0, eos_token_id=1)
    ),
    "granite": lambda: hf.GraniteForCausalLM(hf.GraniteConfig(**SIZES, logits_scaling=3.0)),
}


def batch() -> dict[str, torch.Tensor]:
    x = torch.randint(3, 97, (2, 17))
    labels = x.clone()
    labels[0, :5] = -100
    return {"input_ids": x, "labels": labels}


def pair(make=MODELS["llama"], **options) -> tuple[nn.Module, nn.Module]:
    """Returns a model, and a patched copy."""
    model = make().train()
    patched = copy.deepcopy(model)
    omniattn.hf.patch(patched, **options)
    return model, patched


def assert_equal(model, patched, rtol: float = 1e-4, logits: bool = False, **given) -> None:
    """Asserts that both give the same loss and gradients; `logits` says whether the patched model
    gives logits."""
    given = batch() | given
    expected, actual = model(**given), patched(**given)
    assert expected.logits is not None and (actual.logits is not NO_LOGITS) == logits
    torch.testing.assert_close(actual.loss, expected.loss, rtol=rtol, atol=0)
    for output in (expected, actual):
        output.loss.backward()
    grads = [[p.grad for p in each.parameters() if p.requires_grad] for each in (model, patched)]
    for e, a in zip(*grads, strict=True):
        a = a.full_tensor() if hasattr(a, "full_tensor") else a
        assert (a - e).norm() <= rtol * e.norm()


@pytest.mark.parametrize("items", [None, 40, torch.tensor(40)], ids=["mean", "int", "tensor"])
@pytest.mark.parametrize("name", MODELS)
def test_the_loss_and_its_gradients_are_the_models(name, items):
    model, patched = pair(MODELS[name])
    given = {} if items is None else {"num_items_in_batch": items}
    calls = mock.Mock(wraps=functional.linear_cross_entropy)
    with mock.patch.object(functional, "linear_cross_entropy", calls):
        assert_equal(model, patched, **given)
    assert calls.call_count == 1


def test_labels_that_are_shifted_already():
    model, patched = pair()
    given = batch()
    labels = nn.functional.pad(given["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    assert_equal(model, patched, **given, shift_labels=labels)


def test_logits_are_given_where_they_are_asked_for():
    model, patched = pair()
    given = batch()
    expected = model(**given)
    assert patched(**given).logits is NO_LOGITS and patched(**given)[1] is NO_LOGITS
    loss, logits, *_ = patched(**given, return_dict=False)
    assert logits is NO_LOGITS and torch.isclose(loss, expected.loss)
    for asked in (patched(**given, skip_logits=False), patched(given["input_ids"])):
        torch.testing.assert_close(asked.logits, expected.logits, rtol=1e-4, atol=1e-5)
    patched.eval()
    assert isinstance(patched(**given).logits, torch.Tensor)
    assert patched(**given, skip_logits=True).logits is NO_LOGITS
    with pytest.raises(ValueError, match="skip_logits=True needs labels"):
        patched(given["input_ids"], skip_logits=True)
    patched.loss_function = lambda logits, **_: logits.sum()
    assert isinstance(patched(**given, skip_logits=True).logits, torch.Tensor)
    kept = copy.deepcopy(model)
    omniattn.hf.patch(kept, linear_cross_entropy=False)
    assert isinstance(kept(**given).logits, torch.Tensor)


USES = {
    "shape": lambda z: z.shape,
    "argmax": lambda z: z.argmax(-1),
    "detach": lambda z: z.detach(),
    "index": lambda z: z[..., -1],
    "slice": lambda z: z[:, :-1],
    "plus": lambda z: z + 1,
    "plus from the right": lambda z: 1 + z,
    "tensor times": lambda z: torch.ones(2) * z,
    "equal": lambda z: z == 1,
    "tensor equal": lambda z: torch.ones(2) == z,
    "greater": lambda z: z > 0,
    "minus": lambda z: -z,
    "bool": bool,
    "len": len,
    "list": list,
    "float": float,
    "unpack": lambda z: (lambda *each: each)(*z),
    "numpy": np.asarray,
    "torch function": lambda z: torch.argmax(z, -1),
    "loss": lambda z: nn.functional.cross_entropy(z, torch.ones(2).long()),
}


@pytest.mark.parametrize("use", USES)
def test_logits_that_were_left_out_say_so_where_they_are_used(use):
    _, patched = pair()
    with pytest.raises((AttributeError, RuntimeError), match="must be called with skip_logits=Fal"):
        USES[use](patched(**batch())[1])


def test_outputs_without_logits_pass_through_libraries():
    _, patched = pair()
    with torch.no_grad():
        output = patched(**batch())
    for same in (
        pickle.loads(pickle.dumps(output)),
        copy.deepcopy(output),
        torch.utils._pytree.tree_map(lambda x: x, output),
        accelerate.utils.convert_to_fp32(output),
        accelerate.utils.operations.ConvertOutputsToFp32(lambda: output)(),
        accelerate.utils.send_to_device(output, "cpu"),
        type(output)(**output),
    ):
        assert same.logits is NO_LOGITS and same.to_tuple()[1] is NO_LOGITS
        assert torch.equal(same.loss, output.loss)
    assert nested_detach(tuple(output.values())[1:])[0] is NO_LOGITS
    assert repr(output.logits) == "NO_LOGITS" and {output.logits: 1}[NO_LOGITS] == 1


def test_what_a_head_defers_is_what_it_gives():
    """A scale and a soft cap are kept for the loss; all else makes the logits."""
    linear = nn.Linear(6, 11)
    linear.__class__ = subclass(nn.Linear, head)
    x, target = torch.randn(4, 6), torch.randint(11, (4,))
    real = linear(x).detach()
    linear.omniattn_defers = True
    kept = (
        lambda z: z,
        lambda z: z.float() * 3 / 2,
        lambda z: torch.tanh(z / 2.0) * 2.0,
        lambda z: 0.5 * (torch.tanh((2 * z).to(torch.float32)) * 4),
    )
    for change in kept:
        deferred = change(linear(x))
        assert isinstance(deferred, DeferredLogits) and deferred.shape == (4, 11)
        loss = deferred.cross_entropy(target, -100, "mean")
        torch.testing.assert_close(loss, nn.functional.cross_entropy(change(real), target))
        assert deferred.made is None
        torch.testing.assert_close(deferred.tensor(), change(real))
    made = (
        lambda z: torch.tanh(torch.tanh(z)),
        lambda z: z * torch.arange(11),
        lambda z: z * -1,
        lambda z: 1 + z - 2,
        lambda z: 1 - z,
        lambda z: -z,
        lambda z: z[..., :3],
        lambda z: z.softmax(-1),
        lambda z: torch.cat([z, z]),
    )
    for change in made:
        result = change(linear(x))
        assert isinstance(result, torch.Tensor)
        torch.testing.assert_close(result, change(real))
    assert len(linear(x)) == 4 and len(list(linear(x))) == 4
    hidden = linear(x)
    hidden[:, 2] = real[:, 2] = -1e4  # as Chameleon hides its image tokens
    loss = causal_lm_loss(hidden, None, vocab_size=11, shift_labels=target)
    torch.testing.assert_close(loss, nn.functional.cross_entropy(real, target))


def test_models_with_a_loss_of_their_own_get_logits():
    config = hf.T5Config(
        vocab_size=97, d_model=48, d_kv=12, d_ff=64, num_layers=1, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    assert_equal(*pair(lambda: hf.T5ForConditionalGeneration(config)), logits=True)


def test_an_output_of_another_size_than_the_vocabulary_is_an_error_as_before():
    model, patched = pair()
    for each in (model, patched):
        each.config.vocab_size = 90
        with pytest.raises(RuntimeError, match="invalid for input of size"):
            each(**batch())


def test_a_hook_of_the_head_sees_logits():
    model, patched = pair()
    for each in (model, patched):
        each.lm_head.register_forward_hook(lambda module, inputs, logits: 2 * logits)
    assert_equal(model, patched, logits=True)


@pytest.mark.parametrize("first", ["adapters", "patch"])
@pytest.mark.parametrize("kind", ["elsewhere", "on the head", "whole head"])
def test_adapters(kind, first, caplog):
    options = {
        "elsewhere": {"target_modules": ["q_proj"]},
        "on the head": {"target_modules": ["q_proj", "lm_head"]},
        "whole head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    }[kind]
    models = pair() if first == "patch" else (MODELS["llama"]().train(),)
    adapted = []
    for each in (models[0], models[-1]):
        torch.manual_seed(1)
        config = peft.LoraConfig(init_lora_weights=False, **options)
        adapted.append(peft.get_peft_model(copy.deepcopy(each), config))
    if first == "adapters":
        omniattn.hf.patch(adapted[1])
        reason = "it makes logits: its head is a peft.tuners.lora.layer.Linear"
        line = ("WARNING", f"patch: loss: 1 LlamaForCausalLM unchanged: {reason}")
        assert messages(caplog) == ([line] if kind == "on the head" else [])
    assert_equal(*adapted, logits=kind == "on the head")


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("what", ["model", "forward", "in place"])
def test_compiled_models(what, name):
    model, patched = pair(MODELS[name])
    compile_it = {"backend": "aot_eager", "fullgraph": True}
    if what == "model":
        patched = torch.compile(patched, **compile_it)
    elif what == "forward":
        patched.forward = torch.compile(patched.forward, **compile_it)
    else:
        patched.compile(**compile_it)
    assert_equal(model, patched)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("first", ["shards", "patch"])
def test_sharded_models(tied, first, one_process):
    model = MODELS["tied" if tied else "llama"]().train()
    patched = copy.deepcopy(model)

    def shard() -> None:
        if not tied:
            fully_shard(patched.lm_head)
        fully_shard(patched)

    steps = [shard, lambda: omniattn.hf.patch(patched)]
    for step in steps if first == "shards" else reversed(steps):
        step()
    assert_equal(model, patched)


def test_mixed_precision(one_process):
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model, patched = pair()
    given = batch()
    for each in (model, patched):
        fully_shard(each.lm_head, mp_policy=half)
        fully_shard(each, mp_policy=half)
    losses = [each(**given).loss for each in (model, patched)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-2, atol=0)
    model, patched = pair()
    for context in (torch.autocast("cpu", torch.bfloat16), contextlib.nullcontext()):
        with context:
            losses = [each(**given).loss for each in (model, patched)]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-2, atol=0)
        model, patched = model.bfloat16(), patched.bfloat16()


def test_distributed_and_checkpointed_models(one_process):
    model, patched = pair()
    assert_equal(model, nn.parallel.DistributedDataParallel(patched))
    model, patched = pair()
    for each in (model, patched):
        each.gradient_checkpointing_enable()
    assert_equal(model, patched)


def test_copies_and_pickles_defer_as_well():
    model, patched = pair()
    patched(**batch())
    for again in (copy.deepcopy(patched), pickle.loads(pickle.dumps(patched))):
        assert_equal(copy.deepcopy(model), again)
        omniattn.hf.unpatch(again)
        assert type(again) is type(model) and type(again.lm_head) is nn.Linear
        assert again.lm_head.__dict__.keys() == model.lm_head.__dict__.keys()
