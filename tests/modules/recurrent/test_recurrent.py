"""Recurrent mixers: their formulas, decoding, states, and the layers of transformers."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as nnf

from omniattn.models import BlocksConfig, generate
from omniattn.modules import (
    DecoderBlock,
    DeltaAttention,
    DeltaNet,
    GatedDeltaNet,
    GatedLinearAttention,
    GatedMLP,
    KimiDeltaAttention,
    LinearAttention,
    MultiScaleRetention,
    RecurrentState,
    RMSNorm,
    ShortConvolution,
)

DIM = 24
CONFIGS = {
    "linear": LinearAttention.Config(DIM, 3, init_std=0.3),
    "linear signed": LinearAttention.Config(DIM, 3, feature_map="identity", init_std=0.3),
    "delta attention": DeltaAttention.Config(DIM, 3, init_std=0.3),
    "delta attention, heads": DeltaAttention.Config(
        DIM, 3, feature_map="taylor", gates="heads", gates_of="x", b_bias=False, init_std=0.3
    ),
    "gla": GatedLinearAttention.Config(DIM, 2, init_std=0.3),
    "retention": MultiScaleRetention.Config(DIM, 2, init_std=0.3),
    "delta": DeltaNet.Config(DIM, 2, init_std=0.3),
    "delta, negative": DeltaNet.Config(DIM, 2, allow_neg_eigval=True, conv_size=0, init_std=0.3),
    "gated delta": GatedDeltaNet.Config(DIM, 2, num_v_heads=4, conv_bias=True, init_std=0.3),
    "kda": KimiDeltaAttention.Config(DIM, 2, init_std=0.3),
    "kda, bounded": KimiDeltaAttention.Config(DIM, 2, lower_bound=-5.0, gate=None, init_std=0.3),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return CONFIGS[name].build(dtype=torch.float64)


def inputs(steps: int = 9) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(2, steps, DIM, dtype=torch.float64)


def convolved(layer: nn.Module, name: str, x: torch.Tensor) -> torch.Tensor:
    """silu(conv(x W)) of q, k or v by torch's own convolution."""
    y = nnf.linear(x, getattr(layer, f"{name}_proj").weight)
    if layer.config.conv_size == 0:
        return nnf.silu(y) if layer.activates else y
    conv = getattr(layer, f"{name}_conv1d")
    padded = nnf.pad(y.mT, (layer.config.conv_size - 1, 0))
    return nnf.silu(nnf.conv1d(padded, conv.weight, conv.bias, groups=y.shape[-1])).mT


def heads(t: torch.Tensor, count: int) -> torch.Tensor:
    return t.unflatten(-1, (count, -1))


def unit(t: torch.Tensor) -> torch.Tensor:
    return t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6)


