"""Attention layer and KV cache: head sharing, cross-attention, decoding equals the full forward."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from layer_checks import assert_same_gradients, in_steps

from omniattn.modules import Attention, KVCache, RotaryEmbedding


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def by_hand(layer: Attention, x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """The layer in terms of torch alone, without rotary embedding and cache."""
    c = layer.config
    q, k, v = (
        F.linear(t, p.weight, p.bias).unflatten(-1, (-1, c.head_size)).transpose(1, 2)
        for t, p in ((x, layer.q_proj), (source, layer.k_proj), (source, layer.v_proj))
    )
    q, k = normed(layer, q, k)
    scale = 1.0 if c.qk_norm == "l2" else None
    options = {"is_causal": c.causal, "enable_gqa": True, "scale": scale}
    out = F.scaled_dot_product_attention(q, k, v, **options)
    return F.linear(out.transpose(1, 2).flatten(-2), layer.o_proj.weight, layer.o_proj.bias)


def normed(layer: Attention, q: torch.Tensor, k: torch.Tensor):
    """q and k (B, H, T, D) after the layer's qk_norm."""
    c, size = layer.config, (layer.config.head_size,)
    if c.qk_norm is None:
        return q, k
    if c.qk_norm == "l2":
        factor = layer.logit_scale.clamp(max=math.log(100)).exp()[:, None, None]
        return F.normalize(q, dim=-1) * factor, F.normalize(k, dim=-1)
    weights = layer.q_norm.weight, layer.k_norm.weight
    if c.qk_norm == "layer":
        return [F.layer_norm(t, size, w, None, 1e-6) for t, w in zip((q, k), weights, strict=True)]
    if c.qk_norm == "rms":
        return [F.rms_norm(t, size, w, 1e-6) for t, w in zip((q, k), weights, strict=True)]
    rows = (t.transpose(1, 2).flatten(-2) for t in (q, k))
    both = (F.rms_norm(t, w.shape, w, 1e-6) for t, w in zip(rows, weights, strict=True))
    return [t.unflatten(-1, (-1, *size)).transpose(1, 2) for t in both]


