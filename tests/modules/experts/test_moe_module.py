"""MoE layers: losses, capacity, masks, bias updates."""

import copy
import dataclasses
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import omniattn.functional as F
from omniattn.modules import Experts, MoE, Router


def test_default_vectors_move_in_training_and_teach_the_router():
    torch.manual_seed(0)
    options = {"experts": 5, "top_k": 2, "init_std": 0.5}
    layer, x = MoE(8, 6, router_grad="default_vector", **options), torch.randn(30, 8)
    plain = MoE(8, 6, router_grad="ste", **options)
    plain.load_state_dict(layer.state_dict(), strict=False)
    torch.testing.assert_close(layer(x), plain(x))
    assert not layer.experts.default_vectors.any()
    layer.update_default_vectors()
    assert (layer.experts.default_vectors.abs().sum(-1) > 0).all()
    gradients = []
    for each in (layer, plain):
        each(x).square().sum().backward()
        gradients.append(each.gate.weight.grad)
    assert not torch.allclose(*gradients, rtol=1e-2)
    with pytest.raises(RuntimeError, match="update_default_vectors needs router_grad="):
        plain.update_default_vectors()
    with pytest.raises(ValueError, match="router_grad must be 'exact' unless router is 'sof"):
        dataclasses.replace(layer.config.gate, router="sigmoid")


