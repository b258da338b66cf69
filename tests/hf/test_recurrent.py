"""Patched models of transformers: short convolutions, delta rules, RWKV, xLSTM, MiniMax."""

import copy
import functools
import inspect
import os
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import small_models
from patched_models import RECURRENT

import omniattn.hf
from omniattn.hf.recurrent.recurrent import recurrent_forward
from omniattn.hf.recurrent.scans import SCANS, same_scan


def made(kind: str) -> nn.Module:
    return small_models.make(kind).float().eval()


def tokens(steps: int) -> torch.Tensor:
    return torch.randint(5, 90, (2, steps), generator=torch.Generator().manual_seed(2))


def patched(model: nn.Module) -> nn.Module:
    """A copy with the recurrent layers swapped, and nothing else."""
    other = copy.deepcopy(model)
    options = ("attention", "linear", "norm", "mlp", "rope", "loss", "experts")
    count = omniattn.hf.patch(other, **dict.fromkeys(options, False))
    assert count == {"mixer": RECURRENT[model.config.model_type]}
    return other


@pytest.mark.parametrize("kind", RECURRENT)
def test_outputs_and_gradients(kind):
    # In eval mode RwkvModel writes to a state that its backward needs, xLSTMModel with a cache.
    model, ids = made(kind).train(kind == "rwkv"), tokens(70)
    ours = patched(model)
    expected, actual = (each(ids, use_cache=False).logits for each in (model, ours))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    expected.float().square().mean().backward()
    actual.float().square().mean().backward()
    other = dict(ours.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            scale = parameter.grad.abs().max().item()
            torch.testing.assert_close(
                other[name].grad, parameter.grad, rtol=1e-3, atol=1e-4 * scale + 1e-7
            )


@torch.no_grad()
@pytest.mark.parametrize("kind", RECURRENT)
def test_generation(kind):
    # The steps of RwkvModel mix the sequences of a batch.
    model, ids = made(kind), tokens(7)[: 1 if kind == "rwkv" else None]
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, **options)
    assert patched(model).generate(ids, **options).equal(expected)


#: Their own backward raises.
UNTRAINED = (("bamba", (6, 1)), ("qwen3_next", (6, 3)), ("kimi_linear", (6, 1)))


