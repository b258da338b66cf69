"""Multi-head latent attention: DeepSeek-V3's, absorption, caches, the options."""

from dataclasses import replace

import pytest
import torch
import transformers
from layer_checks import assert_same_gradients
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from omniattn.modules import DeepSeekSparseAttention, RotaryEmbedding
from omniattn.modules import MultiHeadLatentAttention as MLA

CONFIG = MLA.Config(
    dim=48,
    num_heads=4,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_dim=8,
    qk_rope_dim=4,
    v_dim=10,
    init_std=0.4,
)
OPTIONS = {
    "published": {},
    "no-query-latent": {"q_lora_rank": None},
    "half-split": {"rope_interleaved": False},
    "separate-latents": {"separate_kv_latents": True},
    "separate-latents-no-norm": {"separate_kv_latents": True, "latent_norm": False},
    "query-rope-from-x": {"q_rope_from": "x"},
    "no-rope": {"qk_rope_dim": 0},
    "window": {"window_size": (3, 0)},
    "shared-up": {"share_up": True},
    "shared-up-of-two-latents": {"share_up": True, "separate_kv_latents": True},
    "fused": {"fuse_up": True, "latent_norm": False},
    "fused-of-two-latents": {"fuse_up": True, "latent_norm": False, "separate_kv_latents": True},
    "fused-shared-up": {"fuse_up": True, "latent_norm": False, "share_up": True},
    "scaled": {"latent_scale": True},
    "grouped-latents": {"num_latents": 2},
    "mlra-2": {"num_latents": 4, "num_branches": 2, "latent_scale": True},
    "mlra-4": {"num_latents": 4, "num_branches": 4, "latent_scale": True},
    "mlra-4-no-norm-no-rope": {
        "num_latents": 4,
        "num_branches": 4,
        "latent_norm": False,
        "qk_rope_dim": 0,
    },
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def rope(layer: MLA, *span: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    size = layer.config.qk_rope_dim
    return RotaryEmbedding(RotaryEmbedding.Config(size))(torch.arange(*span)) if size else None


@pytest.mark.parametrize("q_rank", [24, None])
@pytest.mark.parametrize("interleaved", [True, False])
def test_equals_deepseek_v3(q_rank, interleaved):
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 40.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 64,
    }
    config = transformers.DeepseekV3Config(
        hidden_size=48,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=q_rank,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=10,
        rope_interleave=interleaved,
        rope_parameters=yarn,
    )
    config._attn_implementation = "eager"
    theirs = DeepseekV3Attention(config, 0)
    mscale = (theirs.scaling * 12**0.5) ** 0.5
    assert mscale == pytest.approx(1.3689, abs=1e-4)
    layer = MLA(replace(CONFIG, q_lora_rank=q_rank, rope_interleaved=interleaved, mscale=mscale))
    theirs.load_state_dict(layer.state_dict())
    x = torch.randn(2, 11, 48, requires_grad=True)
    cos, sin = rope(layer, 11)
    twice = tuple(torch.cat([t, t], -1)[None] for t in (cos, sin))
    causal = torch.zeros(11, 11).masked_fill(torch.ones(11, 11).triu(1).bool(), -1e30)
    expected, _ = theirs(x, twice, causal)
    actual = layer(x, rope=(cos, sin))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    names = [name for name, _ in layer.named_parameters()]
    theirs_by_name = dict(theirs.named_parameters())
    inputs = [x, *layer.parameters()], [x, *(theirs_by_name[n] for n in names)]
    assert_same_gradients(actual, expected, *inputs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", OPTIONS)
def test_absorption_and_decoding_equal_the_expanded_form(name):
    layer = MLA(replace(CONFIG, **OPTIONS[name]), dtype=torch.float64)
    x = torch.randn(2, 11, 48, dtype=torch.float64, requires_grad=True)
    full = layer(x, rope=rope(layer, 11))
    absorbed = layer(x, rope=rope(layer, 11), absorb=True)
    torch.testing.assert_close(absorbed, full)
    assert_same_gradients(absorbed, full, [x, *layer.parameters()])
    with torch.no_grad():
        cache = layer.new_state(2, 11)
        parts = [
            layer(x[:, a:b], rope=rope(layer, a, b), state=cache)
            for a, b in ((0, 5), (5, 6), (6, 9), (9, 10), (10, 11))
        ]
    torch.testing.assert_close(torch.cat(parts, 1), full.detach())
    latents = 2 if layer.config.separate_kv_latents else 1
    assert cache.nbytes == 2 * 11 * (latents * 16 + layer.config.qk_rope_dim) * 8


def test_without_norm_and_rope_it_is_low_rank_attention():
    layer = MLA(
        replace(CONFIG, qk_rope_dim=0, latent_norm=False, q_lora_rank=None), dtype=torch.float64
    )
    x = torch.randn(2, 7, 48, dtype=torch.float64)
    up = layer.kv_b_proj.weight.unflatten(0, (4, 18))
    k, v = (
        torch.einsum("btr,hdr->bhtd", x @ layer.kv_a_proj_with_mqa.weight.T, w)
        for w in (up[:, :8], up[:, 8:])
    )
    q = layer.q_proj(x).unflatten(-1, (4, 8)).transpose(1, 2)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(layer(x), layer.o_proj(out.transpose(1, 2).flatten(2)))


def test_a_shared_projection_is_that_of_heads_with_equal_weights():
    shared = MLA(replace(CONFIG, share_up=True), dtype=torch.float64)
    assert shared.kv_b_proj.weight.shape == (18, 16)
    layer = MLA(CONFIG, dtype=torch.float64)
    state = shared.state_dict()
    state["kv_b_proj.weight"] = state["kv_b_proj.weight"].repeat(4, 1)
    layer.load_state_dict(state)
    x = torch.randn(2, 7, 48, dtype=torch.float64)
    torch.testing.assert_close(shared(x, rope=rope(layer, 7)), layer(x, rope=rope(layer, 7)))


def test_fused_projections_change_no_result():
    x = torch.randn(2, 7, 48, dtype=torch.float64, requires_grad=True)
    layers = [
        MLA(replace(CONFIG, fuse_up=fuse, latent_norm=False), dtype=torch.float64)
        for fuse in (True, False)
    ]
    layers[1].load_state_dict(layers[0].state_dict())
    fused, apart = (layer(x, rope=rope(layer, 7)) for layer in layers)
    torch.testing.assert_close(fused, apart)
    inputs = ([x, *layer.parameters()] for layer in layers)
    assert_same_gradients(fused, apart, *inputs)


@pytest.mark.parametrize("branches", [2, 4])
def test_low_rank_attention_of_its_authors(branches):
    """CausalSelfAttention of model/mlra_2.py and mlra_4.py in SongtaoLiu0823/MLRA, 7e0eb5c."""
    options = {"num_latents": 4, "num_branches": branches, "latent_scale": True}
    config = replace(CONFIG, rope_interleaved=False, v_dim=8, **options)
    layer, x = MLA(config, dtype=torch.float64), torch.randn(2, 7, 48, dtype=torch.float64)
    cos, sin = (t.double() for t in rope(layer, 7))

    def rms(t, norm):
        return t * (t.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm.weight

    def rotated(t):  # (B, H, T, 4)
        a, b = t.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    for norm in (layer.q_a_layernorm, *layer.kv_a_layernorms):
        torch.nn.init.normal_(norm.weight)
    latent = rms(x @ layer.q_a_proj.weight.T, layer.q_a_layernorm) * (48 / 24) ** 0.5
    q = (latent @ layer.q_b_proj.weight.T).unflatten(-1, (4, 12)).transpose(1, 2)
    q = torch.cat([q[..., :8], rotated(q[..., 8:])], -1)
    *latents, k_rope = (x @ layer.kv_a_proj_with_mqa.weight.T).split([4, 4, 4, 4, 4], -1)
    k_rope = rotated(k_rope[:, None])
    ups = layer.kv_b_proj.weight.chunk(4)
    heads = []  # of a branch after another
    for part, norm, up in zip(latents, layer.kv_a_layernorms, ups, strict=True):
        kv = (rms(part, norm) * (48 / 4) ** 0.5) @ up.T
        heads += kv.unflatten(-1, (branches, 16)).unbind(2)
    y = 0
    for branch in range(branches):
        kv = torch.stack(heads[4 * branch : 4 * branch + 4], 1)
        k = torch.cat([kv[..., :8], k_rope.expand(-1, 4, -1, -1)], -1)
        y = y + torch.nn.functional.scaled_dot_product_attention(q, k, kv[..., 8:], is_causal=True)
    expected = (y / branches**0.5).transpose(1, 2).flatten(2) @ layer.o_proj.weight.T
    torch.testing.assert_close(layer(x, rope=(cos, sin)), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_latents": 3}, "got num_latents=3, kv_lora_rank=16"),
        ({"num_latents": 4, "num_branches": 3}, "num_branches=3"),
        ({"num_latents": 8, "num_branches": 1}, "num_latents=8, kv_lora_rank=16, num_branches=1"),
        ({"num_latents": 2, "share_up": True}, "got num_latents=2, separate_kv_latents=False, sha"),
        ({"latent_scale": True, "fuse_up": True, "latent_norm": False}, "latent_scale must be Fa"),
    ],
)
def test_parts_of_a_latent_must_fit(options, message):
    with pytest.raises(ValueError, match=f"MultiHeadLatentAttention: .*{message}"):
        replace(CONFIG, **options)
    with pytest.raises(ValueError, match="DeepSeekSparseAttention: num_latents must be 1, as"):
        DeepSeekSparseAttention.Config(**vars(replace(CONFIG, num_latents=2)), index_heads=2)


def test_names_what_is_wrong():
    x = torch.randn(1, 2, 48)
    with pytest.raises(ValueError, match="got qk_rope_dim=4, rope=None"):
        MLA(CONFIG)(x)
    with pytest.raises(ValueError, match="got qk_rope_dim=0, rope=given"):
        MLA(replace(CONFIG, qk_rope_dim=0))(x, rope=(x, x))
    with pytest.raises(ValueError, match="fuse_up must be False if a norm is between the proj"):
        replace(CONFIG, fuse_up=True)
    with pytest.raises(ValueError, match="DeepSeekSparseAttention: fuse_up must be False, as the"):
        DeepSeekSparseAttention.Config(
            **vars(replace(CONFIG, fuse_up=True, latent_norm=False)), index_heads=2
        )
    with pytest.raises(ValueError, match="qk_rope_dim=3"):
        replace(CONFIG, qk_rope_dim=3)
    with pytest.raises(ValueError, match="'k'"):
        replace(CONFIG, q_rope_from="k")
