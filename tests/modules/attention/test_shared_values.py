"""Layers of Attention that share keys and values, and their projections by tensor products."""

import pytest
import torch

from omniattn.functional import attention
from omniattn.models import BlocksConfig
from omniattn.modules import Attention, DecoderBlock, GatedMLP, RMSNorm, RotaryEmbedding

F64 = torch.float64


def rotated(x, angles):
    """Turns pairs (i, i + D / 2) of x (B, T, H, D)."""
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def test_tensor_products_rotate_their_rows():
    """As in T6: rows B of queries and keys are rotated, then multiplied by A and divided."""
    torch.manual_seed(0)
    layer = Attention(24, 4, ranks=(6, 2, 3), init_std=0.5, dtype=F64)
    x, rotary = torch.randn(2, 9, 24, dtype=F64), RotaryEmbedding(6)
    angles = torch.arange(9, dtype=F64)[:, None] * 10000.0 ** (-torch.arange(3, dtype=F64) / 3)
    heads = []
    for kind, rank, turned in (("q", 6, True), ("k", 2, True), ("v", 3, False)):
        factors = getattr(layer, f"{kind}_factors")
        a = (x @ factors.a.weight.T).view(2, 9, 4, rank)
        b = (x @ factors.b.weight.T).view(2, 9, rank, 6)
        heads.append(a @ (rotated(b, angles) if turned else b) / rank)
    want = layer.o_proj(attention(*heads, causal=True).flatten(-2))
    torch.testing.assert_close(layer(x, rope=rotary(torch.arange(9))), want, rtol=1e-5, atol=1e-6)


def test_a_cache_of_factors_is_small():
    layer = Attention(512, 8, ranks=(6, 2, 2))
    state = layer.new_state(1, 100)
    assert (
        state.nbytes == 4 * 100 * 2 * 2 * (8 + 64) < Attention(512, 8).new_state(1, 100).nbytes / 3
    )
    with pytest.raises(ValueError, match="ranks must be None for a rolling cache"):
        layer.new_state(1, 100, rolling=True)
    with pytest.raises(ValueError, match=r"eviction needs .*, ranks=\(6, 2, 2\)"):
        from omniattn.modules import H2O

        layer.new_state(1, 100, eviction=H2O(4, 4))


def model(*attentions, layers=None, **options):
    torch.manual_seed(0)
    mlp, norm = GatedMLP.Config(24, 32), RMSNorm.Config(24)
    config = BlocksConfig(
        dim=24,
        num_layers=len(attentions),
        blocks=tuple(DecoderBlock.Config(c, mlp, norm) for c in attentions),
        rope=RotaryEmbedding.Config(6),
        **options,
    )
    return config.build(dtype=F64)


def layer(**options):
    return Attention.Config(24, 4, 2, init_std=0.3, **options)


RESIDUAL = (
    layer(value_residual="first"),
    layer(value_residual="later"),
    layer(value_residual="later"),
)
ONCE = (layer(window_size=(3, 0)), layer(shared_kv="source"), layer(shared_kv="reader"))


@pytest.mark.parametrize("kinds", [RESIDUAL, ONCE], ids=["residual", "once"])
def test_steps_and_recomputation(kinds):
    tokens = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0))
    whole = model(*kinds)
    want = whole(tokens)
    with torch.no_grad():
        state = whole.new_state(2, 9)
        parts = [whole(tokens[:, a:b], state=state) for a, b in ((0, 4), (4, 5), (5, 9))]
        torch.testing.assert_close(torch.cat(parts, 1), want)
        for each in state:
            each.crop(5)
        torch.testing.assert_close(whole(tokens[:, 5:], state=state), want[:, 5:])
    nested = torch.nested.nested_tensor_from_jagged(tokens.flatten(), torch.tensor([0, 9, 18]))
    torch.testing.assert_close(whole(nested).values(), want.flatten(0, 1))
    again = model(*kinds, gradient_checkpointing=True)
    for one in (whole, again):
        one(tokens, tokens).backward()
    grads = [{n: p.grad for n, p in one.named_parameters()} for one in (whole, again)]
    torch.testing.assert_close(*grads)


def test_a_value_residual_is_a_weighted_sum():
    torch.manual_seed(0)
    first, later = (layer(value_residual=kind).build(dtype=F64) for kind in ("first", "later"))
    torch.nn.init.normal_(later.value_mix)
    x, y, shared = torch.randn(1, 5, 24, dtype=F64), torch.randn(1, 5, 24, dtype=F64), {}
    first(x, shared=shared)
    q, k, v = (p(y).unflatten(-1, (-1, 6)) for p in (later.q_proj, later.k_proj, later.v_proj))
    w1, w2 = later.value_mix.double()
    v = w1 * first.v_proj(x).unflatten(-1, (-1, 6)) + w2 * v
    want = later.o_proj(attention(q, k, v, causal=True).flatten(-2))
    torch.testing.assert_close(later(y, shared=shared), want)


def test_readers_take_the_keys_of_the_source():
    torch.manual_seed(0)
    source, reader = (layer(shared_kv=kind).build(dtype=F64) for kind in ("source", "reader"))
    assert not hasattr(reader, "k_proj") and reader.new_state(1, 99).nbytes == 0
    x, y, shared = torch.randn(1, 5, 24, dtype=F64), torch.randn(1, 5, 24, dtype=F64), {}
    source(x, shared=shared)
    k, v = (p(x).unflatten(-1, (-1, 6)) for p in (source.k_proj, source.v_proj))
    q = reader.q_proj(y).unflatten(-1, (-1, 6))
    want = reader.o_proj(attention(q, k, v, causal=True).flatten(-2))
    torch.testing.assert_close(reader(y, shared=shared), want)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"value_residual": "second"}, ValueError, "value_residual must be one of"),
        ({"shared_kv": "source", "chunk_size": 4}, ValueError, "shared_kv needs no forget_gate"),
        (
            {"value_residual": "first", "cross": True, "causal": False},
            ValueError,
            "must be None wi",
        ),
        ({"ranks": (2, 2)}, TypeError, "ranks must be three ints"),
        ({"ranks": (2, 2, 0)}, ValueError, "ranks must be at least 1"),
        ({"ranks": (2, 2, 2), "qk_norm": "rms"}, ValueError, "ranks needs self-attention"),
    ],
)
def test_options_that_exclude_each_other(options, error, text):
    with pytest.raises(error, match=f"^Attention: .*{text}"):
        Attention.Config(8, 2, **options)


def test_layers_that_share_need_the_dict_of_a_model():
    for options in ({"value_residual": "later"}, {"shared_kv": "reader"}):
        reader = layer(**options).build()
        with pytest.raises(ValueError, match="shared must be the model's dict"):
            reader(torch.zeros(1, 2, 24))
        with pytest.raises(ValueError, match="shared must come from a layer with"):
            reader(torch.zeros(1, 2, 24), shared={})
