"""The layers of RWKV: their formulas, steps, older parameter names, the layers of transformers."""

import dataclasses
import inspect

import pytest
import torch
from torch import nn
from torch.nn import functional as nnf

from omniattn import modules
from omniattn.models import BlocksConfig, generate
from omniattn.modules import (
    DecoderBlock,
    LayerNorm,
    RWKV4TimeMix,
    RWKV5TimeMix,
    RWKV6TimeMix,
    RWKV7TimeMix,
    RWKVChannelMix,
)
from omniattn.modules.rwkv.layers import Shifted

DIM, HEADS = 24, 3
CONFIGS = {
    "4": RWKV4TimeMix.Config(DIM, 1, 3),
    "5": RWKV5TimeMix.Config(DIM, 1, 3, head_dim=8),
    "6": RWKV6TimeMix.Config(DIM, 1, 3, head_dim=8, mix_rank=5, decay_rank=6),
    "7": RWKV7TimeMix.Config(DIM, 0, 3, head_dim=8, decay_rank=5, a_rank=4, gate_rank=6),
    "channel": RWKVChannelMix.Config(DIM, 1, 3),
    "channel 7": RWKVChannelMix.Config(DIM, 1, 3, hidden_dim=40, receptance=False),
}


def made(config) -> nn.Module:
    torch.manual_seed(0)
    layer = config.build(dtype=torch.float64)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.4)
    return layer


def inputs(steps: int = 9) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(2, steps, DIM, dtype=torch.float64)


def mixed(layer: nn.Module, x: torch.Tensor, part: str, more=0.0) -> torch.Tensor:
    previous = nnf.pad(x, (0, 0, 1, -1))
    return x + (previous - x) * (getattr(layer, layer.prefix + part) + more)


def heads(t: torch.Tensor) -> torch.Tensor:
    return t.unflatten(-1, (HEADS, -1))


def wkv4(layer, x):
    k, v = layer.key(mixed(layer, x, "k")), layer.value(mixed(layer, x, "v"))
    w, u = layer.time_decay.exp(), layer.time_first
    out = []
    for t in range(x.shape[1]):
        distance = torch.arange(t - 1, -1, -1, dtype=x.dtype)[:, None]
        weights = torch.cat((k[:, :t] - distance * w, k[:, t : t + 1] + u), 1).exp()
        out.append((weights * v[:, : t + 1]).sum(1) / weights.sum(1))
    return layer.output(layer.receptance(mixed(layer, x, "r")).sigmoid() * torch.stack(out, 1))


def normalised(layer, out):
    """Each token and head alone."""
    o = torch.stack(out, 1)
    norm = nnf.group_norm(o.flatten(0, 1).flatten(1), HEADS, eps=64e-5)
    return (norm * layer.ln_x.weight + layer.ln_x.bias).view(*o.shape[:2], DIM)


def with_bonus(layer, k, v, r, g, w):
    """Versions 5 and 6, from the inputs of the linear layers; w are decays."""
    k, v, r = (heads(f(y)) for f, y in ((layer.key, k), (layer.value, v), (layer.receptance, r)))
    state, out = k.new_zeros(2, HEADS, 8, 8), []
    for t in range(k.shape[1]):
        new = k[:, t, :, :, None] * v[:, t, :, None]
        out.append((r[:, t, :, :, None] * (state + layer.time_faaaa[..., None] * new)).sum(2))
        state = w[:, t, :, :, None] * state + new
    return layer.output(normalised(layer, out) * nnf.silu(layer.gate(g)))


def wkv5(layer, x):
    w = torch.exp(-torch.exp(layer.time_decay)).expand(2, x.shape[1], -1, -1)
    return with_bonus(layer, *(mixed(layer, x, part) for part in "kvrg"), w)


def wkv6(layer, x):
    low = torch.tanh(mixed(layer, x, "x") @ layer.time_maa_w1).chunk(5, -1)
    xs = {
        part: mixed(layer, x, part, y @ b)
        for part, y, b in zip("wkvrg", low, layer.time_maa_w2, strict=True)
    }
    d = layer.time_decay.flatten() + torch.tanh(xs["w"] @ layer.time_decay_w1) @ layer.time_decay_w2
    return with_bonus(layer, *(xs[part] for part in "kvrg"), heads(torch.exp(-torch.exp(d))))


