"""Layers of fla: names of weights, and results against formulas in plain torch.

The code compared with is flash-linear-attention 0.5.2, commit bc3b101dcb71, `fla/layers`.
"""

import pytest
import torch
from torch.nn import functional as nnf

from omniattn import compat, functional, modules
from omniattn.compat import fla

WIDTH = 16


def layers():
    torch.manual_seed(0)
    sizes = dict(hidden_size=WIDTH, num_heads=4, layer_idx=0)
    conv = dict(use_short_conv=True, conv_size=3)
    heads = dict(hidden_size=WIDTH, num_heads=2, head_dim=4, layer_idx=0)
    found = {
        "gla": fla.GatedLinearAttention(**sizes, num_kv_heads=2, expand_k=1.0, **conv),
        "retention": fla.MultiScaleRetention(**sizes, num_kv_heads=2, feature_map="relu"),
        "simple": fla.SimpleGatedLinearAttention(**sizes, num_kv_heads=1, fuse_norm=False),
        "linear": fla.LinearAttention(**sizes, feature_map="hedgehog", output_norm="identity"),
        "gsa": fla.GatedSlotAttention(**sizes, num_kv_heads=2, feature_map="t2r", **conv),
        "abc": fla.ABCAttention(**sizes, **conv),
        "abc_plain": fla.ABCAttention(**sizes, use_input_gate=True, use_output_gate=False),
        "raven": fla.Raven(**sizes, num_kv_heads=2, topk=2, add_gumbel_noise=False, use_rope=True),
        "raven_gated": fla.Raven(
            **sizes,
            decay_type="GLA",
            router_type="mlp",
            router_score="softmax",
            topk=2,
            add_gumbel_noise=False,
            use_output_gate=True,
        ),
        "lightnet": fla.LightNetAttention(hidden_size=WIDTH, expand_ratio=4, layer_idx=0, **conv),
        "rodimus": fla.RodimusAttention(hidden_size=WIDTH, expand_ratio=4, layer_idx=0),
        "hgrn2": fla.HGRN2Attention(hidden_size=WIDTH, expand_ratio=4, layer_idx=0, **conv),
        "delta": fla.DeltaNet(**sizes, conv_size=3),
        "delta_elu": fla.DeltaNet(
            **sizes, qk_activation="elu", qk_norm="sum", use_beta=False, use_gate=True
        ),
        "gated_delta": fla.GatedDeltaNet(**heads, num_v_heads=4, conv_bias=True),
        "kda": fla.KimiDeltaAttention(**heads, num_v_heads=4, lower_bound=-3.0),
        "precond": fla.PrecondGatedDeltaNet(**heads, num_v_heads=4, allow_neg_eigval=True),
        "precond_kda": fla.PrecondKDA(**heads, num_v_heads=4, lower_bound=-3.0),
        "mesa": fla.MesaNet(**heads, use_output_gate=True, conv_bias=True),
        "kalmanet": fla.GatedKalmaNet(**heads, expand_v=1.5, num_v_heads=4),
        "kalmanet_plain": fla.GatedKalmaNet(
            **heads | {"num_heads": 4}, num_kv_heads=2, use_v_conv=False, use_gate=False
        ),
        "cyfa": fla.CyclicFlowAttention(WIDTH, 1.5, 0.5, 4, 2, num_slots=6, layer_idx=0),
        "attention": fla.Attention(WIDTH, 4, 2, qk_norm=True, window_size=3, layer_idx=0),
        "parallax": fla.Parallax(WIDTH, 4, 2, qk_norm=True, window_size=3, layer_idx=0),
        "comba": fla.Comba(**heads, expand_v=1.5, correction_factor=0.5),
        "delta_product": fla.GatedDeltaProduct(**heads, num_v_heads=4, conv_size=3),
        "gdn2": fla.GatedDeltaNet2(**heads, num_v_heads=4, allow_neg_eigval=True),
        "hgrn": fla.HGRNAttention(hidden_size=WIDTH, layer_idx=0, **conv),
        "rwkv6": fla.RWKV6Attention(**sizes, proj_low_rank_dim=3, gate_low_rank_dim=2),
        "rwkv7": fla.RWKV7Attention(hidden_size=WIDTH, head_dim=4, layer_idx=0),
        "forgetting": fla.ForgettingAttention(WIDTH, 4, 2, qk_norm=True, layer_idx=0),
        "wall": fla.WallAttention(WIDTH, 4, 2, qk_norm=True, use_output_gate=True, layer_idx=0),
        "wall_forgetting": fla.WallAttention(WIDTH, 4, 2, use_scalar_gate=True, layer_idx=0),
        "path": fla.PaTHAttention(WIDTH, 4, 2, layer_idx=0),
        "path_forgetting": fla.PaTHAttention(WIDTH, 4, use_forget_gate=True, layer_idx=0),
        "deltaformer": fla.DeltaFormerAttention(WIDTH, 4, 2, layer_idx=0),
        "nsa": fla.NativeSparseAttention(WIDTH, 4, 2, 4, False, 2, 2, 3, layer_idx=0),
        # Steps see all keys, as the parallel form does with all blocks.
        "moba": fla.MoBA(WIDTH, 4, 2, layer_idx=0, moba_chunk_size=2, use_output_gate=True),
        "mamba": fla.Mamba(WIDTH, 3, intermediate_size=12, layer_idx=0),
        "mamba2": fla.Mamba2(None, 8, WIDTH, 3, n_groups=2, use_bias=True, layer_idx=0),
        "log_linear_mamba2": fla.LogLinearMamba2(4, 8, WIDTH, 3, conv_kernel=3, layer_idx=0),
        "mamba3": fla.Mamba3(WIDTH, 4, head_dim=8, is_outproj_norm=True, layer_idx=0),
        "mla": fla.MultiheadLatentAttention(WIDTH, 2, 6, 4, 5, 3, 8, None, layer_idx=0),
    }
    with torch.no_grad():
        for parameter in (p for layer in found.values() for p in layer.parameters()):
            parameter += 0.1 * torch.randn_like(parameter)  # some are 0 at first
    return found