@pytest.mark.parametrize("kv_heads", [None, 2, 1], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("qk_norm", [None, "rms", "rms_full", "layer", "l2"])
@pytest.mark.parametrize("cross", [False, True])
def test_equals_torch(kv_heads, qk_norm, cross):
    config = Attention.Config(
        dim=24,
        num_heads=4,
        num_kv_heads=kv_heads,
        head_dim=5,
        qk_norm=qk_norm,
        bias=True,
        causal=not cross,
        cross=cross,
        source_dim=7 if cross else None,
        init_std=0.5,
    )
    layer = Attention(config, dtype=torch.float64)
    for name, parameter in layer.named_parameters():
        if "norm" in name or name == "logit_scale":
            parameter.data.uniform_(0.5, 5)  # ln 100 = 4.6
    x = torch.randn(2, 9, 24, dtype=torch.float64, requires_grad=True)
    source = torch.randn(2, 6, 7, dtype=torch.float64) if cross else None
    actual = layer(x, source)
    expected = by_hand(layer, x, source if cross else x)
    torch.testing.assert_close(actual, expected)
    assert_same_gradients(actual, expected, [x, *layer.parameters()])


@pytest.mark.parametrize("window", [(-1, -1), (3, 0)])
@torch.no_grad()
def test_prefill_and_steps_equal_the_full_forward(window):
    layer = Attention(Attention.Config(24, 4, 2, window_size=window, init_std=0.5))
    rotary = RotaryEmbedding(RotaryEmbedding.Config(6))
    x = torch.randn(2, 11, 24)
    full = layer(x, rope=rotary(torch.arange(11)))
    torch.testing.assert_close(in_steps(layer, x, rotary)[0], full, rtol=1e-4, atol=2e-5)


@torch.no_grad()
def test_cross_attention_projects_the_source_once():
    layer = Attention(Attention.Config(8, 2, causal=False, cross=True))
    x, source = torch.randn(1, 3, 8), torch.randn(1, 5, 8)
    cache = layer.new_state(1, 5)
    first = layer(x, source, state=cache)
    torch.testing.assert_close(first, layer(x, source))
    torch.testing.assert_close(layer(x, state=cache), first)


@pytest.mark.parametrize("gate", ["elementwise", "headwise"])
@pytest.mark.parametrize("activation", ["sigmoid", "silu"])
def test_gate_multiplies_what_the_output_projection_reads(gate, activation):
    config = Attention.Config(24, 4, 2, head_dim=5, init_std=0.5)
    plain = Attention(config, dtype=torch.float64)
    gated = Attention(replace(config, gate=gate, gate_activation=activation), dtype=torch.float64)
    gated.load_state_dict({**plain.state_dict(), "g_proj.weight": gated.g_proj.weight.detach()})
    x = torch.randn(2, 7, 24, dtype=torch.float64)
    plain.o_proj.weight.data.copy_(torch.eye(24, 20))
    heads = plain(x)[..., :20].unflatten(-1, (4, 5))
    logits = F.linear(x, gated.g_proj.weight).unflatten(-1, (4, -1))
    factor = logits.sigmoid() if activation == "sigmoid" else F.silu(logits)
    expected = F.linear((heads * factor).flatten(-2), gated.o_proj.weight)
    torch.testing.assert_close(gated(x), expected)


def test_elementwise_gate_is_that_of_qwen3_next():
    from transformers.models.qwen3_next import modeling_qwen3_next as hf

    config = hf.Qwen3NextConfig(
        hidden_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=6
    )
    config._attn_implementation = "eager"
    theirs = hf.Qwen3NextAttention(config, 0)
    for p in theirs.parameters():
        torch.nn.init.normal_(p, std=0.5)
    ours = Attention(Attention.Config(24, 4, 2, head_dim=6, qk_norm="rms", gate="elementwise"))
    state = {name: w.clone() for name, w in theirs.state_dict().items()}
    q, gate = state["q_proj.weight"].unflatten(0, (4, 2, 6)).unbind(1)
    state |= {"q_proj.weight": q.flatten(0, 1), "g_proj.weight": gate.flatten(0, 1)}
    for name in ("q_norm.weight", "k_norm.weight"):
        state[name] += 1  # theirs multiply by 1 + w
    ours.load_state_dict(state)
    x = torch.randn(2, 9, 24)
    angles = torch.randn(9, 2)
    cos, sin = angles.cos(), angles.sin()
    twice = tuple(torch.cat([t, t], -1)[None] for t in (cos, sin))
    causal = torch.zeros(9, 9).masked_fill(torch.ones(9, 9).triu(1).bool(), -1e30)
    expected, _ = theirs(x, twice, causal)
    torch.testing.assert_close(ours(x, rope=(cos, sin)), expected, rtol=1e-4, atol=1e-4)


def test_mask_and_bias_reach_the_scores():
    layer = Attention(Attention.Config(8, 2, causal=False, init_std=0.5))
    x = torch.randn(1, 4, 8)
    mask = torch.ones(4, 4).tril().bool()
    causal = Attention(Attention.Config(8, 2, causal=True))
    causal.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x, mask=mask), causal(x))
    torch.testing.assert_close(layer(x, bias=mask.float().log()), causal(x))


def test_dropout_acts_in_training_only():
    layer = Attention(Attention.Config(8, 2, dropout_p=0.5, init_std=0.5))
    x = torch.randn(1, 16, 8)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dim": 8, "num_heads": 4, "num_kv_heads": 3}, "num_kv_heads=3"),
        ({"dim": 9, "num_heads": 4}, "dim=9"),
        ({"dim": 8, "num_heads": 4, "cross": True}, "causal=True"),
        ({"dim": 8, "num_heads": 4, "gate": "all"}, "'all'"),
        ({"dim": 8, "num_heads": 4, "gate_activation": "relu"}, "'relu'"),
        ({"dim": 8, "num_heads": 4, "softcap": -1.0}, "softcap=-1.0"),
        ({"dim": 8, "num_heads": 4, "dropout_p": 2.0}, "dropout_p=2.0"),
        ({"dim": 8, "num_heads": 4, "normalizer": "relu"}, "'relu'"),
        ({"dim": 8, "num_heads": 4, "normalizer": "sigmoid", "sinks": True}, "sinks need softmax"),
        ({"dim": 8, "num_heads": 4, "norm_n": 4}, "norm_n needs sigmoid, got norm_n=4"),
        ({"dim": 8, "num_heads": 4, "qk_norm_offset": 1.0}, "qk_norm=None, qk_norm_offset=1.0"),
        ({"dim": 8, "num_heads": 4, "window_size": (-3, 0)}, r"window_size=\(-3, 0\)"),
    ],
)
def test_config_names_the_wrong_value(values, message):
    with pytest.raises(ValueError, match=message):
        Attention.Config(**values)


