"""tensor_parallel on two and four processes (gloo) against one process, in fp64."""

import copy
import shutil
import tempfile
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from processes import main, run, start
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from omniattn import functional, modules
from omniattn.distributed import tensor_parallel, vocabulary_parallel_cross_entropy
from omniattn.models import PRESETS, Routers
from omniattn.models.generation import generate
from omniattn.training import recompute_blocks
from omniattn.training.optimizer import clip_gradients, parameter_groups

EXACT = {"rtol": 1e-11, "atol": 1e-12}
T = 16


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def draw(module):
    """Draws all parameters, so that none is 0 or 1 and gradients are of order 1."""
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return module


def same(found, expected, where):
    torch.testing.assert_close(found, expected, **EXACT, msg=lambda m: f"{where}: {m}")


def same_gradients(split, whole, where):
    """Each parameter of the split module has the gradient of the whole one."""
    expected = dict(whole.named_parameters())
    names = [name for name, _ in split.named_parameters()]
    assert names == list(expected)
    for name, p in split.named_parameters():
        assert isinstance(p, DTensor) and p.shape == expected[name].shape
        if expected[name].grad is None:
            assert p.grad is None, f"{where} {name}"
            continue
        same(p.grad.full_tensor(), expected[name].grad, f"{where} {name}")


#: Layers and their options besides dim=16.
HEADS = {"num_heads": 4}
MIXTURE = {
    **{"hidden_dim": 12, "experts": 3, "top_k": 2},
    **{"balance_coefficient": 0.1, "z_coefficient": 0.1},
}
LAYERS = {
    "mha": ("Attention", {**HEADS, "bias": True, "out_bias": True, "sinks": True}),
    "gqa": ("Attention", {**HEADS, "num_kv_heads": 2, "qk_norm": "rms", "gate": "headwise"}),
    "mqa": ("Attention", {**HEADS, "num_kv_heads": 1, "head_dim": 6, "alibi": 8.0}),
    "forget": ("Attention", {**HEADS, "forget_gate": True, "q_rank": 8}),
    "l2": ("Attention", {**HEADS, "qk_norm": "l2", "gate": "elementwise", "log_scale": False}),
    "tpa": ("Attention", {**HEADS, "ranks": (3, 2, 2)}),
    "mla": (
        "MultiHeadLatentAttention",
        {
            **HEADS,
            **{"q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_dim": 6, "qk_rope_dim": 0},
            "v_dim": 5,
        },
    ),
    "deltanet": ("DeltaNet", {**HEADS, "gate": "sigmoid", "conv_bias": True}),
    "gdn": ("GatedDeltaNet", {"num_heads": 2, "num_v_heads": 4}),
    "kda": ("KimiDeltaAttention", HEADS),
    "gla": ("GatedLinearAttention", HEADS),
    "linear": ("LinearAttention", HEADS),
    "mamba2": ("Mamba2", {"headdim": 4, "ngroups": 4, "d_state": 5, "bias": True}),
    "mlp": ("MLP", {"hidden_dim": 24}),
    "glu": ("GatedMLP", {"hidden_dim": 24, "bias": True, "recompute": True}),
    "moe": ("MoE", MIXTURE | {"activation": "clamped_swiglu", "bias": True}),
    "moe-relu": ("MoE", MIXTURE | {"activation": "relu", "bias": True, "capacity_factor": 1.0}),
    "moe-inputs": ("MoE", MIXTURE | {"router": "llama4", "top_k": 1, "bias": True}),
    "moe-shared": ("MoE", MIXTURE | {"shared_hidden_dim": 8, "shared_gate": True}),
    "moe-chosen": ("MoE", MIXTURE | {"router": "expert_choice", "capacity_factor": 1.0}),
    "moe-vectors": ("MoE", MIXTURE | {"router_grad": "default_vector", "shared_hidden_dim": 8}),
}