LAYERS = layers()
#: Layers in which padding also decays states, as in fla.
DECAYING = ("simple", "linear")


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_steps_padding_and_packing_are_the_parallel_form(name):
    layer, x = LAYERS[name], torch.randn(2, 7, WIDTH)
    whole, weights, cache = layer(x, output_attentions=True)[:3]
    assert whole.shape == x.shape and weights is None and cache is None
    cache, pieces = fla.FLACache(), []
    for part in (x[:, :4], x[:, 4:5], x[:, 5:6], x[:, 6:]):
        y, _, cache = layer(part, past_key_values=cache, use_cache=True)[:3]
        pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces, 1), whole)
    assert cache.get_seq_length(0) == 7 and len(cache) == 1
    if name in DECAYING:
        return
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1] * 7])
    padded = layer(x, attention_mask=mask)[0]
    torch.testing.assert_close(padded[:1, 3:], layer(x[:1, 3:])[0])
    torch.testing.assert_close(padded[1:], whole[1:])
    assert (padded[0, :3] == 0).all()
    if name != "deltaformer":
        cache = fla.FLACache()
        first = layer(x[:, :5], mask[:, :5], cache, use_cache=True)[0]
        last = [layer(x[:, n : n + 1], mask[:, : n + 1], cache, use_cache=True)[0] for n in (5, 6)]
        torch.testing.assert_close(torch.cat([first, *last], 1), padded)
    boundaries = torch.tensor([0, 3, 7], dtype=torch.int32)
    packed = layer(x[:1], cu_seqlens=boundaries)[0]
    torch.testing.assert_close(packed[:, 3:], layer(x[:1, 3:])[0])


def loaded(ours, layer, **renamed):
    """Loads the weights of an fla layer into a layer of this package."""
    weights = {}
    for name, value in layer.state_dict().items():
        head, dot, tail = name.partition(".")
        weights[renamed.get(head, head) + dot + tail] = value
    ours.load_state_dict(weights)
    return ours


def test_layers_are_those_of_this_package():
    torch.manual_seed(1)
    x = torch.randn(2, 9, WIDTH)
    theirs = fla.GatedLinearAttention(hidden_size=WIDTH, num_heads=2)
    ours = modules.GatedLinearAttention(dim=WIDTH, num_heads=2, head_dim=4, v_head_dim=8)
    names = set(theirs.state_dict())
    assert "g_norm_swish_gate.weight" in names and "gk_proj.1.bias" in names
    loaded(ours, theirs, g_norm_swish_gate="o_norm")
    torch.testing.assert_close(ours(x), theirs(x)[0])