def wkv7(layer, x):
    xs = {part: mixed(layer, x, part) for part in "rwkvag"}
    r, k, v = layer.receptance(xs["r"]), layer.key(xs["k"]), layer.value(xs["v"])
    d = -nnf.softplus(-(layer.w0 + torch.tanh(xs["w"] @ layer.w1) @ layer.w2)) - 0.5
    w = heads(torch.exp(-torch.exp(d)))
    a = torch.sigmoid(layer.a0 + (xs["a"] @ layer.a1) @ layer.a2)
    kk = nnf.normalize(heads(k * layer.k_k), dim=-1)
    k = k * (1 + (a - 1) * layer.k_a)
    r, k, v, a = (heads(t) for t in (r, k, v, a))
    state, out = k.new_zeros(2, HEADS, 8, 8), []  # (value, key), as the paper has it
    for t in range(x.shape[1]):
        forgotten = (state @ kk[:, t, :, :, None]) @ (kk[:, t] * a[:, t])[:, :, None]
        state = state * w[:, t, :, None] - forgotten + v[:, t, :, :, None] @ k[:, t, :, None]
        out.append((state @ r[:, t, :, :, None])[..., 0])
    norm = normalised(layer, out)
    bonus = ((r * k * layer.r_k).sum(-1, keepdim=True) * v).flatten(2)
    return layer.output((norm + bonus) * (torch.sigmoid(xs["g"] @ layer.g1) @ layer.g2))


def channel(layer, x):
    y = layer.value(torch.relu(layer.key(mixed(layer, x, "k"))) ** 2)
    return layer.receptance(mixed(layer, x, "r")).sigmoid() * y if "r" in layer.parts else y


FORMULAS = {"4": wkv4, "5": wkv5, "6": wkv6, "7": wkv7, "channel": channel, "channel 7": channel}


@pytest.mark.parametrize("name", CONFIGS)
def test_formula(name):
    layer, x = made(CONFIGS[name]), inputs()
    torch.testing.assert_close(layer(x), FORMULAS[name](layer, x))


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_decoding_goes_on_from_a_state(name):
    layer, x = made(CONFIGS[name]), inputs()
    state = layer.new_state(2, 9)
    parts = [layer(part, state=state) for part in x.split([2, 1, 0, 5, 1], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), layer(x))
    assert state.length == 9
    assert state.nbytes == layer.new_state(2, 10_000).nbytes


@pytest.mark.parametrize("name", CONFIGS)
def test_every_parameter_has_a_gradient(name):
    layer, x = made(CONFIGS[name]), inputs().requires_grad_()
    layer(x).square().sum().backward()
    for parameter, value in [("x", x), *layer.named_parameters()]:
        assert value.grad is not None and value.grad.abs().max() > 0, parameter


def blocks(version: str) -> BlocksConfig:
    """A decoder of three layers, each told its place."""
    parts = []
    for i in range(3):
        place = {"layer_idx": i, "num_layers": 3}
        mixer = type(CONFIGS[version])(DIM, **place, **({} if version == "4" else {"head_dim": 8}))
        mlp = RWKVChannelMix.Config(DIM, **place, receptance=version != "7")
        parts.append(DecoderBlock.Config(mixer, mlp, LayerNorm.Config(DIM)))
    return BlocksConfig(vocab_size=31, dim=DIM, num_layers=3, blocks=tuple(parts))


@torch.no_grad()
@pytest.mark.parametrize("version", ["4", "5", "6", "7"])
def test_a_decoder_generates_from_states_of_both_layers(version):
    model = made(blocks(version))
    prompt = torch.randint(31, (2, 4))
    tokens = generate(model, prompt, 5)
    for length in range(4, 9):
        assert tokens[:, length].equal(model(tokens[:, :length])[:, -1].argmax(-1))
    state = model.new_state(2, 9)
    model(tokens[:, :5], state=state)
    saved = [each.state_dict() for each in state]
    for each in state:
        each.reorder(torch.tensor([1, 0]))
    swapped = model(tokens[:, 5:].flip(0), state=state).flip(0)
    again = model.new_state(2, 9)
    for each, values in zip(again, saved, strict=True):
        each.load_state_dict(values)
        assert each.length == 5 and each.nbytes > 0
        with pytest.raises(ValueError, match="cannot forget"):
            each.crop(3)
    torch.testing.assert_close(model(tokens[:, 5:], state=again), swapped)


