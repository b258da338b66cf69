"""Chunks, queries that grow with their position, and norms without weights in Attention."""

import pytest
import torch

from omniattn.functional import masks
from omniattn.modules import Attention, RotaryEmbedding, Streaming

X = torch.randn(2, 11, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
SEEN = torch.arange(11)[:, None] // 4 == torch.arange(11) // 4


def built(**options):
    torch.manual_seed(0)
    return Attention(16, 4, 2, init_std=0.5, **options, dtype=torch.float64)


@torch.no_grad()
def test_queries_see_their_chunk_with_and_without_a_cache():
    plain, layer = built(), built(chunk_size=4)
    wanted = plain(X, mask=SEEN)
    torch.testing.assert_close(layer(X), wanted)
    state = layer.new_state(2, 11)
    parts = [layer(part, state=state) for part in X.split([3, 1, 1, 6], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), wanted)


@torch.no_grad()
def test_chunks_join_every_kind_of_mask():
    plain, layer = built(), built(chunk_size=4)
    odd = torch.arange(11) % 3 != 1
    wanted = plain(X, mask=SEEN & odd)
    given = (odd.expand(11, 11), masks.BoolMask(odd.expand(11, 11)), lambda b, h, q, k: k % 3 != 1)
    for mask in given:
        torch.testing.assert_close(layer(X, mask=mask), wanted)


@torch.no_grad()
def test_queries_grow_with_their_position():
    layer, plain = built(query_growth=0.3, query_period=3), built()
    factor = 1 + 0.3 * torch.log1p(((torch.arange(11.0).double() + 1) / 3).floor())
    q_proj = plain.q_proj

    class Grown(torch.nn.Module):
        def forward(self, x):
            return q_proj(x) * factor[:, None]

    plain.q_proj = Grown()
    wanted = plain(X)
    torch.testing.assert_close(layer(X), wanted)
    state = layer.new_state(2, 11)
    parts = [layer(part, state=state) for part in X.split([5, 1, 5], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), wanted)


@torch.no_grad()
def test_layers_without_positions_ignore_the_rotation():
    rope = RotaryEmbedding(RotaryEmbedding.Config(4))(torch.arange(11))
    torch.testing.assert_close(built(rotary=False)(X, rope=rope), built()(X))
    torch.testing.assert_close(
        built(qk_norm="rms_fixed")(X, rope=rope), built(qk_norm="rms")(X, rope=rope)
    )
    assert "q_norm.weight" not in built(qk_norm="rms_fixed").state_dict()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_size": 4, "window_size": (3, 0)}, "chunk_size needs causal=True and no window"),
        ({"chunk_size": 4, "causal": False}, "chunk_size needs causal=True .* causal=False"),
        ({"query_growth": 0.1}, "query_growth needs self-attention and a query_period"),
    ],
)
def test_options_that_exclude_each_other_are_named(options, message):
    with pytest.raises(ValueError, match=f"Attention: {message}"):
        built(**options)


def test_caches_of_chunks_do_not_evict():
    with pytest.raises(ValueError, match=r"eviction needs causal .* chunk_size=4"):
        built(chunk_size=4).new_state(2, 11, eviction=Streaming(2, 4))