def test_slots_are_those_of_this_package():
    x = torch.randn(2, 9, WIDTH)
    sizes = dict(num_heads=2, conv_size=3, num_slots=5)
    for theirs, ours in (
        (fla.GatedSlotAttention, modules.GatedSlotAttention),
        (fla.ABCAttention, modules.ABCAttention),
    ):
        rope = {} if theirs is fla.GatedSlotAttention else {"use_rope": False}
        layer = theirs(hidden_size=WIDTH, use_short_conv=True, **sizes, **rope)
        own = loaded(ours(dim=WIDTH, **sizes), layer, g_norm="o_norm")
        torch.testing.assert_close(own(x), layer(x)[0])


def test_layers_of_pull_requests_are_those_of_this_package():
    x = torch.randn(2, 9, WIDTH)
    sizes = dict(num_heads=2, head_dim=4, conv_size=3)
    pairs = (
        (
            fla.GatedKalmaNet(WIDTH, use_forgetting_gate_kk=False, **sizes),
            modules.GatedKalmaNet(dim=WIDTH, decay="values", **sizes),
        ),
        (
            fla.GatedKalmaNet(WIDTH, use_beta_gate=False, use_alpha_connection=False, **sizes),
            modules.GatedKalmaNet(dim=WIDTH, weighted=False, mixed=False, **sizes),
        ),
        (
            fla.CyclicFlowAttention(WIDTH, num_slots=6, **sizes),
            modules.CyclicFlowAttention(dim=WIDTH, num_slots=5, **sizes),
        ),
    )
    for theirs, own in pairs:
        torch.testing.assert_close(loaded(own, theirs)(x), theirs(x)[0])


def test_wall_attention_is_that_of_this_package():
    x = torch.randn(2, 9, WIDTH)
    options = dict(use_output_gate=True, use_scalar_gate=True, gate_init_bias=2.0)
    theirs = fla.WallAttention(WIDTH, 4, 2, **options)
    own = modules.WallAttention(
        dim=WIDTH, num_heads=4, num_kv_heads=2, gate=True, scalar_gate=True, gate_bias=2.0
    )
    torch.testing.assert_close(loaded(own, theirs)(x), theirs(x)[0])
    with pytest.raises(NotImplementedError, match="WallAttention: window_size is not supported"):
        fla.WallAttention(WIDTH, 4, window_size=3)


@pytest.mark.parametrize("name", ["path", "wall"])
@torch.no_grad()
def test_caches_may_begin_with_padding_alone(name):
    """The first call has no token of the first sequence."""
    layer, x = LAYERS[name], torch.randn(2, 5, WIDTH)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1] * 5])
    cache = fla.FLACache()
    parts = [layer(x[:, a:b], mask[:, :b], cache)[0] for a, b in ((0, 2), (2, 4), (4, 5))]
    torch.testing.assert_close(torch.cat(parts, 1), layer(x, mask)[0])
    with pytest.raises(ValueError, match="attention_mask must have padding on the left"):
        layer(x, 1 - mask, fla.FLACache())


def test_mixture_of_memories():
    """Checks names of weights, logits, and steps, padding and packing as other layers."""
    torch.manual_seed(2)
    sizes = dict(num_heads=2, head_dim=4, num_memories=3, shared_mem=True, conv_size=3)
    layer = fla.MomAttention(WIDTH, layer_idx=0, **sizes)
    names = {"k_proj.2.weight", "shared_a.weight", "gate.weight", "o_norm.weight", "A_log"}
    assert names <= set(layer.state_dict())
    x = torch.randn(2, 7, WIDTH)
    whole, _, _, logits = layer(x)
    torch.testing.assert_close(logits, layer.gate(x).flatten(0, 1))
    cache = fla.FLACache()
    parts = [layer(part, None, cache, True)[0] for part in (x[:, :4], x[:, 4:5], x[:, 5:])]
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    padded = layer(x, torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1] * 7]))[0]
    torch.testing.assert_close(padded[:1, 3:], layer(x[:1, 3:])[0])
    packed = layer(x[:1], cu_seqlens=torch.tensor([0, 3, 7], dtype=torch.int32))[0]
    torch.testing.assert_close(packed[:, 3:], layer(x[:1, 3:])[0])


def test_bias_of_ravens_router():
    """The bias chooses slots, and has no gradient, but does not change their shares."""
    options = dict(hidden_size=WIDTH, num_heads=2, topk=1, add_gumbel_noise=False)
    layer = fla.Raven(**options, bias_rmm=True)
    x = torch.randn(1, 5, WIDTH)
    with torch.no_grad():
        layer.r_bias[:, 3] = 9.0
    shares = layer._shares(x)
    assert (shares[..., 3] > 0.99).all() and (shares[..., :3] == 0).all()
    shares.sum().backward()
    assert layer.r_bias.grad is None


