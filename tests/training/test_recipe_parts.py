"""Parts of recipes: groups, clipping, master weights, recomputation, accumulation."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from small_presets import SMALL

from omniattn.models import PRESETS
from omniattn.models.presets import TRAINED
from omniattn.modules import Linear
from omniattn.training import (
    LanguageModeling,
    MaskedLanguageModeling,
    MasterAdamW,
    TrainConfig,
    Trainer,
    WarmupCosine,
    clip_gradients,
    parameter_groups,
    recompute_blocks,
)

pytestmark = pytest.mark.usefixtures("one_thread")
TEXT = b"".join(b"%d * %d = %d\n" % (a, b, a * b) for a in range(40) for b in range(20))


@pytest.mark.parametrize("name", TRAINED)
def test_weight_decay_reaches_weights_of_layers_only(name):
    model = TRAINED[name].build(device="meta")
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    decayed, others = (
        {names[id(p)] for p in g["params"]} for g in parameter_groups(model, weight_decay=0.1)
    )
    assert decayed | others == set(names.values()) and not decayed & others
    last = {name.rpartition(".")[2] for name in decayed}
    factors = {"g_weight", "b_weight", "recurrent", "C", "up_proj", "down_proj", "gate_up_proj"}
    factors |= {"alpha_weight", "learnable_ttt_lr_weight", "conv_weight", "readout"}
    assert last <= {"weight"} | factors
    assert not any("norm" in name or "embed_tokens" in name for name in decayed)


@pytest.mark.parametrize("name", ["rwkv4", "rwkv5", "rwkv6", "rwkv7"])
def test_rwkv_decays_linear_layers_only(name):
    model = TRAINED[name].build(device="meta")
    linears = {id(m.weight) for m in model.modules() if isinstance(m, Linear)}
    assert {id(p) for p in parameter_groups(model, 0.1)[0]["params"]} == linears


def gradients(dtype, scale=1.0):
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.zeros(n, 3, dtype=dtype)) for n in (5, 70, 1)]
    for weight in weights:
        weight.grad = (scale * torch.randn_like(weight, dtype=torch.float32)).to(dtype)
    return [*weights, torch.nn.Parameter(torch.zeros(2, dtype=dtype))]


@pytest.mark.parametrize("limit", [0.5, 100.0, math.inf])
def test_clipping_in_fp32_has_the_bits_of_torch(limit):
    ours, theirs = gradients(torch.float32), gradients(torch.float32)
    norm = clip_gradients(ours, limit)
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(theirs, limit))
    for a, b in zip(ours[:-1], theirs[:-1], strict=True):
        assert torch.equal(a.grad, b.grad)


def test_the_norm_of_half_gradients_is_that_of_their_values():
    ours = gradients(torch.bfloat16, scale=1e-3)
    exact = math.sqrt(sum(float(p.grad.double().square().sum()) for p in ours[:-1]))
    rounded = torch.nn.utils.get_total_norm([p.grad for p in ours[:-1]])
    norm = clip_gradients(ours, exact / 2)
    assert norm.dtype == torch.float32
    assert abs(norm.item() / exact - 1) < 1e-6 < abs(rounded.item() / exact - 1)
    after = math.sqrt(sum(float(p.grad.double().square().sum()) for p in ours[:-1]))
    assert after == pytest.approx(exact / 2, rel=1e-2)
    assert clip_gradients([], 1.0) == 0
    with pytest.raises(ValueError, match=r"clip_gradients: max_norm must be .* got max_norm=-1"):
        clip_gradients(ours, -1)


def stepped(model, tokens, optimizer, parts=1):
    """One step of a loop as in docs/recipes.md, in `parts` parts."""
    for part in tokens.tensor_split(parts):
        (model(part[:, :-1], part[:, 1:]) / parts).backward()
        if isinstance(optimizer, MasterAdamW):
            optimizer.collect()
    clip_gradients((p for g in optimizer.param_groups for p in g["params"]), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def begin(dtype=torch.bfloat16, lr=1e-4):
    torch.manual_seed(0)
    model = PRESETS["llama-test"].build(dtype=dtype)
    kind = MasterAdamW if dtype == torch.bfloat16 else torch.optim.AdamW
    optimizer = kind(parameter_groups(model, 0.1), lr=lr, fused=True)
    return model, optimizer, WarmupCosine(optimizer, warmup=2, steps=20, min_lr=lr / 10)


def test_master_weights_are_those_of_a_step_in_fp32():
    model, optimizer, _ = begin()
    names = {id(p): n for n, p in model.named_parameters()}
    masters = {names[id(w)]: m for w, m in optimizer._pairs}
    exact = {n: p.detach().float().requires_grad_() for n, p in model.named_parameters()}
    groups = [
        {"params": [exact[names[id(p)]] for p in g["params"]], "weight_decay": g["weight_decay"]}
        for g in parameter_groups(model, 0.1)
    ]
    plain = torch.optim.AdamW(groups, lr=1e-2, fused=True)
    for group in optimizer.param_groups:
        group["lr"] = 1e-2
    before = {n: p.clone() for n, p in model.named_parameters()}
    for seed in range(3):
        torch.manual_seed(seed)
        for name, parameter in model.named_parameters():
            parameter.grad = torch.randn_like(parameter)
            exact[name].grad = parameter.grad.float()
        optimizer.step()
        plain.step()
        optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        assert torch.equal(masters[name], exact[name]), name
        assert torch.equal(parameter, exact[name].bfloat16()) and parameter.grad is None
        assert not torch.equal(parameter, before[name])


def test_small_steps_are_not_lost():
    """A step of 1e-4 is below the rounding of a weight 1 in bfloat16, which is 2^-8."""
    weights = [torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16)) for _ in range(2)]
    ours, plain = MasterAdamW([weights[0]], lr=1e-4), torch.optim.AdamW([weights[1]], lr=1e-4)
    for _ in range(100):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        ours.step()
        plain.step()
    assert (weights[1] == 1).all() and (weights[0] < 1).all()
    master = ours.param_groups[0]["params"][0]
    assert master.tolist() == pytest.approx([(1 - 1e-6) ** 100 - 0.01] * 4, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loop_stops_and_goes_on_with_the_same_bits(dtype):
    torch.manual_seed(1)
    batches = torch.randint(97, (6, 4, 12))
    model, optimizer, schedule = begin(dtype, 1e-2)
    for step, tokens in enumerate(batches):
        if step == 3:
            parts = (model, optimizer, schedule)
            saved = copy.deepcopy([part.state_dict() for part in parts])
        stepped(model, tokens, optimizer, parts=2)
        schedule.step()
    torch.manual_seed(99)
    again, second, later = begin(dtype, 1e-2)
    for part, state in zip((again, second, later), saved, strict=True):
        part.load_state_dict(state)
    for tokens in batches[3:]:
        stepped(again, tokens, second, parts=2)
        later.step()
    assert later.get_last_lr() == schedule.get_last_lr()
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


def test_master_weights_refuse_states_without_them():
    model, optimizer, _ = begin()
    with pytest.raises(ValueError, match=r"MasterAdamW: state_dict must have master .*got None"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    with pytest.raises(TypeError, match="step must have no closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(ValueError, match="got one in two groups"):
        MasterAdamW([{"params": [model.norm.weight]}, {"params": [model.norm.weight]}])
    with pytest.raises(TypeError, match="without their names, got tuple"):
        MasterAdamW(model.named_parameters())


RECOMPUTED = ("gpt2", "bert", "t5", "vit", "mixtral")


@pytest.mark.parametrize("name", RECOMPUTED)
def test_recomputed_blocks_have_the_same_bits_and_keep_less(name):
    config = SMALL[name]
    if hasattr(config, "dropout_p"):
        config = replace(config, dropout_p=0.2)
    torch.manual_seed(0)
    model = config.build()
    if name == "vit":
        shape = (2, config.channels, config.image, config.image)
        batch = (torch.rand(shape), torch.tensor([0, 1]))
    else:
        batch = (torch.randint(97, (2, 40)),) * (3 if name == "t5" else 2)
    found = []
    for recompute in (False, True):
        torch.manual_seed(1)
        kept = 0

        def count(t):
            nonlocal kept
            kept += t.nbytes
            return t

        with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
            if recompute:
                with recompute_blocks(model):
                    loss = model(*batch)
            else:
                loss = model(*batch)
        (loss + model.auxiliary_loss()).backward()
        found.append((kept, loss.detach(), [p.grad for p in model.parameters()]))
        model.zero_grad()
    (plain, loss, grads), (less, same, others) = found
    assert less < 0.5 * plain and torch.equal(loss, same)
    for a, b in zip(grads, others, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    assert not any("forward" in vars(module) for module in model.modules())


def test_recomputation_of_a_model_of_transformers():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 97}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    tokens = torch.randint(97, (2, 9))
    model(tokens, labels=tokens).loss.backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with recompute_blocks(model):
        loss = model(tokens, labels=tokens, use_cache=False).loss
        with pytest.raises(NotImplementedError, match=r"(cache|values) must be None with grad"):
            model(tokens, labels=tokens, use_cache=True)
        with torch.no_grad():
            model(tokens, use_cache=True)
    loss.backward()
    for p, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, grad)
    with (
        pytest.raises(ValueError, match="must have blocks in a ModuleList, got Linear"),
        recompute_blocks(torch.nn.Linear(2, 2)),
    ):
        pass


def run_of(model, task=LanguageModeling, **options):
    config = TrainConfig(model, 6, 4, 33, warmup=2, lr=5e-3, **options)
    return Trainer(config, task(TEXT, 33))


@pytest.mark.parametrize(
    ("model", "task"), [("llama-tiny", LanguageModeling), ("bert", MaskedLanguageModeling)]
)
def test_accumulated_parts_are_the_batch(model, task):
    """Parts of masked text have different numbers of targets."""
    whole, parts = run_of(model, task), run_of(model, task, accumulate=3, recompute=True)
    for _ in range(3):
        whole.train_step()
        parts.train_step()
    assert parts.losses == pytest.approx(whole.losses, rel=1e-5)
    for a, b in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-5)


def test_accumulated_routers_count_all_parts(tmp_path):
    whole, parts = run_of("deepseek-moe"), run_of("deepseek-moe", accumulate=2)
    for run in (whole, parts):
        run.train_step()
    assert torch.equal(parts.routers.loads[0], whole.routers.loads[0])
    for a, b in zip(whole.routers.layers, parts.routers.layers, strict=True):
        bias = (layer.gate.e_score_correction_bias for layer in (a, b))
        torch.testing.assert_close(*bias)
    parts.save(tmp_path / "c")
    resumed = run_of("deepseek-moe", accumulate=2)
    resumed.load(tmp_path / "c")
    for run in (parts, resumed):
        run.train_step()
    assert resumed.losses == parts.losses
    assert torch.equal(resumed.routers.loads[1], parts.routers.loads[1])
    for a, b in zip(parts.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match="accumulate must be at most batch, got accumulate=5"):
        run_of("llama-tiny", accumulate=5)