@pytest.mark.parametrize("options", [{}, {"router_grad": "default_vector"}, {"jitter": 0.1}])
def test_checkpointing_changes_neither_gradients_nor_statistics(options):
    config = MoE.Config.of(8, 6, 5, 2, init_std=0.5, balance_coefficient=0.1, **options)
    torch.manual_seed(0)
    plain, x = MoE(config, dtype=torch.float64), torch.randn(30, 8, dtype=torch.float64)
    layer = copy.deepcopy(plain)
    for _ in range(2):
        torch.manual_seed(1)
        (plain(x).square().sum() + plain.state.balance_loss).backward()
        torch.manual_seed(1)
        y = checkpoint(layer, x, use_reentrant=False)
        state = layer.state
        (y.square().sum() + state.balance_loss).backward()
        assert layer.state is state  # another one would keep the graph of the repeated forward
        for a, b in zip(plain.parameters(), layer.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
        if options.get("router_grad"):
            for each in (plain, layer):
                each.update_default_vectors()
            assert torch.equal(plain.experts.default_vectors, layer.experts.default_vectors)


def test_switch_layer_drops_over_capacity_in_training_only():
    torch.manual_seed(0)
    layer, x = MoE(MoE.Config.switch(16, 24, 4)), torch.randn(2, 20, 16)
    layer.gate.weight.data[0] += 1  # expert 0 becomes popular with some
    y = layer(x)
    state = layer.state
    capacity = F.expert_capacity(40, 4, 1, 1.25)
    assert (
        state.counts.sum() == 40 and state.dropped == (state.counts - capacity).clamp(min=0).sum()
    )
    assert state.dropped > 0
    assert torch.equal((y == 0).all(-1), state.experts[..., 0] < 0)
    dropped = (state.experts < 0).any(-1)
    gate = layer.gate
    gate.config = dataclasses.replace(gate.config, capacity_by_score=True, jitter=0.0)
    layer.config = dataclasses.replace(layer.config, gate=gate.config)
    routing, state = layer.route(x)
    gone, best = state.experts[..., 0] < 0, routing.scores.amax(-1)
    assert not torch.equal(gone, dropped)
    for e in range(4):
        mine = routing.scores.argmax(-1) == e
        if (gone & mine).any():
            assert best[gone & mine].max() <= best[mine & ~gone].min()
    layer.eval()(x)
    assert layer.state.dropped == 0


def test_padding_goes_to_no_expert():
    torch.manual_seed(0)
    config = MoE.Config.deepseek_v3(16, 24, 8, 2, groups=4, top_groups=2, z_coefficient=1.0)
    layer, x = MoE(config), torch.randn(2, 9, 16)
    mask = torch.arange(9) < torch.tensor([[9], [5]])
    y = layer(x, mask)
    state = layer.state
    assert state.counts.sum() == 2 * 14
    torch.testing.assert_close(y[~mask], layer.shared_experts(x)[~mask])
    z = F.router_z_loss(layer.gate(x)[0][mask])
    torch.testing.assert_close(state.z_loss, z)
    x[~mask] = torch.nan
    torch.testing.assert_close(layer(x, mask)[mask], y[mask])
    torch.testing.assert_close(layer.state.balance_loss, state.balance_loss)
    torch.testing.assert_close(layer.state.entropy, state.entropy)


@pytest.mark.parametrize("router", ["softmax", "noisy", "expert_choice"])
def test_padding_takes_no_room_and_makes_none(router):
    options = {"router": router, "capacity_factor": 0.5, "capacity_at_eval": True}
    torch.manual_seed(0)
    layer, x = MoE(8, 6, 4, 2, init_std=0.5, **options).eval(), torch.randn(2, 20, 8)
    x[:, 8:] = 0.0
    mask = (torch.arange(20) < 8).expand(2, 20)
    y = layer(x, mask)
    counts, dropped = layer.state.counts, layer.state.dropped
    torch.testing.assert_close(layer(x[:, :8]), y[:, :8])
    assert torch.equal(layer.state.counts, counts) and layer.state.dropped == dropped
    assert router == "expert_choice" or dropped > 0


@pytest.mark.parametrize("router", ["softmax", "sigmoid", "noisy", "llama4", "expert_choice"])
def test_no_tokens_and_none_but_padding(router):
    balance = {"sigmoid": "deepseek_v3", "noisy": "importance_load"}.get(router, "switch")
    options = {"balance": balance, "balance_coefficient": 0.1, "z_coefficient": 0.1}
    layer = MoE(MoE.Config.of(12, 16, 6, 2, router=router, capacity_factor=2.0, **options))
    for tokens, padding in ((0, False), (0, True), (3, True)):
        x = torch.randn(2, tokens, 12, requires_grad=True)
        y = layer(x, torch.zeros(2, tokens, dtype=torch.bool) if padding else None)
        state = layer.state
        assert y.shape == x.shape and not y.any()
        assert state.entropy == 0 and state.balance_loss == 0 and state.z_loss == 0
        (y.sum() + state.balance_loss).backward()
        for p in layer.parameters():
            assert p.grad is None or p.grad.isfinite().all()


def test_importance_and_load_of_the_noisy_router():
    options = {"router": "noisy", "balance": "importance_load", "balance_coefficient": 0.5}
    torch.manual_seed(0)
    layer, x = MoE(MoE.Config.of(8, 6, 4, 2, **options)), torch.randn(30, 8)
    torch.nn.init.normal_(layer.gate.weight)
    layer(x)
    loss = layer.state.balance_loss
    for weight in (layer.gate.weight, layer.gate.noise_weight):
        assert torch.autograd.grad(loss, weight, retain_graph=True)[0].any()
    layer.eval()(x)
    routing, state = layer.route(x)
    importance = torch.stack([routing.weights[routing.experts == e].sum() for e in range(4)])
    expected = sum(t.var(correction=0) / t.mean() ** 2 for t in (importance, state.counts.float()))
    torch.testing.assert_close(state.balance_loss, 0.5 * expected)


def test_dense_straight_through_counts_the_chosen():
    options = {"renormalize": False, "balance_coefficient": 1.0}
    torch.manual_seed(0)
    sparse, x = MoE(MoE.Config.of(8, 6, 4, 2, **options)), torch.randn(30, 8)
    dense = MoE(8, 6, 4, 2, router_grad="ste_dense", **options)
    dense.load_state_dict(sparse.state_dict())
    torch.testing.assert_close(dense(x), sparse(x))
    assert torch.equal(dense.state.counts, sparse.state.counts)
    torch.testing.assert_close(dense.state.balance_loss, sparse.state.balance_loss)


def test_empty_slots_of_expert_choice_are_not_kept_for_the_backward():
    config = MoE.Config.of(8, 64, 32, 1, router="expert_choice", capacity_factor=1.0)
    x, kept = torch.randn(64, 8), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()), lambda t: t):
        MoE(config)(x)
    assert max(kept) <= 32 * 2 * 64 * 8  # the weights; E slots a token would be eight times that