def test_rodimus_is_that_of_this_package():
    x = torch.randn(2, 9, WIDTH)
    layer = fla.RodimusAttention(hidden_size=WIDTH, expand_ratio=4)
    own = loaded(modules.Rodimus(dim=WIDTH, d_state=4), layer)
    torch.testing.assert_close(own(x), layer(x)[0])


def test_groups_of_heads_share_keys():
    layer, x = LAYERS["gla"], torch.randn(1, 6, WIDTH)
    wide = fla.GatedLinearAttention(
        hidden_size=WIDTH, num_heads=4, expand_k=1.0, use_short_conv=True, conv_size=3
    )
    weights = {}
    for name, value in layer.state_dict().items():
        shared = name.split(".")[0] in ("k_proj", "v_proj", "k_conv1d", "v_conv1d")
        if shared or name.startswith("gk_proj.1"):
            value = value.unflatten(0, (2, 4)).repeat_interleave(2, 0).flatten(0, 1)
        weights[name] = value
    wide.load_state_dict(weights)
    torch.testing.assert_close(wide(x)[0], layer(x)[0])


def test_delta_rules_have_the_activations_and_norms_of_fla():
    layer, x = LAYERS["delta_elu"], torch.randn(1, 6, WIDTH)

    def convolved(name, activation):
        y = nnf.pad(getattr(layer, f"{name}_proj")(x).mT, (3, 0))
        y = nnf.conv1d(y, getattr(layer, f"{name}_conv1d").weight, groups=WIDTH).mT
        return activation(y).unflatten(-1, (4, 4))

    q, k = (convolved(n, lambda y: nnf.elu(y) + 1) for n in "qk")
    v = convolved("v", nnf.silu)
    q, k = (t / t.sum(-1, keepdim=True) for t in (q, k))
    o = functional.delta_rule(q, k, v, torch.ones(1, 6, 4), backend="reference")[0]
    gate = layer.g_proj(x).unflatten(-1, (4, 4))
    o = nnf.rms_norm(o, (4,), layer.o_norm.weight, 1e-5) * nnf.silu(gate)
    torch.testing.assert_close(layer(x)[0], layer.o_proj(o.flatten(-2)))


def test_hgrn2_has_lower_bounds_from_the_second_layer_on():
    torch.manual_seed(0)
    x, bound = torch.randn(1, 6, WIDTH), torch.full((WIDTH,), 0.3)
    layer = fla.HGRN2Attention(hidden_size=WIDTH, expand_ratio=8, layer_idx=1)
    f = 0.3 + 0.7 * layer.f_proj(x).sigmoid()
    q, k, g, i = (
        t.unflatten(-1, (2, 8))
        for t in (nnf.silu(layer.q_proj(x)), 1 - f, f.log(), layer.i_proj(x))
    )
    o = functional.gated_linear_attention(q, k, i, g, backend="reference")[0].flatten(-2)
    wanted = layer.o_proj(nnf.rms_norm(o, (WIDTH,), layer.g_norm.weight, 1e-5))
    torch.testing.assert_close(layer(x, lower_bound=bound)[0], wanted)
    layer.layer_idx = 0
    assert not torch.allclose(layer(x, lower_bound=bound)[0], wanted)


def test_gradients_reach_all_parameters():
    for name, layer in LAYERS.items():
        layer(torch.randn(1, 5, WIDTH))[0].sum().backward()
        missing = [n for n, p in layer.named_parameters() if p.grad is None]
        assert not missing, f"{name}: {missing}"
        layer.zero_grad(None)


def test_layers_without_a_cache_are_sums_over_earlier_tokens():
    x = torch.randn(2, 9, WIDTH)
    earlier = torch.ones(9, 9).tril()

    def expected(layer, weights, eps):
        v = layer.v_proj(x).unflatten(-1, (4, -1)).transpose(1, 2)
        weights = weights * earlier
        o = weights @ v / (weights.sum(-1, keepdim=True) + eps)
        return layer.o_proj(o.transpose(1, 2).flatten(-2))

    def products(layer, turned=lambda t: t):
        q, k = (
            turned(p(x).unflatten(-1, (4, -1))).transpose(1, 2)
            for p in (layer.q_proj, layer.k_proj)
        )
        return q @ k.mT

    for mode, scale in (("parallel", 1.0), ("chunk", 4**-0.5)):
        layer = fla.BasedLinearAttention(WIDTH, 4, 4, 4, mode=mode)
        u = scale * products(layer)
        torch.testing.assert_close(layer(x), expected(layer, 1 + u + u * u / 2, 0.0))
    layer = fla.ReBasedLinearAttention(WIDTH, feature_dim=6, num_key_value_heads=4, num_heads=4)
    u = products(layer, lambda t: nnf.layer_norm(t, (6,))) * 6**-0.5
    torch.testing.assert_close(layer(x), expected(layer, u * u, 1e-5))