def test_values_of_the_first_layer_reach_the_others():
    config = blocks("7")
    model, tokens = made(config), torch.randint(31, (2, 6))
    loss = model(tokens, tokens)
    loss.backward()
    assert model.layers[2].mixer.v0.grad.abs().max() > 0
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.config = type(config)(**{**vars(config), "gradient_checkpointing": True})
    model(tokens, tokens).backward()
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(parameter.grad, grad)
    with pytest.raises(ValueError, match=r"shared must hold the values v_first .* layer_idx=1"):
        model.layers[1].mixer(inputs())
    with pytest.raises(ValueError, match=r"layer_idx=1, got shared=\['embeddings'\]$"):
        model.layers[1].mixer(inputs(), shared={"embeddings": inputs()})


def test_beginnings():
    """As the code of RWKV-7 prints them for a small layer."""
    layer = RWKV7TimeMix(64, 1, 3, head_dim=32)
    assert layer.w0[0, 0, 0].item() == pytest.approx(-6 + 0.5 - 2.5)
    assert layer.w0[0, 0, -1].item() == pytest.approx(0.5 + 2.5)
    assert layer.x_w[0, 0, 32].item() == pytest.approx(1 - 0.5 ** (0.9 * 2 / 3))
    assert layer.v0.mean().item() == pytest.approx(0.73) and layer.k_k[0, 0, 0] > 0.75
    assert layer.w1.shape == (64, 32) and layer.w1.abs().max() == layer.output.weight.max() == 0
    torch.testing.assert_close(layer.w2 @ layer.w2.T, 0.01 * torch.eye(32))
    layer = RWKV4TimeMix(64, 1, 3)
    assert layer.time_decay[0] == -5 and layer.time_decay[-1] == 3
    expected = torch.tensor(0.3).log() + 0.5 * torch.tensor([0.0, 1, -1, 0])
    torch.testing.assert_close(layer.time_first[:4], expected)
    torch.testing.assert_close(layer.x_v[0, 0, 32].item(), 1 - 0.5 ** (2 / 3) - 0.15)


def test_layers_of_transformers():
    module = pytest.importorskip("transformers.models.rwkv.modeling_rwkv")
    from transformers import RwkvConfig

    config = RwkvConfig(hidden_size=DIM, num_hidden_layers=1, intermediate_size=40)
    x = inputs(30).float()
    for theirs, ours in (
        (module.RwkvSelfAttention(config), RWKV4TimeMix(DIM)),
        (module.RwkvFeedForward(config), RWKVChannelMix(DIM, hidden_dim=40)),
    ):
        for parameter in theirs.parameters():
            nn.init.normal_(parameter, std=0.4)
        ours.load_state_dict(theirs.state_dict())
        torch.testing.assert_close(ours(x), theirs(x)[0], rtol=1e-4, atol=1e-5)