def test_bias_update_evens_out_the_load():
    torch.manual_seed(0)
    layer = MoE(MoE.Config.deepseek_v3(16, 8, 8, 2, groups=1, top_groups=1))
    layer.gate.weight.data.mul_(20)
    layer.gate.weight.data[0] *= 0
    x = torch.randn(200, 16)
    spread = []
    for _ in range(60):
        layer(x)
        spread.append(layer.state.counts.double().std().item())
        layer.update_bias(8e-3)
    assert spread[-1] < 0.3 * spread[0]


def test_bias_update_by_the_counts_of_several_forwards():
    torch.manual_seed(0)
    config = MoE.Config.deepseek_v3(16, 8, 8, 2, groups=1, top_groups=1)
    whole, parts = MoE(config), MoE(config)
    parts.load_state_dict(whole.state_dict())
    x = torch.randn(30, 16)
    whole(x)
    whole.update_bias()
    counts = 0
    for part in x.split(10):
        parts(part)
        counts = counts + parts.state.counts
    parts.update_bias(counts=counts)
    assert torch.equal(parts.gate.e_score_correction_bias, whole.gate.e_score_correction_bias)


@pytest.mark.parametrize("router", ["softmax", "sigmoid", "noisy", "expert_choice"])
def test_every_router_trains(router):
    torch.manual_seed(0)
    config = MoE.Config.of(
        12, 16, 6, 2, router=router, capacity_factor=2.0, balance_coefficient=0.1
    )
    layer = MoE(config).double()
    x = torch.randn(3, 10, 12, dtype=torch.float64)
    target = torch.randn(3, 10, 12, dtype=torch.float64)
    optimizer = torch.optim.Adam(layer.parameters(), 5e-2)
    losses = []
    for _ in range(15):
        loss = (layer(x) - target).square().mean() + layer.state.balance_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_copies_between_forward_and_backward():
    layer = MoE(MoE.Config.mixtral(8, 16, experts=4)).train()
    x = torch.randn(2, 3, 8)
    y = layer(x)
    for same in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert same.state is None
        torch.testing.assert_close(same(x), y, rtol=0, atol=0)
    (y.sum() + layer.state.balance_loss).backward()


def test_half_precision_and_autocast():
    torch.manual_seed(0)
    layer, x = MoE(MoE.Config.mixtral(16, 24, 4)), torch.randn(2, 5, 16)
    y = layer(x)
    default = MoE(MoE.Config.mixtral(16, 24, 4, router_grad="default_vector"))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == default(x).dtype == torch.bfloat16
    assert default.to("meta")(x.to("meta")).is_meta
    low = MoE(layer.config, dtype=torch.bfloat16)
    low.load_state_dict(layer.state_dict())
    torch.testing.assert_close(low(x.bfloat16()).float(), y, rtol=0.1, atol=3e-5)