def test_feature_maps_have_their_kernels():
    q, k = torch.randn(2, 5, 4)
    u = (q * k).sum(-1)
    for layer, kernel in (
        (fla.TaylorFeatureMap(4), 1 + u / 2 + u * u / 8),
        (fla.RebasedFeatureMap(4, normalize=False), u * u / 4),
    ):
        torch.testing.assert_close((layer(q) * layer(k)).sum(-1), kernel)
    assert fla.LearnablePolySketchNonNegativeFeatureMap(4, 3, 8)(q).shape == (5, 6)
    assert fla.LearnableOuterProductFeatureMap(4, 3)(q).shape == (5, 6)
    torch.testing.assert_close(fla.SquaredReLUFeatureMap()(q), q.relu() ** 2)
    torch.testing.assert_close(fla.SwishFeatureMap()(q), nnf.silu(q))
    assert [n for n in range(9) if fla.is_power_of_2(n)] == [1, 2, 4, 8]


def test_errors_name_arguments_of_fla():
    x = torch.randn(1, 4, WIDTH)
    for create, text in (
        (lambda: fla.GatedLinearAttention("chunks"), "GatedLinearAttention: mode must be one of"),
        (lambda: fla.MultiScaleRetention(num_kv_heads=3), "num_kv_heads must divide num_heads"),
        (lambda: fla.DeltaNet(qk_norm="l3"), "DeltaNet: qk_norm must be one of"),
        (lambda: fla.GatedDeltaNet(head_dim=5, expand_v=0.5), "head_dim . expand_v must be"),
        (lambda: fla.LinearAttention(feature_map="elo"), "feature_map must be one of .*did you"),
        (lambda: fla.GatedDeltaNet2(num_v_heads=8), "GatedDeltaNet2: num_v_heads must be a mult"),
        (lambda: fla.GatedKalmaNet(num_v_heads=8), "GatedKalmaNet: num_v_heads must be a multiple"),
        (lambda: fla.GatedKalmaNet(num_kv_heads=3), "num_kv_heads must divide num_heads"),
        (lambda: fla.CyclicFlowAttention(num_slots=5), "num_slots must be even and > 0"),
        (lambda: fla.CyclicFlowAttention(head_dim=5, expand_k=0.5), "head_dim . expand_k must be"),
        (lambda: fla.RWKV7Attention(hidden_size=30), "RWKV7Attention: head_dim must divide"),
        (lambda: fla.RWKV7Attention(hidden_size=64)(x), "v_first must be given to layers after"),
        (lambda: fla.MultiheadLatentAttention(qk_head_dim=100), "qk_head_dim must be qk_nope"),
        (lambda: fla.BasedLinearAttention(WIDTH, num_heads=4), "num_heads must be num_key_value"),
        (lambda: fla.RebasedFeatureMap(4, False, True, False), "use_gamma or normalize must be"),
        (lambda: LAYERS["kda"](x[0]), "KimiDeltaAttention: hidden_states must have shape"),
        (lambda: LAYERS["kda"](x, torch.ones(1, 4, 4)), "attention_mask must have shape"),
    ):
        with pytest.raises(ValueError, match=text):
            create()
    layer = fla.GatedLinearAttention(hidden_size=WIDTH)
    with pytest.raises(ValueError, match="layer_idx must be given with past_key_values"):
        layer(x, past_key_values=fla.FLACache())
    with pytest.raises(NotImplementedError, match='mode must be "chunk"'):
        fla.DeltaNet("fused_chunk")
    with pytest.warns(UserWarning, match="use_short_conv=False"):
        fla.DeltaNet(hidden_size=WIDTH, use_short_conv=False)


def test_scripts_import_layers_of_fla():
    if not compat.install("fla")["fla"]:
        pytest.skip("fla is installed")
    try:
        from fla.layers import GatedDeltaNet
        from fla.layers.gla import GatedLinearAttention
        from fla.models.utils import Cache

        assert GatedDeltaNet is fla.GatedDeltaNet
        assert GatedLinearAttention is fla.GatedLinearAttention and Cache is fla.FLACache
    finally:
        compat.uninstall()