def rwkv_lm(version: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a layer in RWKV's own code, of ranks 4 and 5."""
    square, vector, heads = (DIM, DIM), (1, 1, DIM), (HEADS, DIM // HEADS)
    norm = {"ln_x.weight": (DIM,), "ln_x.bias": (DIM,)}
    linear = dict.fromkeys(("receptance", "key", "value", "output", "gate"), square)
    if version == "6":
        found = {f"time_maa_{part}": vector for part in "xwkvrg"} | {"time_decay": vector}
        found |= {"time_maa_w1": (DIM, 20), "time_maa_w2": (5, 4, DIM), "time_faaaa": heads}
        found |= {"time_decay_w1": (DIM, 5), "time_decay_w2": (5, DIM)}
    elif version == "7":
        del linear["gate"]
        names = (*(f"x_{part}" for part in "rwkvag"), "w0", "a0", "v0", "k_k", "k_a")
        found = dict.fromkeys(names, vector) | {"r_k": heads}
        found |= {f"{part}1": (DIM, 4) for part in "wavg"}
        found |= {f"{part}2": (4, DIM) for part in "wavg"}
    else:
        norm, found = {}, {"time_maa_k": vector, "time_maa_r": vector}
        linear = {"key": (40, DIM), "value": (DIM, 40), "receptance": square}
        if version == "channel 7":
            found = {"x_k": vector}
            del linear["receptance"]
    return found | {f"{name}.weight": size for name, size in linear.items()} | norm


OF_RWKV = {
    "6": RWKV6TimeMix.Config(DIM, head_dim=DIM // HEADS, mix_rank=4, decay_rank=5),
    "7": RWKV7TimeMix.Config(
        DIM, 1, 2, head_dim=DIM // HEADS, decay_rank=4, a_rank=4, v_rank=4, gate_rank=4
    ),
    "channel 6": RWKVChannelMix.Config(DIM, hidden_dim=40),
    "channel 7": RWKVChannelMix.Config(DIM, hidden_dim=40, receptance=False),
}


@pytest.mark.parametrize("version", OF_RWKV)
def test_weights_of_rwkv_are_saved_as_they_were_loaded(version):
    theirs = {name: torch.randn(size) for name, size in rwkv_lm(version).items()}
    layer = OF_RWKV[version].build(dtype=torch.float32)
    layer.load_state_dict(dict(theirs))
    saved = layer.state_dict()
    assert saved.keys() == theirs.keys()
    assert all(torch.equal(saved[name], weight) for name, weight in theirs.items())


def test_first_layer_of_rwkv7_drops_what_it_never_reads():
    """RWKV-LM makes and saves v0, v1 and v2 in all layers."""
    theirs = {name: torch.randn(size) for name, size in rwkv_lm("7").items()}
    layer = dataclasses.replace(OF_RWKV["7"], layer_idx=0).build(dtype=torch.float32)
    layer.load_state_dict(dict(theirs))
    saved = layer.state_dict()
    assert theirs.keys() - saved.keys() == {"v0", "v1", "v2"}
    assert all(torch.equal(theirs[name], weight) for name, weight in saved.items())


@pytest.mark.parametrize("name", [n for n in CONFIGS if n != "7"])
def test_older_names_of_parameters(name):
    """x_k for all versions, decays (heads, head_dim) of RWKV-6, and time_mix_k, which is 1 - mu."""
    layer = made(CONFIGS[name])
    x = inputs()
    mus = {layer.prefix + part: part for part in layer.parts}
    for rename, change in (("x_", lambda w: w), ("time_mix_", lambda w: 1 - w)):
        older = {
            rename + mus[n] if n in mus else n: change(w) if n in mus else w
            for n, w in layer.state_dict().items()
        }
        if name == "6":
            older["time_decay"] = older["time_decay"].view(HEADS, -1)
        again = CONFIGS[name].build(dtype=torch.float64)
        again.load_state_dict(older)
        torch.testing.assert_close(again(x), layer(x))


def test_only_these_layers_rename_what_they_load():
    """A layer that does must say under which names it saves, and be tested above."""
    kinds = [kind for name in modules.__all__ if inspect.isclass(kind := getattr(modules, name))]
    renaming = {
        kind.__name__
        for kind in kinds
        if issubclass(kind, Shifted) or "load_state_dict_pre_hook" in inspect.getsource(kind)
    }
    rwkv = {f"RWKV{version}TimeMix" for version in (4, 5, 6, 7)} | {"RWKVChannelMix"}
    assert renaming == rwkv | {"DecoderBlock"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RWKV4TimeMix(8, 3, 3), "layer_idx must be below num_layers, got layer_idx=3"),
        (lambda: RWKV6TimeMix(8), "dim must be a multiple of head_dim, got dim=8, head_dim=64"),
        (lambda: RWKV4TimeMix(8)(torch.ones(2, 8)), r"x must have shape \(B, T, 8\)"),
        (lambda: RWKV4TimeMix(8)(torch.ones(1, 2, 8), mask=torch.ones(1)), "mask must be None"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()
    with pytest.raises(TypeError, match=r"state must be a RecurrentState, got type\(state\)=dict"):
        RWKVChannelMix(8)(torch.ones(1, 2, 8), state={})