def recurrence(q, k, v, g, beta) -> torch.Tensor:
    """Token by token; g (B, T, H, K) log-decays, beta (B, T, H) or None."""
    s = q.new_zeros(q.shape[0], v.shape[2], q.shape[-1], v.shape[-1])
    q, k = (t.repeat_interleave(v.shape[2] // t.shape[2], 2) for t in (q, k))
    out = []
    for t in range(q.shape[1]):
        s = s * g[:, t, :, :, None].exp()
        u = v[:, t]
        if beta is not None:
            u = beta[:, t, :, None] * (u - torch.einsum("bhkv,bhk->bhv", s, k[:, t]))
        s = s + k[:, t, :, :, None] * u[:, :, None]
        out.append(torch.einsum("bhkv,bhk->bhv", s, q[:, t]) * q.shape[-1] ** -0.5)
    return torch.stack(out, 1)


def output(layer: nn.Module, o: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The norm, the gate and the projection of a recurrence."""
    c = layer.config
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + c.norm_eps) * layer.o_norm.weight
    if c.gate is not None:
        o = o * {"silu": nnf.silu, "sigmoid": torch.sigmoid}[c.gate](
            heads(layer.g_proj(x), c.v_heads)
        )
    return nnf.linear(o.flatten(-2), layer.o_proj.weight)


def formula(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    c = layer.config
    q, k, v = (convolved(layer, name, x) for name in "qkv")
    q, k, v = heads(q, c.num_heads), heads(k, c.num_heads), heads(v, c.v_heads)
    g, beta = torch.zeros_like(k).repeat_interleave(c.v_heads // c.num_heads, 2), None
    if isinstance(layer, GatedLinearAttention):
        g = nnf.logsigmoid(heads(layer.gk_proj(x), c.v_heads)) / 16
    elif isinstance(layer, MultiScaleRetention):
        gamma = 1 - 2.0 ** (-5 - torch.arange(c.v_heads, dtype=x.dtype))
        g = g + gamma.log()[:, None]
    else:
        q, k = unit(q), unit(k)
        beta = layer.b_proj(x).sigmoid() * (2 if c.allow_neg_eigval else 1)
    if isinstance(layer, GatedDeltaNet):
        g = g - (layer.A_log.exp() * nnf.softplus(layer.a_proj(x) + layer.dt_bias))[..., None]
    elif isinstance(layer, KimiDeltaAttention):
        step = heads(layer.f_proj(x) + layer.dt_bias, c.v_heads)
        rate = layer.A_log.exp()[:, None]
        g = -rate * nnf.softplus(step) if c.lower_bound is None else -5 * (rate * step).sigmoid()
    return output(layer, recurrence(q, k, v, g, beta), x)


@pytest.mark.parametrize(
    "name", [name for name in CONFIGS if "attention" not in name and not name.startswith("linear")]
)
def test_formula(name):
    layer, x = made(name), inputs()
    torch.testing.assert_close(layer(x), formula(layer, x))


@pytest.mark.parametrize("causal", [True, False])
def test_linear_attention(causal):
    torch.manual_seed(0)
    layer, x = LinearAttention(DIM, 3, causal=causal, init_std=0.3, dtype=torch.float64), inputs()
    q, k, v = (heads(getattr(layer, f"{name}_proj")(x), 3) for name in "qkv")
    weight = torch.einsum("bthk,bshk->bhts", nnf.elu(q) + 1, nnf.elu(k) + 1)
    weight = weight.tril() if causal else weight
    o = torch.einsum("bhts,bshv->bthv", weight / weight.sum(-1, keepdim=True), v)
    torch.testing.assert_close(layer(x), nnf.linear(o.flatten(-2), layer.o_proj.weight))


@pytest.mark.parametrize("gates_of", ["qk", "x"])
@pytest.mark.parametrize("gates", ["features", "heads"])
def test_delta_attention(gates, gates_of):
    """Token by token; the gates of each head alone."""
    torch.manual_seed(0)
    config = DeltaAttention.Config(DIM, 3, gates=gates, gates_of=gates_of, init_std=0.3)
    layer, x = config.build(dtype=torch.float64), inputs()
    assert layer.g_bias.eq(4).all() and layer.b_bias.eq(0).all()
    nn.init.normal_(layer.g_bias), nn.init.normal_(layer.b_bias)
    q, k, v = (heads(getattr(layer, f"{name}_proj")(x), 3) for name in "qkv")
    out = []
    for h in range(3):
        g_of, b_of = (q[:, :, h], k[:, :, h]) if gates_of == "qk" else (x, x)
        g = (g_of @ layer.g_weight[h].T + layer.g_bias[h]).sigmoid()
        b = (b_of @ layer.b_weight[h].T + layer.b_bias[h]).sigmoid()
        phi_q, phi_k = nnf.elu(q[:, :, h]) + 1, nnf.elu(k[:, :, h]) + 1
        s, z, rows = 0, 0, []
        for t in range(x.shape[1]):
            new = b[:, t] * phi_k[:, t]
            s = g[:, t, :, None] * s + new[..., None] * v[:, t, h, None]
            z = g[:, t] * z + new
            rows.append(torch.einsum("bk,bkv->bv", phi_q[:, t], s))
            rows[-1] = rows[-1] / (phi_q[:, t] * z).sum(-1, keepdim=True)
        out.append(torch.stack(rows, 1))
    expected = nnf.linear(torch.cat(out, -1), layer.o_proj.weight)
    torch.testing.assert_close(layer(x), expected)


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_decoding_goes_on_from_a_state(name):
    layer, x = made(name), inputs()
    state = layer.new_state(2, 9)
    parts = [layer(x[:, a:b], state=state) for a, b in ((0, 2), (2, 3), (3, 8), (8, 9))]
    torch.testing.assert_close(torch.cat(parts, 1), layer(x))
    assert isinstance(state, RecurrentState) and state.length == 9
    assert state.nbytes == layer.new_state(2, 10_000).nbytes


@torch.no_grad()
@pytest.mark.parametrize("name", ["linear", "gated delta"])
def test_states_are_reordered_and_saved(name):
    layer, x = made(name), inputs()
    state = layer.new_state(2, 9)
    layer(x[:, :5], state=state)
    saved = state.state_dict()
    swapped = copy.deepcopy(state)
    swapped.reorder(torch.tensor([1, 0]))
    torch.testing.assert_close(layer(x[:, 5:].flip(0), state=swapped).flip(0), layer(x)[:, 5:])
    again = layer.new_state(2, 9)
    again.load_state_dict(saved)
    torch.testing.assert_close(layer(x[:, 5:], state=again), layer(x)[:, 5:])


def test_half_states_are_fp32():
    layer = GatedDeltaNet(DIM, 2, dtype=torch.bfloat16)
    state = layer.new_state(1, 4)
    assert state["s"].dtype == torch.float32 and state["q_conv"].dtype == torch.bfloat16
    assert layer.A_log.dtype == torch.float32
    with torch.no_grad():
        assert layer(torch.randn(1, 3, DIM).bfloat16(), state=state).dtype == torch.bfloat16


@pytest.mark.parametrize("name", CONFIGS)
def test_every_parameter_has_a_gradient(name):
    layer, x = made(name), inputs().requires_grad_()
    layer(x).square().sum().backward()
    for parameter, value in [("x", x), *layer.named_parameters()]:
        assert value.grad is not None and value.grad.abs().max() > 0, parameter


def test_retention_rotates():
    layer, x = made("retention"), inputs()
    angle = torch.arange(9, dtype=torch.float64)[:, None] * torch.rand(6, dtype=torch.float64)
    assert not torch.allclose(layer(x, rope=(angle.cos(), angle.sin())), layer(x))
    torch.testing.assert_close(layer(x, rope=(torch.ones(9, 6), torch.zeros(9, 6))), layer(x))


@torch.no_grad()
@pytest.mark.parametrize("name", ["linear", "gated delta"])
def test_a_decoder_generates(name):
    torch.manual_seed(0)
    block = DecoderBlock.Config(CONFIGS[name], GatedMLP.Config(DIM, 32), RMSNorm.Config(DIM))
    config = BlocksConfig(vocab_size=31, dim=DIM, num_layers=2, blocks=(block,), init_std=0.5)
    model, prompt = config.build(dtype=torch.float64), torch.randint(31, (2, 4))
    tokens = generate(model, prompt, 5)
    for length in range(4, 9):
        expected = model(tokens[:, :length])[:, -1].argmax(-1)
        assert tokens[:, length].equal(expected)


def test_short_convolution():
    torch.manual_seed(0)
    conv, x = ShortConvolution(6, 3, bias=True), torch.randn(2, 7, 6)
    y, state = conv(x)
    expected = nnf.conv1d(nnf.pad(x.mT, (2, 0)), conv.weight, conv.bias, groups=6).mT
    torch.testing.assert_close(y, nnf.silu(expected))
    torch.testing.assert_close(state, x[:, -2:].mT)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DeltaNet(8, 3), r"dim must be a multiple of 3 .*, got dim=8, num_heads=3"),
        (lambda: GatedLinearAttention(6, 2), r"dim must be a multiple of 4 .*, got dim=6"),
        (lambda: DeltaNet(8, 2, num_v_heads=3), r"num_v_heads must be a multiple .*=3, num_heads"),
        (
            lambda: DeltaNet(8, 2, gate="relu"),
            r"gate must be 'silu', 'sigmoid' or None, got gate",
        ),
        (lambda: KimiDeltaAttention(8, 2, lower_bound=1.0), r"lower_bound must be .* < 0, got .*1"),
        (lambda: LinearAttention(8, 2, feature_map="cosine"), r"feature_map must be .*'cosine'"),
        (lambda: DeltaAttention(8, 2, causal=False), r"DeltaAttention: causal must be True, got"),
        (
            lambda: DeltaAttention(8, 2, gates="all"),
            r'gates must be one of "features", "heads", got',
        ),
        (lambda: LinearAttention(8, 2, causal=False).new_state(1, 1), r"a state must have causal"),
        (lambda: ShortConvolution(8, 0), r"kernel_size must be >= 1.*, got kernel_size=0"),
        (lambda: DeltaNet(8, 2)(torch.ones(1, 2, 8), mask=torch.ones(1)), r"mask must be None"),
        (lambda: DeltaNet(8, 2)(torch.ones(2, 8)), r"x must have shape \(B, T, 8\), got x.shape"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()
    with pytest.raises(TypeError, match=r"state must be a RecurrentState, got type\(state\)=dict"):
        DeltaNet(8, 2)(torch.ones(1, 2, 8), state={})


def _copied(layer: nn.Module, weights: dict[str, torch.Tensor]) -> nn.Module:
    layer.load_state_dict(weights)
    return layer


def test_gated_delta_net_of_transformers():
    module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    from transformers import Qwen3NextConfig

    config = Qwen3NextConfig(
        hidden_size=DIM,
        num_hidden_layers=1,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=6,
        linear_conv_kernel_dim=4,
        layer_types=["linear_attention"],
    )
    torch.manual_seed(0)
    theirs = module.Qwen3NextGatedDeltaNet(config, 0).double()
    with torch.no_grad():
        theirs.dt_bias.normal_()
    # Rows of each key head: q, k, then v and z of its two value heads; b, then a of these.
    q, k, v, z = theirs.in_proj_qkvz.weight.unflatten(0, (2, -1)).split([8, 8, 12, 12], 1)
    b, a = theirs.in_proj_ba.weight.unflatten(0, (2, -1)).split([2, 2], 1)
    conv = theirs.conv1d.weight.split([16, 16, 24])
    parts = {"q_proj": q, "k_proj": k, "v_proj": v, "g_proj": z, "a_proj": a, "b_proj": b}
    ours = _copied(
        GatedDeltaNet(DIM, 2, 4, 8, 6, norm_eps=config.rms_norm_eps, dtype=torch.float64),
        {f"{name}.weight": weight.flatten(0, 1) for name, weight in parts.items()}
        | {f"{name}_conv1d.weight": w for name, w in zip("qkv", conv, strict=True)}
        | {"A_log": theirs.A_log, "dt_bias": theirs.dt_bias}
        | {"o_norm.weight": theirs.norm.weight, "o_proj.weight": theirs.out_proj.weight},
    )
    x = inputs(70)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-6)  # theirs is in fp32


def test_kimi_delta_attention_of_transformers():
    module = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    from transformers import KimiLinearConfig

    config = KimiLinearConfig(
        hidden_size=DIM,
        num_hidden_layers=1,
        linear_num_heads=2,
        linear_head_dim=8,
        linear_conv_kernel_dim=4,
        layer_types=["linear_attention"],
    )
    torch.manual_seed(0)
    theirs = module.KimiLinearDeltaAttention(config, 0).double()
    gate = theirs.forget_gate
    with torch.no_grad():
        gate.A_log.normal_(), gate.dt_bias.normal_()
    own = dict(theirs.named_parameters())
    weights = {name: own[name] for name in own if name.startswith(("q_", "k_", "v_", "b_", "o_"))}
    for part, layers in {
        "g_proj": (theirs.g_a_proj, theirs.g_b_proj),
        "f_proj": (gate.f_a_proj, gate.f_b_proj),
    }.items():
        weights |= {f"{part}.{n}.weight": layer.weight for n, layer in enumerate(layers)}
    weights |= {
        f"{name}_conv1d.weight": w
        for name, w in zip("qkv", theirs.conv1d.weight.chunk(3), strict=True)
    }
    weights |= {"A_log": gate.A_log.flatten(), "dt_bias": gate.dt_bias.flatten()}
    layer = KimiDeltaAttention(
        DIM, 2, head_dim=8, gate_bias=False, norm_eps=config.rms_norm_eps, dtype=torch.float64
    )
    x = inputs(70)
    torch.testing.assert_close(_copied(layer, weights)(x), theirs(x), rtol=1e-5, atol=1e-6)