def test_forward_names_what_is_missing():
    x = torch.randn(1, 2, 8)
    self_attention = Attention(Attention.Config(8, 2))
    with pytest.raises(ValueError, match="source must be None"):
        self_attention(x, x)
    cross = Attention(Attention.Config(8, 2, causal=False, cross=True))
    with pytest.raises(ValueError, match="source must be given"):
        cross(x)
    with pytest.raises(ValueError, match="rope must be None"):
        cross(x, x, rope=(x, x))
    with pytest.raises(RuntimeError, match="no_grad"):
        self_attention(x, state=self_attention.new_state(1, 2))


def test_cache_append_crop_reorder_bytes():
    cache = KVCache(2, 4, 3, 5, v_head_dim=7, dtype=torch.bfloat16)
    assert cache.nbytes == 2 * 4 * 3 * (5 + 7) * 2
    k, v = torch.randn(2, 3, 3, 5).bfloat16(), torch.randn(2, 3, 3, 7).bfloat16()
    stored_k, stored_v = cache.append(k, v)
    assert torch.equal(stored_k, k)
    assert torch.equal(stored_v, v)
    assert stored_k.stride(-1) == 1
    with pytest.raises(ValueError, match="length=6"):
        cache.append(k, v)
    with pytest.raises(ValueError, match="v must have shape"):
        cache.append(k[:, :1], v[:, :1, :2])
    assert cache.length == 3
    cache.crop(1)
    assert torch.equal(cache.views()[0], k[:, :1])
    with pytest.raises(ValueError, match="length=2"):
        cache.crop(2)
    cache.reorder(torch.tensor([1, 1, 0]))
    assert cache.batch == 3
    assert torch.equal(cache.views()[1], v[[1, 1, 0], :1])


@pytest.mark.parametrize("cross", [False, True])
def test_nested_sequences_are_those_alone(cross):
    config = Attention.Config(24, 4, 2, causal=not cross, cross=cross, gate="headwise")
    layer = Attention(config, dtype=torch.float64)
    rotary = RotaryEmbedding(RotaryEmbedding.Config(6))
    lengths, source_lengths = (5, 1, 9), (4, 7, 2)

    def sequences(sizes):
        return [torch.randn(n, 24, dtype=torch.float64, requires_grad=True) for n in sizes]

    x, source = sequences(lengths), sequences(source_lengths) if cross else []
    nested = [
        torch.nested.nested_tensor(list(t), layout=torch.jagged, requires_grad=True)
        for t in (x, source)
        if t
    ]
    positions = torch.cat([torch.arange(n) for n in lengths])
    got = layer(*nested, rope=None if cross else rotary(positions))
    want = [
        layer(
            row[None],
            source[i][None] if cross else None,
            rope=None if cross else rotary(torch.arange(len(row))),
        )[0]
        for i, row in enumerate(x)
    ]
    for a, w in zip(got.unbind(), want, strict=True):
        torch.testing.assert_close(a, w)
    assert (nested[0] + got).shape == nested[0].shape  # the same ragged structure
    got.values().square().sum().backward()
    sum(w.square().sum() for w in want).backward()
    for t, rows in zip(nested, (x, source), strict=False):
        torch.testing.assert_close(t.grad.values(), torch.cat([row.grad for row in rows]))