@pytest.mark.parametrize(("kind", "pieces"), [("bamba", (6, 3)), ("lfm2_moe", (6, 1)), *UNTRAINED])
def test_gradients_through_a_cache(kind, pieces):
    """The states that a backward needs outlive the cache's writing over them."""
    model, ids = made(kind).train(), tokens(sum(pieces))

    def logits(each: nn.Module) -> torch.Tensor:
        cache, found = None, []
        for piece in ids.split(pieces, 1):
            out = each(piece, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            found.append(out.logits)
        return torch.cat(found, 1)

    ours = patched(model)
    with torch.no_grad():
        expected = logits(model)
    found = logits(ours)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    found.square().mean().backward()
    if (kind, pieces) in UNTRAINED:
        assert all(p.grad.isfinite().all() for p in ours.parameters() if p.grad is not None)
        return
    logits(model).square().mean().backward()
    other = dict(ours.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            scale = parameter.grad.abs().max().item()
            torch.testing.assert_close(
                other[name].grad, parameter.grad, rtol=1e-3, atol=1e-4 * scale + 1e-7
            )


@torch.no_grad()
def test_states_of_another_dtype_stay_theirs():
    """xLSTM rounds the states of inference to a dtype of its config."""
    model, ids = made("xlstm"), tokens(9)
    for layer in model.modules():
        if hasattr(layer, "config"):
            layer.config.inference_state_dtype, layer.config.mode = "bfloat16", "inference"
    assert patched(model)(ids).logits.equal(model(ids).logits)


@torch.no_grad()
def test_a_cache_without_keys_in_its_first_layer():
    """MiniMax: its length is that of layer 0, of lightning attention, and so 0 for each mask."""
    model, ids = made("minimax").float(), tokens(9)[:1]
    config = copy.deepcopy(model.config)
    config.layer_types = ["linear_attention", "full_attention"][: config.num_hidden_layers]
    torch.manual_seed(0)
    model = type(model)(config).eval()
    ours = copy.deepcopy(model)
    assert omniattn.hf.patch(ours)["attention"] == 1
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert ours.generate(ids, **options).equal(model.generate(ids, **options))
    padded = options | {"attention_mask": (torch.arange(9) > 2)[None].long()}
    with pytest.raises(ValueError, match="pass use_cache=False, or prompts without padding"):
        ours.generate(ids, **padded)
    wanted = model.generate(ids, **padded, use_cache=False)
    assert ours.generate(ids, **padded, use_cache=False).equal(wanted)


@torch.no_grad()
def test_a_layer_is_pickled_and_restored():
    model, ids = made("qwen3_next"), tokens(9)
    ours = patched(model)
    again = pickle.loads(pickle.dumps(ours))
    assert again(ids).logits.equal(ours(ids).logits)
    omniattn.hf.unpatch(ours)
    assert ours(ids).logits.equal(model(ids).logits)


#: Example of docs/hf.md, in a process of its own, since transformers looks for the names at import.
#: In float64: the gradients of Zamba-2 lose three digits of float32, in transformers' code, too.
PACKED = """
import sys

import omniattn.compat

assert all(omniattn.compat.install("mamba_ssm", "causal_conv1d").values())

import torch
from test_recurrent import made, patched

sizes, ids = [3, 9], torch.randint(5, 90, (1, 12))
rows = {"position_ids": torch.cat([torch.arange(n) for n in sizes])[None]}
rows["seq_idx"] = torch.tensor([0, 1]).repeat_interleave(torch.tensor(sizes))[None].int()
for kind in sys.argv[1:]:
    model = made(kind).double().train()
    leaves = list(model.parameters())
    alone = torch.cat([model(part, use_cache=False).logits for part in ids.split(sizes, 1)], 1)
    want = torch.autograd.grad(alone.square().mean(), leaves)
    for each in (model, patched(model)):
        y = each(ids, **rows, use_cache=False).logits
        torch.testing.assert_close(y, alone, rtol=1e-4, atol=1e-4)
        grads = torch.autograd.grad(y.square().mean(), list(each.parameters()))
        for got, grad in zip(grads, want, strict=True):
            scale = grad.abs().max().item()
            torch.testing.assert_close(got, grad, rtol=1e-3, atol=1e-4 * scale + 1e-7)
"""


def test_packed_sequences_train_with_the_names_of_compat():
    env = os.environ | {"PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    command = [sys.executable, "-c", PACKED, "bamba", "zamba2"]
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.parametrize("name", sorted(SCANS))
def test_a_scan_that_computes_something_else_is_told_apart(name):
    from transformers.models.mamba import modeling_mamba
    from transformers.models.mamba2 import modeling_mamba2

    theirs = getattr(modeling_mamba2 if "mamba2" in name else modeling_mamba, name)

    def twice(*args, **options):
        y = theirs(*args, **options)
        return (2 * y[0], y[1]) if isinstance(y, tuple) else 2 * y

    with torch.no_grad():
        for function, same in ((theirs, True), (twice, False)):
            calls = same_scan(name, function, SCANS[name](function))
            equal = [
                torch.allclose(*pair, rtol=1e-4, atol=1e-5) for pair in zip(*calls, strict=True)
            ]
            assert all(equal) == same


def test_patched_under_autocast_and_other_defaults():
    """Found once for a type of layer, whatever the caller has set then."""
    recurrent_forward.cache_clear()
    with torch.autocast("cpu", torch.bfloat16):
        model = made("mamba")
        assert omniattn.hf.patch(model)["mixer"] > 0
    with torch.device("meta"):
        from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

        assert callable(recurrent_forward(Mamba2Mixer))


def test_kernels_of_packages_for_gpus_stay_out_of_the_cpu(monkeypatch):
    from transformers.models.mamba import modeling_mamba as module

    def packaged(original):
        @functools.wraps(inspect.unwrap(original))
        def kernel(*args, **options):
            raise RuntimeError("Expected u.is_cuda() to be true")

        return kernel

    for name in ("mamba_selective_scan", "causal_conv1d_fn", "mamba_inner_fn"):
        monkeypatch.setattr(module, name, packaged(getattr(module, name)))
    recurrent_forward.cache_clear()
    model, ids = made("mamba"), tokens(9)
    assert omniattn.hf.patch(model)["mixer"] > 0
    model.train()(ids, use_cache=False).logits.sum().backward()
    recurrent_forward.cache_clear()


def test_other_functions_are_left(caplog):
    """A module's function that computes something else, or takes more."""
    from transformers.models.qwen3_next import modeling_qwen3_next as module

    from omniattn.hf.common.probe import Left
    from omniattn.hf.recurrent.recurrent import recurrent_forward

    layer, rule = module.Qwen3NextGatedDeltaNet, module.torch_chunk_gated_delta_rule

    def doubled(query, key, value, g, beta, **options):
        return rule(2 * query, key, 2 * value, g, beta, **options)

    def further(query, key, value, g, beta, forget=1.0, **options):
        return rule(query, key, value, g, beta, **options)

    try:
        for other, reason in ((doubled, "something else"), (further, "takes forget")):
            module.torch_chunk_gated_delta_rule = other
            recurrent_forward.cache_clear()
            found = recurrent_forward(layer)
            assert isinstance(found, Left) and reason in found.reason
    finally:
        module.torch_chunk_gated_delta_rule = rule
        recurrent_forward.cache_clear()