def of_layers(rank, ranks, port):
    start(rank, ranks, port)
    mesh = init_device_mesh("cpu", (ranks,))
    for name, (kind, options) in LAYERS.items():
        torch.manual_seed(0)
        whole = draw(getattr(modules, kind)(dim=16, **options).double())
        x, pull = randn(2, T, 16), randn(2, T, 16)
        given = x.clone().requires_grad_()
        expected = whole(given)
        ((expected * pull).sum() + Routers(whole).loss()).backward()
        for sequence_parallel in (False, True):
            where = f"{name} {sequence_parallel}"
            split = copy.deepcopy(whole)
            split.zero_grad()
            if rank > 0:  # the first rank's values are taken
                draw(split)
            assert tensor_parallel(split, mesh, sequence_parallel) is split
            mine = (lambda t: t.chunk(ranks, 1)[rank]) if sequence_parallel else (lambda t: t)
            ours = mine(x).clone().requires_grad_()
            out = split(ours)
            ((out * mine(pull)).sum() + Routers(split).loss()).backward()
            same(out, mine(expected), where)
            same(ours.grad, mine(given.grad), where)
            same_gradients(split, whole, where)
    dist.destroy_process_group()


SIZES = {"dim": 16, "num_layers": 2, "vocab_size": 40}
MLA = {"kv_lora_rank": 8, "qk_nope_dim": 4, "qk_rope_dim": 2, "v_dim": 4}
MOE = {"experts": 4, "top_k": 2, "hidden_dim": 24}
NEXT = {"linear_heads": 2, "linear_v_heads": 4, "linear_head_dim": 4, "linear_v_head_dim": 4}


def mamba2():
    mixer = modules.Mamba2.Config(16, d_state=5, headdim=4, ngroups=4)
    block = modules.DecoderBlock.Config(mixer, None, modules.RMSNorm.Config(16))
    return replace(PRESETS["gated-deltanet"], blocks=(block,), **SIZES)


def models():
    """Configs by name: a GQA, a tied head with caps, ALiBi, recurrences, hybrids, experts, MTP."""

    def preset(name, **sizes):
        return replace(PRESETS[name], **SIZES | sizes)

    yield "llama", preset("llama", num_heads=4, num_kv_heads=2, hidden_dim=24)
    yield "gemma2", preset("gemma-2-2b", num_heads=4, num_kv_heads=2, head_dim=4, hidden_dim=24)
    yield "bloom", preset("bloom-560m", num_heads=4)
    yield "gpt2", preset("gpt2", num_heads=4)
    yield "mamba2", mamba2()
    yield "mixtral", preset("mixtral", num_heads=4, num_kv_heads=2, **MOE)
    linear = {"linear_heads": 4, "linear_head_dim": 4, "schedule": ("linear", "full")}
    yield "kimi", preset("kimi-linear", num_heads=4, expert_dim=12, **MLA, **MOE, **linear)
    moe = MOE | {"expert_dim": 12, "shared_dim": 8, "num_kv_heads": 2, "head_dim": 8}
    schedule = {"schedule": ("linear", "full")}
    yield "qwen-next", preset("qwen3-next-80b-a3b", num_heads=4, **moe, **NEXT, **schedule)
    moe = MOE | {"expert_dim": 12}
    yield "deepseek", preset("deepseek-moe-mtp", num_heads=4, **MLA, **moe)


def of_models(rank, ranks, port):
    start(rank, ranks, port)
    mesh = init_device_mesh("cpu", (ranks,))
    for name, config in models():
        torch.manual_seed(0)
        whole = draw(config.build(dtype=torch.float64))
        tokens = torch.randint(config.vocab_size, (2, T + 1))
        tokens[0, 5] = -100 if whole.predictor is None else 3
        inputs = tokens.clamp(min=0)
        expected = whole(inputs[:, :-1])
        loss = whole(inputs[:, :-1], tokens[:, 1:])
        (loss + whole.auxiliary_loss() + Routers(whole).loss()).backward()
        for sequence_parallel in (False, True):
            where = f"{name} {sequence_parallel}"
            recompute = sequence_parallel and name != "kimi"
            split = replace(config, gradient_checkpointing=recompute).build(dtype=torch.float64)
            split.load_state_dict(whole.state_dict())
            tensor_parallel(split, mesh, sequence_parallel)
            same(split(inputs[:, :-1]), expected, where)
            with recompute_blocks(split) if name == "kimi" else nullcontext():
                found = split(inputs[:, :-1], tokens[:, 1:])
            same(found, loss, where)
            (found + split.auxiliary_loss() + Routers(split).loss()).backward()
            same_gradients(split, whole, where)
    dist.destroy_process_group()