def test_nested_sequences_that_do_not_fit():
    layer, dense = Attention(Attention.Config(8, 2, causal=False, cross=True)), torch.ones(2, 3, 8)
    nested = torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)], layout=torch.jagged)
    with pytest.raises(ValueError, match=r"source must be a jagged nested tensor .* without holes"):
        layer(nested, dense)
    with pytest.raises(ValueError, match="state must be None where x is nested"):
        layer(nested, nested, state=layer.new_state(2, 3))
    holes = torch.nested.narrow(
        dense, 1, torch.tensor([0, 1]), torch.tensor([2, 2]), layout=torch.jagged
    )
    with pytest.raises(ValueError, match=r"x must be a jagged nested tensor .* without holes"):
        layer(holes, holes)


@pytest.mark.parametrize("norm_n", [None, 1, 20])
@pytest.mark.parametrize("cross", [False, True])
def test_sigmoid_attention(cross, norm_n):
    options = {"normalizer": "sigmoid", "norm_n": norm_n, "causal": not cross, "cross": cross}
    layer = Attention(12, 3, init_std=0.5, **options, dtype=torch.float64)
    x, source = torch.randn(2, 5, 12).double(), torch.randn(2, 7, 12).double()
    seen = source if cross else x
    q, k, v = (
        p(t).unflatten(-1, (3, -1)).transpose(1, 2)
        for p, t in ((layer.q_proj, x), (layer.k_proj, seen), (layer.v_proj, seen))
    )
    bias = torch.randn(5, seen.shape[1]).double()
    scores = q @ k.mT / 2 + bias - math.log(norm_n or seen.shape[1])
    hidden = torch.ones(5, seen.shape[1]).triu(1).bool() & (not cross)
    out = (scores.sigmoid().masked_fill(hidden, 0) @ v).transpose(1, 2).flatten(-2)
    got = layer(x, source if cross else None, bias=bias)
    torch.testing.assert_close(got, layer.o_proj(out))


@pytest.mark.parametrize("rolling", [False, True])
@torch.no_grad()
def test_sigmoid_attention_decodes(rolling):
    window = {"window_size": (3, -1)} if rolling else {}
    layer = Attention(12, 3, normalizer="sigmoid", norm_n=16, init_std=0.5, **window)
    x = torch.randn(2, 9, 12)
    state = layer.new_state(2, 9, rolling=rolling)
    steps = [layer(part, state=state) for part in x.split([4, 1, 1, 3], 1)]
    torch.testing.assert_close(torch.cat(steps, 1), layer(x), rtol=1e-4, atol=1e-5)


def test_sigmoid_attention_to_jagged_keys_counts_those_of_each_sequence():
    layer = Attention(12, 3, normalizer="sigmoid", init_std=0.5, dtype=torch.float64)
    rows = [torch.randn(n, 12).double() for n in (5, 1, 9)]
    out = layer(torch.nested.nested_tensor(rows, layout=torch.jagged))
    for row, y in zip(rows, out.unbind(), strict=True):
        torch.testing.assert_close(y, layer(row[None])[0])
    state = KVCache(1, 9, 3, 4, dtype=torch.float64)
    with torch.no_grad(), pytest.raises(ValueError, match="decoding with sigmoid needs a norm_n"):
        layer(rows[0][None], state=state)


@pytest.mark.parametrize("qk_norm", ["rms", "rms_full"])
def test_a_qk_norm_whose_weights_start_at_zero(qk_norm):
    one, zero = (
        Attention(12, 3, qk_norm=qk_norm, qk_norm_offset=offset, init_std=0.5)
        for offset in (0.0, 1.0)
    )
    x, weights = torch.randn(2, 5, 12), torch.randn(2, one.q_norm.weight.numel())
    assert not zero.q_norm.weight.any()
    zero.load_state_dict(
        one.state_dict() | {"q_norm.weight": weights[0], "k_norm.weight": weights[1]}
    )
    with torch.no_grad():
        one.q_norm.weight.copy_(1 + weights[0])
        one.k_norm.weight.copy_(1 + weights[1])
    torch.testing.assert_close(zero(x), one(x))


def test_a_normed_scale_is_the_only_one():
    for options in ({"scale": 0.5}, {"head_scale": True}):
        with pytest.raises(ValueError, match='qk_norm="l2" has its own scale'):
            Attention.Config(8, 2, qk_norm="l2", **options)