@pytest.mark.parametrize("options", [{"router": "sigmoid"}, {"router_grad": "default_vector"}])
def test_what_moves_in_small_steps_stays_in_float32(options):
    layer, x = MoE(MoE.Config.of(8, 6, 4, 2, **options)), torch.randn(9, 8)
    (name,) = dict(layer.named_buffers())
    layer.get_buffer(name).add_(1.0)
    layer = layer.bfloat16()
    layer(x.bfloat16())
    layer.update_bias(1e-3) if "router" in options else layer.update_default_vectors()
    buffer = layer.get_buffer(name)
    assert buffer.dtype == torch.float32 and not torch.equal(buffer, buffer.bfloat16().float())
    assert layer.double().get_buffer(name).dtype == torch.float64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 5}, "top_k must be an int >= 1 and <= 4"),
        ({"router": "hash"}, "router must be one of softmax"),
        ({"activation": "tanh"}, "activation must be one of swiglu"),
        ({"balance": "gini"}, "balance must be one of switch"),
        ({"router": "expert_choice"}, "needs a capacity_factor"),
        ({"capacity_factor": -1.0}, "capacity_factor must be a finite number >= 0"),
        ({"capacity_factor": 1.0, "router_grad": "ste_dense"}, "capacity_factor must be None"),
        ({"capacity": 1, "router_grad": "ste_dense"}, "capacity_factor must be None"),
        ({"capacity": 1, "capacity_factor": 1.0}, "must not both be given"),
        ({"capacity": -1}, "capacity must be an int >= 0"),
        ({"capacity_at_eval": True}, "capacity_at_eval needs capacity or capacity_factor"),
        ({"capacity_by_score": True}, "capacity_by_score needs capacity or capacity_factor"),
        ({"groups": 3}, "Router: groups must divide E"),
        ({"top_k": 3, "groups": 2}, "k must be at most the experts of top_groups groups"),
        ({"router": "llama4", "route_scale": 2.5}, "route_scale must be 1.0 unless router is"),
        ({"router": "noisy", "groups": 2}, "top_groups must be 2 unless router is"),
        ({"noise_eps": 0.01}, "noise_eps must be 0.0 unless router is 'noisy', got noise_eps=0.01"),
        ({"balance": "importance_load"}, "needs router='noisy'"),
        ({"shared_gate": True}, "shared_gate needs shared experts"),
        ({"clamp": (1.0,)}, r"clamp must be \(alpha, limit\)"),
        ({"colour": 1}, r"MoE: must have .* \(unknown options colour\)"),
        ({"jitter": 1.0}, "jitter must be a finite number >= 0 and < 1"),
    ],
)
def test_bad_config(change, message):
    with pytest.raises((TypeError, ValueError), match=message):
        MoE(**({"dim": 8, "hidden_dim": 8, "experts": 4, "top_k": 2} | change))


@pytest.mark.parametrize(
    ("shape", "mask", "error", "message"),
    [
        ((8,), None, ValueError, r"x must have shape \(..., T, 8\), got x.shape=\(8,\)"),
        ((3, 7), None, ValueError, r"x must have shape \(..., T, 8\)"),
        ((3, 8), torch.ones(2, dtype=torch.bool), ValueError, r"token_mask must have shape \(3,\)"),
        ((3, 8), torch.ones(3), TypeError, "token_mask must be a bool tensor"),
        ((3, 8), [True] * 3, TypeError, "token_mask must be a bool tensor, got list"),
    ],
)
def test_bad_input(shape, mask, error, message):
    with pytest.raises(error, match=f"MoE: {message}"):
        MoE(MoE.Config.of(8, 6, 4, 2))(torch.zeros(shape), mask)


def test_parts_that_do_not_fit_each_other():
    gate, experts = Router.Config(8, 4, 2), Experts.Config(8, 16, 4)
    assert MoE.Config(gate, experts) == MoE.Config.of(8, 16, 4, 2)
    assert MoE(MoE.Config(gate, experts)).gate.config is gate
    for wrong, message in (
        ((gate, Experts.Config(6, 16, 4)), "the same dim, got gate.dim=8, experts.dim=6"),
        ((Router.Config(8, 6, 2), experts), "the same experts, got gate.experts=6, ex"),
        ((gate, Experts.Config(8, 16, 4, default_vectors=True)), "if and only if router_grad"),
    ):
        with pytest.raises(ValueError, match=message):
            MoE.Config(*wrong)


def test_renormalised_top_1_warns():
    with pytest.warns(UserWarning, match="weight 1 to every token"):
        MoE.Config.of(8, 8, 4, 1)