def of_vocabulary(mesh, rank, ranks):
    """The loss of a head in parts, its options, and its refusals."""
    x, weight, bias = randn(2, 7, 8), randn(24, 8), randn(24)
    target = torch.randint(24, (2, 7))
    target[0, 2] = target[1, 3] = -100
    own = slice(rank * 24 // ranks, (rank + 1) * 24 // ranks)
    for options in (
        {},
        {"bias": bias, "softcap": 2.0, "z_loss": 0.1, "reduction": "sum"},
        {"reduction": "none", "backend": "reference", "ignore_index": 3},
    ):
        goal = target.where(target >= 0, 3) if "ignore_index" in options else target
        whole = [t.clone().requires_grad_() for t in (x, weight, bias)]
        more = {"bias": whole[2]} if "bias" in options else {}
        expected = functional.linear_cross_entropy(*whole[:2], goal, **options | more)
        mine = [x.clone(), weight[own].clone(), bias[own].clone()]
        mine = [t.requires_grad_() for t in mine]
        more = {"bias": mine[2]} if "bias" in options else {}
        found = vocabulary_parallel_cross_entropy(*mine[:2], goal, mesh, **options | more)
        same(found, expected, f"vocabulary {options}")
        pull = torch.randn_like(expected)
        (expected * pull).sum().backward()
        (found * pull).sum().backward()
        same(mine[0].grad, whole[0].grad, "vocabulary x")
        same(mine[1].grad, whole[1].grad[own], "vocabulary weight")
        if more:
            same(mine[2].grad, whole[2].grad[own], "vocabulary bias")
    bias[:: 24 // ranks] = -torch.inf  # hidden classes, the first of each rank among them
    goal = target.where(target % (24 // ranks) != 0, 1)
    expected = functional.linear_cross_entropy(x, weight, goal, bias=bias)
    found = vocabulary_parallel_cross_entropy(x, weight[own], goal, mesh, bias=bias[own])
    same(found, expected, "vocabulary with hidden classes")
    none = torch.full_like(target, -100)
    assert vocabulary_parallel_cross_entropy(x, weight[own], none, mesh) == 0
    for wrong in (24, -1):
        with pytest.raises(ValueError, match=r"target must be in \[0, 24\) or -100"):
            vocabulary_parallel_cross_entropy(x, weight[own], torch.full_like(none, wrong), mesh)


def refuse(mesh, ranks):
    """All ranks get the same error, and nothing changes."""
    cases = [
        ("num_heads of Attention, got num_heads=3", modules.Attention(dim=12, num_heads=3)),
        (
            "num_kv_heads of Attention or be a multiple of it",
            modules.Attention(dim=24, num_heads=12, num_kv_heads=3),
        ),
        ("hidden_dim of GatedMLP, got hidden_dim=9", modules.GatedMLP(dim=8, hidden_dim=9)),
        ("hidden_dim of Experts, got hidden_dim=9", modules.MoE(8, 9, experts=4, top_k=2)),
        (
            f"hidden_dim of Experts, got hidden_dim=9, ranks={ranks}",
            replace(
                PRESETS["mixtral"], **SIZES | {"num_heads": 4} | MOE | {"hidden_dim": 9}
            ).build(),
        ),
        ("ngroups of Mamba2, got ngroups=1", modules.Mamba2(dim=8, headdim=4)),
        ("qk_norm of Attention", modules.Attention(dim=8, num_heads=4, qk_norm="rms_full")),
        ("cannot split MoBA", modules.MoBA(dim=8, num_heads=4, block_size=4)),
        ("vocab_size=41", replace(PRESETS["llama-test"], vocab_size=41).build()),
        ("cannot split Mamba; layers that it splits are Attention", PRESETS["samba"].build()),
        ("canon must be ''", PRESETS["canon"].build()),
        ("engram must be None", PRESETS["engram"].build()),
    ]
    for message, model in cases:
        with pytest.raises((NotImplementedError, ValueError)) as error:
            tensor_parallel(model, mesh)
        assert message in str(error.value), error.value
        assert not any(isinstance(p, DTensor) for p in model.parameters())
    layer = modules.Attention(dim=8, num_heads=4)
    with pytest.raises(TypeError, match="mesh must be a DeviceMesh"):
        tensor_parallel(layer, None)
    with pytest.raises(ValueError, match=r"mesh must have one dimension"):
        tensor_parallel(layer, init_device_mesh("cpu", (1, ranks), mesh_dim_names=("dp", "tp")))
    tensor_parallel(layer, mesh)
    with pytest.raises(ValueError, match="must have whole parameters"):
        tensor_parallel(layer, mesh)
    x = torch.randn(1, 4, 8)
    with pytest.raises(NotImplementedError, match="bias must be None"):
        layer(x, bias=torch.zeros(4, 4))
    with pytest.raises(NotImplementedError, match="mask of split heads"):
        layer(x, mask=functional.masks.Strided(2, 2))
    assert all(isinstance(p, DTensor) for p in layer.parameters())  # errors leave nothing behind
    config = replace(PRESETS["llama"], num_heads=4, num_kv_heads=4, **SIZES, hidden_dim=24)
    model = tensor_parallel(config.build(), mesh, sequence_parallel=True)
    with pytest.raises(ValueError, match="the ranks must divide the tokens, got T=7"):
        model(torch.zeros(1, 7, dtype=torch.long))
    with pytest.raises(ValueError, match=r"tokens must be in \[0, 40\)"):
        model(torch.full((1, 8), 40))
    layer = tensor_parallel(modules.Attention(dim=8, num_heads=4), mesh, True)
    with torch.no_grad(), pytest.raises(NotImplementedError, match="state must be None"):
        layer(x[:, :2], state=layer.new_state(1, 4))


def calls(mesh, rank, ranks):
    """Masks and scores of single heads, nested tokens, caches, dropout."""
    config = replace(PRESETS["llama"], num_heads=4, num_kv_heads=2, **SIZES, hidden_dim=24)
    torch.manual_seed(0)
    whole = draw(config.build(dtype=torch.float64))
    split = tensor_parallel(copy.deepcopy(whole), mesh)
    tokens = torch.randint(40, (2, T))
    seen = torch.rand(2, 4, T, T) < 0.7
    for given in (
        {"mask": seen},
        {"mask": seen[:, :1]},
        {"mask": functional.masks.KeyLengths(torch.tensor([9, 16]))},
        {"mask": lambda b, h, q, k: (q + h) % 3 != k % 3},
        {"score_mod": lambda score, b, h, q, k: score + h * 0.1 * (q - k)},
    ):
        same(split(tokens, **given), whole(tokens, **given), f"{list(given)}")
    nested = torch.nested.nested_tensor([tokens[0], tokens[1, :5]], layout=torch.jagged)
    same(split(nested, nested), whole(nested, nested), "nested")
    same(split(nested).values(), whole(nested).values(), "nested")
    expected = generate(whole, tokens[:, :5], 6)
    assert torch.equal(generate(split, tokens[:, :5], 6), expected)
    recurrent = draw(mamba2().build(dtype=torch.float64))
    expected = generate(recurrent, tokens[:, :5], 6)
    assert torch.equal(generate(tensor_parallel(recurrent, mesh), tokens[:, :5], 6), expected)

    torch.manual_seed(0)
    whole = draw(replace(config, dropout_p=0.5).build(dtype=torch.float64))
    for sequence_parallel in (False, True):
        split = tensor_parallel(copy.deepcopy(whole), mesh, sequence_parallel)
        logits = split(tokens)
        others = [torch.empty_like(logits) for _ in range(ranks)]
        dist.all_gather(others, logits.detach())
        assert all(torch.equal(other, logits) for other in others)
        assert not torch.equal(split(tokens), logits)
    dropped = modules.MLP(dim=8, hidden_dim=64, dropout_p=0.5)
    torch.nn.init.eye_(dropped.down_proj.weight)
    y = tensor_parallel(dropped, mesh)
    seeds = torch.get_rng_state()
    y(torch.ones(1, 4, 8))
    states = [torch.empty_like(seeds) for _ in range(ranks)]
    dist.all_gather(states, torch.get_rng_state())
    assert all(torch.equal(state, states[0]) for state in states)
    assert not torch.equal(states[0], seeds)


def states(mesh, rank, ranks, config):
    """Whole weights from a split model and back, checkpoints on other meshes, an optimizer step."""
    torch.manual_seed(0)
    whole = config.build(dtype=torch.float64)
    split = tensor_parallel(copy.deepcopy(whole), mesh, sequence_parallel=True)
    tokens = torch.randint(40, (2, T))
    for model in (whole, split):
        optimizer = torch.optim.AdamW(
            parameter_groups(model, 0.1), lr=0.1, fused=True, betas=(0.5, 0.5), eps=1e-3
        )
        model(tokens, tokens).backward()
        norm = clip_gradients(model.parameters(), 0.01)
        optimizer.step()
    assert norm > 0.01
    found = get_model_state_dict(split, options=StateDictOptions(full_state_dict=True))
    weights = whole.state_dict()
    assert found.keys() == weights.keys()
    for name, t in found.items():
        same(t, weights[name], f"after a step {name}")

    empty = config.build(dtype=torch.float64, device="meta")
    other = tensor_parallel(empty, mesh).to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(other, dict(weights), options=options)
    same(other(tokens), whole(tokens), "whole weights loaded")

    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    dcp.save({"model": split.state_dict()}, checkpoint_id=folder[0])
    single = config.build(dtype=torch.float64)
    state = {"model": single.state_dict()}
    if rank == 0:
        dcp.load(state, checkpoint_id=folder[0], no_dist=True)
        assert all(torch.equal(t, found[name]) for name, t in state["model"].items())
    dist.barrier()
    dcp.load({"model": other.state_dict()}, checkpoint_id=folder[0])
    same(other(tokens), whole(tokens), "checkpoint loaded")
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])


def of_the_rest(rank, ranks, port):
    start(rank, ranks, port)
    mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0)
    of_vocabulary(mesh, rank, ranks)
    refuse(mesh, ranks)
    calls(mesh, rank, ranks)
    sizes = {"num_heads": 4, "num_kv_heads": 1, **SIZES}
    states(mesh, rank, ranks, replace(PRESETS["llama"], **sizes, hidden_dim=24))
    states(mesh, rank, ranks, replace(PRESETS["mixtral"], **sizes, **MOE))
    dist.destroy_process_group()


def of_three(rank, ranks, port):
    """Halves of experts whose parts go to ranks in another order than they are stored in."""
    start(rank, ranks, port)
    mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0)
    whole = draw(modules.MoE(dim=16, **MIXTURE, bias=True).double())
    split = tensor_parallel(copy.deepcopy(whole), mesh)
    nested = [randn(5, 16), randn(3, 16)]
    for given in (randn(2, T, 16), torch.nested.nested_tensor(nested, layout=torch.jagged)):
        found, expected = split(given), whole(given)
        if given.is_nested:
            found, expected = found.values(), expected.values()
        same(found, expected, "three")
        pull = torch.randn_like(expected)
        for model, y in ((split, found), (whole, expected)):
            ((y * pull).sum() + model.state.balance_loss + model.state.z_loss).backward()
        same_gradients(split, whole, "three")
    dist.destroy_process_group()


WORK = {
    "of_three": of_three,
    "of_layers": of_layers,
    "of_models": of_models,
    "of_the_rest": of_the_rest,
}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("work", ["of_layers", "of_models", "of_the_rest"])
def test_processes(work, ranks):
    run(__file__, work, ranks)


def test_three_processes():
    run(__file__, "of_three", 3)


if __name__ == "__main__":
    main(WORK)
