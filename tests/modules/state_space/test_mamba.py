"""The layer of Mamba: its formula, transformers' mixers, steps and how its parameters begin."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as nnf

from omniattn.modules import Mamba, Mamba2, SimpleSelectiveSSM
from omniattn.training import parameter_groups

DIM = 12


def layer(**options) -> Mamba:
    torch.manual_seed(0)
    made = Mamba(DIM, d_state=5, **{"init_std": 0.3} | options, dtype=torch.float64)
    torch.nn.init.normal_(made.D)
    torch.nn.init.normal_(made.A_log)
    return made


def direct(m: Mamba, x: torch.Tensor) -> torch.Tensor:
    c = m.config
    u, z = m.in_proj(x).chunk(2, -1)
    steps = x.shape[1]
    u = nnf.silu(
        nnf.conv1d(u.mT, m.conv1d.weight, m.conv1d.bias, padding=c.d_conv - 1, groups=c.inner)
    ).mT[:, :steps]
    r, b, rows = m.x_proj(u).split((c.rank, c.d_state, c.d_state), -1)
    if c.norm_eps is not None:
        r, b, rows = m.dt_layernorm(r), m.b_layernorm(b), m.c_layernorm(rows)
    dt = nnf.softplus(nnf.linear(r, m.dt_proj.weight, m.dt_proj.bias))
    h, out = torch.zeros(len(x), c.inner, c.d_state, dtype=x.dtype), []
    for t in range(steps):
        h = (dt[:, t, :, None] * -m.A_log.exp()).exp() * h
        h = h + (dt * u)[:, t, :, None] * b[:, t, None]
        out.append((h * rows[:, t, None]).sum(-1))
    return m.out_proj((torch.stack(out, 1) + m.D * u) * nnf.silu(z))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm_eps": 1e-6},
        {"bias": True, "conv_bias": False, "d_conv": 2, "dt_rank": 3, "inner_dim": 20},
    ],
)
def test_mamba_is_its_formula(options):
    m = layer(**options)
    x = torch.randn(2, 9, DIM, dtype=torch.float64)
    torch.testing.assert_close(m(x), direct(m, x))


@torch.no_grad()
def test_states_are_wide_and_small():
    m = Mamba(DIM).to(torch.bfloat16)
    m.A_log.data, m.D.data = m.A_log.float(), m.D.float()
    state = m.new_state(2, 100)
    assert state["ssm"].dtype == torch.float32 and state["ssm"].shape == (2, 2 * DIM, 16)
    assert state["conv"].dtype == torch.bfloat16 and state["conv"].shape == (2, 2 * DIM, 3)
    x = torch.randn(2, 5, DIM, dtype=torch.bfloat16)
    steps = torch.cat([m(part, state=state) for part in x.split(2, 1)], 1)
    torch.testing.assert_close(steps, m(x), rtol=2e-2, atol=2e-2)


def test_how_it_begins():
    m = Mamba(64, dt_init_floor=2e-3)
    dt = nnf.softplus(m.dt_proj.bias)
    assert m.config.rank == 4 and m.dt_proj.weight.abs().max() <= 0.5
    assert dt.min() > 1.9e-3 and 0.05 < dt.max() < 0.101
    torch.testing.assert_close(m.A_log.exp()[7], torch.arange(1.0, 17.0))
    assert torch.equal(m.D, torch.ones(128))
    assert torch.all(Mamba(64, dt_init="constant", dt_scale=2.0).dt_proj.weight == 1)
    assert Mamba(64, dtype=torch.bfloat16).A_log.dtype == torch.float32


def test_time_scales_do_not_decay():
    layer = nn.ModuleDict(
        {
            "mamba": Mamba(DIM, norm_eps=1e-6),
            "mamba2": Mamba2(DIM, d_state=4, headdim=8),
            "simple": SimpleSelectiveSSM(DIM, 4),
        }
    )
    decayed, _ = (group["params"] for group in parameter_groups(layer, 0.1))
    names = {id(p): name for name, p in layer.named_parameters()}
    kept = {name for name in names.values() if name.endswith("weight") and "norm" not in name}
    assert {names[id(p)] for p in decayed} == kept


def their_mixer(bias: bool = False, conv_bias: bool = True):
    transformers = pytest.importorskip("transformers")
    from transformers.models.mamba import modeling_mamba

    config = transformers.MambaConfig(
        vocab_size=31,
        hidden_size=DIM,
        state_size=5,
        num_hidden_layers=1,
        use_bias=bias,
        use_conv_bias=conv_bias,
    )
    torch.manual_seed(0)
    theirs = modeling_mamba.MambaMixer(config, layer_idx=0).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return theirs, config


def their_cache(config):
    from transformers.cache_utils import DynamicCache

    return DynamicCache(config=config)


@pytest.mark.parametrize(("bias", "conv_bias"), [(False, True), (True, False)])
def test_the_mixer_of_transformers(bias, conv_bias):
    theirs, _ = their_mixer(bias, conv_bias)
    ours = Mamba(DIM, d_state=5, bias=bias, conv_bias=conv_bias)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 9, DIM)
    found, expected = ours(x), theirs(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    found.square().sum().backward()
    expected.square().sum().backward()
    grads = {name: p.grad for name, p in theirs.named_parameters()}
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p.grad, grads[name], rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_steps_of_the_mixer_of_transformers():
    theirs, config = their_mixer()
    ours = Mamba(DIM, d_state=5)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 9, DIM)
    cache, state = their_cache(config), ours.new_state(2, 9)
    for part in (x[:, :6], *x[:, 6:].split(1, 1)):
        expected = theirs(part, cache_params=cache)
        torch.testing.assert_close(ours(part, state=state), expected, rtol=1e-4, atol=1e-5)


def go_on(batch):
    layer = Mamba(8)
    return layer(torch.ones(2, 1, 8), state=layer.new_state(batch, 1))


@torch.no_grad()
def test_a_saved_state_knows_its_tokens_alone():
    """Not what it has derived from the parameters of a layer of this process."""
    layer, x = Mamba(8, dtype=torch.float32), torch.randn(1, 3, 8)
    state = layer.new_state(1, 3)
    fresh = len(pickle.dumps(state))
    for t in range(2):
        layer(x[:, t : t + 1], state=state)
    kept = pickle.dumps(state)
    assert len(kept) < fresh + 16
    torch.testing.assert_close(layer(x[:, 2:], state=pickle.loads(kept)), layer(x)[:, 2:])


@pytest.mark.parametrize("config", [Mamba.Config(8), Mamba2.Config(8, headdim=8)])
@pytest.mark.parametrize("name", ["conv1d.weight", "A_log"])
@torch.no_grad()
def test_a_step_follows_writes_that_raise_no_version(config, name):
    layer, x = config.build(dtype=torch.float32), torch.randn(1, 2, 8)
    state = layer.new_state(1, 2)
    layer(x[:, :1], state=state)
    for write in (lambda t: t.data.mul_(1.5), lambda t: np.multiply(t.numpy(), 2, out=t.numpy())):
        weight = layer.get_parameter(name)
        version = weight._version
        write(weight.detach())
        assert weight._version == version
        other = layer.new_state(1, 2)  # derives anew
        other.load_state_dict(state.state_dict())
        y = layer(x[:, 1:], state=state)
        torch.testing.assert_close(y, layer(x[:, 1:], state=other), rtol=0, atol=0)


def test_a_state_of_another_layer():
    state = Mamba(8).new_state(1, 1)
    with pytest.raises(ValueError, match=r"SSM: state must have s, .*another layer.*got ssm, conv"):
        SimpleSelectiveSSM(dim=8)(torch.ones(1, 1, 8), state=state)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Mamba(8, dt_init="zero"), "dt_init must be 'random' or 'constant', got dt_init="),
        (lambda: Mamba(8, expand=0), "expand must be >= 1, got expand=0"),
        (lambda: Mamba(8, dt_min=1.0), r"dt_min must be in \(0, dt_max\]"),
        (lambda: Mamba(8)(torch.ones(1, 2, 8), mask=torch.ones(1)), "mask must be None"),
        (lambda: Mamba(8)(torch.ones(2, 8)), r"x must have shape \(B, T, 8\), got x.shape"),
        (
            lambda: Mamba(8)(torch.ones(1, 2, 6)),
            r"x must have shape \(B, T, 8\), got .*\(1, 2, 6\)",
        ),
        (
            lambda: go_on(3),
            r"state must be of the B=2 sequences of x, got state\['ssm'\].shape=\(3,",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=f"Mamba: {message}"):
        call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "config", [Mamba.Config(DIM, 5, norm_eps=1e-6), Mamba2.Config(DIM, 4, headdim=8)]
)
@torch.no_grad()
def test_a_token_updates_its_state_in_place(config, dtype):
    """To what the functions give, which a layer calls that insists on a backend; weights that
    change are those of the next token."""
    torch.manual_seed(0)
    layers = [made.build(dtype=dtype) for made in (config, replace(config, backend="cpu"))]
    layers[1].load_state_dict(layers[0].state_dict())
    states = [each.new_state(2, 9) for each in layers]
    name = "ssm" if isinstance(layers[0], Mamba) else "s"
    where = states[0][name].data_ptr()
    for part in torch.randn(2, 9, DIM, dtype=dtype).split((4, 1, 1, 1, 1, 1), 1):
        found, expected = (m(part, state=s) for m, s in zip(layers, states, strict=True))
        torch.testing.assert_close(found, expected)
        for key in (name, "conv"):
            torch.testing.assert_close(states[0][key], states[1][key])
        for each in layers:
            each.A_log.mul_(1.1)
            each.conv1d.weight.mul_(1.1)
    assert states[0].length == 9 and states[0][name].data_ptr() == where
    states[0].reorder(torch.tensor([1, 0]))
    states[1].reorder(torch.tensor([1, 0]))
    x = torch.randn(2, 1, DIM, dtype=dtype)
    torch.testing.assert_close(layers[0](x, state=states[0]), layers[1](x, state=states[1]))
